/* Synchronization of the software device.
 *
 * Four tools, each with one job:
 *
 *   soft_lock     a short mutual exclusion between device halves ("the hardware").
 *   soft_sleeper  a thread that waits for work, and is woken without a lock.
 *   soft_half     entry to a driver half: a mutex, or, on a thread domain, no lock but a check for overlapping calls.
 *   grace         deferred destruction: a thread that looks an object up by its number may use it until grace_leave().
 *
 * soft/base/lock_order.h has the locks and their order, which includes grace sections. */
#ifndef AIOVERBS_SOFT_BASE_EPOCH_H
#define AIOVERBS_SOFT_BASE_EPOCH_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "soft/base/lock_order.h"

/* ---- Time ------------------------------------------------------------------------------------------------ */

uint64_t soft_now_ns(void); /* CLOCK_MONOTONIC in nanoseconds */

/* How long a thread yields to another process's operation in progress, before it checks whether that process is alive.
 * A time rather than a count: on a busy processor each yield may take as long as the time slices of the others. */
#define SOFT_YIELD_NS 100000u

/* ---- Threads and forks ----------------------------------------------------------------------------------- */

/* Thread-local storage that is accessed without a call, at a fixed offset in each thread's memory. A library loaded at
 * run time gets it from a small reserve, so use it for a few words only. */
#define SOFT_THREAD_LOCAL __attribute__((tls_model("initial-exec"))) _Thread_local

/* Number of forks between the first process and this one. A context records the value at its opening; where the values
 * differ, the caller is a child that inherited a context whose threads and file descriptors belong to its parent.
 * Written only by the atfork handler of a child, which has one thread. */
extern uint32_t soft_generation;

/* Reset this file's state in the child of a fork, which has one thread: grace sections of the parent's other threads
 * are abandoned. */
void soft_sync_after_fork(void);

/* Return the kernel's ID of the calling thread: unique among live threads, which is enough to detect overlapping calls,
 * and visible in a debugger. Cached in thread-local storage, since asking costs a system call. */
extern SOFT_THREAD_LOCAL uint32_t soft_thread_id_cached;
uint32_t soft_thread_id_query(void);

static inline uint32_t soft_thread_id(void)
{
    return soft_thread_id_cached ? soft_thread_id_cached : soft_thread_id_query();
}

/* ---- A thread that waits for work ------------------------------------------------------------------------- */

/* Sleeping without a lost wake-up. All four steps are sequentially consistent:
 *
 *   waker                          sleeper
 *   1. add work                    1. set `asleep` (soft_sleeper_begin)
 *   2. read `asleep`;              2. look for work; if there is none,
 *      if set, wake the sleeper       sleep (soft_sleeper_wait)
 *
 * Either the sleeper finds the work, or the waker sees that the sleeper sleeps. The sleeper does not fall asleep after
 * the waker saw that, since the kernel checks the word again. Of many wakers one makes the system call, and none waits.
 */
struct soft_sleeper {
    atomic_uint asleep; /* a futex; 1 from soft_sleeper_begin to soft_sleeper_end, unless woken */
};

static inline void soft_sleeper_begin(struct soft_sleeper *sleeper)
{
    atomic_store(&sleeper->asleep, 1);
}

/* Sleep between soft_sleeper_begin and soft_sleeper_end, until woken or until `due` (CLOCK_MONOTONIC, nanoseconds;
 * UINT64_MAX: no limit). May return early. */
void soft_sleeper_wait(struct soft_sleeper *sleeper, uint64_t due);

static inline void soft_sleeper_end(struct soft_sleeper *sleeper)
{
    atomic_store_explicit(&sleeper->asleep, 0, memory_order_relaxed);
}

/* Wake a sleeper that may be asleep. */
void soft_sleeper_rouse(struct soft_sleeper *sleeper);

/* Wake a sleeper after adding work. */
static inline void soft_sleeper_wake(struct soft_sleeper *sleeper)
{
    if (atomic_load(&sleeper->asleep))
        soft_sleeper_rouse(sleeper);
}

/* ---- Grace periods --------------------------------------------------------------------------------------- */

