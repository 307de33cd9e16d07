/* Queue pairs: creation, destruction, queries and state changes. */
#define _GNU_SOURCE
#include "soft/api/qp.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/read_cache.h"
#include "soft/objects/ah.h"
#include "soft/objects/async_event.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/cq_poll.h"
#include "soft/objects/device.h"
#include "soft/objects/gids.h"
#include "soft/objects/limits.h"
#include "soft/objects/pd.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/objects/qp_state.h"
#include "soft/objects/srq.h"
#include "soft/objects/work_queue.h"
#include "soft/objects/worker_thread.h"
#include "soft/objects/xrcd.h"
#include "soft/transport/direct_requests.h"
#include "soft/transport/requester.h"
#include "soft/transport/responder.h"

/* ---- Sizes ----------------------------------------------------------------------------------------------- */

static uint32_t round_up(uint32_t size, uint32_t to)
{
    return (size + to - 1) / to * to;
}

static uint32_t max_of(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* Check that the attributes have the objects that this type of queue pair needs, and no others. */
static int check_objects(const struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr)
{
    const struct ibv_cq *send_cq = attr->send_cq, *recv_cq = attr->recv_cq;

    switch (attr->qp_type) {
    case IBV_QPT_RC:
    case IBV_QPT_UC:
    case IBV_QPT_UD:
        if (!recv_cq || recv_cq->context != context)
            return EINVAL;
        if (attr->srq && (attr->srq->context != context || to_soft_srq(attr->srq)->type != IBV_SRQT_BASIC))
            return EINVAL;
        break;
    case IBV_QPT_XRC_SEND:
        if (attr->srq)
            return EINVAL;
        break;
    case IBV_QPT_XRC_RECV:
        return attr->xrcd && attr->xrcd->context == context && !attr->srq ? 0 : EINVAL;
    default:
        return EOPNOTSUPP;
    }
    return attr->pd && attr->pd->context == context && send_cq && send_cq->context == context ? 0 : EINVAL;
}

static int qp_check_init_attr(struct soft_context *context, const struct ibv_qp_init_attr_ex *attr)
{
    int error = soft_stale(context) ? ENODEV : check_objects(&context->verbs.context, attr);

    if (error)
        return error;
    if (attr->cap.max_send_wr > SOFT_MAX_QP_WR || attr->cap.max_recv_wr > SOFT_MAX_QP_WR ||
        attr->cap.max_send_sge > SOFT_MAX_SGE || attr->cap.max_recv_sge > SOFT_MAX_SGE ||
        attr->cap.max_inline_data > SOFT_MAX_INLINE)
        return EINVAL;
    return 0;
}

/* Set the capabilities of queues that the type does not have to 0, whatever was requested. */
static void zero_unused_caps(struct ibv_qp_cap *cap, const struct ibv_qp_init_attr_ex *attr)
{
    bool target = attr->qp_type == IBV_QPT_XRC_RECV;

    if (target)
        cap->max_send_wr = cap->max_send_sge = cap->max_inline_data = 0;
    if (target || attr->qp_type == IBV_QPT_XRC_SEND || attr->srq)
        cap->max_recv_wr = cap->max_recv_sge = 0;
}

/* Lay both rings out in one buffer, the receive ring first; return its size in bytes. A ring that was not requested has
 * one entry that is never used, and depth 0. */
static uint32_t lay_out(struct soft_qp *qp, struct ibv_qp_cap *cap)
{
    uint32_t payload = max_of(cap->max_send_sge * (uint32_t)sizeof(struct ibv_sge), cap->max_inline_data);

    qp->rq.max_sge = cap->max_recv_sge;
    qp->rq.stride =
        (uint32_t)soft_power_of_two(sizeof(struct soft_rwqe) + cap->max_recv_sge * (uint32_t)sizeof(struct ibv_sge));
    qp->rq.mask = soft_power_of_two(cap->max_recv_wr) - 1;
    qp->sq.max_sge = cap->max_send_sge;
    qp->sq.stride = round_up((uint32_t)sizeof(struct soft_wqe) + payload, 64);
    qp->sq.mask = soft_power_of_two(cap->max_send_wr) - 1;
    /* The granted sizes are at least the requested ones. */
    cap->max_send_wr = qp->sq.depth = cap->max_send_wr ? qp->sq.mask + 1 : 0;
    cap->max_recv_wr = qp->rq.depth = cap->max_recv_wr ? qp->rq.mask + 1 : 0;
    cap->max_inline_data = qp->max_inline = qp->sq.stride - (uint32_t)sizeof(struct soft_wqe);
    return round_up((qp->rq.mask + 1) * qp->rq.stride, 64) + (qp->sq.mask + 1) * qp->sq.stride;
}

static int get_rings(struct soft_qp *qp, struct ibv_qp_cap *cap)
{
    uint32_t size = lay_out(qp, cap);
    /* Aligned as with mlx5: to the largest stride, at least 64 bytes. */
    uint32_t alignment = max_of(64, max_of(soft_power_of_two(qp->rq.stride), soft_power_of_two(qp->sq.stride)));
    _Atomic uint32_t *record = qp->own_record;
    int error;

    error = soft_memory_get(&qp->buffer, qp->pd, round_up(size, alignment), alignment, SOFT_RES_QP);
    if (error)
        return error;
    if (qp->pd && qp->pd->alloc) {
        error = soft_memory_get(&qp->record, qp->pd, 8, 8, SOFT_RES_DBR);
        if (error) {
            soft_memory_put(&qp->buffer);
            return error;
        }
        record = qp->record.address;
    }
    qp->rq.entries = qp->buffer.address;
    qp->sq.entries = qp->rq.entries + round_up((qp->rq.mask + 1) * qp->rq.stride, 64);
    qp->rq.posted = &record[0];
    qp->sq.posted = &record[1];
    return 0;
}

/* ---- Creation -------------------------------------------------------------------------------------------- */

static int init_qp(struct soft_qp *qp, struct ibv_qp_cap *cap)
{
    struct soft_exclusive *exclusive = qp->pd && qp->pd->td ? &qp->pd->td->exclusive : NULL;
    int error;

    error = soft_table_reserve(&qp->context->device->qps, &qp->qp.qp_num, NULL);
    if (error)
        return error;
    error = soft_half_init(&qp->half, &qp->context->overlaps, SOFT_RANK_HALF, "queue pair", qp->qp.qp_num, exclusive);
    if (error)
        goto release;
    error = pthread_mutex_init(&qp->qp.mutex, NULL);
    if (error)
        goto destroy_half;
    error = pthread_cond_init(&qp->qp.cond, NULL);
    if (error)
        goto destroy_mutex;
    error = soft_worker_reserve_timer(qp->context);
    if (error)
        goto destroy_cond;
    error = get_rings(qp, cap);
    if (error)
        goto unreserve;
    return 0;

unreserve:
    soft_worker_release_timer(qp->context);
destroy_cond:
    pthread_cond_destroy(&qp->qp.cond);
destroy_mutex:
    pthread_mutex_destroy(&qp->qp.mutex);
destroy_half:
    soft_half_destroy(&qp->half);
release:
    soft_table_release(&qp->context->device->qps, qp->qp.qp_num);
    return error;
}

/* Add `by` (1 or -1) to the reference counts of all objects that the queue pair refers to, so that they cannot be
 * destroyed before it. */
static void add_refs(struct soft_qp *qp, int by)
{
    if (qp->pd)
        atomic_fetch_add(&qp->pd->references, (unsigned int)by);
    if (qp->send_cq)
        atomic_fetch_add(&qp->send_cq->references, (unsigned int)by);
    if (qp->recv_cq)
        atomic_fetch_add(&qp->recv_cq->references, (unsigned int)by);
    if (qp->srq)
        atomic_fetch_add(&qp->srq->references, (unsigned int)by);
    if (qp->xrcd)
        atomic_fetch_add(&qp->xrcd->references, (unsigned int)by);
    atomic_fetch_add(&qp->context->qps, (unsigned int)by);
}

/* Draw the token of a requester; return 0 or an errno, as where a sandbox forbids getrandom(). With a random token,
 * responses to requests before a reset, or to other queue pairs that had the same number, are ignored, and processes
 * that received no request cannot guess it. */
static int draw_token(uint32_t *token)
{
    return getentropy(token, sizeof(*token)) ? errno : 0;
}

/* Start the requester anew. Call under both locks, unless no other thread knows the queue pair yet. */
static void init_requester(struct soft_qp *qp, uint32_t token)
{
    qp->req = (struct soft_requester){.token = token, .deadline = UINT64_MAX};
    if (qp->read_cache_entries)
        soft_read_cache_clear(qp->read_cache_entries, SOFT_READ_CACHE_ENTRIES);
}

static void qp_fill_attr(struct soft_qp *qp, const struct ibv_qp_init_attr_ex *attr, uint32_t token)
{
    bool target = attr->qp_type == IBV_QPT_XRC_RECV;

    qp->qp.context = &qp->context->verbs.context;
    qp->qp.qp_context = attr->qp_context;
    qp->qp.pd = target ? NULL : attr->pd;
    qp->qp.send_cq = target ? NULL : attr->send_cq;
    qp->qp.recv_cq = target || attr->qp_type == IBV_QPT_XRC_SEND ? NULL : attr->recv_cq;
    qp->qp.srq = attr->srq;
    qp->qp.state = IBV_QPS_RESET;
    qp->qp.qp_type = attr->qp_type;
    qp->pd = qp->qp.pd ? to_soft_pd(qp->qp.pd) : NULL;
    qp->send_cq = qp->qp.send_cq ? to_soft_cq(qp->qp.send_cq) : NULL;
    qp->recv_cq = qp->qp.recv_cq ? to_soft_cq(qp->qp.recv_cq) : NULL;
    qp->srq = attr->srq ? to_soft_srq(attr->srq) : NULL;
    qp->xrcd = target ? to_soft_xrcd(attr->xrcd) : NULL;
    qp->sq_sig_all = attr->sq_sig_all;
    qp->serial = 1 + atomic_fetch_add(&qp->context->device->serial, 1);
    qp->timer.kind = SOFT_TIMER_QP;
    init_requester(qp, token);
    qp->events.element = &qp->qp;
}

/* Allocate a queue pair, zeroed, with room for the copy of a shared queue's receive behind it if it takes such. */
static struct soft_qp *allocate_qp(const struct ibv_qp_init_attr_ex *attr)
{
    bool shares = attr->srq || attr->qp_type == IBV_QPT_XRC_RECV;
    size_t size = sizeof(struct soft_qp) + (shares ? round_up(sizeof(struct soft_receive), 64) : 0);
    struct soft_qp *qp = aligned_alloc(_Alignof(struct soft_qp), size);

    if (!qp)
        return NULL;
    memset(qp, 0, size);
    if (shares)
        qp->in.recv_wqe.copy = (struct soft_receive *)(qp + 1);
    return qp;
}

/* Create a queue pair; set `attr->cap` to the granted capabilities. */
static struct ibv_qp *qp_create(struct soft_context *context, struct ibv_qp_init_attr_ex *attr)
{
    int error = qp_check_init_attr(context, attr);
    struct ibv_qp_cap cap = attr->cap;
    struct soft_qp *qp = NULL;
    uint32_t token = 0;

    if (!error)
        error = draw_token(&token);
    if (!error && !(qp = allocate_qp(attr)))
        error = ENOMEM;
    if (error)
        goto fail;
    qp->context = context;
    qp_fill_attr(qp, attr, token);
    soft_lock_init(&qp->sq_lock, SOFT_RANK_SQ);
    soft_lock_init(&qp->rq_lock, SOFT_RANK_RQ);
    atomic_init(&qp->state, IBV_QPS_RESET);
    zero_unused_caps(&cap, attr);
    error = init_qp(qp, &cap);
    if (error)
        goto fail;
    attr->cap = qp->attr.cap = cap;
    qp->qp.handle = qp->qp.qp_num;
    add_refs(qp, 1);
    soft_table_publish(&context->device->qps, qp->qp.qp_num, qp);
    return &qp->qp;

fail:
    free(qp);
    errno = error;
    return NULL;
}

struct ibv_qp *soft_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct ibv_qp_init_attr_ex full = {
        .qp_context = attr->qp_context,
        .send_cq = attr->send_cq,
        .recv_cq = attr->recv_cq,
        .srq = attr->srq,
        .cap = attr->cap,
        .qp_type = attr->qp_type,
        .sq_sig_all = attr->sq_sig_all,
        .pd = pd,
    };
    struct ibv_qp *qp = qp_create(to_soft_context(pd->context), &full);

    if (qp)
        attr->cap = full.cap;
    return qp;
}

