/* The C thread of a context. In engine mode it executes every request; in inline mode it is started by the first
 * one that has to be tried again later, or by the first completion queue that is moderated, and serves as their alarm
 * clock. It never calls into Python. */
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

/* ---- Timers: a binary heap, earliest first. All under engine->lock ---------------------------------------- */

static void place(struct soft_engine *engine, uint32_t slot, struct soft_timer *timer)
{
    engine->timers[slot] = timer;
    timer->slot = slot + 1;
}

static void sift_up(struct soft_engine *engine, uint32_t slot, struct soft_timer *timer)
{
    while (slot) {
        uint32_t above = (slot - 1) / 2;

        if (engine->timers[above]->due <= timer->due)
            break;
        place(engine, slot, engine->timers[above]);
        slot = above;
    }
    place(engine, slot, timer);
}

static void sift_down(struct soft_engine *engine, uint32_t slot, struct soft_timer *timer)
{
    uint32_t below;

    while ((below = 2 * slot + 1) < engine->timer_count) {
        if (below + 1 < engine->timer_count && engine->timers[below + 1]->due < engine->timers[below]->due)
            below++;
        if (engine->timers[below]->due >= timer->due)
            break;
        place(engine, slot, engine->timers[below]);
        slot = below;
    }
    place(engine, slot, timer);
}

static void cancel_timer(struct soft_engine *engine, struct soft_timer *timer)
{
    uint32_t slot = timer->slot - 1;
    struct soft_timer *last;

    assert_held(&engine->lock);
    if (!timer->slot)
        return;
    timer->slot = 0;
    last = engine->timers[--engine->timer_count];
    if (last == timer)
        return;
    if (slot && engine->timers[(slot - 1) / 2]->due > last->due)
        sift_up(engine, slot, last);
    else
        sift_down(engine, slot, last);
}

/* Whether it is the next one now, and was not before. One that is set for an earlier moment stays: who is called then
 * finds that it is not time yet, and sets it again. */
static bool set_timer(struct soft_engine *engine, struct soft_timer *timer, uint64_t due)
{
    assert_held(&engine->lock);
    if (timer->forgotten || (timer->slot && timer->due <= due))
        return false;
    cancel_timer(engine, timer);
    timer->due = due;
    sift_up(engine, engine->timer_count++, timer);
    return timer->slot == 1;
}

/* ---- The list of queue pairs to execute, under engine->lock ----------------------------------------------- */

static void worker_append(struct soft_engine *engine, struct soft_qp *first, struct soft_qp *last)
{
    assert_held(&engine->lock);
    last->next_queued = NULL;
    if (engine->last)
        engine->last->next_queued = first;
    else
        engine->first = first;
    engine->last = last;
}

/* Its timer was due. Who submits it just now adds it himself. */
static void enqueue(struct soft_engine *engine, struct soft_qp *qp)
{
    if (!atomic_exchange(&qp->queued, true))
        worker_append(engine, qp, qp);
}

/* Those that were submitted since, in the order in which they were. */
static void take_submitted(struct soft_engine *engine)
{
    struct soft_qp *qp, *next, *first = NULL, *last;

    assert_held(&engine->lock);
    if (!atomic_load_explicit(&engine->submitted, memory_order_relaxed))
        return;
    last = atomic_exchange_explicit(&engine->submitted, NULL, memory_order_acquire); /* nobody else takes them */
    for (qp = last; qp; qp = next) {
        next = qp->next_queued;
        qp->next_queued = first;
        first = qp;
    }
    worker_append(engine, first, last);
}

static struct soft_qp *dequeue(struct soft_engine *engine)
{
    struct soft_qp *qp = engine->first;

    assert_held(&engine->lock);
    if (qp) {
        engine->first = qp->next_queued;
        if (!engine->first)
            engine->last = NULL;
        /* It may be submitted again from here on. Who found it set before did so with release: what he posted is seen
         * by the execution that comes now. */
        atomic_exchange_explicit(&qp->queued, false, memory_order_acq_rel);
    }
    return qp;
}