/* The tables by which one object finds another (queue pairs by number, regions by key) are read without a lock. A
 * reader brackets its use with grace_enter/grace_leave; a thread that removes an object takes it out of its table and
 * calls grace_wait, after which no thread uses the object. The counter is odd inside of a section. All accesses to it
 * and to the tables are sequentially consistent: either the reader's look-up comes after the removal and finds nothing,
 * or the remover sees the reader's odd counter and waits for it. */
struct soft_shared;

enum { SOFT_SECTION_FILES = 4 };

struct grace_reader {
    _Alignas(64) atomic_uint sections; /* written by its thread, read by grace_wait */
    uint32_t depth;                    /* accessed by its thread only, like the next two fields */
    /* Files of other processes whose memory the section accesses, the last one first; and the function that ends the
     * accesses at the section's end. */
    struct soft_shared *shared_files[SOFT_SECTION_FILES];
    void (*files_leave)(struct grace_reader *self);
    atomic_bool in_use;        /* whether a thread uses this record */
    struct grace_reader *next; /* set before the record is published, then constant */
};

extern SOFT_THREAD_LOCAL struct grace_reader *grace_self;
/* Return this thread's record, registered on the first call; NULL: out of memory. */
struct grace_reader *grace_register(void);

/* Return whether this thread can enter sections; false: out of memory. Callers that can fail check before they begin.
 */
static inline bool grace_ready(void)
{
    return grace_self || grace_register();
}

/* Enter a section. grace_ready() has returned true in this thread. */
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
    /* no other thread writes this counter */
    atomic_store_explicit(&self->sections, sections + 1, memory_order_release);
}

/* Wait until all grace sections of other threads that were open at the call have ended. */
void grace_wait(void);

/* ---- Entering a driver half ------------------------------------------------------------------------------ */

/* Owner of objects that take no locks: one for a thread domain with all of its objects (the objects of one domain share
 * a doorbell register of a NIC), or one for a single-threaded completion queue alone. */
struct soft_exclusive {
    atomic_uint owner; /* soft_thread_id(), or 0 when no thread is inside */
    uint32_t depth;    /* accessed by the owner only: number of objects it is inside of */
};

/* Driver half of an object. Overlapping calls are counted in the object and in the context; the first overlap of each
 * object is also written to stderr, with both threads. */
struct soft_half {
    struct soft_exclusive *exclusive; /* NULL: the mutex guards this half */
    struct soft_exclusive own;        /* for an object that is exclusive by itself */
    struct soft_mutex mutex;
    bool inside;          /* accessed by the owner of `exclusive`: refuses re-entry of the same object */
    atomic_uint overlaps; /* number of refused calls */
    atomic_uint *total;   /* const: number for all objects of the context */
    const char *kind;
    uint32_t number;
};

/* Initialise a driver half: with a mutex of `rank`, or without a lock if `exclusive` is not NULL. `kind` and `number`
 * name the object in reports. Return 0 or an errno. */
int soft_half_init(struct soft_half *half, atomic_uint *total, enum soft_rank rank, const char *kind, uint32_t number,
                   struct soft_exclusive *exclusive);
void soft_half_destroy(struct soft_half *half);
/* Count and report an overlapping call of `verb` while thread `inside` is in the half; return EBUSY. */
int soft_half_refuse(struct soft_half *half, const char *verb, uint32_t inside);

/* Enter a driver half. Return 0, or EBUSY where another thread is inside of this unlocked half, or the calling thread
 * is inside of this object already. */
static inline int soft_half_enter(struct soft_half *half, const char *verb)
{
    struct soft_exclusive *exclusive = half->exclusive;
    unsigned int found_owner = 0;
    uint32_t self;

    self = soft_thread_id();
    if (!exclusive) /* the mutex detects re-entry by its owner, as between start_poll and end_poll */
        return soft_mutex_take_checking(&half->mutex) ? soft_half_refuse(half, verb, self) : 0;
    /* Only this thread ever stores its own ID, so a relaxed load that finds it is certain. */
    if (atomic_load_explicit(&exclusive->owner, memory_order_relaxed) == self) {
        if (half->inside)
            return soft_half_refuse(half, verb, self);
    } else if (!atomic_compare_exchange_strong_explicit(&exclusive->owner, &found_owner, self, memory_order_acquire,
                                                        memory_order_relaxed)) {
        return soft_half_refuse(half, verb, found_owner);
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
