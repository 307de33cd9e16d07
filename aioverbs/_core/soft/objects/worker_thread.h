/* The C thread of a context, and the timers that it keeps. */
#ifndef AIOVERBS_SOFT_OBJECTS_WORKER_THREAD_H
#define AIOVERBS_SOFT_OBJECTS_WORKER_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"

struct soft_context;
struct soft_qp;

/* Embedded in what is to be visited later. Under worker->lock. */
struct soft_timer {
    uint32_t slot; /* its place in the heap + 1, or 0 */
    bool cancelled;
    enum { SOFT_TIMER_QP, SOFT_TIMER_CQ } kind; /* const: what it is embedded in */
    uint64_t due;                               /* CLOCK_MONOTONIC */
};

struct soft_worker {
    struct soft_mutex lock; /* guards all of this but the next two */
    /* Queue pairs with something to do, the last one first: anybody adds one, without a lock, and whoever holds the
     * lock takes all at once. So none that was taken can be the head again under who adds. */
    _Atomic(struct soft_qp *) submitted;
    struct soft_sleeper sleeper; /* the thread */
    pthread_t thread;
    bool started, stop;
    struct soft_qp *first, *last;               /* those that were taken, in order of arrival */
    struct soft_timer **timers;                 /* a binary heap by `due` */
    uint32_t timer_count, timer_room, reserved; /* room for each timer that may be set */
};

int soft_worker_init(struct soft_context *context);
void soft_worker_halt(struct soft_context *context); /* the thread stops for good */
void soft_worker_destroy(struct soft_context *context);
int soft_worker_reserve_timer(struct soft_context *context); /* room for one more timer; may start the thread */
void soft_worker_release_timer(struct soft_context *context);
void soft_worker_submit(struct soft_qp *qp); /* the worker thread executes it soon. In a grace section; takes no lock */
int soft_worker_start(struct soft_context *context); /* makes sure that the thread runs: 0 or an errno */
void soft_worker_remove(struct soft_qp *qp);         /* neither executed nor timed from here on */

/* The worker thread comes back then: to execute a queue pair, or for soft_cq_moderation_expired. The earliest of several counts. */
void soft_worker_set_timer(struct soft_context *context, struct soft_timer *timer, uint64_t due);
void soft_worker_cancel_timer(struct soft_context *context, struct soft_timer *timer, bool for_good);

#endif
