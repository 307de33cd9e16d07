/* Execution of send queues: what the hardware does with a work request, in whichever thread it is done. */
#include "soft/transport/send_queue.h"

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/fabric/read_cache.h"
#include "soft/fault/injection.h"
#include "soft/objects/async_event.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/device.h"
#include "soft/objects/gids.h"
#include "soft/objects/limits.h"
#include "soft/objects/mr.h"
#include "soft/objects/mw.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/objects/work_queue.h"
#include "soft/objects/worker_thread.h"
#include "soft/transport/loopback.h"
#include "soft/transport/request.h"
#include "soft/transport/requester.h"
#include "soft/transport/responder.h"

/* ---- Completions ----------------------------------------------------------------------------------------- */

static uint8_t completion_opcode(uint8_t opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD;
    case IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV;
    case IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW;
    default:
        return IBV_WC_SEND;
    }
}

/* Under sq_lock: what an error does to the state. Where nobody is connected reliably, only the send queue stops. */
static void fail_sender(struct soft_qp *qp)
{
    unsigned int from = IBV_QPS_RTS;

    assert_held(&qp->sq_lock);
    if (soft_is_reliable(qp)) {
        atomic_store(&qp->state, IBV_QPS_ERR);
        soft_licence_recall_qp(qp);
        return;
    }
    /* What flushes finds it in SQE; a peer may have broken it meanwhile. */
    atomic_compare_exchange_strong(&qp->state, &from, IBV_QPS_SQE);
}

void soft_complete_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status,
                           uint32_t vendor_err, uint32_t byte_len)
{
    struct soft_cqe cqe;

    assert_held(&qp->sq_lock);
    qp->begun = false;
    if (status != IBV_WC_SUCCESS)
        fail_sender(qp);
    else if (!qp->sq_sig_all && !(wqe->flags & IBV_SEND_SIGNALED))
        return;
    cqe = (struct soft_cqe){
        .wr_id = wqe->wr_id,
        .qp = qp,
        .byte_len = byte_len,
        .qp_num = qp->qp.qp_num,
        .wqe_index = qp->window.taken - 1,
        .vendor_err = vendor_err,
        .status = (uint8_t)status,
        .opcode = completion_opcode(wqe->opcode),
        .is_send = true,
    };
    if (soft_complete(qp->context, qp->send_cq, &cqe))
        return;
    /* What is flushed in ERR tells its user nothing new. */
    if (atomic_exchange(&qp->state, IBV_QPS_ERR) != IBV_QPS_ERR || status != IBV_WC_WR_FLUSH_ERR)
        soft_raise(qp->context, &qp->events, IBV_EVENT_QP_FATAL);
    soft_licence_recall_qp(qp);
}

void soft_end_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status, uint32_t vendor_err,
                      uint32_t byte_len, uint32_t packets)
{
    soft_window_pass(&qp->window, packets);
    soft_complete_request(qp, wqe, status, vendor_err, byte_len);
}

void soft_flush_receives(struct soft_qp *qp)
{
    uint32_t posted = atomic_load(qp->rq.posted);

    assert_held(&qp->rq_lock);
    soft_inbound_end(qp, true);
    while (qp->rq.taken != posted) {
        const struct soft_rwqe *rwqe = soft_ring_entry(&qp->rq, qp->rq.taken);
        struct soft_cqe cqe = {
            .wr_id = rwqe->wr_id,
            .qp = qp,
            .qp_num = qp->qp.qp_num,
            .wqe_index = qp->rq.taken,
            .status = IBV_WC_WR_FLUSH_ERR,
            .opcode = IBV_WC_RECV,
        };

        qp->rq.taken++;
        soft_complete(qp->context, qp->recv_cq,
                      &cqe); /* where it finds no room the queue is lost as a whole, and says so */
    }
}

/* ---- One request ----------------------------------------------------------------------------------------- */

/* Checks the local side of a request and finds its memory. */
enum ibv_wc_status soft_resolve(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_segment *segments,
                                struct soft_request *request)
{
    const struct ibv_sge *sge = (const struct ibv_sge *)(wqe + 1);
    bool answer = soft_is_answered(wqe->opcode);
    uint64_t length = 0;
    unsigned int i;

