/* Requester of a queue pair: sends, repeats and completes its requests, in the posting thread or in the worker thread.
 *
 * The same code serves local and remote peers, which differ only in requester_transmit(). A peer of this device answers
 * in the same call, so requests to it go one by one. Requests to a remote peer are sent one after the other without
 * waiting for responses (soft/transport/completer.c handles these), and are repeated from the oldest one on if
 * responses do not come (go-back-N), as reliable connections of the architecture do.
 *
 * All functions run under sq_lock and in a grace section, unless noted otherwise. The peer's rq_lock is taken inside of
 * it, but no other sq_lock: a peer that breaks is kicked after all locks were released. The queue pair's window says
 * which requests are in flight. Its counters change only by the functions of soft/objects/psn_window.h: responses are
 * first looked up there. */
#include "soft/transport/requester.h"

#include <assert.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/fabric/fabric.h"
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
#include "soft/transport/cached_reads.h"
#include "soft/transport/direct_requests.h"
#include "soft/transport/loopback.h"
#include "soft/transport/request.h"
#include "soft/transport/request_frames.h"
#include "soft/transport/responder.h"

/* Time for which an unreliable request waits for a connection before it is dropped. */
#define UNRELIABLE_NS 200000000u

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

/* Change the state after an error, under sq_lock. If the queue pair is not reliable, only the send queue stops. */
static void fail_sender(struct soft_qp *qp)
{
    unsigned int from = IBV_QPS_RTS;

    assert_held(&qp->sq_lock);
    if (soft_is_reliable(qp)) {
        atomic_store(&qp->state, IBV_QPS_ERR);
        soft_read_cache_invalidate_qp(qp);
        return;
    }
    /* Flushing expects SQE; a peer may have broken the queue pair meanwhile. */
    atomic_compare_exchange_strong(&qp->state, &from, IBV_QPS_SQE);
}

void soft_complete_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status,
                           uint32_t vendor_err, uint32_t byte_len)
{
    struct soft_cqe cqe;

    assert_held(&qp->sq_lock);
    qp->req.begun = false;
    if (status != IBV_WC_SUCCESS)
        fail_sender(qp);
    else if (!qp->sq_sig_all && !(wqe->flags & IBV_SEND_SIGNALED))
        return;
    cqe = (struct soft_cqe){
        .wr_id = wqe->wr_id,
        .qp = qp,
        .byte_len = byte_len,
        .qp_num = qp->qp.qp_num,
        .wqe_index = qp->req.window.finished - 1,
        .vendor_err = vendor_err,
        .status = (uint8_t)status,
        .opcode = completion_opcode(wqe->opcode),
        .is_send = true,
    };
    if (soft_complete(qp->context, qp->send_cq, &cqe))
        return;
    /* A lost flush completion in ERR is no news to the application: no event. */
    if (atomic_exchange(&qp->state, IBV_QPS_ERR) != IBV_QPS_ERR || status != IBV_WC_WR_FLUSH_ERR)
        soft_raise_event(qp->context, &qp->events, IBV_EVENT_QP_FATAL);
    soft_read_cache_invalidate_qp(qp);
}

void soft_end_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status, uint32_t vendor_err,
                      uint32_t byte_len, uint32_t packets)
{
    soft_window_skip(&qp->req.window, packets);
    soft_complete_request(qp, wqe, status, vendor_err, byte_len);
}

/* ---- One request ----------------------------------------------------------------------------------------- */

enum ibv_wc_status soft_resolve(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_segment *segments,
                                struct soft_request *request)
{
    const struct ibv_sge *sge = (const struct ibv_sge *)(wqe + 1);
    bool answer = soft_returns_data(wqe->opcode);
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
    if (answer && !qp->attr.max_rd_atomic) /* max_rd_atomic is 0: it could never be sent */
        return IBV_WC_LOC_QP_OP_ERR;
    request->length = (uint32_t)length;
    return IBV_WC_SUCCESS;
}

uint32_t soft_request_length(const struct soft_wqe *wqe)
{
    const struct ibv_sge *sge = (const struct ibv_sge *)(wqe + 1);
    uint32_t length = 0;
    unsigned int i;

    if (wqe->flags & IBV_SEND_INLINE)
        return wqe->inline_length;
    for (i = 0; i < wqe->num_sge; i++)
        length += sge[i].length;
    return length;
}

