/* Posting: the driver halves of the send and the receive queue. Posting writes a work request into the queue's memory
 * and publishes it by the doorbell record; from there on the request belongs to the device half. */
#include "soft/api/post.h"

#include <string.h>

#include "soft/base/epoch.h"
#include "soft/base/util.h"
#include "soft/fault/injection.h"
#include "soft/objects/ah.h"
#include "soft/objects/context.h"
#include "soft/objects/qp.h"
#include "soft/objects/shared_keys.h"
#include "soft/objects/work_queue.h"
#include "soft/transport/requester.h"

/* ---- Sending --------------------------------------------------------------------------------------------- */

static bool is_sending_state(unsigned int state)
{
    return state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_SQE || state == IBV_QPS_ERR;
}

/* Return the opcodes that a type of queue pair can send, a bit for each. */
static uint32_t qp_type_opcodes(enum ibv_qp_type type)
{
    const uint32_t sends = 1u << IBV_WR_SEND | 1u << IBV_WR_SEND_WITH_IMM;
    const uint32_t unanswered = sends | 1u << IBV_WR_RDMA_WRITE | 1u << IBV_WR_RDMA_WRITE_WITH_IMM |
                                1u << IBV_WR_SEND_WITH_INV | 1u << IBV_WR_LOCAL_INV | 1u << IBV_WR_BIND_MW;

    switch (type) {
    case IBV_QPT_UD:
        return sends;
    case IBV_QPT_UC:
        return unanswered;
    case IBV_QPT_XRC_RECV:
        return 0;
    default:
        return unanswered | 1u << IBV_WR_RDMA_READ | 1u << IBV_WR_ATOMIC_CMP_AND_SWP |
               1u << IBV_WR_ATOMIC_FETCH_AND_ADD;
    }
}

