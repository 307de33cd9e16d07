/* Shared receive queues: a ring of receives for any number of queue pairs. Taking an entry copies it, so its place in
 * the ring is free at once. The depth limits the receives that were posted and whose completions were not polled yet,
 * so a receive that was taken and did not complete has a place to return to. */
#define _GNU_SOURCE
#include "soft/objects/srq.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/objects/async_event.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/cq_poll.h"
#include "soft/objects/hooks.h"
#include "soft/objects/limits.h"
#include "soft/objects/pd.h"
#include "soft/objects/work_queue.h"
#include "soft/objects/xrcd.h"

/* ---- Memory ---------------------------------------------------------------------------------------------- */

static struct soft_rwqe *entry_of(uint8_t *entries, uint32_t mask, uint32_t stride, uint32_t counter)
{
    return (struct soft_rwqe *)(void *)(entries + (size_t)(counter & mask) * stride);
}

/* As with mlx5: entries of at least 32 bytes, on pages that they do not share, with a size that is not rounded up to a
 * page. */
static int get_entries(const struct soft_srq *srq, struct soft_memory *buffer, uint32_t depth)
{
    return soft_memory_get(buffer, srq->pd, (size_t)depth * srq->stride, soft_page(), SOFT_RES_SRQ);
}

static int srq_get_ring(struct soft_srq *srq)
{
    int error = get_entries(srq, &srq->buffer, srq->depth);

    if (error)
        return error;
    srq->entries = srq->buffer.address;
    srq->posted = &srq->own_record;
    if (!srq->pd->alloc)
        return 0;
    error = soft_memory_get(&srq->record, srq->pd, 8, 8, SOFT_RES_DBR);
    if (error)
        soft_memory_put(&srq->buffer);
    else
        srq->posted = srq->record.address;
    return error;
}

/* ---- Creation -------------------------------------------------------------------------------------------- */

static int init_srq(struct soft_srq *srq)
{
    struct soft_table *table = &srq->context->device->srqs;
    int error = soft_table_reserve(table, &srq->number, NULL);

    if (error)
        return error;
    error = soft_half_init(&srq->half, &srq->context->overlaps, SOFT_RANK_HALF, "shared receive queue", srq->number,
                           srq->pd->td ? &srq->pd->td->exclusive : NULL);
    if (error)
        goto release;
    error = pthread_mutex_init(&srq->srq.mutex, NULL);
    if (error)
        goto destroy_half;
    error = pthread_cond_init(&srq->srq.cond, NULL);
    if (error)
        goto destroy_mutex;
    error = srq_get_ring(srq);
    if (error)
        goto destroy_cond;
    return 0;

destroy_cond:
    pthread_cond_destroy(&srq->srq.cond);
destroy_mutex:
    pthread_mutex_destroy(&srq->srq.mutex);
destroy_half:
    soft_half_destroy(&srq->half);
release:
    soft_table_release(table, srq->number);
    return error;
}

static int check_type(const struct ibv_context *context, const struct ibv_srq_init_attr_ex *attr,
                      enum ibv_srq_type type)
{
    const uint32_t xrc_only = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;

    if (type == IBV_SRQT_TM)
        return EOPNOTSUPP;
    if (type == IBV_SRQT_BASIC)
        return attr->comp_mask & xrc_only ? EINVAL : 0;
    if (type != IBV_SRQT_XRC || (attr->comp_mask & xrc_only) != xrc_only)
        return EINVAL;
    return !attr->xrcd || attr->xrcd->context != context || !attr->cq || attr->cq->context != context ? EINVAL : 0;
}

static int srq_check_init_attr(const struct ibv_context *context, const struct ibv_srq_init_attr_ex *attr,
                               enum ibv_srq_type type)
{
    const uint32_t known =
        IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;

    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    if (attr->comp_mask & ~known)
        return EOPNOTSUPP;
    if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD) || !attr->pd || attr->pd->context != context)
        return EINVAL;
    if (!attr->attr.max_wr || attr->attr.max_wr > SOFT_MAX_SRQ_WR || attr->attr.max_sge > SOFT_MAX_SGE)
        return EINVAL;
    return check_type(context, attr, type);
}