    if (qp->qp.qp_type == IBV_QPT_UD && wqe->ah_refused)
        return IBV_WC_LOC_QP_OP_ERR;
    request->local = segments;
    if (wqe->flags & IBV_SEND_INLINE) {
        segments[0] = (struct soft_segment){(uint8_t *)(wqe + 1), wqe->inline_length};
        request->local_count = 1;
        request->length = wqe->inline_length;
        return IBV_WC_SUCCESS;
    }
    for (i = 0; i < wqe->num_sge; i++) {
        if (!sge[i].length)
            continue;
        length += sge[i].length;
        segments[request->local_count].length = sge[i].length;
        segments[request->local_count].address = soft_mr_resolve(qp->context->device, qp->pd, sge[i].lkey, sge[i].addr,
                                                                 sge[i].length, answer ? IBV_ACCESS_LOCAL_WRITE : 0);
        if (!segments[request->local_count++].address)
            return IBV_WC_LOC_PROT_ERR;
    }
    if (length > SOFT_MAX_MESSAGE || (soft_is_atomic(wqe->opcode) && length != 8))
        return IBV_WC_LOC_LEN_ERR;
    if (answer && !qp->attr.max_rd_atomic) /* no reads in flight were agreed on: it could never be sent */
        return IBV_WC_LOC_QP_OP_ERR;
    request->length = (uint32_t)length;
    return IBV_WC_SUCCESS;
}

/* How many packets a message, or a read's answer, takes: sequence numbers count them. */
uint32_t soft_packets(const struct soft_qp *qp, uint32_t length)
{
    unsigned int shift = 7 + qp->attr.path_mtu; /* of the MTU */

    if (qp->qp.qp_type == IBV_QPT_UD || !length)
        return 1;
    return (length + (1u << shift) - 1) >> shift;
}

/* The peer did not take it: wait, and try again at `retry_ns`; where it did not even answer, while retries are
 * left. Nobody would wake us up where the thread cannot be had. */
static enum ibv_wc_status wait_until(struct soft_qp *qp, uint64_t retry_ns, bool unanswered)
{
    assert_held(&qp->sq_lock);
    if (retry_ns != UINT64_MAX && soft_engine_start(qp->context))
        return IBV_WC_GENERAL_ERR;
    qp->waiting = true;
    qp->unanswered = unanswered;
    qp->retry_ns = retry_ns;
    return IBV_WC_SUCCESS;
}

/* The wait is over: whether there may be another attempt. */
static bool may_retry(struct soft_qp *qp)
{
    qp->waiting = false;
    if (!qp->unanswered)
        return true;
    if (!qp->retries_left)
        return false;
    qp->retries_left--;
    return true;
}

static enum ibv_wc_status send_queue_rnr(struct soft_qp *qp, uint64_t rnr_ns)
{
    if (qp->attr.rnr_retry != 7) { /* 7: without end */
        if (!qp->rnr_left)
            return IBV_WC_RNR_RETRY_EXC_ERR;
        qp->rnr_left--;
    }
    return wait_until(qp, soft_now_ns() + rnr_ns, false);
}

/* The first attempt and each retry wait for the whole timeout, 4.096 us * 2^timeout. With timeout 0 nothing is ever
 * sent again: only a change of state ends the wait. */
static enum ibv_wc_status no_answer(struct soft_qp *qp)
{
    return wait_until(qp, qp->attr.timeout ? soft_now_ns() + (4096ull << qp->attr.timeout) : UINT64_MAX, true);
}

/* With this read or atomic, how many the queue pair would have in flight: those that are posted behind it, as many as
 * it was told to have, up to the first that is fenced. */
static uint32_t reads_in_flight(const struct soft_qp *qp)
{
    uint32_t posted = atomic_load_explicit(qp->sq.posted, memory_order_acquire), next, count = 1;

    for (next = qp->window.taken + 1; next != posted && count < qp->attr.max_rd_atomic; next++) {
        const struct soft_wqe *wqe = soft_ring_entry(&qp->sq, next);

        if (wqe->flags & IBV_SEND_FENCE)
            break;
        if (!soft_is_answered(wqe->opcode))
            continue;
        if (wqe->due_ns && wqe->due_ns > soft_now_ns())
            break;
        count++;
    }
    return count;
}