/* Extended creation. The builder interface for posting (IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) is not supported, nor is any
 * other optional feature. */
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    bool target = attr->qp_type == IBV_QPT_XRC_RECV;

    if (attr->comp_mask & ~(uint32_t)(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (!(attr->comp_mask & (target ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD)) ||
        (!target && (attr->comp_mask & IBV_QP_INIT_ATTR_XRCD))) {
        errno = EINVAL;
        return NULL;
    }
    return qp_create(to_soft_context(context), attr);
}

/* ---- Entering the queue pair together with its completion queues ------------------------------------------ */

/* Enter the driver halves of the completion queues: destroying or resetting a queue pair removes its completions from
 * them, so pollers must stay out. The completion queues come before the queue pair, since a polling thread may post
 * before end_poll. Of two completion queues the one with the lower address comes first, so that two queue pairs cannot
 * wait for each other. */
static int enter_cqs(struct soft_qp *qp, const char *verb)
{
    struct soft_cq *first = qp->send_cq, *second = qp->recv_cq;
    int error;

    if (first == second)
        second = NULL;
    if (second && second < first) {
        first = qp->recv_cq;
        second = qp->send_cq;
    }
    error = first ? soft_half_enter(&first->half, verb) : 0;
    if (error || !second)
        return error;
    error = soft_half_enter(&second->half, verb);
    if (error)
        soft_half_leave(&first->half);
    return error;
}

static void leave_cqs(struct soft_qp *qp)
{
    if (qp->recv_cq && qp->recv_cq != qp->send_cq)
        soft_half_leave(&qp->recv_cq->half);
    if (qp->send_cq)
        soft_half_leave(&qp->send_cq->half);
}

static void purge_cqs(struct soft_qp *qp)
{
    if (qp->send_cq)
        soft_cq_purge(qp->send_cq, qp, NULL);
    if (qp->recv_cq && qp->recv_cq != qp->send_cq)
        soft_cq_purge(qp->recv_cq, qp, NULL);
}

/* Refuse posting and state changes from here on: the receiver of an event may use the queue pair until it acknowledges
 * the event, but its requests could not complete. */
static void begin_destroy(struct soft_qp *qp)
{
    soft_lock_take(&qp->sq_lock);
    soft_lock_take(&qp->rq_lock);
    qp->destroying = true;
    atomic_store(&qp->state, IBV_QPS_RESET);
    soft_read_cache_invalidate_qp(qp);
    soft_lock_give(&qp->rq_lock);
    soft_lock_give(&qp->sq_lock);
    soft_direct_wait(qp);
    soft_lock_take(&qp->sq_lock);
    soft_lock_take(&qp->rq_lock);
    soft_requester_stop(qp);
    soft_inbound_abort(qp, false);
    soft_lock_give(&qp->rq_lock);
    soft_lock_give(&qp->sq_lock);
}

int soft_destroy_qp(struct ibv_qp *ibv_qp)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    struct soft_context *context = qp->context;
    int error;

    if (soft_stale(context))
        return ENODEV;
    error = enter_cqs(qp, "destroy_qp");
    if (error)
        return error;
    error = soft_half_enter(&qp->half, "destroy_qp");
    if (error) {
        leave_cqs(qp);
        return error;
    }
    /* First, no look-up finds the queue pair any more. Then wait for the threads that found it before, which are the
     * last that could submit it to the worker thread. Then remove it from the worker thread, and wait for an execution
     * there. */
    begin_destroy(qp);
    soft_table_withdraw(&context->device->qps, ibv_qp->qp_num);
    grace_wait();
    soft_worker_remove(qp);
    grace_wait();
    purge_cqs(qp);
    soft_half_leave(&qp->half);
    leave_cqs(qp);
    soft_events_drain(context, &qp->events, &ibv_qp->mutex, &ibv_qp->cond, &ibv_qp->events_completed);

    soft_worker_release_timer(context);
    soft_table_release(&context->device->qps, ibv_qp->qp_num);
    if (qp->link)
        soft_link_put(qp->link);
    soft_memory_put(&qp->record);
    soft_memory_put(&qp->buffer);
    add_refs(qp, -1);
    soft_half_destroy(&qp->half);
    pthread_cond_destroy(&ibv_qp->cond);
    pthread_mutex_destroy(&ibv_qp->mutex);
    free(qp->direct_parts);
    if (qp->read_cache_entries)
        soft_read_cache_clear(qp->read_cache_entries, SOFT_READ_CACHE_ENTRIES);
    free(qp->read_cache_entries);
    free(qp);
    return 0;
}

