/* Completion queues: creation, resizing and destruction. A queue is a ring in memory that the user may provide; device
 * halves fill it (soft/objects/cq_push.c), one driver half empties it (soft/objects/cq_poll.c). */
#include "soft/objects/cq.h"

#include <stdlib.h>
#include <string.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/objects/async_event.h"
#include "soft/objects/comp_channel.h"
#include "soft/objects/context.h"
#include "soft/objects/cq_poll.h"
#include "soft/objects/limits.h"
#include "soft/objects/pd.h"
#include "soft/objects/worker_thread.h"

#define SOFT_WC_FLAGS                                                                                                \
    ((uint64_t)IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP |        \
     IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL | IBV_WC_EX_WITH_DLID_PATH_BITS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | \
     IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

/* ---- Creation -------------------------------------------------------------------------------------------- */

static int check_cq(struct soft_context *context, uint32_t cqe, struct ibv_comp_channel *channel, uint32_t comp_vector)
{
    if (soft_stale(context))
        return ENODEV;
    if (!cqe || cqe > SOFT_MAX_CQE || comp_vector)
        return EINVAL;
    if (channel && channel->context != &context->verbs.context)
        return EINVAL;
    return 0;
}

static int get_buffer(struct soft_memory *buffer, const struct soft_cq *cq, uint32_t entries)
{
    size_t page = soft_page(), size = ((size_t)entries * sizeof(struct soft_cqe) + page - 1) & ~(page - 1);

    return soft_memory_get(buffer, cq->parent_domain, size, page, SOFT_RES_CQ);
}

static int cq_get_ring(struct soft_cq *cq, uint32_t entries)
{
    int error = get_buffer(&cq->buffer, cq, entries);

    if (error)
        return error;
    error = soft_memory_get(&cq->record, cq->parent_domain, 8, 8, SOFT_RES_DBR);
    if (error) {
        soft_memory_put(&cq->buffer);
        return error;
    }
    cq->ring = cq->buffer.address;
    cq->mask = entries - 1;
    cq->consumer = cq->record.address;
    return 0;
}

static int init_cq(struct soft_cq *cq, struct soft_context *context, struct soft_exclusive *exclusive)
{
    struct ibv_cq_ex *ex = &cq->ex;
    int error;

    error = pthread_mutex_init(&ex->mutex, NULL);
    if (error)
        return error;
    error = pthread_cond_init(&ex->cond, NULL);
    if (error)
        goto destroy_mutex;
    ex->context = &context->verbs.context;
    ex->handle = atomic_fetch_add(&context->next_handle, 1);
    error = soft_half_init(&cq->half, &context->overlaps, SOFT_RANK_CQ_HALF, "completion queue", ex->handle, exclusive);
    if (error)
        goto destroy_cond;
    return 0;

destroy_cond:
    pthread_cond_destroy(&ex->cond);
destroy_mutex:
    pthread_mutex_destroy(&ex->mutex);
    return error;
}

static struct soft_cq *cq_create(struct soft_context *context, const struct ibv_cq_init_attr_ex *attr,
                                 struct soft_pd *parent_domain, bool single_threaded)
{
    int error = check_cq(context, attr->cqe, attr->channel, attr->comp_vector);
    struct soft_exclusive *exclusive = NULL;
    struct soft_cq *cq = NULL;

    if (!error && !(cq = calloc(1, sizeof(*cq))))
        error = ENOMEM;
    if (error)
        goto fail;
    cq->parent_domain = parent_domain;
    if (parent_domain && parent_domain->td)
        exclusive = &parent_domain->td->exclusive;
    else if (single_threaded)
        exclusive = &cq->half.own;
    error = init_cq(cq, context, exclusive);
    if (error)
        goto free_cq;
    error = cq_get_ring(cq, soft_power_of_two(attr->cqe));
    if (error)
        goto destroy;
    cq->ex.cq_context = attr->cq_context;
    cq->ex.channel = attr->channel;
    cq->ex.cqe = (int)cq->mask + 1;
    cq->timestamps =
        attr->wc_flags & (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);
    cq->timer.kind = SOFT_TIMER_CQ;
    cq->events.element = &cq->ex;
    soft_lock_init(&cq->lock, SOFT_RANK_CQ);
    if (attr->channel) {
        cq->channel = container_of(attr->channel, struct soft_channel, channel);
        atomic_fetch_add(&cq->channel->references, 1);
    }
    if (parent_domain)
        atomic_fetch_add(&parent_domain->references, 1);
    atomic_fetch_add(&context->cqs, 1);
    return cq;

destroy:
    soft_half_destroy(&cq->half);
    pthread_cond_destroy(&cq->ex.cond);
    pthread_mutex_destroy(&cq->ex.mutex);
free_cq:
    free(cq);
fail:
    errno = error;
    return NULL;
}

struct ibv_cq *soft_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                              int comp_vector)
{
    struct ibv_cq_init_attr_ex attr = {
        .cqe = cqe < 0 ? 0 : (uint32_t)cqe,
        .cq_context = cq_context,
        .channel = channel,
        .comp_vector = (uint32_t)comp_vector,
    };
    struct soft_cq *cq = cq_create(to_soft_context(context), &attr, NULL, false);