uint32_t soft_packets(const struct soft_qp *qp, uint32_t length)
{
    unsigned int shift = 7 + qp->attr.path_mtu; /* log2 of the MTU */

    if (qp->qp.qp_type == IBV_QPT_UD || !length)
        return 1;
    return (length + (1u << shift) - 1) >> shift;
}

/* Execute a request that does not involve the peer. */
static enum ibv_wc_status execute_locally(struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (wqe->opcode == IBV_WR_BIND_MW)
        return soft_mw_bind(qp, wqe) ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR;
    return soft_mw_invalidate(qp, qp->pd, wqe->imm_data) ? IBV_WC_SUCCESS : IBV_WC_LOC_QP_OP_ERR;
}

/* Apply the fault plan to a request that is tried for the first time, then check it. Return its status. */
static enum ibv_wc_status begin_request(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_segment *segments,
                                        struct soft_request *request, uint32_t *vendor_err)
{
    enum ibv_wc_status status = IBV_WC_SUCCESS;

    if (!qp->req.begun && (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS))
        status = soft_fault_status(qp, false, vendor_err);
    qp->req.begun = true;
    if (status == IBV_WC_SUCCESS)
        status = soft_is_local_op(wqe->opcode) ? execute_locally(qp, wqe) : soft_resolve(qp, wqe, segments, request);
    return status;
}

/* ---- Retries --------------------------------------------------------------------------------------------- */

static uint64_t timeout_from_now(const struct soft_qp *qp)
{
    if (!soft_is_reliable(qp))
        return soft_now_ns() + UNRELIABLE_NS;
    return qp->attr.timeout ? soft_now_ns() + (4096ull << qp->attr.timeout) : UINT64_MAX;
}

void soft_await_response(struct soft_qp *qp)
{
    qp->req.waiting = true;
    if (qp->req.deadline == UINT64_MAX)
        qp->req.deadline = timeout_from_now(qp);
}

/* Return whether the worker thread can handle the queue pair's timer. With a remote peer it has run since the path was
 * set. */
static bool can_start_timer(struct soft_qp *qp)
{
    return soft_is_remote(qp) || !soft_worker_start(qp->context);
}

void soft_requester_go_back(struct soft_qp *qp)
{
    struct soft_requester *req = &qp->req;

    assert(!req->direct_count);
    soft_window_rewind(&qp->req.window);
    req->pending_entry.owner_serial = 0;
    req->deadline = UINT64_MAX;
    req->rewind = false;
}

void soft_requester_fail(struct soft_qp *qp, enum ibv_wc_status status)
{
    const struct soft_wqe *wqe = soft_request_at(qp, qp->req.window.finished);

    soft_requester_go_back(qp);
    qp->req.waiting = false;
    soft_window_fail(&qp->req.window);
    soft_complete_request(qp, wqe, status, 0, 0);
}

void soft_requester_stop(struct soft_qp *qp)
{
    assert_held(&qp->sq_lock);
    soft_requester_go_back(qp);
    soft_window_undo(
        &qp->req.window); /* requests posted from here on are new, even if the peer saw a part of a message */
    qp->req.refused = false;
    qp->req.pause = 0;
    qp->req.waiting = false;
    if (qp->link)
        soft_link_forget(qp->link, qp);
}

/* Complete an unreliable request or datagram: there is no response to wait for. */
static void requester_drop(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length)
{
    soft_requester_go_back(qp);
    qp->req.waiting = false;
    soft_end_request(qp, wqe, IBV_WC_SUCCESS, 0, length, soft_packets(qp, length));
}

/* Give up the request at window.finished. The peer has ended all copies. */
static void requester_give_up(struct soft_qp *qp, enum ibv_wc_status status)
{
    const struct soft_wqe *wqe = soft_request_at(qp, qp->req.window.finished);

    if (soft_is_reliable(qp)) {
        soft_requester_fail(qp, status);
        return;
    }
    if (qp->link)
        soft_link_forget(qp->link, qp);
    requester_drop(qp, wqe, soft_request_length(wqe));
}

/* Handle a timeout. The peer has ended all copies. */
static void requester_timeout(struct soft_qp *qp)
{
    if (soft_is_reliable(qp) && qp->req.retries_left) {
        qp->req.retries_left--;
        soft_requester_go_back(qp);
    } else {
        requester_give_up(qp, IBV_WC_RETRY_EXC_ERR);
    }
}