/* Publish the queue, and count it in the objects that it refers to. */
static void publish(struct soft_srq *srq)
{
    atomic_fetch_add(&srq->pd->references, 1);
    if (srq->type == IBV_SRQT_XRC) {
        atomic_fetch_add(&srq->xrcd->references, 1);
        atomic_fetch_add(&srq->cq->references, 1);
    }
    atomic_fetch_add(&srq->context->srqs, 1);
    soft_table_publish(&srq->context->device->srqs, srq->number, srq);
}

struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
    enum ibv_srq_type type = attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? attr->srq_type : IBV_SRQT_BASIC;
    int error = srq_check_init_attr(context, attr, type);
    struct soft_srq *srq = NULL;

    if (!error && !(srq = calloc(1, sizeof(*srq))))
        error = ENOMEM;
    if (error)
        goto fail;
    srq->context = to_soft_context(context);
    srq->type = type;
    srq->pd = to_soft_pd(attr->pd);
    if (type == IBV_SRQT_XRC) {
        srq->xrcd = to_soft_xrcd(attr->xrcd);
        srq->cq = to_soft_cq(attr->cq);
    }
    srq->max_sge = attr->attr.max_sge;
    srq->stride = soft_power_of_two((uint32_t)(sizeof(struct soft_rwqe) + sizeof(struct ibv_sge) * srq->max_sge));
    if (srq->stride < 32)
        srq->stride = 32;
    srq->depth = soft_power_of_two(attr->attr.max_wr);
    srq->mask = srq->depth - 1;
    srq->events.element = &srq->srq;
    soft_lock_init(&srq->lock, SOFT_RANK_SRQ);
    error = init_srq(srq);
    if (error)
        goto fail;
    srq->srq.context = context;
    srq->srq.srq_context = attr->srq_context;
    srq->srq.pd = attr->pd;
    srq->srq.handle = srq->number;
    attr->attr.max_wr = srq->depth;
    publish(srq);
    return &srq->srq;

fail:
    free(srq);
    errno = error;
    return NULL;
}

struct ibv_srq *soft_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
    struct ibv_srq_init_attr_ex ex = {
        .srq_context = attr->srq_context,
        .attr = attr->attr,
        .comp_mask = IBV_SRQ_INIT_ATTR_PD,
        .pd = pd,
    };
    struct ibv_srq *srq = soft_create_srq_ex(pd->context, &ex);

    if (srq)
        attr->attr = ex.attr;
    return srq;
}

/* ---- Destruction ----------------------------------------------------------------------------------------- */

/* Enter the driver half of an XRC queue's completion queue first, since its completions are removed from there. */
static int enter_for_destruction(struct soft_srq *srq)
{
    int error = srq->cq ? soft_half_enter(&srq->cq->half, "destroy_srq") : 0;

    if (error)
        return error;
    error = soft_half_enter(&srq->half, "destroy_srq");
    if (error && srq->cq)
        soft_half_leave(&srq->cq->half);
    return error;
}

static void leave_for_destruction(struct soft_srq *srq)
{
    soft_half_leave(&srq->half);
    if (srq->cq)
        soft_half_leave(&srq->cq->half);
}

int soft_destroy_srq(struct ibv_srq *ibv_srq)
{
    struct soft_srq *srq = to_soft_srq(ibv_srq);
    struct soft_context *context = srq->context;
    int error;

    if (soft_stale(context))
        return ENODEV;
    if (srq->type == IBV_SRQT_XRC && !grace_ready())
        return ENOMEM;
    error = enter_for_destruction(srq);
    if (error)
        return error;
    if (atomic_load(&srq->references)) {
        leave_for_destruction(srq);
        return EBUSY;
    }
    /* No queue pair refers to the queue. Wait for threads that found it by its number, and so for their completions. An
     * XRC target may hold a receive for a message of which further parts are expected. */
    soft_table_withdraw(&context->device->srqs, srq->number);
    grace_wait();
    if (srq->type == IBV_SRQT_XRC)
        context->device->hooks->release_srq(context->device, srq);
    if (srq->cq)
        soft_cq_purge(srq->cq, NULL, srq);
    leave_for_destruction(srq); /* a thread that received an event may post before it acknowledges the event */
    soft_events_drain(context, &srq->events, &ibv_srq->mutex, &ibv_srq->cond, &ibv_srq->events_completed);

    soft_table_release(&context->device->srqs, srq->number);
    soft_memory_put(&srq->record);
    soft_memory_put(&srq->buffer);
    if (srq->type == IBV_SRQT_XRC) {
        atomic_fetch_sub(&srq->cq->references, 1);
        atomic_fetch_sub(&srq->xrcd->references, 1);
    }
    atomic_fetch_sub(&srq->pd->references, 1);
    soft_half_destroy(&srq->half);
    pthread_cond_destroy(&ibv_srq->cond);
    pthread_mutex_destroy(&ibv_srq->mutex);
    atomic_fetch_sub(&context->srqs, 1);
    free(srq);
    return 0;
}