/* ---- Queries --------------------------------------------------------------------------------------------- */

int soft_query_qp(struct ibv_qp *ibv_qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init_attr)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    int error;

    (void)mask; /* the verb allows returning all attributes, whatever was requested */
    if (soft_stale(qp->context))
        return ENODEV;
    error = soft_half_enter(&qp->half, "query_qp");
    if (error)
        return error;
    soft_lock_take(&qp->sq_lock);
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = (enum ibv_qp_state)atomic_load(&qp->state);
    attr->sq_psn = qp->req.window.first_psn;
    attr->sq_draining = attr->qp_state == IBV_QPS_SQD && qp->req.waiting;
    soft_lock_give(&qp->sq_lock);
    soft_lock_take(&qp->rq_lock);
    attr->rq_psn = qp->expected_psn;
    soft_lock_give(&qp->rq_lock);
    *init_attr = (struct ibv_qp_init_attr){
        .qp_context = ibv_qp->qp_context,
        .send_cq = ibv_qp->send_cq,
        .recv_cq = ibv_qp->recv_cq,
        .srq = ibv_qp->srq,
        .cap = qp->attr.cap,
        .qp_type = ibv_qp->qp_type,
        .sq_sig_all = qp->sq_sig_all,
    };
    soft_half_leave(&qp->half);
    return 0;
}