/* Handle an RNR NAK: the peer has no receive for the request at window.finished. That request and all after it are sent
 * again; the peer executed none of them. */
static void requester_rnr(struct soft_qp *qp, uint64_t delay_ns)
{
    if (qp->attr.rnr_retry != 7) { /* 7: retry without limit */
        if (!qp->req.rnr_left) {
            soft_requester_fail(qp, IBV_WC_RNR_RETRY_EXC_ERR);
            return;
        }
        qp->req.rnr_left--;
    }
    if (!can_start_timer(qp)) {
        soft_requester_fail(qp, IBV_WC_GENERAL_ERR);
        return;
    }
    soft_requester_go_back(qp);
    soft_window_undo(&qp->req.window);
    qp->req.waiting = qp->req.refused = true;
    qp->req.pause = soft_now_ns() + delay_ns;
}

void soft_requester_refused(struct soft_qp *qp, const struct soft_reply *reply)
{
    if (reply->kind == SOFT_RNR)
        requester_rnr(qp, reply->rnr_ns);
    else
        soft_requester_fail(qp, reply->status);
}

void soft_reset_retries(struct soft_qp *qp)
{
    qp->req.retries_left = qp->attr.retry_cnt;
    qp->req.rnr_left = qp->attr.rnr_retry;
    qp->req.deadline = UINT64_MAX;
    qp->req.waiting = qp->req.refused = false;
    if (soft_is_in_flight(qp))
        soft_await_response(qp);
    else
        qp->req.rewind = false; /* nothing to send again */
}

/* ---- Sending --------------------------------------------------------------------------------------------- */

/* Return whether the request at `sent` was sent before, in part or in vain: while the queue drains, such a request is
 * finished. */
static bool has_left_before(const struct soft_qp *qp)
{
    return qp->req.window.offset || soft_window_repeats(&qp->req.window) || qp->req.refused;
}

/* Return whether the request at `sent` may be sent before all requests before it are acknowledged. A peer of this
 * device answers at once, so a request that it did not answer is lost, and all behind it would be, too. */
static bool may_leave(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    unsigned int state = atomic_load(&qp->state);

    if (state != IBV_QPS_RTS && !(state == IBV_QPS_SQD && has_left_before(qp)))
        return false;
    if (qp->req.window.offset || !soft_is_in_flight(qp))
        return true;
    if (!soft_is_remote(qp) || soft_is_local_op(wqe->opcode) ||
        (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS))
        return false;
    if (qp->req.window.reads && (wqe->flags & IBV_SEND_FENCE))
        return false;
    return !soft_returns_data(wqe->opcode) || qp->req.window.reads < qp->attr.max_rd_atomic;
}

/* Return whether the window has room for the next part of the request at `sent`, however large that part becomes. If
 * not, responses to requests in flight make room. */
static bool fits_window(const struct soft_qp *qp, uint32_t length)
{
    uint32_t part = length - qp->req.window.offset;

    if (part > SOFT_DIRECT_FRAGMENT)
        part = SOFT_DIRECT_FRAGMENT;
    return soft_window_has_room(&qp->req.window, soft_packets(qp, part));
}

/* Return the link for a request. That of the last datagram is reused, since most queues send to one place for a while.
 * That of a connected queue pair is fixed. */
static struct soft_link *find_link(struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (qp->qp.qp_type != IBV_QPT_UD)
        return qp->link;
    if (qp->link && !soft_link_is_to(qp->link, &wqe->dgid)) {
        soft_link_forget(qp->link, qp);
        soft_link_put(qp->link);
        qp->link = NULL;
    }
    if (!qp->link)
        qp->link = soft_link_get(qp->context->device, &wqe->dgid);
    return qp->link;
}

/* Return whether the destination of a request is on another device. */
static bool has_remote_peer(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (qp->qp.qp_type == IBV_QPT_UD)
        return !soft_gid_is_local(qp->context->device, &wqe->dgid);
    return qp->link;
}

/* Send a request, in the one place that does: over the link as `part` to a remote peer, whose response comes later; or
 * to the responder of a peer of this device, which answers in `reply` at once. Return 0, or an errno as
 * soft_link_send(). A request that is lost on its way counts as sent. */
