/* Identify threads, and notice their end.
 *
 * A thread gets a record on its first call, with a number that is never used again: the system reuses idents and ids at
 * once. Code that remembers a thread holds a reference to its record, so that comparing addresses tells whether it is
 * the calling thread. The record is marked when its thread ends. The child of a fork continues with the record of the
 * thread that forked: code that must tell them apart also compares the fork count. */
#ifndef AIOVERBS_THREAD_ID_H
#define AIOVERBS_THREAD_ID_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

struct affinity_thread {
    uint64_t number;
    atomic_uint references; /* one is the thread's own, while it lives */
    atomic_bool ended;
};

static pthread_key_t affinity_key; /* exists for its destructor only */
static _Atomic uint64_t affinity_numbers;
static __attribute__((tls_model("initial-exec"))) _Thread_local struct affinity_thread *affinity_self;

static inline void affinity_thread_forget(struct affinity_thread *thread)
{
    if (atomic_fetch_sub(&thread->references, 1) == 1)
        free(thread);
}

/* Mark the end of a thread. Called when the thread ends, or as soon as it runs no Python code any more; by another
 * thread, for a thread that a fork did not copy. Later calls of affinity_thread_self in the same thread, such as by a
 * destructor, create a new record. */
static void affinity_thread_end(void *record)
{
    struct affinity_thread *thread = record;

    atomic_store(&thread->ended, true);
    if (affinity_self == thread) {
        affinity_self = NULL;
        pthread_setspecific(affinity_key, NULL);
        affinity_thread_forget(thread);
    }
}

/* Prepare the module, once, at import; return 0 or an errno. */
static int affinity_thread_prepare(void)
{
    return pthread_key_create(&affinity_key, affinity_thread_end);
}

static struct affinity_thread *affinity_thread_begin(void)
{
    struct affinity_thread *thread = calloc(1, sizeof(*thread));

    if (!thread || pthread_setspecific(affinity_key, thread)) {
        free(thread);
        return NULL;
    }
    thread->number = atomic_fetch_add(&affinity_numbers, 1) + 1;
    atomic_init(&thread->references, 1);
    affinity_self = thread;
    return thread;
}

/* Return the record of the calling thread; NULL without memory. */
static inline struct affinity_thread *affinity_thread_self(void)
{
    return affinity_self ? affinity_self : affinity_thread_begin();
}

static inline struct affinity_thread *affinity_thread_remember(struct affinity_thread *thread)
{
    atomic_fetch_add(&thread->references, 1);
    return thread;
}

static inline bool affinity_thread_ended(const struct affinity_thread *thread)
{
    return atomic_load(&thread->ended);
}

/* Claim the affinity for one caller; return false where another caller holds it. */
static inline bool affinity_claim(int *inside)
{
    int expected = 0;

    return __atomic_compare_exchange_n(inside, &expected, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static inline void affinity_yield(int *inside)
{
    __atomic_store_n(inside, 0, __ATOMIC_RELEASE);
}

#endif