static bool needs_answer(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static bool is_local(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_LOCAL_INV || opcode == IBV_WR_BIND_MW;
}

static bool is_unsupported(enum ibv_wr_opcode opcode)
{
    return opcode == IBV_WR_TSO || opcode == IBV_WR_DRIVER1 || opcode == IBV_WR_ATOMIC_WRITE;
}

static int check_opcode(const struct soft_qp *qp, const struct ibv_send_wr *wr)
{
    if ((unsigned int)wr->opcode > 31 || !(qp_type_opcodes(qp->qp.qp_type) & 1u << wr->opcode))
        return is_unsupported(wr->opcode) ? EOPNOTSUPP : EINVAL;
    /* A response needs memory to be written to, and a local operation carries no bytes. */
    if ((needs_answer(wr->opcode) || is_local(wr->opcode)) && (wr->send_flags & IBV_SEND_INLINE))
        return EINVAL;
    return 0;
}

/* Check a bind request. A window keeps the upper bits of its key, and one of type 1 is bound by ibv_bind_mw only. */
static int check_window(const struct soft_qp *qp, const struct ibv_send_wr *wr, enum ibv_mw_type type)
{
    const struct ibv_mw *mw = wr->bind_mw.mw;
    const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;

    if (!mw || mw->context != qp->qp.context || mw->type != type || (wr->bind_mw.rkey ^ mw->rkey) >> 8)
        return EINVAL;
    if ((info->length && !info->mr) || (info->mr && info->mr->context != qp->qp.context))
        return EINVAL;
    return info->mw_access_flags & IBV_ACCESS_ZERO_BASED ? EOPNOTSUPP : 0;
}

static int check_send(const struct soft_qp *qp, const struct ibv_send_wr *wr, uint32_t head, enum ibv_mw_type window)
{
    const unsigned int known = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
    int error = check_opcode(qp, wr);

    if (error)
        return error;
    if ((wr->send_flags & ~known) || wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->sq.max_sge)
        return EINVAL;
    if (qp->qp.qp_type == IBV_QPT_UD &&
        (!wr->wr.ud.ah || wr->wr.ud.ah->context != qp->qp.context || wr->wr.ud.remote_qpn > 0xffffff))
        return EINVAL;
    if (wr->opcode == IBV_WR_BIND_MW)
        error = check_window(qp, wr, window);
    if (!error && head - atomic_load_explicit(&qp->sq.reaped, memory_order_acquire) >= qp->sq.depth)
        error = ENOMEM;
    return error;
}

/* Return whether a work request refers to memory that another process registered, whose addresses are invalid here. */
static bool wr_uses_shared_memory(const struct soft_qp *qp, const struct ibv_send_wr *wr)
{
    int i;

    for (i = 0; i < wr->num_sge; i++)
        if (soft_shared_is_foreign(qp->pd, wr->sg_list[i].lkey))
            return true;
    return false;
}

/* Copy the bytes of an inline request, which the caller may change as soon as the call returns. */
static int copy_inline(const struct soft_qp *qp, struct soft_wqe *wqe, const struct ibv_send_wr *wr)
{
    uint8_t *to = (uint8_t *)(wqe + 1);
    uint64_t length = 0;
    int i;

    for (i = 0; i < wr->num_sge; i++)
        length += wr->sg_list[i].length;
    if (length > qp->max_inline)
        return EINVAL;
    for (i = 0; i < wr->num_sge; i++) {
        if (wr->sg_list[i].length)
            memcpy(to, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        to += wr->sg_list[i].length;
    }
    wqe->inline_length = (uint32_t)length;
    return 0;
}

static void write_datagram(const struct soft_qp *qp, struct soft_wqe *wqe, const struct ibv_send_wr *wr)
{
    const struct soft_ah *ah = container_of(wr->wr.ud.ah, struct soft_ah, ah);
    const struct ibv_global_route *route = &ah->attr.grh;

    wqe->ah_refused = ah->pd->domain != qp->pd->domain;
    wqe->remote_addr = wr->wr.ud.remote_qpn;
    wqe->rkey = wr->wr.ud.remote_qkey;
    wqe->dgid = route->dgid;
    wqe->path.flow_label = route->flow_label;
    wqe->path.sgid_index = route->sgid_index;
    wqe->path.hop_limit = route->hop_limit;
    wqe->path.traffic_class = route->traffic_class;
}

static void write_bind(struct soft_wqe *wqe, const struct ibv_send_wr *wr)
{
    const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;

    wqe->imm_data = info->mr ? info->mr->lkey : 0;
    wqe->remote_addr = info->addr;
    wqe->rkey = wr->bind_mw.rkey;
    wqe->bind.length = info->length;
    wqe->bind.access = info->mw_access_flags;
}

static int write_send(const struct soft_qp *qp, struct soft_wqe *wqe, const struct ibv_send_wr *wr, uint64_t due_ns)
{
    wqe->wr_id = wr->wr_id;
    wqe->opcode = (uint8_t)wr->opcode;
    wqe->flags = (uint8_t)wr->send_flags;
    wqe->num_sge = is_local(wr->opcode) ? 0 : (uint8_t)wr->num_sge;
    wqe->imm_data = wr->imm_data; /* or the key to invalidate */
    wqe->due_ns = due_ns;
    if (qp->qp.qp_type == IBV_QPT_UD) {
        write_datagram(qp, wqe, wr);
    } else if (wr->opcode == IBV_WR_BIND_MW) {
        write_bind(wqe, wr);
    } else if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wqe->remote_addr = wr->wr.atomic.remote_addr;
        wqe->rkey = wr->wr.atomic.rkey;
        wqe->compare_add = wr->wr.atomic.compare_add;
        wqe->swap = wr->wr.atomic.swap;
    } else {
        wqe->remote_addr = wr->wr.rdma.remote_addr;
        wqe->rkey = wr->wr.rdma.rkey;
    }
    if (qp->qp.qp_type == IBV_QPT_XRC_SEND)
        wqe->remote_srqn = wr->qp_type.xrc.remote_srqn;
    if (wr->send_flags & IBV_SEND_INLINE) {
        if (!wr_uses_shared_memory(qp, wr))
            return copy_inline(qp, wqe, wr);
        wqe->flags &= (uint8_t)~IBV_SEND_INLINE;
    }
    soft_copy_sges((struct ibv_sge *)(wqe + 1), wr->sg_list, wqe->num_sge);
    return 0;
}

/* Add without overflow: UINT64_MAX means never. */
static uint64_t add_saturated(uint64_t time, uint64_t by)
{
    return by > UINT64_MAX - time ? UINT64_MAX : time + by;
}

/* Return the earliest time to execute a request that is posted now; 0: at once. */
static uint64_t earliest_execution(struct soft_qp *qp)
{
    uint64_t delay = atomic_load_explicit(&qp->context->delay_ns, memory_order_relaxed);

    if (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS)
        delay = add_saturated(delay, soft_fault_delay(qp));
    return delay ? add_saturated(soft_now_ns(), delay) : 0;
}

static int post_sends(struct ibv_qp *ibv_qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad, enum ibv_mw_type window)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    uint32_t first, head;
    int error;

    *bad = wr;
    if (soft_stale(qp->context))
        return ENODEV;
    if (!grace_ready())
        return ENOMEM;
    error = soft_half_enter(&qp->half, "post_send");
    if (error)
        return error;
    if (!is_sending_state(atomic_load(&qp->state))) {
        error = EINVAL;
        goto leave;
    }
    first = head = atomic_load_explicit(qp->sq.posted, memory_order_relaxed);
    for (; wr; wr = wr->next, head++) {
        error = check_send(qp, wr, head, window);
        if (!error)
            error = write_send(qp, soft_ring_entry(&qp->sq, head), wr, earliest_execution(qp));
        if (error)
            break;
    }
    *bad = wr;
    if (head != first) {
        atomic_store_explicit(qp->sq.posted, head, memory_order_release);
        soft_kick_from_driver(qp);
    }
leave:
    soft_half_leave(&qp->half);
    return error;
}