static inline int requester_transmit(struct soft_qp *qp, const struct soft_request *request,
                                     const struct soft_outgoing *part, struct soft_reply *reply)
{
    if (!soft_port_works(qp))
        return 0;
    if ((atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS) &&
        soft_fault_loses(qp))
        return 0;
    if (part)
        return soft_link_send(qp->link, qp, &part->frame, part->data, part->count);
    soft_loopback_deliver(request, reply);
    return 0;
}

/* Wait for a response to the request at window.finished, or for the connection. */
static void requester_wait(struct soft_qp *qp)
{
    soft_await_response(qp);
    if (qp->req.deadline != UINT64_MAX && !can_start_timer(qp))
        requester_give_up(qp, IBV_WC_GENERAL_ERR);
}

/* Return how many reads and atomics the queue pair would have in flight, with this one, if the local peer did not
 * answer at once: count those posted behind it, up to max_rd_atomic, and up to the first that is fenced. */
static uint32_t reads_in_flight(const struct soft_qp *qp)
{
    uint32_t next, count = 1;

    for (next = qp->req.window.sent + 1; next != qp->req.window.posted && count < qp->attr.max_rd_atomic; next++) {
        const struct soft_wqe *wqe = soft_request_at(qp, next);

        if (wqe->flags & IBV_SEND_FENCE)
            break;
        if (!soft_returns_data(wqe->opcode))
            continue;
        if (wqe->due_ns && wqe->due_ns > soft_now_ns())
            break;
        count++;
    }
    return count;
}

/* Send the whole request at `sent` to a peer of this device. The request is in flight only if the peer does not answer.
 * Return a peer that the request broke, or NULL. */
static struct soft_qp *send_local(struct soft_qp *qp, struct soft_request *request)
{
    struct soft_reply reply = {.kind = SOFT_SILENT};
    const struct soft_wqe *wqe = request->wqe;

    request->total = request->length;
    request->packets = soft_packets(qp, request->length);
    if (qp->qp.qp_type == IBV_QPT_UD)
        request->sgid = &qp->context->device->gids[wqe->path.sgid_index];
    if (soft_returns_data(wqe->opcode))
        request->reads = reads_in_flight(qp);
    requester_transmit(qp, request, NULL, &reply);
    if (!soft_is_reliable(qp)) {
        requester_drop(qp, wqe, request->length); /* or it arrived: the sender cannot tell */
    } else if (reply.kind == SOFT_ACK) {
        if (qp->req.waiting) /* an earlier attempt was in vain */
            soft_reset_retries(qp);
        soft_end_request(qp, wqe, IBV_WC_SUCCESS, 0, request->length, request->packets);
    } else if (reply.kind == SOFT_SILENT) {
        soft_window_send(&qp->req.window, request->length, request->packets, true, soft_returns_data(wqe->opcode));
        requester_wait(qp);
    } else {
        soft_requester_refused(qp, &reply);
    }
    return reply.broken;
}

/* Send the next part of the request at `sent` to a remote peer, or make the read without asking. Return whether more
 * may follow at once. `*again` is set to the time at which a connection may be requested, if no attempt to connect was
 * made for this request: so a request that came just after the last connection or attempt ended does not lose a whole
 * timeout. */
static bool send_remote(struct soft_qp *qp, const struct soft_request *request, int64_t *left, uint64_t *again)
{
    const struct soft_wqe *wqe = request->wqe;
    struct soft_outgoing part;
    int error = EHOSTUNREACH;

    /* Not if the request was sent before: then the peer counts it in the sequence, or refused it. */
    if (!request->offset && !has_left_before(qp) && soft_cached_read_may(qp, wqe, request->length)) {
        if (qp->req.window.reads && qp->req.window.sent - qp->req.window.finished == qp->req.window.reads)
            return false; /* waiting for the reads before it, which are alike, is quicker */
        if (!soft_is_in_flight(qp) && soft_cached_read(qp, wqe, request, left))
            return true;
    }
    if (!fits_window(qp, request->length))
        return false;
    if (find_link(qp, wqe)) {
        soft_outgoing_make(qp, &part, request);
        error = requester_transmit(qp, request, &part, NULL);
        soft_outgoing_sent(qp, &part, error);
    }
    if (!error) {
        *left -= part.frame.part;
        qp->req.refused = false;
        soft_window_send(&qp->req.window, part.frame.part, part.frame.packets, part.frame.flags & SOFT_FRAME_LAST,
                         soft_returns_data(wqe->opcode));
    }
    if (soft_is_reliable(qp) || (error ? error != EHOSTUNREACH : qp->req.window.offset)) {
        requester_wait(qp);
        if (error == EHOSTUNREACH && soft_is_reliable(qp) && qp->waiter.retry_at)
            *again = qp->waiter.retry_at;
        return !error || !qp->req.waiting; /* otherwise the queue pair is kicked, or repeats after the timeout */
    }
    requester_drop(qp, wqe, request->length); /* or it will arrive: the sender cannot tell */
    return true;
}

