#define _GNU_SOURCE
#include "soft/base/lock_order.h"

#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "soft/base/epoch.h"

int soft_mutex_init_checking(struct soft_mutex *mutex, enum soft_rank rank)
{
    pthread_mutexattr_t attr;
    int error = pthread_mutexattr_init(&attr);

    if (error)
        return error;
    soft_rank_set(mutex, rank);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ERRORCHECK);
    error = pthread_mutex_init(&mutex->mutex, &attr);
    pthread_mutexattr_destroy(&attr);
    return error;
}

void soft_lock_wait(struct soft_lock *lock)
{
    unsigned int spins = 0;

    for (;;) {
        while (atomic_load_explicit(&lock->held, memory_order_relaxed))
            if (++spins > 64)
                sched_yield();
        if (!atomic_exchange_explicit(&lock->held, 1, memory_order_acquire))
            return;
    }
}

/* ---- The check of the order ------------------------------------------------------------------------------- */

#ifndef NDEBUG

static const char *const names[SOFT_RANKS] = {
    [SOFT_RANK_CQ_HALF] = "the driver half of a completion queue",
    [SOFT_RANK_HALF] = "the driver half of a queue pair or shared receive queue",
    [SOFT_RANK_DEVICES] = "device_lock",
    [SOFT_RANK_XRCD] = "device->xrcd_lock",
    [SOFT_RANK_DEVICE] = "device->lock",
    [SOFT_RANK_REAPING] = "file->reaping",
    [SOFT_RANK_PD] = "pd->lock",
    [SOFT_RANK_SETUP] = "fabric->setup",
    [SOFT_RANK_PROGRESS] = "fabric->progress",
    [SOFT_RANK_GRACE] = "a grace section",
    [SOFT_RANK_SQ] = "qp->sq_lock",
    [SOFT_RANK_RQ] = "qp->rq_lock",
    [SOFT_RANK_MW] = "mw->lock",
    [SOFT_RANK_SRQ] = "srq->lock",
    [SOFT_RANK_FAULTS] = "plan->lock",
    [SOFT_RANK_CQ] = "cq->lock",
    [SOFT_RANK_CHANNEL] = "channel->lock",
    [SOFT_RANK_WORKER] = "worker->lock",
    [SOFT_RANK_EVENTS] = "events->lock",
    [SOFT_RANK_LINKS] = "fabric->links",
    [SOFT_RANK_TX] = "stream->tx",
    [SOFT_RANK_FRAMES] = "plan->frames",
    [SOFT_RANK_HELD] = "fabric->held",
    [SOFT_RANK_WAKEUP] = "fabric->wakeup_lock",
    [SOFT_RANK_WAITED] = "file->wait_lock",
    [SOFT_RANK_TABLE] = "table->lock",
    [SOFT_RANK_DESCRIPTORS] = "the lock of descriptors",
};

/* Locks that the calling thread holds, in the order in which it took them, including those of a user's sessions of
 * start_poll. */
enum { MAX_HELD = 64 };
static _Thread_local struct {
    const void *lock;
    enum soft_rank rank;
} held[MAX_HELD];
static _Thread_local unsigned int count;

static _Noreturn void lock_order_refuse(enum soft_rank rank, enum soft_rank under)
{
    fprintf(stderr, "soft0: waiting for %s while holding %s breaks the order of locks in soft/base/lock_order.h\n",
            names[rank], names[under]);
    abort();
}

bool soft_rank_holds(const void *lock)
{
    unsigned int i;

    for (i = 0; i < count; i++)
        if (held[i].lock == lock)
            return true;
    return false;
}

void soft_rank_check(const void *lock, enum soft_rank rank)
{
    unsigned int i;

    for (i = 0; i < count; i++)
        if (held[i].rank > rank || held[i].lock == lock || (held[i].rank == rank && rank != SOFT_RANK_CQ_HALF))
            lock_order_refuse(rank, held[i].rank);
    if (rank <= SOFT_RANK_GRACE && grace_self && grace_self->depth)
        lock_order_refuse(rank, SOFT_RANK_GRACE);
}

void soft_rank_push(const void *lock, enum soft_rank rank)
{
    assert(names[rank]);
    if (count == MAX_HELD) {
        fprintf(stderr, "soft0: a thread holds %u locks and takes %s: raise MAX_HELD in soft/base/lock_order.c\n",
                count, names[rank]);
        abort();
    }
    held[count].lock = lock;
    held[count++].rank = rank;
}

void soft_rank_pop(const void *lock, enum soft_rank rank)
{
    unsigned int i = count;

    while (i && held[i - 1].lock != lock)
        i--;
    if (!i) {
        fprintf(stderr, "soft0: %s is released by a thread that does not hold it\n", names[rank]);
        abort();
    }
    for (count--; i <= count; i++)
        held[i - 1] = held[i];
}

void soft_rank_assert(const void *lock, enum soft_rank rank, const char *text, const char *function)
{
    if (soft_rank_holds(lock))
        return;
    fprintf(stderr, "soft0: %s() needs %s (%s), which the calling thread does not hold\n", function, names[rank], text);
    abort();
}

#endif
