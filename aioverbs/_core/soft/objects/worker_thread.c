/* Worker thread of a context. In thread mode it executes every request. In inline mode it starts with the first request
 * that has to be repeated later, or with the first moderated completion queue, and handles timers. It never calls into
 * Python. */
#define _GNU_SOURCE
#include "soft/objects/worker_thread.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/cq_push.h"
#include "soft/objects/hooks.h"
#include "soft/objects/qp.h"

/* ---- Timers: a binary heap, earliest first. All under worker->lock ---------------------------------------- */

static void heap_place(struct soft_worker *worker, uint32_t slot, struct soft_timer *timer)
{
    worker->timers[slot] = timer;
    timer->slot = slot + 1;
}

static void sift_up(struct soft_worker *worker, uint32_t slot, struct soft_timer *timer)
{
    while (slot) {
        uint32_t above = (slot - 1) / 2;

        if (worker->timers[above]->due <= timer->due)
            break;
        heap_place(worker, slot, worker->timers[above]);
        slot = above;
    }
    heap_place(worker, slot, timer);
}

static void sift_down(struct soft_worker *worker, uint32_t slot, struct soft_timer *timer)
{
    uint32_t below;

    while ((below = 2 * slot + 1) < worker->timer_count) {
        if (below + 1 < worker->timer_count && worker->timers[below + 1]->due < worker->timers[below]->due)
            below++;
        if (worker->timers[below]->due >= timer->due)
            break;
        heap_place(worker, slot, worker->timers[below]);
        slot = below;
    }
    heap_place(worker, slot, timer);
}

static void cancel_timer(struct soft_worker *worker, struct soft_timer *timer)
{
    uint32_t slot = timer->slot - 1;
    struct soft_timer *last;

    assert_held(&worker->lock);
    if (!timer->slot)
        return;
    timer->slot = 0;
    last = worker->timers[--worker->timer_count];
    if (last == timer)
        return;
    if (slot && worker->timers[(slot - 1) / 2]->due > last->due)
        sift_up(worker, slot, last);
    else
        sift_down(worker, slot, last);
}

/* Set a timer; return whether it is the next one now and was not before. A timer that is set for an earlier time stays:
 * its handler finds that the time has not come, and sets the timer again. */
static bool set_timer(struct soft_worker *worker, struct soft_timer *timer, uint64_t due)
{
    assert_held(&worker->lock);
    if (timer->cancelled || (timer->slot && timer->due <= due))
        return false;
    cancel_timer(worker, timer);
    timer->due = due;
    sift_up(worker, worker->timer_count++, timer);
    return timer->slot == 1;
}

/* ---- The list of queue pairs to execute, under worker->lock ----------------------------------------------- */

static void worker_append(struct soft_worker *worker, struct soft_qp *first, struct soft_qp *last)
{
    assert_held(&worker->lock);
    last->next_queued = NULL;
    if (worker->last)
        worker->last->next_queued = first;
    else
        worker->first = first;
    worker->last = last;
}

/* Add a queue pair whose timer expired. A thread that is submitting it adds it instead. */
static void enqueue(struct soft_worker *worker, struct soft_qp *qp)
{
    if (!atomic_exchange(&qp->queued, true))
        worker_append(worker, qp, qp);
}

/* Take the queue pairs that were submitted since, in the order of submission. */
static void take_submitted(struct soft_worker *worker)
{
    struct soft_qp *qp, *next, *first = NULL, *last;

    assert_held(&worker->lock);
    if (!atomic_load_explicit(&worker->submitted, memory_order_relaxed))
        return;
    /* the lock keeps other threads from taking them */
    last = atomic_exchange_explicit(&worker->submitted, NULL, memory_order_acquire);
    for (qp = last; qp; qp = next) {
        next = qp->next_queued;
        qp->next_queued = first;
        first = qp;
    }
    worker_append(worker, first, last);
}

static struct soft_qp *dequeue(struct soft_worker *worker)
{
    struct soft_qp *qp = worker->first;