/* ---- Changes of state ------------------------------------------------------------------------------------ */

static int check_values(const struct ibv_qp_attr *attr, int mask)
{
    const int known =
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

    if ((mask & IBV_QP_PKEY_INDEX) && attr->pkey_index)
        return EINVAL;
    if ((mask & IBV_QP_PORT) && attr->port_num != 1)
        return EINVAL;
    if ((mask & IBV_QP_ACCESS_FLAGS) && (attr->qp_access_flags & ~(unsigned int)known))
        return EINVAL;
    if ((mask & IBV_QP_AV) && soft_ah_check(&attr->ah_attr))
        return EINVAL;
    if ((mask & IBV_QP_PATH_MTU) && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096))
        return EINVAL;
    if (((mask & IBV_QP_DEST_QPN) && attr->dest_qp_num > 0xffffff) ||
        ((mask & IBV_QP_RQ_PSN) && attr->rq_psn > SOFT_PSN_MASK) ||
        ((mask & IBV_QP_SQ_PSN) && attr->sq_psn > SOFT_PSN_MASK))
        return EINVAL;
    if (((mask & IBV_QP_MAX_QP_RD_ATOMIC) && attr->max_rd_atomic > SOFT_MAX_RD_ATOMIC) ||
        ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) && attr->max_dest_rd_atomic > SOFT_MAX_RD_ATOMIC))
        return EINVAL;
    if (((mask & IBV_QP_MIN_RNR_TIMER) && attr->min_rnr_timer > 31) ||
        ((mask & IBV_QP_TIMEOUT) && attr->timeout > 31) || ((mask & IBV_QP_RETRY_CNT) && attr->retry_cnt > 7) ||
        ((mask & IBV_QP_RNR_RETRY) && attr->rnr_retry > 7))
        return EINVAL;
    return 0;
}