/* ---- The thread ------------------------------------------------------------------------------------------ */

/* Under the lock, which is given back meanwhile: sleeps until there may be something to do. What is changed under the
 * lock from here on comes after soft_sleeper_begin, so who changes it wakes us; who submits needs no lock for that. */
static void sleep_until_work(struct soft_engine *engine)
{
    uint64_t due = engine->timer_count ? engine->timers[0]->due : UINT64_MAX;

    assert_held(&engine->lock);
    soft_sleeper_begin(&engine->sleeper);
    soft_mutex_give(&engine->lock);
    if (!atomic_load(&engine->submitted))
        soft_sleeper_wait(&engine->sleeper, due);
    soft_sleeper_end(&engine->sleeper);
    soft_mutex_take(&engine->lock);
}

/* Under the lock: queue pairs whose timers are due join the list, up to a completion queue whose timer is. */
static struct soft_cq *expire_timers(struct soft_engine *engine)
{
    uint64_t now;

    assert_held(&engine->lock);
    if (!engine->timer_count)
        return NULL;
    now = soft_now_ns();
    while (engine->timer_count && engine->timers[0]->due <= now) {
        struct soft_timer *timer = engine->timers[0];

        cancel_timer(engine, timer);
        if (timer->of == SOFT_TIMER_CQ)
            return container_of(timer, struct soft_cq, timer);
        enqueue(engine, container_of(timer, struct soft_qp, timer));
    }
    return NULL;
}

/* In a grace section. */
static void worker_execute(struct soft_context *context, struct soft_qp *qp)
{
    uint64_t again = context->device->hooks->execute(qp);

    if (again != UINT64_MAX)
        soft_engine_timer(context, &qp->timer, again);
}

static void *engine_main(void *argument)
{
    struct soft_context *context = argument;
    struct soft_engine *engine = &context->engine;

    prctl(PR_SET_TIMERSLACK, 1000); /* ns: delays are to be what they are set to */
    while (!grace_ready())
        sched_yield();                   /* memory for one record: requests wait until there is some */
    prctl(PR_SET_NAME, "aioverbs-soft"); /* last: whoever reads it knows that this thread allocates no more */
    soft_mutex_take(&engine->lock);
    while (!engine->stop) {
        struct soft_cq *cq = expire_timers(engine);
        struct grace_reader *grace;
        struct soft_qp *qp;

        take_submitted(engine);
        if (!cq && !engine->first) {
            sleep_until_work(engine);
            continue;
        }
        /* The section begins before the lock is given back, so that soft_engine_forget, which then finds
		 * the queue pair in no list, or soft_engine_cancel, which finds the timer not set, is followed by a
		 * grace_wait that sees us. Entering waits for nobody. */
        grace = grace_enter();
        qp = dequeue(engine);
        soft_mutex_give(&engine->lock);
        if (cq)
            soft_cq_expired(cq);
        if (qp)
            worker_execute(context, qp);
        grace_leave(grace);
        soft_mutex_take(&engine->lock);
    }
    soft_mutex_give(&engine->lock);
    return NULL;
}

/* Under the lock. Signals are for the user's threads. */
static int worker_start(struct soft_context *context)
{
    struct soft_engine *engine = &context->engine;
    sigset_t all, before;
    int error;

    assert_held(&context->engine.lock);
    if (engine->started || engine->stop)
        return engine->stop ? ECANCELED : 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&engine->thread, NULL, engine_main, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    engine->started = !error;
    return error;
}

int soft_engine_start(struct soft_context *context)
{
    int error;

    soft_mutex_take(&context->engine.lock);
    error = worker_start(context);
    soft_mutex_give(&context->engine.lock);
    return error;
}

/* ---- What others call ------------------------------------------------------------------------------------ */

