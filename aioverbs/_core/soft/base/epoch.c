#define _GNU_SOURCE
#include "soft/base/epoch.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "soft/base/lock_order.h"

uint64_t soft_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- Threads --------------------------------------------------------------------------------------------- */

SOFT_THREAD_LOCAL uint32_t soft_thread_id_cached;

uint32_t soft_thread_id_query(void)
{
    soft_thread_id_cached = (uint32_t)syscall(SYS_gettid); /* gettid() needs glibc 2.30 */
    return soft_thread_id_cached;
}

/* ---- A thread that waits for work ------------------------------------------------------------------------- */

_Static_assert(sizeof(time_t) == sizeof(long), "the system call takes a struct timespec of longs");

void soft_sleeper_wait(struct soft_sleeper *sleeper, uint64_t due)
{
    struct timespec until = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};

    syscall(SYS_futex, &sleeper->asleep, FUTEX_WAIT_BITSET_PRIVATE, 1, due == UINT64_MAX ? NULL : &until, NULL,
            FUTEX_BITSET_MATCH_ANY);
}

void soft_sleeper_rouse(struct soft_sleeper *sleeper)
{
    if (atomic_exchange(&sleeper->asleep, 0))
        syscall(SYS_futex, &sleeper->asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ---- Grace periods --------------------------------------------------------------------------------------- */

SOFT_THREAD_LOCAL struct grace_reader *grace_self;

/* Records are pushed and never removed; a thread that ends leaves its record to the next new thread. */
static _Atomic(struct grace_reader *) grace_readers;
static pthread_once_t grace_once = PTHREAD_ONCE_INIT;
static pthread_key_t grace_key;
static bool grace_key_valid;

static void grace_thread_ends(void *record)
{
    struct grace_reader *self = record;

    grace_self = NULL;
    atomic_store_explicit(&self->in_use, false, memory_order_release);
}

static void grace_make_key(void)
{
    grace_key_valid = pthread_key_create(&grace_key, grace_thread_ends) == 0;
}

struct grace_reader *grace_register(void)
{
    struct grace_reader *self;

    pthread_once(&grace_once, grace_make_key);
    if (!grace_key_valid)
        return NULL;
    for (self = atomic_load(&grace_readers); self; self = self->next) {
        bool free_record = false;

        if (atomic_compare_exchange_strong(&self->in_use, &free_record, true))
            break;
    }
    if (!self) {
        self = aligned_alloc(_Alignof(struct grace_reader), sizeof(*self));
        if (!self)
            return NULL;
        memset(self, 0, sizeof(*self));
        atomic_init(&self->in_use, true);
        self->next = atomic_load(&grace_readers);
        while (!atomic_compare_exchange_weak(&grace_readers, &self->next, self))
            ;
    }
    if (pthread_setspecific(grace_key, self)) {
        atomic_store(&self->in_use, false);
        return NULL;
    }
    grace_self = self;
    return self;
}

void grace_wait(void)
{
    struct grace_reader *reader;

    soft_rank_wait_for_sections();
    for (reader = atomic_load(&grace_readers); reader; reader = reader->next) {
        unsigned int seen = atomic_load(&reader->sections);
        unsigned int spins = 0;

        if (reader == grace_self || !(seen & 1))
            continue;
        while (atomic_load(&reader->sections) == seen)
            if (++spins > 64)
                sched_yield();
    }
}

/* ---- Forks ----------------------------------------------------------------------------------------------- */

uint32_t soft_generation;

/* Start anew in the child, which has one thread. What the parent's other threads held or were inside of is abandoned;
 * contexts opened before are recognised by their generation. */
void soft_sync_after_fork(void)
{
    soft_generation++;
    soft_thread_id_cached = 0;
    grace_self = NULL;
    atomic_store(&grace_readers, NULL);
}

/* ---- Driver halves --------------------------------------------------------------------------------------- */

int soft_half_init(struct soft_half *half, atomic_uint *total, enum soft_rank rank, const char *kind, uint32_t number,
                   struct soft_exclusive *exclusive)
{
    memset(half, 0, sizeof(*half));
    half->total = total;
    half->kind = kind;
    half->number = number;
    half->exclusive = exclusive;
    return exclusive ? 0 : soft_mutex_init_checking(&half->mutex, rank);
}

void soft_half_destroy(struct soft_half *half)
{
    if (!half->exclusive)
        soft_mutex_destroy(&half->mutex);
}

int soft_half_refuse(struct soft_half *half, const char *verb, uint32_t inside)
{
    uint32_t self = soft_thread_id();

    atomic_fetch_add(half->total, 1);
    if (atomic_fetch_add(&half->overlaps, 1) == 0)
        fprintf(stderr,
                "soft0: %s on %s %u refused: thread %u called it while thread %u is inside; do not overlap calls\n",
                verb, half->kind, half->number, self, inside);
    return EBUSY;
}