    assert_held(&worker->lock);
    if (qp) {
        worker->first = qp->next_queued;
        if (!worker->first)
            worker->last = NULL;
        /* The queue pair may be submitted again from here on. A thread that found the flag set before wrote with
         * release, so the execution that follows sees the requests that it posted. */
        atomic_exchange_explicit(&qp->queued, false, memory_order_acq_rel);
    }
    return qp;
}

/* ---- The thread ------------------------------------------------------------------------------------------ */

/* Sleep until there may be work; the lock is released meanwhile. A change under the lock from here on comes after
 * soft_sleeper_begin, so the thread that makes the change wakes this one; a thread that submits needs no lock for that.
 */
static void sleep_until_work(struct soft_worker *worker)
{
    uint64_t due = worker->timer_count ? worker->timers[0]->due : UINT64_MAX;

    assert_held(&worker->lock);
    soft_sleeper_begin(&worker->sleeper);
    soft_mutex_give(&worker->lock);
    if (!atomic_load(&worker->submitted))
        soft_sleeper_wait(&worker->sleeper, due);
    soft_sleeper_end(&worker->sleeper);
    soft_mutex_take(&worker->lock);
}

/* Add queue pairs whose timers have expired to the list, up to a completion queue whose timer has expired, which is
 * returned. Call under the lock. */
static struct soft_cq *expire_timers(struct soft_worker *worker)
{
    uint64_t now;

    assert_held(&worker->lock);
    if (!worker->timer_count)
        return NULL;
    now = soft_now_ns();
    while (worker->timer_count && worker->timers[0]->due <= now) {
        struct soft_timer *timer = worker->timers[0];

        cancel_timer(worker, timer);
        if (timer->kind == SOFT_TIMER_CQ)
            return container_of(timer, struct soft_cq, timer);
        enqueue(worker, container_of(timer, struct soft_qp, timer));
    }
    return NULL;
}

/* Execute a queue pair in a grace section. */
static void worker_execute(struct soft_context *context, struct soft_qp *qp)
{
    uint64_t again = context->device->hooks->execute(qp);

    if (again != UINT64_MAX)
        soft_worker_set_timer(context, &qp->timer, again);
}

static void *worker_main(void *argument)
{
    struct soft_context *context = argument;
    struct soft_worker *worker = &context->worker;

    prctl(PR_SET_TIMERSLACK, 1000); /* nanoseconds; delays are to be exact */
    while (!grace_ready())
        sched_yield();                   /* until there is memory for a record, requests wait */
    prctl(PR_SET_NAME, "aioverbs-soft"); /* last: an observer of the name knows that this thread allocates no more */
    soft_mutex_take(&worker->lock);
    while (!worker->stop) {
        struct soft_cq *cq = expire_timers(worker);
        struct grace_reader *grace;
        struct soft_qp *qp;

        take_submitted(worker);
        if (!cq && !worker->first) {
            sleep_until_work(worker);
            continue;
        }
        /* Begin the section before the lock is released: soft_worker_remove, which then finds the queue pair on no
         * list, or soft_worker_cancel_timer, which finds the timer not set, is followed by a grace_wait that waits for
         * this section. Entering a section does not block. */
        grace = grace_enter();
        qp = dequeue(worker);
        soft_mutex_give(&worker->lock);
        if (cq)
            soft_cq_moderation_expired(cq);
        if (qp)
            worker_execute(context, qp);
        grace_leave(grace);
        soft_mutex_take(&worker->lock);
    }
    soft_mutex_give(&worker->lock);
    return NULL;
}

/* Start the thread under the lock, with all signals blocked: signals are for the user's threads. */
static int worker_start(struct soft_context *context)
{
    struct soft_worker *worker = &context->worker;
    sigset_t all, before;
    int error;

    assert_held(&context->worker.lock);
    if (worker->started || worker->stop)
        return worker->stop ? ECANCELED : 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&worker->thread, NULL, worker_main, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    worker->started = !error;
    return error;
}

int soft_worker_start(struct soft_context *context)
{
    int error;

    soft_mutex_take(&context->worker.lock);
    error = worker_start(context);
    soft_mutex_give(&context->worker.lock);
    return error;
}

