/* Posting: the driver halves of the send and the receive queue. A work request is written into the queue's memory
 * and made known by the doorbell record; from there on it is the device half's. */
#include "soft.h"

#include <string.h>

/* ---- Sending --------------------------------------------------------------------------------------------- */

static bool is_sending_state(unsigned int state)
{
    return state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_ERR;
}

static int check_opcode(const struct ibv_send_wr *wr)
{
    switch (wr->opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return 0;
    case IBV_WR_RDMA_READ:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return wr->send_flags & IBV_SEND_INLINE ? EINVAL : 0; /* the answer needs a place to go to */
    case IBV_WR_LOCAL_INV:
    case IBV_WR_BIND_MW:
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_TSO:
    case IBV_WR_DRIVER1:
        return EOPNOTSUPP;
    default:
        return EINVAL;
    }
}

static int check_send(const struct soft_qp *qp, const struct ibv_send_wr *wr, uint32_t head)
{
    const unsigned int known = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
    int error = check_opcode(wr);

    if (error)
        return error;
    if ((wr->send_flags & ~known) || wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->sq.max_sge)
        return EINVAL;
    if (head - atomic_load_explicit(&qp->sq.reaped, memory_order_acquire) >= qp->sq.depth)
        return ENOMEM;
    return 0;
}

/* Copies the bytes that the caller may change as soon as the call returns. */
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

static int write_send(const struct soft_qp *qp, struct soft_wqe *wqe, const struct ibv_send_wr *wr, uint64_t due_ns)
{
    wqe->wr_id = wr->wr_id;
    wqe->opcode = (uint8_t)wr->opcode;
    wqe->flags = (uint8_t)wr->send_flags;
    wqe->num_sge = (uint8_t)wr->num_sge;
    wqe->imm_data = wr->imm_data;
    wqe->due_ns = due_ns;
    if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wqe->remote_addr = wr->wr.atomic.remote_addr;
        wqe->rkey = wr->wr.atomic.rkey;
        wqe->compare_add = wr->wr.atomic.compare_add;
        wqe->swap = wr->wr.atomic.swap;
    } else {
        wqe->remote_addr = wr->wr.rdma.remote_addr;
        wqe->rkey = wr->wr.rdma.rkey;
    }
    if (wr->send_flags & IBV_SEND_INLINE)
        return copy_inline(qp, wqe, wr);
    if (wr->num_sge)
        memcpy(wqe + 1, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
    return 0;
}

int soft_post_send(struct ibv_qp *ibv_qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    uint32_t first, head;
    uint64_t delay, due = 0;
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
    delay = atomic_load_explicit(&qp->context->delay_ns, memory_order_relaxed);
    if (delay) {
        due = soft_now_ns();
        due = delay > UINT64_MAX - due ? UINT64_MAX : due + delay;
    }
    first = head = atomic_load_explicit(qp->sq.posted, memory_order_relaxed);
    for (; wr; wr = wr->next, head++) {
        error = check_send(qp, wr, head);
        if (!error)
            error = write_send(qp, soft_ring_entry(&qp->sq, head), wr, due);
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

/* ---- Receiving ------------------------------------------------------------------------------------------- */

static int check_receive(const struct soft_qp *qp, const struct ibv_recv_wr *wr, uint32_t head)
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
    if (atomic_load(&qp->state) == IBV_QPS_RESET) {
        error = EINVAL;
        goto leave;
    }
    first = head = atomic_load_explicit(qp->rq.posted, memory_order_relaxed);
    for (; wr; wr = wr->next, head++) {
        struct soft_rwqe *rwqe = soft_ring_entry(&qp->rq, head);

        error = check_receive(qp, wr, head);
        if (error)
            break;
        rwqe->wr_id = wr->wr_id;
        rwqe->num_sge = (uint64_t)wr->num_sge;
        if (wr->num_sge)
            memcpy(rwqe + 1, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
    }
    *bad = wr;
    if (head != first) {
        /* Sequentially consistent, as the state is: either this thread sees ERR and has the requests
		 * flushed, or who sets ERR sees them in the ring. */
        atomic_store(qp->rq.posted, head);
        if (atomic_load(&qp->state) == IBV_QPS_ERR)
            soft_kick_from_driver(qp);
    }
leave:
    soft_half_leave(&qp->half);
    return error;
}