/* Send requests while possible. `*again` is set to the time at which the obstacle ends by itself. Return false if the
 * turn is over. It ends at the latest when a peer of this device broke, which must be kicked first: the next datagram
 * may break another one. */
static bool requester_send(struct soft_qp *qp, uint64_t *again, struct soft_qp **broken)
{
    struct soft_window *window = &qp->req.window;
    int64_t left = SOFT_QUEUE_TURN;

    while (left > 0 && soft_has_posted(qp)) {
        const struct soft_wqe *wqe = soft_request_at(qp, window->sent);
        struct soft_segment segments[SOFT_MAX_SGE];
        struct soft_request request = {
            .from = qp,
            .wqe = wqe,
            .src_qp = qp->qp.qp_num,
            .psn = soft_window_psn(window),
            .offset = window->offset,
        };
        uint32_t vendor_err = 0;
        enum ibv_wc_status status;

        if (!may_leave(qp, wqe))
            return true;
        if (!request.offset && wqe->due_ns && wqe->due_ns > soft_now_ns()) {
            *again = wqe->due_ns;
            return true;
        }
        status = request.offset ? soft_resolve(qp, wqe, segments, &request)
                                : begin_request(qp, wqe, segments, &request, &vendor_err);
        if (status != IBV_WC_SUCCESS && soft_is_in_flight(qp)) {
            if (request.offset)
                /* Its memory was deregistered in between; otherwise the requests before it complete first. */
                qp->req.rewind = true;
            return true;
        }
        left -= SOFT_REQUEST_COST;
        if (status != IBV_WC_SUCCESS || soft_is_local_op(wqe->opcode)) {
            soft_end_request(qp, wqe, status, vendor_err, 0, 0);
        } else if (qp->qp.qp_type == IBV_QPT_UD && request.length > SOFT_MTU) {
            requester_drop(qp, wqe, request.length); /* it is dropped, which is no error */
        } else if (!has_remote_peer(qp, wqe)) {
            struct soft_qp *peer = send_local(qp, &request);

            left -= request.length;
            if (peer) {
                *broken = peer;
                return false;
            }
            if (qp->req.waiting)
                return true;
        } else if (!send_remote(qp, &request, &left, again)) {
            return true;
        }
    }
    return left > 0;
}

/* Flush posted requests, in ERR and SQE. */
static uint64_t flush_sends(struct soft_qp *qp)
{
    int64_t left = SOFT_QUEUE_TURN;

    if (!soft_direct_revoke(qp))
        return soft_direct_next_check(qp);
    soft_requester_stop(qp);
    while (soft_has_posted(qp)) {
        if (left <= 0)
            return 0;
        soft_end_request(qp, soft_request_at(qp, qp->req.window.finished), IBV_WC_WR_FLUSH_ERR, 0, 0, 0);
        left -= SOFT_REQUEST_COST;
    }
    return UINT64_MAX;
}

/* Report that the send queue is drained. Under sq_lock, in SQD with no request in flight. */
static void sq_drained(struct soft_qp *qp)
{
    assert_held(&qp->sq_lock);
    if (qp->req.drain_notify)
        soft_raise_event(qp->context, &qp->events, IBV_EVENT_SQ_DRAINED);
    qp->req.drain_notify = false;
}

/* Check whether the reason of the wait is over. Return 0 to go on; else the time of the next check. */
static uint64_t requester_resume(struct soft_qp *qp)
{
    struct soft_requester *req = &qp->req;
    bool late = req->deadline != UINT64_MAX && req->deadline <= soft_now_ns();

    if ((req->rewind || late) && !soft_direct_revoke(qp))
        return soft_direct_next_check(qp);
    if (req->rewind)
        soft_requester_go_back(qp);
    else if (late)
        requester_timeout(qp);
    if (req->pause && req->pause > soft_now_ns())
        return req->pause;
    req->pause = 0;
    return 0;
}

