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

/* Embedded in what is to be visited later. Under engine->lock. */
struct soft_timer {
    uint32_t slot; /* its place in the heap + 1, or 0 */
    bool forgotten;
    enum { SOFT_TIMER_QP, SOFT_TIMER_CQ } of; /* const: what it is embedded in */
    uint64_t due;                             /* CLOCK_MONOTONIC */
};

struct soft_engine {
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

int soft_engine_init(struct soft_context *context);
void soft_engine_halt(struct soft_context *context); /* the thread stops for good */
void soft_engine_destroy(struct soft_context *context);
int soft_engine_reserve(struct soft_context *context); /* room for one more timer; may start the thread */
void soft_engine_unreserve(struct soft_context *context);
void soft_engine_ring(struct soft_qp *qp); /* the engine executes it soon. In a grace section; takes no lock */
int soft_engine_start(struct soft_context *context); /* makes sure that the thread runs: 0 or an errno */
void soft_engine_forget(struct soft_qp *qp);         /* neither executed nor timed from here on */

/* The engine comes back then: to execute a queue pair, or for soft_cq_expired. The earliest of several counts. */
void soft_engine_timer(struct soft_context *context, struct soft_timer *timer, uint64_t due);
void soft_engine_cancel(struct soft_context *context, struct soft_timer *timer, bool for_good);

#endif