/* ---- Interface ------------------------------------------------------------------------------------------- */

int soft_worker_init(struct soft_context *context)
{
    return soft_mutex_init(&context->worker.lock, SOFT_RANK_WORKER);
}

void soft_worker_halt(struct soft_context *context)
{
    struct soft_worker *worker = &context->worker;
    bool join;

    soft_mutex_take(&worker->lock);
    join = worker->started;
    worker->started = false;
    worker->stop = true;
    soft_mutex_give(&worker->lock);
    soft_sleeper_wake(&worker->sleeper);
    if (join)
        pthread_join(worker->thread, NULL);
}

void soft_worker_destroy(struct soft_context *context)
{
    struct soft_worker *worker = &context->worker;

    soft_worker_halt(context);
    soft_mutex_destroy(&worker->lock);
    free(worker->timers);
}

int soft_worker_reserve_timer(struct soft_context *context)
{
    struct soft_worker *worker = &context->worker;
    int error = 0;

    soft_mutex_take(&worker->lock);
    if (worker->reserved == worker->timer_room) {
        uint32_t room = worker->timer_room ? 2 * worker->timer_room : 64;
        struct soft_timer **timers = realloc(worker->timers, room * sizeof(struct soft_timer *));

        if (timers) {
            worker->timers = timers;
            worker->timer_room = room;
        } else {
            error = ENOMEM;
        }
    }
    if (!error && context->mode == SOFT_THREAD)
        error = worker_start(context);
    if (!error)
        worker->reserved++;
    soft_mutex_give(&worker->lock);
    return error;
}

void soft_worker_release_timer(struct soft_context *context)
{
    soft_mutex_take(&context->worker.lock);
    context->worker.reserved--;
    soft_mutex_give(&context->worker.lock);
}

void soft_worker_submit(struct soft_qp *qp)
{
    struct soft_worker *worker = &qp->context->worker;
    struct soft_qp *first;

    if (atomic_exchange_explicit(&qp->queued, true, memory_order_acq_rel))
        return;
    first = atomic_load_explicit(&worker->submitted, memory_order_relaxed);
    do
        qp->next_queued = first;
    while (!atomic_compare_exchange_weak(&worker->submitted, &first, qp));
    soft_sleeper_wake(&worker->sleeper);
}

void soft_worker_set_timer(struct soft_context *context, struct soft_timer *timer, uint64_t due)
{
    struct soft_worker *worker = &context->worker;
    bool wake;

    soft_mutex_take(&worker->lock);
    wake = set_timer(worker, timer, due);
    soft_mutex_give(&worker->lock);
    if (wake)
        soft_sleeper_wake(&worker->sleeper);
}

void soft_worker_cancel_timer(struct soft_context *context, struct soft_timer *timer, bool for_good)
{
    struct soft_worker *worker = &context->worker;

    soft_mutex_take(&worker->lock);
    if (for_good)
        timer->cancelled = true;
    cancel_timer(worker, timer);
    soft_mutex_give(&worker->lock);
}

void soft_worker_remove(struct soft_qp *qp)
{
    struct soft_worker *worker = &qp->context->worker;
    struct soft_qp **link, *last = NULL;

    soft_mutex_take(&worker->lock);
    /* The thread may be executing the queue pair, and set its timer afterwards: that is ignored from here on. */
    qp->timer.cancelled = true;
    cancel_timer(worker, &qp->timer);
    /* No thread submits the queue pair any more: one that may is in its driver half, which the caller is in, or found
     * it in a grace section, and those have ended. So if the flag is set, the queue pair is on the list by now. */
    take_submitted(worker);
    if (atomic_load_explicit(&qp->queued, memory_order_relaxed)) {
        for (link = &worker->first; *link != qp; link = &(*link)->next_queued)
            last = *link;
        *link = qp->next_queued;
        if (worker->last == qp)
            worker->last = last;
        atomic_store_explicit(&qp->queued, false, memory_order_relaxed);
    }
    soft_mutex_give(&worker->lock);
}
