/* Worker thread of a context, and its timers. */
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

/* Timer, embedded in the object that the worker thread handles when the timer expires. Under worker->lock. */
struct soft_timer {
    uint32_t slot; /* index in the heap + 1, or 0 */
    bool cancelled;
    enum { SOFT_TIMER_QP, SOFT_TIMER_CQ } kind; /* const: type of the embedding object */
    uint64_t due;                               /* CLOCK_MONOTONIC */
};

struct soft_worker {
    struct soft_mutex lock; /* guards all fields but the next two */
    /* Queue pairs with work, the last one first. Any thread adds one without a lock; a thread that holds the lock takes
     * all at once. So a queue pair that was taken cannot become the head again while another thread adds one (ABA). */
    _Atomic(struct soft_qp *) submitted;
    struct soft_sleeper sleeper; /* the thread waits for work */
    pthread_t thread;
    bool started, stop;
    struct soft_qp *first, *last;               /* queue pairs that were taken, in order of submission */
    struct soft_timer **timers;                 /* binary heap by `due` */
    uint32_t timer_count, timer_room, reserved; /* timers in the heap, size of the array, timers that were reserved */
};

int soft_worker_init(struct soft_context *context);
void soft_worker_halt(struct soft_context *context); /* Stop the thread for good. */
void soft_worker_destroy(struct soft_context *context);
/* Reserve room for one more timer; start the thread in thread mode. Return 0 or an errno. */
int soft_worker_reserve_timer(struct soft_context *context);
void soft_worker_release_timer(struct soft_context *context);
/* Have the worker thread execute a queue pair soon. Call in a grace section; takes no lock. */
void soft_worker_submit(struct soft_qp *qp);
int soft_worker_start(struct soft_context *context); /* Start the thread unless it runs: return 0 or an errno. */
/* Remove a queue pair: the worker thread neither executes it nor sets its timer from here on. */
void soft_worker_remove(struct soft_qp *qp);

/* Set a timer (CLOCK_MONOTONIC, nanoseconds): the worker thread then executes the queue pair, or calls
 * soft_cq_moderation_expired. The earliest of several times counts. */
void soft_worker_set_timer(struct soft_context *context, struct soft_timer *timer, uint64_t due);
/* Cancel a timer; with `for_good`, later calls of soft_worker_set_timer are ignored. */
void soft_worker_cancel_timer(struct soft_context *context, struct soft_timer *timer, bool for_good);

#endif