static uint64_t requester_run(struct soft_qp *qp, struct soft_qp **broken)
{
    struct soft_requester *req = &qp->req;
    uint64_t again = UINT64_MAX, until;
    unsigned int state;

    assert_held(&qp->sq_lock);
    for (;;) {
        state = atomic_load(&qp->state);
        if (state == IBV_QPS_ERR || state == IBV_QPS_SQE)
            return flush_sends(qp);
        if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
            return UINT64_MAX;
        if (qp->req.waiting && (until = requester_resume(qp)))
            return until;
        if (!requester_send(qp, &again, broken))
            return 0;
        if (atomic_load(&qp->state) != state)
            continue; /* a request failed */
        if (!qp->req.waiting && state == IBV_QPS_RTS)
            return again;
        if (req->rewind)
            continue;
        if (req->pause)
            return req->pause;
        if (state == IBV_QPS_SQD && !soft_is_in_flight(qp) && !has_left_before(qp)) {
            /* A request that waits for its connection was not sent: it starts again later, with the whole timeout, and
             * perhaps over another link. */
            soft_requester_stop(qp);
            sq_drained(qp);
        }
        return again < req->deadline ? again : req->deadline;
    }
}

/* ---- Execution ------------------------------------------------------------------------------------------- */

/* Under rq_lock: complete every posted receive as flushed. */
static void flush_receives(struct soft_qp *qp)
{
    uint32_t posted = atomic_load(qp->rq.posted);

    assert_held(&qp->rq_lock);
    soft_inbound_abort(qp, true);
    while (qp->rq.consumed != posted) {
        const struct soft_rwqe *rwqe = soft_ring_entry(&qp->rq, qp->rq.consumed);
        struct soft_cqe cqe = {
            .wr_id = rwqe->wr_id,
            .qp = qp,
            .qp_num = qp->qp.qp_num,
            .wqe_index = qp->rq.consumed,
            .status = IBV_WC_WR_FLUSH_ERR,
            .opcode = IBV_WC_RECV,
        };

        qp->rq.consumed++;
        soft_complete(qp->context, qp->recv_cq,
                      &cqe); /* if the completion queue is full, it breaks as a whole, and reports that */
    }
}

/* Report that this queue pair takes nothing from its shared receive queue any more, which has nothing to flush. Under
 * rq_lock, in ERR. */
static void last_wqe_reached(struct soft_qp *qp)
{
    assert_held(&qp->rq_lock);
    if (qp->srq && !qp->last_wqe)
        soft_raise_event(qp->context, &qp->events, IBV_EVENT_QP_LAST_WQE_REACHED);
    qp->last_wqe = true;
}

uint64_t soft_execute(struct soft_qp *qp)
{
    struct soft_qp *broken = NULL;
    uint64_t again;

    if (atomic_load(&qp->context->special) & SOFT_SPECIAL_LOST) /* see soft_lose */
        return UINT64_MAX;
    soft_lock_take(&qp->sq_lock);
    again = requester_run(qp, &broken);
    soft_lock_give(&qp->sq_lock);
    if (atomic_load(&qp->state) == IBV_QPS_ERR) {
        soft_lock_take(&qp->rq_lock);
        /* Check once more, now that the state cannot change: a queue pair that was reset has new receives. */
        if (atomic_load(&qp->state) == IBV_QPS_ERR) {
            flush_receives(qp);
            last_wqe_reached(qp);
        }
        soft_lock_give(&qp->rq_lock);
    }
    /* Only now, with no lock held: the peer's turn may need its own send queue. Flushing breaks no other queue pair, so
     * the recursion is one level deep. */
    if (broken && broken != qp)
        soft_kick(broken);
    return again;
}

void soft_kick(struct soft_qp *qp)
{
    uint64_t again;

    if (qp->context->mode == SOFT_THREAD) {
        soft_worker_submit(qp);
        return;
    }
    do
        again = soft_execute(qp);
    while (!again); /* no other thread continues; the number of posted requests is bounded by the queue */
    if (again != UINT64_MAX)
        soft_worker_set_timer(qp->context, &qp->timer, again);
}

void soft_kick_from_driver(struct soft_qp *qp)
{
    struct grace_reader *grace = grace_enter();

    soft_kick(qp);
    grace_leave(grace);
}
