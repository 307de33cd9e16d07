/* How the software device keeps its threads apart.
 *
 * Four tools, each with one job:
 *
 *   soft_lock     a short mutual exclusion between device halves ("the hardware").
 *   soft_sleeper  a thread that waits for work, and is woken without a lock.
 *   soft_half     the door of a driver half: a mutex, or, on a thread domain, no lock but a watch.
 *   grace         deferred destruction: who looks an object up by its number may use it until grace_leave().
 *
 * soft/base/lock_order.h has the locks and their order, in which grace sections have their place, too.
 */
#ifndef AIOVERBS_SOFT_BASE_EPOCH_H
#define AIOVERBS_SOFT_BASE_EPOCH_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "soft/base/lock_order.h"

/* ---- Time ------------------------------------------------------------------------------------------------ */

uint64_t soft_now_ns(void); /* CLOCK_MONOTONIC */

/* How long a thread yields for what another process is just at, before it looks whether that is there. A time, and not a
 * count: on a busy processor each yield may take as long as the others' slices. */
#define SOFT_YIELD_NS 100000u

/* ---- Threads and forks ----------------------------------------------------------------------------------- */

/* Reached without a call, at a fixed place in each thread's memory: a library that is loaded late gets some of the
 * little that is kept free there, so this is for a few words. */
#define SOFT_THREAD_LOCAL __attribute__((tls_model("initial-exec"))) _Thread_local

/* Counts the forks between the first process and this one. A context remembers the count it was opened under;
 * where they differ, the caller is a child that inherited a context whose threads and file descriptors belong
 * to its parent. Written only in the atfork handler of a child, when it has one thread. */
extern uint32_t soft_generation;

/* In the child of a fork, which has one thread: what the other threads of the parent were inside of is abandoned. */
void soft_sync_after_fork(void);

/* The kernel's number of the calling thread: unique among the threads that live, which is all that telling an
 * overlap takes, and what a debugger shows. Kept in thread-local memory, since asking costs a system call. */
extern SOFT_THREAD_LOCAL uint32_t soft_thread_id_cached;
uint32_t soft_thread_id_query(void);

static inline uint32_t soft_thread_id(void)
{
    return soft_thread_id_cached ? soft_thread_id_cached : soft_thread_id_query();
}

/* ---- A thread that waits for work ------------------------------------------------------------------------- */

/* Who makes work says so where the sleeper looks for it, and then wakes; the sleeper says that it will sleep, looks for
 * work once more, and then sleeps. All four are sequentially consistent, so no wake-up is lost: either the sleeper finds
 * the work, or the waker sees that it sleeps. And it does not go to sleep after the waker saw that, since the kernel
 * looks at the word again. Of many wakers one makes the system call, and none waits. */
struct soft_sleeper {
    atomic_uint asleep; /* 1 from soft_sleeper_begin to soft_sleeper_end, unless it was woken: a futex */
};

static inline void soft_sleeper_begin(struct soft_sleeper *sleeper)
{
    atomic_store(&sleeper->asleep, 1);
}

/* Between the two: until it is woken, or until then (CLOCK_MONOTONIC; UINT64_MAX: never); perhaps for nothing. */
void soft_sleeper_wait(struct soft_sleeper *sleeper, uint64_t due);

static inline void soft_sleeper_end(struct soft_sleeper *sleeper)
{
    atomic_store_explicit(&sleeper->asleep, 0, memory_order_relaxed);
}

void soft_sleeper_rouse(struct soft_sleeper *sleeper);

static inline void soft_sleeper_wake(struct soft_sleeper *sleeper)
{
    if (atomic_load(&sleeper->asleep))
        soft_sleeper_rouse(sleeper);
}

/* ---- Grace periods --------------------------------------------------------------------------------------- */

/* The tables by which one object finds another (queue pairs by number, regions by key) are read without a lock.
 * A reader brackets its use with grace_enter/grace_leave; who removes an object takes it out of its table, calls
 * grace_wait, and then nobody uses it any more. The counter is odd inside of a section. All accesses to it and
 * to the tables are sequentially consistent: either the reader's look-up comes later than the removal and finds
 * nothing, or the remover sees the reader's odd counter and waits for it. */
struct soft_shared;

