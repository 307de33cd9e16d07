/* Locks of the software device, and the order in which a thread takes them.
 *
 *   soft_mutex  a mutex whose waiters sleep.
 *   soft_lock   a short mutual exclusion between device halves ("the hardware").
 *
 * Each lock has a rank, and so has waiting for the grace sections of other threads. Builds without NDEBUG, such as
 * those for sanitizers and of the C tests, abort where a thread waits for a lock that does not rank behind all locks
 * that it holds, and where assert_held() names a lock that the calling thread does not hold. Other builds check
 * nothing.
 *
 * The locks of `struct ibv_qp` and the like, by which users wait for acknowledgements, are taken alone. */
#ifndef AIOVERBS_SOFT_BASE_LOCK_ORDER_H
#define AIOVERBS_SOFT_BASE_LOCK_ORDER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* Ranks, outermost first: a thread takes a later one while it holds an earlier one, never the reverse. */
enum soft_rank {
    SOFT_RANK_CQ_HALF,     /* also held in a user's sessions of start_poll; of two, the lower address is taken first */
    SOFT_RANK_HALF,        /* driver half of a queue pair or a shared receive queue */
    SOFT_RANK_DEVICES,     /* list of devices */
    SOFT_RANK_XRCD,        /* device->xrcd_lock */
    SOFT_RANK_DEVICE,      /* device->lock */
    SOFT_RANK_REAPING,     /* file->reaping of a domain that processes share */
    SOFT_RANK_PD,          /* pd->lock */
    SOFT_RANK_SETUP,       /* fabric->setup */
    SOFT_RANK_PROGRESS,    /* fabric->progress; not waited for in a grace section */
    SOFT_RANK_GRACE,       /* no lock: a grace section begins, or the sections of other threads are waited for */
    SOFT_RANK_SQ,          /* qp->sq_lock. One at a time: work on a peer's send queue follows after the release */
    SOFT_RANK_RQ,          /* qp->rq_lock, of the same queue pair or of its peer */
    SOFT_RANK_MW,          /* mw->lock */
    SOFT_RANK_SRQ,         /* srq->lock */
    SOFT_RANK_FAULTS,      /* plan->lock; held while completions are released, so that none overtakes another */
    SOFT_RANK_CQ,          /* cq->lock */
    SOFT_RANK_CHANNEL,     /* channel->lock */
    SOFT_RANK_WORKER,      /* worker->lock */
    SOFT_RANK_EVENTS,      /* context->events.lock */
    SOFT_RANK_LINKS,       /* fabric->links */
    SOFT_RANK_TX,          /* stream->tx */
    SOFT_RANK_FRAMES,      /* plan->frames */
    SOFT_RANK_HELD,        /* fabric->held */
    SOFT_RANK_WAKEUP,      /* fabric->wakeup_lock */
    SOFT_RANK_WAITED,      /* file->wait_lock */
    SOFT_RANK_TABLE,       /* table->lock */
    SOFT_RANK_DESCRIPTORS, /* lock of descriptors; held over a fork */
    SOFT_RANKS,
};

#ifdef NDEBUG
#define SOFT_RANKED
#define SOFT_RANKED_AS(value)
#define soft_rank_set(lock, value) ((void)(value))
#define soft_rank_wait(lock) ((void)0)
#define soft_rank_wait_again(lock) ((void)0)
#define soft_rank_take(lock) ((void)0)
#define soft_rank_give(lock) ((void)0)
#define soft_rank_wait_for_sections() ((void)0)
#define assert_held(lock) ((void)0)
#else
#define SOFT_RANKED enum soft_rank rank; /* const */
#define SOFT_RANKED_AS(value) .rank = (value),
#define soft_rank_set(lock, value) ((void)((lock)->rank = (value)))
#define soft_rank_wait(lock) soft_rank_check((lock), (lock)->rank)
#define soft_rank_wait_again(lock) (soft_rank_holds(lock) ? (void)0 : soft_rank_wait(lock))
#define soft_rank_take(lock) soft_rank_push((lock), (lock)->rank)
#define soft_rank_give(lock) soft_rank_pop((lock), (lock)->rank)
#define soft_rank_wait_for_sections() soft_rank_check(NULL, SOFT_RANK_GRACE)
#define assert_held(lock) soft_rank_assert((lock), (lock)->rank, #lock, __func__)

