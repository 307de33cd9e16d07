/* Requests of remote peers. Permissions are checked as for requests of this device, by the owner of the memory. The
 * peer is never trusted. All under fabric->progress and in a grace section.
 *
 * Acknowledgements are coalesced: the last one of a run acknowledges all. */
#include "soft/transport/inbound.h"

#include <assert.h>
#include <string.h>

#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/read_cache.h"
#include "soft/objects/device.h"
#include "soft/objects/gids.h"
#include "soft/objects/limits.h"
#include "soft/objects/mr.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/objects/work_queue.h"
#include "soft/transport/completer.h"
#include "soft/transport/loopback.h"
#include "soft/transport/request.h"
#include "soft/transport/requester.h"
#include "soft/transport/responder.h"

/* State of a remote request, beyond that of a local one. */
struct remote {
    struct soft_carrier carrier;
    struct soft_stream *stream;
    struct soft_qp *peer; /* queue pair that the request is for */
    const struct soft_frame *frame;
    const uint8_t *payload;
    bool answered; /* a response with data was sent */
};

/* ---- Answers ----------------------------------------------------------------------------------------------- */

static struct soft_frame response_to(const struct soft_frame *frame, uint8_t opcode)
{
    return (struct soft_frame){
        .kind = SOFT_FRAME_RESPONSE,
        .opcode = opcode,
        .to = frame->from,
        .from = frame->to,
        .token = frame->token,
        .psn = frame->psn,
    };
}

/* Send the coalesced acknowledgement, over the stream of the requests: the fabric ends a batch before it reads from
 * another stream, and also when it refuses a stream. Another peer would believe an acknowledgement that was sent to
 * it. */
static void batch_end(struct soft_stream *stream)
{
    struct soft_coalesced_ack *ack = soft_stream_coalesced_ack(stream);

    assert(!ack->stream || ack->stream == stream);
    if (ack->stream)
        soft_stream_answer(stream, &ack->frame, NULL, 0);
    ack->stream = NULL;
}

static void inbound_acknowledge(struct soft_stream *stream, const struct soft_frame *frame, uint32_t psn)
{
    struct soft_coalesced_ack *ack = soft_stream_coalesced_ack(stream);

    if (ack->stream &&
        (ack->frame.to != frame->from || ack->frame.from != frame->to || ack->frame.token != frame->token))
        batch_end(stream);
    ack->stream = stream;
    ack->frame = response_to(frame, SOFT_FRAME_ACK);
    ack->frame.psn = psn;
}

static void inbound_answer(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                           unsigned int count)
{
    batch_end(stream);
    soft_stream_answer(stream, frame, data, count);
}

static void inbound_refuse(struct soft_stream *stream, const struct soft_frame *frame, const struct soft_reply *reply)
{
    struct soft_frame refusal = response_to(frame, reply->kind == SOFT_NAK ? SOFT_FRAME_NAK : SOFT_FRAME_RNR);

    if (reply->kind == SOFT_NAK)
        refusal.status = (uint8_t)reply->status;
    else
        refusal.address = reply->rnr_ns;
    inbound_answer(stream, &refusal, NULL, 0);
}

/* ---- Bytes ------------------------------------------------------------------------------------------------- */

static int carrier_read(struct soft_carrier *carrier, const struct soft_segment *to, uint32_t length)
{
    const struct remote *remote = container_of(carrier, struct remote, carrier);
    struct iovec here[SOFT_MAX_SGE];
    unsigned int count;

    for (count = 0; length; count++) {
        uint32_t part = to[count].length < length ? to[count].length : length;

        here[count] = (struct iovec){to[count].address, part};
        length -= part;
    }
    return soft_direct_move(remote->stream, remote->frame, remote->payload, here, count, true);
}

/* Save the response to an atomic, which cannot be executed a second time. */
static void atomic_replay_save(struct soft_qp *peer, const struct soft_frame *frame, const struct soft_segment *from)
{
    struct soft_atomic_replay *replay = &peer->atomic_replays[peer->atomic_replays_next++ % SOFT_MAX_RD_ATOMIC];

    *replay = (struct soft_atomic_replay){.valid = true, .psn = frame->psn};
    memcpy(&replay->value, from->address, sizeof(replay->value));
}

/* Add a read cache grant to the response, if the peer may have one: further reads of this range then need no
 * request. */
