/* The device half of completion queues: any thread adds completions, and the channel is notified of those that the
 * queue is armed for. */
#include "soft/objects/cq_push.h"

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/objects/async_event.h"
#include "soft/objects/comp_channel.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/hooks.h"
#include "soft/objects/worker_thread.h"

/* Actions after the lock is released: other threads may want the lock meanwhile, and an action may be a system call, or
 * take a mutex. A grace section of the caller, or its use of the queue, keeps the queue alive. */
struct follow_up {
    bool broke;   /* raise CQ_ERR */
    bool notify;  /* notify the channel */
    uint64_t due; /* when the worker thread calls soft_cq_moderation_expired; or 0 */
};

static void unlock_and_notify(struct soft_cq *cq, struct follow_up follow_up)
{
    struct soft_context *context = to_soft_context(cq->ex.context);

    soft_lock_give(&cq->lock);
    if (follow_up.notify)
        soft_channel_notify(cq->channel, cq);
    if (follow_up.due)
        soft_worker_set_timer(context, &cq->timer, follow_up.due);
    if (follow_up.broke)
        soft_raise_event(context, &cq->events, IBV_EVENT_CQ_ERR);
}

/* Disarm the queue; return whether it was armed. Call under the lock, like all functions up to soft_cq_push. */
static bool disarm(struct soft_cq *cq)
{
    bool armed = cq->armed != SOFT_UNARMED;

    assert_held(&cq->lock);
    cq->armed = SOFT_UNARMED;
    cq->moderated = 0;
    return armed;
}

/* Mark the queue as overrun, for good. Sleeping threads are notified of that, and of each further completion: poll_cq
 * reports the rest. */
static struct follow_up mark_overrun(struct soft_cq *cq)
{
    bool broke = !atomic_exchange_explicit(&cq->overrun, true, memory_order_relaxed);

    assert_held(&cq->lock);
    return (struct follow_up){.broke = broke, .notify = disarm(cq)};
}

static bool moderates(const struct soft_cq *cq)
{
    return cq->moderate_count > 1 && cq->moderate_period_us;
}

/* Decide whether the queue notifies now of the completions that it is armed for and has counted, or when to decide
 * again. */
static struct follow_up check_moderation(struct soft_cq *cq)
{
    uint64_t due = cq->moderated_since + 1000ull * cq->moderate_period_us;

    assert_held(&cq->lock);
    if (!cq->moderated)
        return (struct follow_up){0};
    if (!moderates(cq) || cq->moderated >= cq->moderate_count || due <= soft_now_ns())
        return (struct follow_up){.notify = disarm(cq)};
    return (struct follow_up){.due = due};
}

/* Count one more completion that the queue is armed for. */
static struct follow_up count_completion(struct soft_cq *cq)
{
    assert_held(&cq->lock);
    if (!moderates(cq) || ++cq->moderated >= cq->moderate_count)
        return (struct follow_up){.notify = disarm(cq)};
    if (cq->moderated > 1)
        return (struct follow_up){0}; /* the timer is set already */
    cq->moderated_since = soft_now_ns();
    return check_moderation(cq);
}

static bool is_armed_for(const struct soft_cq *cq, const struct soft_cqe *cqe)
{
    assert_held(&cq->lock);
    return cq->armed == SOFT_ARMED_ANY ||
           (cq->armed == SOFT_ARMED_SOLICITED && (cqe->solicited || cqe->status != IBV_WC_SUCCESS));
}

bool soft_cq_push(struct soft_cq *cq, const struct soft_cqe *cqe)
{
    struct soft_cqe *entry;
    uint32_t producer;

    soft_lock_take(&cq->lock);
    producer = atomic_load_explicit(&cq->producer, memory_order_relaxed);
    if (atomic_load_explicit(&cq->overrun, memory_order_relaxed) ||
        producer - atomic_load_explicit(cq->consumer, memory_order_acquire) > cq->mask) {
        unlock_and_notify(cq, mark_overrun(cq));
        return false;
    }
    entry = &cq->ring[producer & cq->mask];
    *entry = *cqe;
    if (cq->timestamps) /* under the lock, so that timestamps are ordered as the entries are */
        entry->timestamp = soft_now_ns();
    atomic_store_explicit(&cq->producer, producer + 1, memory_order_release);
    if (is_armed_for(cq, cqe))
        unlock_and_notify(cq, count_completion(cq));
    else
        soft_lock_give(&cq->lock);
    return true;
}

void soft_cq_break(struct soft_cq *cq)
{
    soft_lock_take(&cq->lock);
    unlock_and_notify(cq, mark_overrun(cq));
}

int soft_req_notify_cq(struct ibv_cq *ibv_cq, int solicited_only)
{
    struct soft_device *device = to_soft_context(ibv_cq->context)->device;
    struct soft_cq *cq = to_soft_cq(ibv_cq);

    if (soft_stale(to_soft_context(ibv_cq->context)))
        return ENODEV;
    if (!cq->channel)
        return EINVAL;
    /* InfiniBand architecture: the next completion that is added raises the event, not one that is in the queue
     * already. A request for any completion replaces one for solicited completions. Completions that moderation has
     * counted for an earlier request, which another thread may be waiting for, stay counted and timed. */
    soft_lock_take(&cq->lock);
    if (cq->armed != SOFT_ARMED_ANY)
        cq->armed = solicited_only ? SOFT_ARMED_SOLICITED : SOFT_ARMED_ANY;
    soft_lock_give(&cq->lock);
    device->hooks->stop_polling(device, cq->channel); /* a thread that arms the queue stops polling */
    return 0;
}

/* ---- Moderation ------------------------------------------------------------------------------------------ */

/* Reserve a timer for the end of the period, which the worker thread handles in inline mode, too. */
static int get_timer(struct soft_cq *cq)
{
    struct soft_context *context = to_soft_context(cq->ex.context);
    int error = soft_worker_reserve_timer(context);

    if (error)
        return error;
    error = soft_worker_start(context);
    if (error)
        soft_worker_release_timer(context);
    else
        cq->has_timer = true;
    return error;
}

int soft_modify_cq(struct ibv_cq *ibv_cq, struct ibv_modify_cq_attr *attr)
{
    struct soft_cq *cq = to_soft_cq(ibv_cq);
    int error;

    if (soft_stale(to_soft_context(ibv_cq->context)))
        return ENODEV;
    if (attr->attr_mask != IBV_CQ_ATTR_MODERATE)
        return EINVAL;
    error = soft_half_enter(&cq->half, "modify_cq");
    if (error)
        return error;
    /* Without a channel there is nothing to moderate. */
    if (cq->channel && !cq->has_timer && attr->moderate.cq_count > 1 && attr->moderate.cq_period)
        error = get_timer(cq);
    if (!error) {
        soft_lock_take(&cq->lock);
        cq->moderate_count = attr->moderate.cq_count;
        cq->moderate_period_us = attr->moderate.cq_period;
        unlock_and_notify(cq, check_moderation(cq));
    }
    soft_half_leave(&cq->half);
    return error;
}

void soft_cq_moderation_expired(struct soft_cq *cq)
{
    /* The worker thread keeps the earliest of several times, and the queue may have notified and begun to count anew
     * since: this call may be too early, or without need. */
    soft_lock_take(&cq->lock);
    unlock_and_notify(cq, check_moderation(cq));
}