/* Copy the attributes of the mask to the queue pair. Call under both locks. */
static void apply_attr(struct soft_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    struct ibv_qp_attr *own = &qp->attr;

    assert_held(&qp->rq_lock);
    assert_held(&qp->sq_lock);
#define COPY_ATTR(bit, field)         \
    do {                              \
        if (mask & (bit))             \
            own->field = attr->field; \
    } while (0)
    COPY_ATTR(IBV_QP_PKEY_INDEX, pkey_index);
    COPY_ATTR(IBV_QP_PORT, port_num);
    COPY_ATTR(IBV_QP_QKEY, qkey);
    COPY_ATTR(IBV_QP_ACCESS_FLAGS, qp_access_flags);
    COPY_ATTR(IBV_QP_AV, ah_attr);
    COPY_ATTR(IBV_QP_PATH_MTU, path_mtu);
    COPY_ATTR(IBV_QP_DEST_QPN, dest_qp_num);
    COPY_ATTR(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
    COPY_ATTR(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
    COPY_ATTR(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
    COPY_ATTR(IBV_QP_TIMEOUT, timeout);
    COPY_ATTR(IBV_QP_RETRY_CNT, retry_cnt);
    COPY_ATTR(IBV_QP_RNR_RETRY, rnr_retry);
#undef COPY_ATTR
    if (mask & IBV_QP_AV)
        qp->is_loopback = soft_gid_is_local(qp->context->device, &attr->ah_attr.grh.dgid);
    if (mask & IBV_QP_RQ_PSN)
        qp->expected_psn = attr->rq_psn;
    if (mask & IBV_QP_SQ_PSN)
        soft_window_begin(&qp->req.window, attr->sq_psn);
    /* A change of other attributes keeps the remaining retries of a request that is being repeated. */
    if (mask & IBV_QP_RETRY_CNT)
        qp->req.retries_left = own->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY)
        qp->req.rnr_left = own->rnr_retry;
}

/* Reset the queue pair. Call under both locks, inside of the driver halves of the queue pair and of its completion
 * queues. */
static void reset(struct soft_qp *qp, uint32_t token)
{
    struct ibv_qp_cap cap = qp->attr.cap;

    assert_held(&qp->rq_lock);
    assert_held(&qp->sq_lock);
    memset(&qp->attr, 0, sizeof(qp->attr));
    qp->attr.cap = cap;
    qp->is_loopback = false;
    soft_requester_stop(qp);
    if (qp->link)
        soft_link_put(qp->link);
    qp->link = NULL;
    init_requester(qp, token);
    soft_inbound_abort(qp, false);
    memset(qp->atomic_replays, 0, sizeof(qp->atomic_replays));
    qp->established = qp->last_wqe = false;
    qp->expected_psn = 0;
    qp->rq.consumed = 0;
    atomic_store(qp->sq.posted, 0);
    atomic_store(qp->rq.posted, 0);
    atomic_store(&qp->sq.reaped, 0);
    atomic_store(&qp->rq.reaped, 0);
}

/* Change the state and attributes, inside of the driver half. `*link`, the link to a remote peer if the path leads to
 * one, is exchanged with the queue pair's. */
static int apply_modify(struct soft_qp *qp, const struct ibv_qp_attr *attr, int mask, struct soft_link **link)
{
    enum ibv_qp_state from, to;
    uint32_t token = 0;
    int error;

    soft_lock_take(&qp->sq_lock);
    soft_lock_take(&qp->rq_lock);
    from = (enum ibv_qp_state)atomic_load(&qp->state);
    to = mask & IBV_QP_STATE ? attr->qp_state : from;
    error = qp->destroying ? EINVAL : soft_state_check(qp->qp.qp_type, from, to, mask);
    if (!error && (mask & IBV_QP_CUR_STATE) && attr->cur_qp_state != from)
        error = EINVAL;
    if (!error && from == IBV_QPS_SQD && to == IBV_QPS_SQD && qp->req.waiting)
        error = EINVAL; /* requests in flight keep the attributes that they began with */
    if (!error && to == IBV_QPS_RESET)
        error = draw_token(&token);
    if (!error && to == IBV_QPS_RESET) {
        /* Nothing is sent or responded to from here on. The driver half keeps other threads from changing the state,
         * except to ERR. */
        atomic_store(&qp->state, IBV_QPS_RESET);
        soft_lock_give(&qp->rq_lock);
        soft_lock_give(&qp->sq_lock);
        soft_direct_wait(qp);
        soft_lock_take(&qp->sq_lock);
        soft_lock_take(&qp->rq_lock);
        reset(qp, token);
    } else if (!error) {
        apply_attr(qp, attr, mask);
    }
    if (!error) {
        if (mask & IBV_QP_AV) {
            struct soft_link *before = qp->link;

            /* Unsent requests may wait at the old link, even if all that was sent is acknowledged, and would not be
             * found there later. */
            if (before)
                soft_link_forget(before, qp);
            qp->link = *link;
            *link = before;
        }
        if (to != IBV_QPS_RTS && to != IBV_QPS_SQD) {
            if (to != IBV_QPS_ERR) /* with ERR, the flush stops the requester */
                soft_requester_stop(qp);
            qp->req.waiting = false;
        }
        if (to != IBV_QPS_SQD)
            qp->req.drain_notify = false;
        else if (from != IBV_QPS_SQD)
            qp->req.drain_notify = (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY) && attr->en_sqd_async_notify;
        atomic_store(&qp->state, to);
        qp->qp.state = to;
        soft_read_cache_invalidate_qp(qp);
    }
    soft_lock_give(&qp->rq_lock);
    soft_lock_give(&qp->sq_lock);
    return error;
}

/* Prepare for a remote peer: listen, and get the link to it. Return 0 or an errno. A datagram queue pair, whose peers
 * are not known yet, does without listening if that fails: peers cannot reach it then. */
static int resolve_path(struct soft_qp *qp, const struct ibv_qp_attr *attr, int mask, struct soft_link **link)
{
    struct soft_device *device = qp->context->device;
    int error;

    if (qp->qp.qp_type == IBV_QPT_UD) {
        if ((mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_RTR)
            soft_fabric_listen(device);
        return 0;
    }
    if (!(mask & IBV_QP_AV) || soft_gid_is_local(device, &attr->ah_attr.grh.dgid))
        return 0;
    error = soft_fabric_listen(device);
    if (!error)
        error = soft_worker_start(qp->context); /* its timers repeat requests */
    if (!error && !(*link = soft_link_get(device, &attr->ah_attr.grh.dgid)))
        error = errno;
    return error;
}

int soft_modify_qp(struct ibv_qp *ibv_qp, struct ibv_qp_attr *attr, int mask)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    bool to_reset = (mask & IBV_QP_STATE) && attr->qp_state == IBV_QPS_RESET;
    struct soft_link *link = NULL;
    int error;

    if (soft_stale(qp->context))
        return ENODEV;
    error = grace_ready() ? check_values(attr, mask) : ENOMEM;
    if (error)
        return error;
    if (to_reset && (error = enter_cqs(qp, "modify_qp")))
        return error;
    error = soft_half_enter(&qp->half, "modify_qp");
    if (error)
        goto leave;
    error = resolve_path(qp, attr, mask, &link);
    if (!error)
        error = apply_modify(qp, attr, mask, &link);
    if (link)
        soft_link_put(link);
    if (!error && to_reset)
        purge_cqs(qp);
    if (!error)
        soft_kick_from_driver(qp); /* to ERR: flush; back to RTS: continue with the posted requests */
    soft_half_leave(&qp->half);
leave:
    if (to_reset)
        leave_cqs(qp);
    return error;
}

/* ---- Fatal errors ---------------------------------------------------------------------------------------- */

void soft_qp_break(struct soft_qp *qp)
{
    bool broken;

    soft_lock_take(&qp->sq_lock); /* keeps soft_modify_qp out */
    broken = qp->destroying || atomic_exchange(&qp->state, IBV_QPS_ERR) == IBV_QPS_ERR;
    soft_lock_give(&qp->sq_lock);
    if (broken)
        return;
    soft_read_cache_invalidate_qp(qp);
    soft_raise_event(qp->context, &qp->events, IBV_EVENT_QP_FATAL);
    soft_kick(qp);
}