static void grant_read_cache(const struct remote *remote, struct soft_frame *made)
{
    struct soft_read_cache_grant grant;

    if (remote->frame->opcode != IBV_WR_RDMA_READ || !made->part || !soft_stream_has_read_cache(remote->stream) ||
        !soft_read_cache_grant(remote->peer, remote->frame->key, &grant))
        return;
    made->flags |= SOFT_FRAME_READ_CACHE;
    made->address = grant.address;
    made->compare_add = grant.length;
    made->imm = (uint32_t)(grant.file + 1);
}

static int carrier_write(struct soft_carrier *carrier, const struct soft_segment *from, uint32_t length)
{
    struct remote *remote = container_of(carrier, struct remote, carrier);
    struct soft_frame made = response_to(remote->frame, SOFT_FRAME_ACK);
    struct iovec here = {from->address, length};
    int error;

    made.psn = soft_frame_last_psn(remote->frame);
    made.part = length;
    if (remote->frame->flags & SOFT_FRAME_DIRECT) {
        error = soft_direct_move(remote->stream, remote->frame, remote->payload, &here, 1, false);
        if (error)
            return error;
        made.flags = SOFT_FRAME_DIRECT;
        grant_read_cache(remote, &made);
        inbound_answer(remote->stream, &made, NULL, 0);
    } else {
        if (soft_is_atomic(remote->frame->opcode))
            atomic_replay_save(remote->peer, remote->frame, from);
        made.size = length;
        grant_read_cache(remote, &made);
        inbound_answer(remote->stream, &made, &here, length ? 1 : 0);
    }
    remote->answered = true;
    return 0;
}

/* ---- Requests ---------------------------------------------------------------------------------------------- */

/* Make a work request like that of a local queue pair. */
static struct soft_wqe wqe_of(const struct soft_frame *frame)
{
    struct soft_wqe wqe = {
        .opcode = frame->opcode,
        .flags = frame->flags & SOFT_FRAME_SOLICITED ? IBV_SEND_SOLICITED : 0,
        .imm_data = frame->imm,
        .remote_addr = frame->address,
        .rkey = frame->key,
    };

    if (frame->transport == IBV_QPT_UD) {
        memcpy(wqe.dgid.raw, frame->dgid, sizeof(wqe.dgid.raw));
        wqe.path.flow_label = frame->flow_label;
        wqe.path.sgid_index = frame->sgid_index;
        wqe.path.hop_limit = frame->hop_limit;
        wqe.path.traffic_class = frame->traffic_class;
    } else {
        wqe.compare_add = frame->compare_add;
        wqe.swap = frame->swap;
        wqe.remote_srqn = frame->srqn;
    }
    return wqe;
}

/* Return whether the frame is addressed to this queue pair. */
static bool is_addressed_to(const struct soft_qp *peer, const struct soft_stream *stream,
                            const struct soft_frame *frame)
{
    enum ibv_qp_type type = peer->qp.qp_type;
    union ibv_gid dgid;

    if (frame->transport == IBV_QPT_UD) {
        memcpy(dgid.raw, frame->dgid, sizeof(dgid.raw));
        return type == IBV_QPT_UD && peer->attr.qkey == frame->key &&
               soft_gid_is_local(soft_stream_device(stream), &dgid);
    }
    return type == (frame->transport == IBV_QPT_XRC_SEND ? IBV_QPT_XRC_RECV : (enum ibv_qp_type)frame->transport) &&
           peer->attr.dest_qp_num == frame->from && !peer->is_loopback &&
           soft_stream_is_from(stream, &peer->attr.ah_attr.grh.dgid);
}

/* Execute the request, under rq_lock. */
static void inbound_execute(struct remote *remote, struct soft_reply *reply, bool again)
{
    const struct soft_frame *frame = remote->frame;
    struct soft_wqe wqe = wqe_of(frame);
    struct soft_segment payload = {(uint8_t *)(uintptr_t)remote->payload, frame->size};
    struct soft_request request = {
        .wqe = &wqe,
        .src_qp = frame->from,
        .sgid = soft_stream_gid(remote->stream, frame->sgid_index),
        .carrier = &remote->carrier,
        .total = frame->total,
        .offset = frame->offset,
        .psn = frame->psn,
        .packets = frame->packets,
        .reads = frame->reads,
        .again = again,
        .length = frame->part,
        .local = &payload,
        .local_count = 1,
    };

    assert_held(&remote->peer->rq_lock);
    remote->carrier = (struct soft_carrier){frame->flags & SOFT_FRAME_DIRECT ? carrier_read : NULL, carrier_write};
    soft_respond(remote->peer, &request, reply);
}