/* Requests that no peer hears of. */
static enum ibv_wc_status execute_locally(struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (wqe->opcode == IBV_WR_BIND_MW)
        return soft_mw_bind(qp, wqe) ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR;
    return soft_mw_invalidate(qp, qp->pd, wqe->imm_data) ? IBV_WC_SUCCESS : IBV_WC_LOC_QP_OP_ERR;
}

/* What the fault plan makes of a request, the first time that it is tried; else whether it can be sent at all. */
enum ibv_wc_status soft_begin_request(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_segment *segments,
                                      struct soft_request *request, uint32_t *vendor_err)
{
    enum ibv_wc_status status = IBV_WC_SUCCESS;

    if (!qp->begun && (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS))
        status = soft_fault_status(qp, false, vendor_err);
    qp->begun = true;
    if (status == IBV_WC_SUCCESS)
        status = soft_is_local(wqe->opcode) ? execute_locally(qp, wqe) : soft_resolve(qp, wqe, segments, request);
    return status;
}

/* Sends and forgets: all that the requester can tell is that it left. A datagram may wait a little for the way. */
static void send_unreliably(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_request *request,
                            struct soft_reply *reply)
{
    bool datagram = qp->qp.qp_type == IBV_QPT_UD;
    struct soft_device *device = qp->context->device;
    uint64_t until;

    if (datagram) {
        request->sgid = &device->gids[wqe->path.sgid_index];
        /* One that is larger than the port's MTU goes nowhere, which is no error (C10-93.1.1). */
        if (request->length <= SOFT_MTU && !soft_gid_is_local(device, &wqe->dgid)) {
            until = soft_ask_datagram(qp, wqe, request);
            if (until && wait_until(qp, until, false) == IBV_WC_SUCCESS)
                return;
        } else if (request->length <= SOFT_MTU) {
            soft_link_deliver(request, reply);
        }
    } else {
        soft_link_deliver(request, reply);
    }
    soft_end_request(qp, wqe, IBV_WC_SUCCESS, 0, request->length, request->packets);
}

/* Under sq_lock, in RTS: executes the request at window.taken, completes it or makes the queue wait. Returns a peer that
 * it broke, or NULL. */
static struct soft_qp *execute_one(struct soft_qp *qp, const struct soft_wqe *wqe, int64_t *left)
{
    struct soft_segment segments[SOFT_MAX_SGE];
    struct soft_request request = {
        .from = qp,
        .wqe = wqe,
        .psn = qp->window.first_psn,
        .src_qp = qp->qp.qp_num,
    };
    struct soft_reply reply = {.kind = SOFT_SILENT};
    uint32_t vendor_err = 0;
    enum ibv_wc_status status = soft_begin_request(qp, wqe, segments, &request, &vendor_err);

    assert_held(&qp->sq_lock);
    *left -= SOFT_REQUEST_COST + (int64_t)request.length;
    if (status != IBV_WC_SUCCESS || soft_is_local(wqe->opcode)) {
        soft_end_request(qp, wqe, status, vendor_err, 0, 0);
        return NULL;
    }
    request.total = request.length;
    request.packets = soft_packets(qp, request.length);
    if (!soft_is_reliable(qp)) {
        send_unreliably(qp, wqe, &request, &reply);
        return reply.broken;
    }
    if (soft_is_answered(wqe->opcode))
        request.reads = reads_in_flight(qp);
    soft_link_deliver(&request, &reply);
    switch (reply.kind) {
    case SOFT_ACK:
        qp->retries_left = qp->attr.retry_cnt;
        qp->rnr_left = qp->attr.rnr_retry;
        soft_end_request(qp, wqe, IBV_WC_SUCCESS, 0, request.length, request.packets);
        return reply.broken;
    case SOFT_NAK:
        status = reply.status;
        break;
    case SOFT_RNR:
        status = send_queue_rnr(qp, reply.rnr_ns);
        break;
    case SOFT_SILENT:
        status = no_answer(qp);
        break;
    }
    if (status != IBV_WC_SUCCESS)
        soft_end_request(qp, wqe, status, 0, 0, 0);
    return reply.broken;
}