/* ---- Queries and changes --------------------------------------------------------------------------------- */

/* Query the device half: like arming a limit, this does not enter the driver half. */
int soft_query_srq(struct ibv_srq *ibv_srq, struct ibv_srq_attr *attr)
{
    struct soft_srq *srq = to_soft_srq(ibv_srq);

    if (soft_stale(srq->context))
        return ENODEV;
    soft_lock_take(&srq->lock);
    *attr = (struct ibv_srq_attr){.max_wr = srq->depth, .max_sge = srq->max_sge, .srq_limit = srq->limit};
    soft_lock_give(&srq->lock);
    return 0;
}

int soft_get_srq_num(struct ibv_srq *ibv_srq, uint32_t *number)
{
    struct soft_srq *srq = to_soft_srq(ibv_srq);

    if (soft_stale(srq->context))
        return ENODEV;
    if (srq->type != IBV_SRQT_XRC)
        return EINVAL;
    *number = srq->number;
    return 0;
}

static int arm(struct soft_srq *srq, uint32_t limit)
{
    int error = 0;

    soft_lock_take(&srq->lock);
    if (limit > srq->depth)
        error = EINVAL;
    else
        srq->limit = limit;
    soft_lock_give(&srq->lock);
    return error;
}

/* Move the waiting receives to another ring, inside of the driver half; `buffer` becomes the old one. */
static int move_entries(struct soft_srq *srq, struct soft_memory *buffer, uint32_t depth, const uint32_t *new_limit)
{
    uint8_t *entries = buffer->address;
    struct soft_memory old = srq->buffer;
    uint32_t counter, posted, limit;
    int error = EINVAL;

    soft_lock_take(&srq->lock);
    limit = new_limit ? *new_limit : srq->limit;
    if (limit <= depth && atomic_load_explicit(&srq->outstanding, memory_order_acquire) <= depth) {
        posted = atomic_load_explicit(srq->posted, memory_order_relaxed);
        for (counter = srq->consumed; counter != posted; counter++)
            memcpy(entry_of(entries, depth - 1, srq->stride, counter),
                   entry_of(srq->entries, srq->mask, srq->stride, counter), srq->stride);
        srq->entries = entries;
        srq->mask = depth - 1;
        srq->depth = depth;
        srq->limit = limit;
        srq->buffer = *buffer;
        *buffer = old;
        error = 0;
    }
    soft_lock_give(&srq->lock);
    return error;
}

/* Resize the ring. The user's allocator may wait for a thread that waits for this driver half, so it is called before
 * entering and after leaving. */
static int resize(struct soft_srq *srq, struct ibv_srq_attr *attr, int mask)
{
    struct soft_memory buffer = {0};
    uint32_t depth;
    int error;

    if (!attr->max_wr || attr->max_wr > SOFT_MAX_SRQ_WR)
        return EINVAL;
    depth = soft_power_of_two(attr->max_wr);
    error = get_entries(srq, &buffer, depth);
    if (error)
        return error;
    error = soft_half_enter(&srq->half, "modify_srq");
    if (!error) {
        error = move_entries(srq, &buffer, depth, mask & IBV_SRQ_LIMIT ? &attr->srq_limit : NULL);
        soft_half_leave(&srq->half);
    }
    soft_memory_put(&buffer);
    if (!error)
        attr->max_wr = depth;
    return error;
}

int soft_modify_srq(struct ibv_srq *ibv_srq, struct ibv_srq_attr *attr, int mask)
{
    struct soft_srq *srq = to_soft_srq(ibv_srq);

    if (soft_stale(srq->context))
        return ENODEV;
    if (mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
        return EINVAL;
    if (mask & IBV_SRQ_MAX_WR)
        return resize(srq, attr, mask);
    return mask & IBV_SRQ_LIMIT ? arm(srq, attr->srq_limit) : 0;
}

/* ---- The driver half ------------------------------------------------------------------------------------- */

static int srq_check_receive(const struct soft_srq *srq, const struct ibv_recv_wr *wr, uint32_t posted_before)
{
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > srq->max_sge)
        return EINVAL;
    /* A returned credit means that its receive was taken before, so that place in the ring is free. */
    if (atomic_load_explicit(&srq->outstanding, memory_order_acquire) + posted_before >= srq->depth)
        return ENOMEM;
    return 0;
}