int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    return post_sends(qp, wr, bad, IBV_MW_TYPE_2);
}

/* Bind a window of type 1: the verb itself creates the work request, with the window's next key. */
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    struct ibv_send_wr *bad, wr = {
                                 .wr_id = bind->wr_id,
                                 .opcode = IBV_WR_BIND_MW,
                                 .send_flags = bind->send_flags,
                                 .bind_mw = {mw, (mw->rkey & ~0xffu) | ((mw->rkey + 1) & 0xff), bind->bind_info},
                             };
    int error;

    if (mw->type != IBV_MW_TYPE_1)
        return EINVAL;
    error = post_sends(qp, &wr, &bad, IBV_MW_TYPE_1);
    if (!error)
        mw->rkey = wr.bind_mw.rkey;
    return error;
}

/* ---- Receiving ------------------------------------------------------------------------------------------- */

static int post_check_receive(const struct soft_qp *qp, const struct ibv_recv_wr *wr, uint32_t head)
{
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->rq.max_sge)
        return EINVAL;
    if (head - atomic_load_explicit(&qp->rq.reaped, memory_order_acquire) >= qp->rq.depth)
        return ENOMEM;
    return 0;
}

int soft_post_recv(struct ibv_qp *ibv_qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    uint32_t first, head;
    int error;

    *bad = wr;
    if (soft_stale(qp->context))
        return ENODEV;
    if (!grace_ready())
        return ENOMEM;
    error = soft_half_enter(&qp->half, "post_recv");
    if (error)
        return error;
    if (qp->srq || qp->qp.qp_type == IBV_QPT_XRC_SEND || qp->qp.qp_type == IBV_QPT_XRC_RECV ||
        atomic_load(&qp->state) == IBV_QPS_RESET) {
        error = EINVAL; /* the queue pair has no receive queue, or cannot use it yet */
        goto leave;
    }
    first = head = atomic_load_explicit(qp->rq.posted, memory_order_relaxed);
    for (; wr; wr = wr->next, head++) {
        struct soft_rwqe *rwqe = soft_ring_entry(&qp->rq, head);

        error = post_check_receive(qp, wr, head);
        if (error)
            break;
        rwqe->wr_id = wr->wr_id;
        rwqe->num_sge = (uint64_t)wr->num_sge;
        soft_copy_sges((struct ibv_sge *)(rwqe + 1), wr->sg_list, (unsigned int)wr->num_sge);
    }
    *bad = wr;
    if (head != first) {
        /* Sequentially consistent, as the state is: either this thread sees ERR and has the requests flushed, or the
         * thread that sets ERR sees them in the ring. */
        atomic_store(qp->rq.posted, head);
        if (atomic_load(&qp->state) == IBV_QPS_ERR)
            soft_kick_from_driver(qp);
    }
leave:
    soft_half_leave(&qp->half);
    return error;
}