/* ---- A queue --------------------------------------------------------------------------------------------- */

/* Under sq_lock, in SQD with no request under way. */
void soft_drained(struct soft_qp *qp)
{
    assert_held(&qp->sq_lock);
    if (qp->drain_notify)
        soft_raise(qp->context, &qp->events, IBV_EVENT_SQ_DRAINED);
    qp->drain_notify = false;
}

/* A shared receive queue has nothing to flush: its user is told that this queue pair takes nothing from it any more.
 * Under rq_lock, in ERR. */
static void last_wqe_reached(struct soft_qp *qp)
{
    assert_held(&qp->rq_lock);
    if (qp->srq && !qp->last_wqe)
        soft_raise(qp->context, &qp->events, IBV_EVENT_QP_LAST_WQE_REACHED);
    qp->last_wqe = true;
}

/* Under sq_lock. Returns when to come again: 0 when its turn is over but not its work. */
static uint64_t run(struct soft_qp *qp, struct soft_qp **broken)
{
    int64_t left = SOFT_QUEUE_TURN;

    assert_held(&qp->sq_lock);
    if (soft_is_remote(qp))
        return soft_ask(qp);
    while (left > 0) {
        const struct soft_wqe *wqe = soft_ring_entry(&qp->sq, qp->window.taken);
        unsigned int state = atomic_load(&qp->state);
        struct soft_qp *peer;

        if (state == IBV_QPS_SQD && !qp->waiting)
            soft_drained(qp);
        if (!soft_has_posted(qp))
            return UINT64_MAX;
        if (state == IBV_QPS_ERR || state == IBV_QPS_SQE) {
            soft_end_request(qp, wqe, IBV_WC_WR_FLUSH_ERR, 0, 0, 0);
            left -= SOFT_REQUEST_COST;
            continue;
        }
        /* Draining: what was begun is brought to its end. */
        if (state != IBV_QPS_RTS && !(state == IBV_QPS_SQD && qp->waiting))
            return UINT64_MAX;
        if (qp->waiting) {
            if (qp->retry_ns > soft_now_ns())
                return qp->retry_ns;
            if (!may_retry(qp)) {
                soft_end_request(qp, wqe, IBV_WC_RETRY_EXC_ERR, 0, 0, 0);
                continue;
            }
        } else if (wqe->due_ns && wqe->due_ns > soft_now_ns()) {
            return wqe->due_ns;
        }
        peer = execute_one(qp, wqe, &left);
        if (peer) { /* it is kicked first: the next datagram may break another one */
            *broken = peer;
            return 0;
        }
    }
    return 0;
}

uint64_t soft_execute(struct soft_qp *qp)
{
    struct soft_qp *broken = NULL;
    uint64_t again;

    if (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_LOST)
        return UINT64_MAX;
    soft_lock_take(&qp->sq_lock);
    again = run(qp, &broken);
    soft_lock_give(&qp->sq_lock);
    if (atomic_load(&qp->state) == IBV_QPS_ERR) {
        soft_lock_take(&qp->rq_lock);
        /* Once more, now that it cannot change: a queue pair that was reset has new receives. */
        if (atomic_load(&qp->state) == IBV_QPS_ERR) {
            soft_flush_receives(qp);
            last_wqe_reached(qp);
        }
        soft_lock_give(&qp->rq_lock);
    }
    /* Only now, with no lock held: the peer's turn may need its own send queue. Flushing breaks nobody else, so
	 * this goes one level deep. */
    if (broken && broken != qp)
        soft_kick(broken);
    return again;
}

void soft_kick(struct soft_qp *qp)
{
    uint64_t again;

    if (qp->context->mode == SOFT_ENGINE) {
        soft_engine_ring(qp);
        return;
    }
    do
        again = soft_execute(qp);
    while (!again); /* nobody else goes on with it; what was posted is no more than the queue holds */
    if (again != UINT64_MAX)
        soft_engine_timer(qp->context, &qp->timer, again);
}

void soft_kick_from_driver(struct soft_qp *qp)
{
    struct grace_reader *grace = grace_enter();

    soft_kick(qp);
    grace_leave(grace);
}