int soft_post_srq_recv(struct ibv_srq *ibv_srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct soft_srq *srq = to_soft_srq(ibv_srq);
    uint32_t first, count;
    int error;

    *bad = wr;
    if (soft_stale(srq->context))
        return ENODEV;
    error = soft_half_enter(&srq->half, "post_srq_recv");
    if (error)
        return error;
    first = atomic_load_explicit(srq->posted, memory_order_relaxed);
    for (count = 0; wr; wr = wr->next, count++) {
        struct soft_rwqe *rwqe = entry_of(srq->entries, srq->mask, srq->stride, first + count);

        error = srq_check_receive(srq, wr, count);
        if (error)
            break;
        rwqe->wr_id = wr->wr_id;
        rwqe->num_sge = (uint64_t)wr->num_sge;
        soft_copy_sges((struct ibv_sge *)(rwqe + 1), wr->sg_list, (unsigned int)wr->num_sge);
    }
    *bad = wr;
    /* Count the receives before another thread can take, complete and poll them. */
    atomic_fetch_add_explicit(&srq->outstanding, count, memory_order_relaxed);
    atomic_store_explicit(srq->posted, first + count, memory_order_release);
    soft_half_leave(&srq->half);
    return error;
}

/* ---- The device half ------------------------------------------------------------------------------------- */

/* Return the number of receives in the ring. Call under the lock. */
static uint32_t waiting(const struct soft_srq *srq)
{
    assert_held(&srq->lock);
    return srq->broken ? 0 : atomic_load_explicit(srq->posted, memory_order_acquire) - srq->consumed;
}

bool soft_srq_has_receive(struct soft_srq *srq)
{
    bool has;

    soft_lock_take(&srq->lock);
    has = waiting(srq) > 0;
    soft_lock_give(&srq->lock);
    return has;
}

bool soft_srq_take(struct soft_srq *srq, struct soft_receive *receive)
{
    const struct soft_rwqe *rwqe;
    bool reached = false;
    uint32_t left;

    soft_lock_take(&srq->lock);
    left = waiting(srq);
    if (!left) {
        soft_lock_give(&srq->lock);
        return false;
    }
    rwqe = entry_of(srq->entries, srq->mask, srq->stride, srq->consumed++);
    receive->wr_id = rwqe->wr_id;
    receive->num_sge = (uint32_t)rwqe->num_sge;
    soft_copy_sges(receive->sges, (const struct ibv_sge *)(rwqe + 1), receive->num_sge);
    if (left - 1 < srq->limit) {
        srq->limit = 0;
        reached = true;
    }
    soft_lock_give(&srq->lock);
    if (reached)
        soft_raise_event(srq->context, &srq->events, IBV_EVENT_SRQ_LIMIT_REACHED);
    return true;
}

/* Posting overwrites no entry that a receive returns to: waiting receives, receives being posted, and receives taken
 * that may return are counted together in `outstanding`, which never exceeds the number of entries. */
void soft_srq_return(struct soft_srq *srq, const struct soft_receive *receive)
{
    struct soft_rwqe *rwqe;

    assert(receive->num_sge <= srq->max_sge);
    soft_lock_take(&srq->lock);
    rwqe = entry_of(srq->entries, srq->mask, srq->stride, --srq->consumed);
    assert(atomic_load_explicit(srq->posted, memory_order_acquire) - srq->consumed <= srq->depth);
    rwqe->wr_id = receive->wr_id;
    rwqe->num_sge = receive->num_sge;
    soft_copy_sges((struct ibv_sge *)(rwqe + 1), receive->sges, receive->num_sge);
    soft_lock_give(&srq->lock);
}

void soft_srq_break(struct soft_srq *srq)
{
    bool broken;

    soft_lock_take(&srq->lock);
    broken = srq->broken;
    srq->broken = true;
    soft_lock_give(&srq->lock);
    if (!broken)
        soft_raise_event(srq->context, &srq->events, IBV_EVENT_SRQ_ERR);
}
