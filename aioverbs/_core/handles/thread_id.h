/* Who a thread is, and whether it still lives.
 *
 * A thread gets a record when it is first asked, with a number that is never given out again: what the system tells
 * of threads (idents, ids) is reused at once. Who remembers a thread holds a reference to its record, so that the
 * address alone says whether it is the calling one. The record learns of its thread's end. A child of a fork goes on
 * with the record of the thread that forked: who must tell them apart asks for the fork generation, too. */
#ifndef AIOVERBS_AFFINITY_THREAD_H
#define AIOVERBS_AFFINITY_THREAD_H

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

static pthread_key_t affinity_key; /* its destructor is all that it is for */
static _Atomic uint64_t affinity_numbers;
static __attribute__((tls_model("initial-exec"))) _Thread_local struct affinity_thread *affinity_self;

static inline void affinity_thread_forget(struct affinity_thread *thread)
{
    if (atomic_fetch_sub(&thread->references, 1) == 1)
        free(thread);
}

/* At the thread's end, or as soon as it runs no Python any more, by another thread where it is one that a fork did not
 * copy. Who asks again in the same thread later, such as a destructor, gets a record of its own. */
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

/* Once, at import. 0 or an errno. */
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

/* The calling thread, NULL where memory ran out. */
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

/* One at a time: whether nobody was inside. */
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