int soft_engine_init(struct soft_context *context)
{
    return soft_mutex_init(&context->engine.lock, SOFT_RANK_ENGINE);
}

void soft_engine_halt(struct soft_context *context)
{
    struct soft_engine *engine = &context->engine;
    bool join;

    soft_mutex_take(&engine->lock);
    join = engine->started;
    engine->started = false;
    engine->stop = true;
    soft_mutex_give(&engine->lock);
    soft_sleeper_wake(&engine->sleeper);
    if (join)
        pthread_join(engine->thread, NULL);
}

void soft_engine_destroy(struct soft_context *context)
{
    struct soft_engine *engine = &context->engine;

    soft_engine_halt(context);
    soft_mutex_destroy(&engine->lock);
    free(engine->timers);
}

int soft_engine_reserve(struct soft_context *context)
{
    struct soft_engine *engine = &context->engine;
    int error = 0;

    soft_mutex_take(&engine->lock);
    if (engine->reserved == engine->timer_room) {
        uint32_t room = engine->timer_room ? 2 * engine->timer_room : 64;
        struct soft_timer **timers = realloc(engine->timers, room * sizeof(struct soft_timer *));

        if (timers) {
            engine->timers = timers;
            engine->timer_room = room;
        } else {
            error = ENOMEM;
        }
    }
    if (!error && context->mode == SOFT_THREAD)
        error = worker_start(context);
    if (!error)
        engine->reserved++;
    soft_mutex_give(&engine->lock);
    return error;
}

void soft_engine_unreserve(struct soft_context *context)
{
    soft_mutex_take(&context->engine.lock);
    context->engine.reserved--;
    soft_mutex_give(&context->engine.lock);
}

void soft_engine_ring(struct soft_qp *qp)
{
    struct soft_engine *engine = &qp->context->engine;
    struct soft_qp *first;

    if (atomic_exchange_explicit(&qp->queued, true, memory_order_acq_rel))
        return;
    first = atomic_load_explicit(&engine->submitted, memory_order_relaxed);
    do
        qp->next_queued = first;
    while (!atomic_compare_exchange_weak(&engine->submitted, &first, qp));
    soft_sleeper_wake(&engine->sleeper);
}

void soft_engine_timer(struct soft_context *context, struct soft_timer *timer, uint64_t due)
{
    struct soft_engine *engine = &context->engine;
    bool wake;

    soft_mutex_take(&engine->lock);
    wake = set_timer(engine, timer, due);
    soft_mutex_give(&engine->lock);
    if (wake)
        soft_sleeper_wake(&engine->sleeper);
}

void soft_engine_cancel(struct soft_context *context, struct soft_timer *timer, bool for_good)
{
    struct soft_engine *engine = &context->engine;

    soft_mutex_take(&engine->lock);
    if (for_good)
        timer->forgotten = true;
    cancel_timer(engine, timer);
    soft_mutex_give(&engine->lock);
}

void soft_engine_forget(struct soft_qp *qp)
{
    struct soft_engine *engine = &qp->context->engine;
    struct soft_qp **link, *last = NULL;

    soft_mutex_take(&engine->lock);
    /* The thread may be executing it, and come back for it to be timed: it is not taken in any more. */
    qp->timer.forgotten = true;
    cancel_timer(engine, &qp->timer);
    /* Nobody submits it any more: who may do so is in its driver half, where the caller is, or found it in a grace
     * section, and those are over. So where it is marked it stands on the list by now. */
    take_submitted(engine);
    if (atomic_load_explicit(&qp->queued, memory_order_relaxed)) {
        for (link = &engine->first; *link != qp; link = &(*link)->next_queued)
            last = *link;
        *link = qp->next_queued;
        if (engine->last == qp)
            engine->last = last;
        atomic_store_explicit(&qp->queued, false, memory_order_relaxed);
    }
    soft_mutex_give(&engine->lock);
}
