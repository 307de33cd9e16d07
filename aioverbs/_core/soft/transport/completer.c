/* Apply responses of remote peers to the requests in flight. All under sq_lock and in a grace section. */
#include "soft/transport/completer.h"

#include <string.h>

#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/objects/device.h"
#include "soft/objects/mr.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/objects/work_queue.h"
#include "soft/transport/cached_reads.h"
#include "soft/transport/direct_requests.h"
#include "soft/transport/loopback.h"
#include "soft/transport/request.h"
#include "soft/transport/request_frames.h"
#include "soft/transport/requester.h"

/* Give the requests in flight the whole timeout again. Only a response that acknowledges more than any other since
 * these requests were sent does so: otherwise a peer that repeats itself could keep a request from ending for ever. */
static void restart_timer(struct soft_qp *qp)
{
    qp->req.deadline = UINT64_MAX;
    soft_await_response(qp);
}

/* Complete the oldest request in flight: all of it was sent, and the peer has executed it. */
static void completer_complete(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length)
{
    soft_window_acknowledge(&qp->req.window, soft_packets(qp, length), soft_returns_data(wqe->opcode));
    soft_complete_request(qp, wqe, IBV_WC_SUCCESS, 0, length);
}

/* Copy response data to the memory of the request, from `offset` on. The memory may have been deregistered
 * meanwhile. */
static enum ibv_wc_status completer_copy_response(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t offset,
                                                  const uint8_t *data, uint32_t length)
{
    struct soft_segment segments[SOFT_MAX_SGE];
    struct soft_request request = {.from = qp, .wqe = wqe};
    enum ibv_wc_status status = soft_resolve(qp, wqe, segments, &request);
    struct soft_outgoing part = {.frame = {.part = length}};
    unsigned int i;

    if (status != IBV_WC_SUCCESS)
        return status;
    soft_slice(&part, &request, offset);
    for (i = 0; i < part.count; data += part.data[i++].iov_len)
        memcpy(part.data[i].iov_base, data, part.data[i].iov_len);
    return IBV_WC_SUCCESS;
}

/* Complete the requests whose packets are all among the `packets` oldest in flight, up to the first request that needs
 * data. That one is at window.finished afterwards. */
static void completer_acknowledge(struct soft_qp *qp, uint32_t packets)
{
    bool some = false;

    while (qp->req.window.sent != qp->req.window.finished) {
        const struct soft_wqe *wqe = soft_request_at(qp, qp->req.window.finished);
        uint32_t length = soft_request_length(wqe), count = soft_packets(qp, length);

        /* A read of no bytes is acknowledged like requests without data. */
        if ((soft_returns_data(wqe->opcode) && length) || count > packets)
            break;
        packets -= count;
        completer_complete(qp, wqe, length);
        some = true;
        if (atomic_load(&qp->state) == IBV_QPS_ERR)
            return; /* the completion queue was full */
    }
    if (some)
        soft_reset_retries(qp);
}

/* Handle a response with data: the next part of the read or atomic at window.finished, or nothing that is expected. The
 * packet that the response ends with is in flight, so the whole response can only belong to a request that was sent
 * completely. */
static bool completer_response(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *payload)
{
    uint32_t packets = soft_window_locate(&qp->req.window, frame->psn), length;
    enum ibv_wc_status status = IBV_WC_SUCCESS;
    const struct soft_wqe *wqe;
    bool more;

    if (!packets)
        return true;
    wqe = soft_request_at(qp, qp->req.window.finished);
    if (!soft_returns_data(wqe->opcode))
        return true;
    length = soft_request_length(wqe);
    if (soft_packets(qp, qp->req.window.received + frame->part) !=
        packets) /* an earlier response was lost, or this one is a repetition */
        return true;
    if (frame->part > length - qp->req.window.received)
        return false;
    soft_cached_read_answered(qp, frame);
    if (!(frame->flags & SOFT_FRAME_DIRECT))
        status = completer_copy_response(qp, wqe, qp->req.window.received, payload, frame->part);
    if (status != IBV_WC_SUCCESS) {
        if (soft_direct_revoke(qp))
            soft_requester_fail(qp, status);
        else
            qp->req.rewind = true; /* the request fails when it would be sent again */
        return true;
    }
    more = soft_window_receive(&qp->req.window, frame->part);
    restart_timer(qp);
    if (qp->req.window.received == length)
        completer_complete(qp, wqe, length);
    if (more && atomic_load(&qp->state) != IBV_QPS_ERR)
        soft_reset_retries(qp);
    return true;
}

/* Handle a response, under sq_lock. It is dropped if its packet is not in flight (its request is finished, or never
 * existed), or if it has data for more packets than are in flight. It is also dropped if the peer is still copying from
 * or to memory that the response would release: then all is sent again when the peer has finished. */
static bool handle_response(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *payload)
{
    uint32_t packets = soft_window_locate(&qp->req.window, frame->psn);
    uint32_t data = frame->part ? soft_packets(qp, frame->part) : 0;
    bool done = frame->opcode == SOFT_FRAME_ACK;

    if (!packets || data > packets)
        return true;
    if (!(done ? soft_direct_revoke_up_to(qp, frame->psn) : soft_direct_revoke(qp))) {
        qp->req.rewind = true;
        return true;
    }
    if (soft_window_note_answer(&qp->req.window, packets))
        restart_timer(qp); /* each part of a long message has the whole timeout */
    if (data) {
        completer_acknowledge(qp, packets - data);
        return atomic_load(&qp->state) == IBV_QPS_ERR || completer_response(qp, frame, payload);
    }
    completer_acknowledge(qp, done ? packets : packets - 1);
    if (done || !soft_is_in_flight(qp) || atomic_load(&qp->state) == IBV_QPS_ERR)
        return true;
    soft_requester_refused(qp, &(struct soft_reply){.kind = frame->opcode == SOFT_FRAME_RNR ? SOFT_RNR : SOFT_NAK,
                                                    .status = frame->status,
                                                    .rnr_ns = frame->address});
    return true;
}

/* Return whether the queue pair awaits responses. A broken one does not, even before its requests are flushed: they are
 * neither executed nor refused any more. The code that broke the queue pair has it flushed. */
static bool awaits_responses(const struct soft_qp *qp)
{
    unsigned int state = atomic_load(&qp->state);

    return soft_is_reliable(qp) && soft_port_works(qp) && (state == IBV_QPS_RTS || state == IBV_QPS_SQD);
}

bool soft_handle_response(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload)
{
    struct soft_device *device = soft_stream_device(soft_link_stream(by));
    struct soft_qp *qp = soft_table_find(&device->qps, frame->to);
    bool honest = true, more = false;

    if (!qp)
        return true; /* the queue pair was destroyed */
    soft_lock_take(&qp->sq_lock);
    if (qp->link == by && qp->req.token == frame->token && awaits_responses(qp)) {
        honest = handle_response(qp, frame, payload);
        more = atomic_load(&qp->state) == IBV_QPS_ERR || qp->req.pause || qp->req.rewind || soft_has_posted(qp) ||
               qp->req.drain_notify;
    }
    soft_lock_give(&qp->sq_lock);
    if (more)
        soft_kick(qp);
    if (!honest)
        soft_stream_refuse(soft_link_stream(by), "a response has more data than was requested");
    return honest;
}