/* Answer a request that was executed before: the response was lost. Reads are executed again; others are only
 * acknowledged, and atomics get the saved response. */
static void execute_repeated(struct remote *remote, struct soft_reply *reply)
{
    const struct soft_frame *frame = remote->frame;
    struct soft_qp *peer = remote->peer;
    unsigned int i;

    if (frame->opcode == IBV_WR_RDMA_READ) {
        inbound_execute(remote, reply, true);
        return;
    }
    if (!soft_is_atomic(frame->opcode)) {
        inbound_acknowledge(remote->stream, frame, (peer->expected_psn - 1) & SOFT_PSN_MASK);
        return;
    }
    for (i = 0; i < SOFT_MAX_RD_ATOMIC; i++) {
        struct soft_frame made = response_to(frame, SOFT_FRAME_ACK);
        struct iovec value = {&peer->atomic_replays[i].value, sizeof(peer->atomic_replays[i].value)};

        if (!peer->atomic_replays[i].valid || peer->atomic_replays[i].psn != frame->psn)
            continue;
        made.part = made.size = sizeof(peer->atomic_replays[i].value);
        inbound_answer(remote->stream, &made, &value, 1);
        return;
    }
}

/* Return whether the frame is next in sequence. An unreliable connection adopts the sequence number of each message's
 * first frame, and drops a message of which a part is missing. */
static bool is_next(struct soft_qp *peer, const struct soft_frame *frame)
{
    if (frame->transport == IBV_QPT_UC && (frame->flags & SOFT_FRAME_FIRST))
        peer->expected_psn = frame->psn;
    return frame->transport == IBV_QPT_UD || peer->expected_psn == frame->psn;
}

static bool is_repeated(const struct soft_qp *peer, const struct soft_frame *frame)
{
    return frame->transport != IBV_QPT_UC && frame->transport != IBV_QPT_UD &&
           ((peer->expected_psn - frame->psn) & SOFT_PSN_MASK) <= SOFT_PSN_MASK / 2;
}

static bool request(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload)
{
    struct soft_device *device = soft_stream_device(stream);
    struct remote remote = {.stream = stream, .frame = frame, .payload = payload};
    struct soft_reply reply = {.kind = SOFT_SILENT};
    struct soft_qp *peer = soft_table_find(&device->qps, frame->to);

    if (!peer)
        return true;
    remote.peer = peer;
    soft_lock_take(&peer->rq_lock);
    if (soft_can_receive(peer) && is_addressed_to(peer, stream, frame)) {
        if (is_next(peer, frame)) {
            inbound_execute(&remote, &reply, false);
            if (reply.kind == SOFT_ACK)
                peer->expected_psn = (frame->psn + frame->packets) & SOFT_PSN_MASK;
        } else if (is_repeated(peer, frame)) {
            execute_repeated(&remote, &reply);
            reply.kind = reply.kind == SOFT_ACK ? SOFT_SILENT : reply.kind;
        }
    }
    soft_lock_give(&peer->rq_lock);
    if (soft_is_reliable(peer)) {
        if (reply.kind == SOFT_ACK && !remote.answered)
            inbound_acknowledge(stream, frame, soft_frame_last_psn(frame));
        else if (reply.kind == SOFT_NAK || reply.kind == SOFT_RNR)
            inbound_refuse(stream, frame, &reply);
    }
    if (reply.broken)
        soft_kick(reply.broken);
    return true;
}

static bool is_connected_to_peer(const struct soft_stream *stream)
{
    struct soft_device *device = soft_stream_device(stream);
    uint32_t number, end = soft_table_end(&device->qps);
    bool found = false;

    for (number = SOFT_FIRST_QPN; number < end && !found; number++) {
        struct soft_qp *qp = soft_table_find(&device->qps, number);

        if (!qp || qp->qp.qp_type == IBV_QPT_UD)
            continue;
        soft_lock_take(&qp->rq_lock);
        found = soft_can_receive(qp) && !qp->is_loopback && soft_stream_is_from(stream, &qp->attr.ah_attr.grh.dgid);
        soft_lock_give(&qp->rq_lock);
    }
    return found;
}

const struct soft_fabric_user soft_remote_user = {request, soft_handle_response, batch_end, soft_kick,
                                                  is_connected_to_peer};