enum { SOFT_SECTION_FILES = 4 };

struct grace_reader {
    _Alignas(64) atomic_uint sections; /* written by its thread, read by grace_wait */
    uint32_t depth;                    /* its thread only, like the next */
    /* Whose memory of other processes the section reaches, the last one first; and what is told of its end, if it
     * reaches any. */
    struct soft_shared *shared_files[SOFT_SECTION_FILES];
    void (*files_leave)(struct grace_reader *self);
    atomic_bool in_use;        /* a thread uses this record */
    struct grace_reader *next; /* set before the record is published, then constant */
};

extern SOFT_THREAD_LOCAL struct grace_reader *grace_self;
struct grace_reader *grace_register(void);

/* Whether this thread can enter sections; false means that memory ran out. Who may fail asks before he begins. */
static inline bool grace_ready(void)
{
    return grace_self || grace_register();
}

/* grace_ready() was true. */
static inline struct grace_reader *grace_enter(void)
{
    struct grace_reader *self = grace_self;

    if (self->depth++ == 0)
        atomic_fetch_add(&self->sections, 1);
    return self;
}

static inline void grace_leave(struct grace_reader *self)
{
    unsigned int sections = atomic_load_explicit(&self->sections, memory_order_relaxed);

    if (--self->depth)
        return;
    if (self->shared_files[0])
        self->files_leave(self);
    atomic_store_explicit(&self->sections, sections + 1, memory_order_release); /* no other thread counts here */
}

void grace_wait(void);

/* ---- The door of a driver half --------------------------------------------------------------------------- */

/* Who is inside of objects that take no locks: one for a thread domain with all of its objects (a NIC's objects
 * of one domain share a doorbell register), or one for a single-threaded completion queue alone. */
struct soft_exclusive {
    atomic_uint owner; /* soft_thread_id(), or 0 when nobody is inside */
    uint32_t depth;    /* the owner only: entries by it, into different objects */
};

/* An overlap is counted in the object and in the context; the first one of each object is also written to
 * stderr, with both threads. */
struct soft_half {
    struct soft_exclusive *exclusive; /* NULL: the mutex guards this half */
    struct soft_exclusive own;        /* for an object that is exclusive by itself */
    struct soft_mutex mutex;
    bool inside;          /* under `exclusive` by its owner: refuses re-entry of the same object */
    atomic_uint overlaps; /* calls that were refused */
    atomic_uint *total;   /* const: of all objects of the context */
    const char *kind;
    uint32_t number;
};

int soft_half_init(struct soft_half *half, atomic_uint *total, enum soft_rank rank, const char *kind, uint32_t number,
                   struct soft_exclusive *exclusive);
void soft_half_destroy(struct soft_half *half);
int soft_half_refuse(struct soft_half *half, const char *verb, uint32_t inside);

/* 0, or EBUSY: somebody else is inside of this unlocked half, or the calling thread of this very object. */
static inline int soft_half_enter(struct soft_half *half, const char *verb)
{
    struct soft_exclusive *exclusive = half->exclusive;
    unsigned int nobody = 0;
    uint32_t self;

    self = soft_thread_id();
    if (!exclusive) /* the mutex tells when its own thread comes again, as between start_poll and end_poll */
        return soft_mutex_take_checking(&half->mutex) ? soft_half_refuse(half, verb, self) : 0;
    /* Only this thread ever stores its own number, so a relaxed load that finds it is certain. */
    if (atomic_load_explicit(&exclusive->owner, memory_order_relaxed) == self) {
        if (half->inside)
            return soft_half_refuse(half, verb, self);
    } else if (!atomic_compare_exchange_strong_explicit(&exclusive->owner, &nobody, self, memory_order_acquire,
                                                        memory_order_relaxed)) {
        return soft_half_refuse(half, verb, nobody);
    }
    exclusive->depth++;
    half->inside = true;
    return 0;
}

static inline void soft_half_leave(struct soft_half *half)
{
    struct soft_exclusive *exclusive = half->exclusive;

    if (!exclusive) {
        soft_mutex_give_checking(&half->mutex);
        return;
    }
    half->inside = false;
    if (--exclusive->depth == 0)
        atomic_store_explicit(&exclusive->owner, 0, memory_order_release);
}

#endif