void soft_rank_check(const void *lock, enum soft_rank rank); /* abort unless the calling thread may wait for the lock */
void soft_rank_push(const void *lock, enum soft_rank rank);  /* record that the calling thread holds the lock */
void soft_rank_pop(const void *lock, enum soft_rank rank);   /* record that it does not any more */
bool soft_rank_holds(const void *lock);
void soft_rank_assert(const void *lock, enum soft_rank rank, const char *text, const char *function);
#endif

/* ---- A mutex --------------------------------------------------------------------------------------------- */

struct soft_mutex {
    pthread_mutex_t mutex;
    SOFT_RANKED
};

#define SOFT_MUTEX_INITIALIZER(value) {PTHREAD_MUTEX_INITIALIZER, SOFT_RANKED_AS(value)}

static inline int soft_mutex_init(struct soft_mutex *mutex, enum soft_rank rank)
{
    soft_rank_set(mutex, rank);
    return pthread_mutex_init(&mutex->mutex, NULL);
}

static inline void soft_mutex_destroy(struct soft_mutex *mutex)
{
    pthread_mutex_destroy(&mutex->mutex);
}

static inline void soft_mutex_take(struct soft_mutex *mutex)
{
    soft_rank_wait(mutex);
    pthread_mutex_lock(&mutex->mutex);
    soft_rank_take(mutex);
}

/* Take the mutex if it is free; return whether it was. Since this never waits, the order of locks does not apply. */
static inline bool soft_mutex_try(struct soft_mutex *mutex)
{
    if (pthread_mutex_trylock(&mutex->mutex))
        return false;
    soft_rank_take(mutex);
    return true;
}

static inline void soft_mutex_give(struct soft_mutex *mutex)
{
    soft_rank_give(mutex);
    pthread_mutex_unlock(&mutex->mutex);
}

/* Error-checking mutex: fails with EDEADLK where its owner would wait for itself, and with EPERM where another thread
 * releases it. */
int soft_mutex_init_checking(struct soft_mutex *mutex, enum soft_rank rank);

static inline int soft_mutex_take_checking(struct soft_mutex *mutex)
{
    int error;

    soft_rank_wait_again(mutex);
    error = pthread_mutex_lock(&mutex->mutex);
    if (!error)
        soft_rank_take(mutex);
    return error;
}

static inline void soft_mutex_give_checking(struct soft_mutex *mutex)
{
    if (!pthread_mutex_unlock(&mutex->mutex))
        soft_rank_give(mutex);
}

/* ---- A lock for device halves ---------------------------------------------------------------------------- */

/* Held for a memory copy at the longest, never across a callback or a call that waits for another thread. A waiter
 * yields its processor, since the holder may have lost its own. */
struct soft_lock {
    atomic_uint held;
    SOFT_RANKED
};

/* Spin, then yield, until the lock is taken. */
void soft_lock_wait(struct soft_lock *lock);

static inline void soft_lock_init(struct soft_lock *lock, enum soft_rank rank)
{
    soft_rank_set(lock, rank);
    atomic_init(&lock->held, 0);
}

static inline void soft_lock_take(struct soft_lock *lock)
{
    soft_rank_wait(lock);
    if (atomic_exchange_explicit(&lock->held, 1, memory_order_acquire))
        soft_lock_wait(lock);
    soft_rank_take(lock);
}

static inline void soft_lock_give(struct soft_lock *lock)
{
    soft_rank_give(lock);
    atomic_store_explicit(&lock->held, 0, memory_order_release);
}

#endif