    return cq ? (struct ibv_cq *)&cq->ex : NULL;
}

struct ibv_cq_ex *soft_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    const uint32_t known_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    bool single_threaded = false;
    struct soft_pd *parent_domain = NULL;
    struct soft_cq *cq;

    if ((attr->comp_mask & ~known_mask) || (attr->wc_flags & ~SOFT_WC_FLAGS)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) {
        if (attr->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED) {
            errno = EOPNOTSUPP;
            return NULL;
        }
        single_threaded = attr->flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    }
    if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) {
        /* As with mlx5, the field is for parent domains: a plain protection domain is an error. */
        if (!attr->parent_domain || attr->parent_domain->context != context ||
            to_soft_pd(attr->parent_domain)->base == to_soft_pd(attr->parent_domain)) {
            errno = EINVAL;
            return NULL;
        }
        parent_domain = to_soft_pd(attr->parent_domain);
    }
    cq = cq_create(to_soft_context(context), attr, parent_domain, single_threaded);
    if (!cq)
        return NULL;
    soft_cq_ex_methods(&cq->ex, attr->wc_flags);
    return &cq->ex;
}

/* ---- Resizing -------------------------------------------------------------------------------------------- */

/* Move the completions to the places of their counters in another ring, inside of the driver half; `buffer` becomes the
 * old memory. */
static int move_to(struct soft_cq *cq, struct soft_memory *buffer, uint32_t cqe, uint32_t entries)
{
    struct soft_cqe *ring = buffer->address;
    struct soft_memory old = cq->buffer;
    uint32_t consumer, producer;

    soft_lock_take(&cq->lock);
    consumer = atomic_load_explicit(cq->consumer, memory_order_relaxed);
    producer = atomic_load_explicit(&cq->producer, memory_order_relaxed);
    if (producer - consumer > cqe) {
        soft_lock_give(&cq->lock);
        return EINVAL;
    }
    for (; consumer != producer; consumer++)
        ring[consumer & (entries - 1)] = cq->ring[consumer & cq->mask];
    cq->buffer = *buffer;
    cq->ring = ring;
    cq->mask = entries - 1;
    cq->ex.cqe = (int)entries;
    soft_lock_give(&cq->lock);
    *buffer = old;
    return 0;
}

int soft_resize_cq(struct ibv_cq *ibv_cq, int cqe)
{
    struct soft_cq *cq = to_soft_cq(ibv_cq);
    struct soft_memory buffer;
    uint32_t entries;
    int error;

    if (soft_stale(to_soft_context(ibv_cq->context)))
        return ENODEV;
    if (cqe < 1 || (uint32_t)cqe > SOFT_MAX_CQE)
        return EINVAL;
    entries = soft_power_of_two((uint32_t)cqe);
    /* The user's allocator may need what a thread holds that waits for this queue, so call it outside of the driver
     * half. */
    error = get_buffer(&buffer, cq, entries);
    if (error)
        return error;
    error = soft_half_enter(&cq->half, "resize_cq");
    if (!error) {
        error = move_to(cq, &buffer, (uint32_t)cqe, entries);
        soft_half_leave(&cq->half);
    }
    soft_memory_put(&buffer);
    return error;
}

/* ---- Destruction ----------------------------------------------------------------------------------------- */

int soft_destroy_cq(struct ibv_cq *ibv_cq)
{
    struct soft_cq *cq = to_soft_cq(ibv_cq);
    struct soft_context *context = to_soft_context(ibv_cq->context);
    int error;

    if (soft_stale(context))
        return ENODEV;
    error = soft_half_enter(&cq->half, "destroy_cq");
    if (error)
        return error;
    if (atomic_load(&cq->references)) {
        soft_half_leave(&cq->half);
        return EBUSY;
    }
    /* No queue pair refers to the queue. Wait for executions that still push into it, and for a worker thread that
     * handles its timer. */
    soft_worker_cancel_timer(context, &cq->timer, true);
    grace_wait();
    /* a thread that received an event may poll and moderate before it acknowledges the event */
    soft_half_leave(&cq->half);
    soft_events_drain(context, &cq->events, &cq->ex.mutex, &cq->ex.cond, &cq->ex.async_events_completed);
    if (cq->channel) {
        uint32_t delivered = soft_channel_remove_cq(cq->channel, cq);

        pthread_mutex_lock(&cq->ex.mutex);
        while (cq->ex.comp_events_completed != delivered)
            pthread_cond_wait(&cq->ex.cond, &cq->ex.mutex);
        pthread_mutex_unlock(&cq->ex.mutex);
        atomic_fetch_sub(&cq->channel->references, 1);
    }
    if (cq->has_timer)
        soft_worker_release_timer(context);
    soft_memory_put(&cq->record);
    soft_memory_put(&cq->buffer);
    if (cq->parent_domain)
        atomic_fetch_sub(&cq->parent_domain->references, 1);
    soft_half_destroy(&cq->half);
    pthread_cond_destroy(&cq->ex.cond);
    pthread_mutex_destroy(&cq->ex.mutex);
    atomic_fetch_sub(&context->cqs, 1);
    free(cq);
    return 0;
}
