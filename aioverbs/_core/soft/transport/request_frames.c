/* Requests to remote peers, as frames. */
#include "soft/transport/request_frames.h"

#include <stdlib.h>
#include <string.h>

#include "soft/fabric/fabric.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/mr.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/objects/shared_keys.h"
#include "soft/objects/work_queue.h"
#include "soft/transport/cached_reads.h"
#include "soft/transport/request.h"
#include "soft/transport/requester.h"

/* Size from which on the peer copies the bytes itself, if it can: one copy less, but one more system call and a
 * list. */
#define DIRECT_BYTES 8192u

void soft_slice(struct soft_outgoing *part, const struct soft_request *request, uint32_t offset)
{
    uint32_t left = part->frame.part, i;

    for (i = 0; i < request->local_count && left; i++) {
        const struct soft_segment *segment = &request->local[i];
        uint32_t length = segment->length;

        if (offset >= length) {
            offset -= length;
            continue;
        }
        length -= offset;
        if (length > left)
            length = left;
        part->data[part->count++] = (struct iovec){segment->address + offset, length};
        left -= length;
        offset = 0;
    }
}

/* Set the fields that are the same in every part of a request. */
static void part_fill(struct soft_outgoing *part, const struct soft_qp *qp, const struct soft_request *request)
{
    const struct soft_wqe *wqe = request->wqe;
    struct soft_frame *frame = &part->frame;

    *frame = (struct soft_frame){
        .kind = SOFT_FRAME_REQUEST,
        .opcode = wqe->opcode,
        .flags = wqe->flags & IBV_SEND_SOLICITED ? SOFT_FRAME_SOLICITED : 0,
        .transport = (uint8_t)qp->qp.qp_type,
        .from = qp->qp.qp_num,
        .token = qp->req.token,
        .psn = request->psn,
        .total = request->length,
        .offset = request->offset,
    };
    if (wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || wqe->opcode == IBV_WR_SEND_WITH_IMM ||
        wqe->opcode == IBV_WR_SEND_WITH_INV)
        frame->imm = wqe->imm_data;
    part->count = 0;
}

static void fill_datagram_destination(struct soft_frame *frame, const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    frame->to = (uint32_t)wqe->remote_addr;
    frame->key = wqe->rkey & 0x80000000u ? qp->attr.qkey : wqe->rkey;
    frame->sgid_index = wqe->path.sgid_index;
    frame->flow_label = wqe->path.flow_label;
    frame->hop_limit = wqe->path.hop_limit;
    frame->traffic_class = wqe->path.traffic_class;
    memcpy(frame->dgid, wqe->dgid.raw, sizeof(frame->dgid));
}

/* Set the destination. */
static void fill_destination(struct soft_frame *frame, const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (qp->qp.qp_type == IBV_QPT_UD) {
        fill_datagram_destination(frame, qp, wqe);
        return;
    }
    frame->to = qp->attr.dest_qp_num;
    frame->sgid_index = qp->attr.ah_attr.grh.sgid_index;
    if (wqe->opcode == IBV_WR_RDMA_WRITE || wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
        soft_returns_data(wqe->opcode)) {
        frame->address = wqe->remote_addr + frame->offset;
        frame->key = wqe->rkey;
    }
    if (soft_is_atomic(wqe->opcode)) {
        frame->compare_add = wqe->compare_add;
        frame->swap = wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? wqe->swap : 0;
    }
    if (soft_returns_data(wqe->opcode))
        frame->reads = qp->req.window.reads + !frame->offset;
    if (qp->qp.qp_type == IBV_QPT_XRC_SEND)
        frame->srqn = wqe->remote_srqn;
}

/* Return whether some of the request's memory belongs to another process. That process cannot revoke copy tokens when
 * it takes the memory back: it waits for threads that access the memory only. */
static bool wqe_uses_shared_memory(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    const struct ibv_sge *sge = (const struct ibv_sge *)(wqe + 1);
    unsigned int i;

    for (i = 0; i < wqe->num_sge; i++)
        if (soft_shared_is_foreign(qp->pd, sge[i].lkey))
            return true;
    return false;
}

/* Return whether there is room for one more direct part. */
static bool has_direct_room(struct soft_qp *qp)
{
    if (!qp->direct_parts)
        qp->direct_parts = calloc(SOFT_DIRECT_PARTS, sizeof(*qp->direct_parts));
    return qp->direct_parts && qp->req.direct_count < SOFT_DIRECT_PARTS;
}

/* Return whether the peer copies `left` bytes itself, if it can. That is one copy, in one process. Through a ring there
 * are two, but two processes make them at the same time, without a system call in which the kernel looks up each page.
 * So a ring takes what fits in one frame, and a read of any length if no other read is in flight and no request waits
 * behind it: its time is waited for. Of several it is the work that counts. */
static bool is_worth_direct(const struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t left)
{
    const struct soft_window *window = &qp->req.window;
    bool alone = window->posted - window->sent == 1 && window->reads == !!window->offset;

    if (!soft_link_has_rings(qp->link))
        return left >= DIRECT_BYTES;
    return left > SOFT_FRAGMENT && !(alone && wqe->opcode == IBV_WR_RDMA_READ);
}

/* Try to make a direct part, which the peer copies. Return false if all copy tokens are in use or direct copies are not
 * possible; or if the request was sent before: its parts must not be larger than they were, since the peer may have
 * executed some of them. */
static bool try_direct_part(struct soft_qp *qp, struct soft_outgoing *part, const struct soft_request *request)
{
    struct soft_frame_segment segments[SOFT_MAX_SGE];
    struct soft_frame *frame = &part->frame;
    uint32_t left = request->length - frame->offset;
    unsigned int i;

    if (!is_worth_direct(qp, request->wqe, left) || soft_window_repeats(&qp->req.window) || !soft_is_reliable(qp) ||
        (request->wqe->flags & IBV_SEND_INLINE) || !soft_link_direct(qp->link) ||
        wqe_uses_shared_memory(qp, request->wqe) || !has_direct_room(qp) ||
        soft_copy_token_open(qp->link, &frame->copy_token, &frame->serial))
        return false;
    frame->flags |= SOFT_FRAME_DIRECT;
    frame->part = left < SOFT_DIRECT_FRAGMENT ? left : SOFT_DIRECT_FRAGMENT;
    soft_slice(part, request, frame->offset);
    for (i = 0; i < part->count; i++)
        segments[i] = (struct soft_frame_segment){(uintptr_t)part->data[i].iov_base, (uint32_t)part->data[i].iov_len};
    soft_segments_pack(segments, part->count, part->list);
    frame->segments = (uint16_t)part->count;
    frame->size = part->count * SOFT_SEGMENT_SIZE;
    part->data[0] = (struct iovec){part->list, frame->size};
    part->count = 1;
    return true;
}

/* Make a part whose bytes go over the stream; those of a read come back over it. */
static void fill_stream_part(struct soft_outgoing *part, const struct soft_wqe *wqe, const struct soft_request *request)
{
    struct soft_frame *frame = &part->frame;
    uint32_t left = request->length - frame->offset;

    frame->part = left < SOFT_FRAGMENT ? left : SOFT_FRAGMENT;
    if (soft_returns_data(wqe->opcode))
        return;
    frame->size = frame->part;
    soft_slice(part, request, frame->offset);
}

static void set_first_last(struct soft_frame *frame)
{
    if (!frame->offset)
        frame->flags |= SOFT_FRAME_FIRST;
    if (frame->offset + frame->part == frame->total)
        frame->flags |= SOFT_FRAME_LAST;
}

void soft_outgoing_make(struct soft_qp *qp, struct soft_outgoing *part, const struct soft_request *request)
{
    part_fill(part, qp, request);
    fill_destination(&part->frame, qp, request->wqe);
    if (!try_direct_part(qp, part, request))
        fill_stream_part(part, request->wqe, request);
    set_first_last(&part->frame);
    part->frame.packets = soft_packets(qp, part->frame.part);
    soft_cached_read_ask(qp, request->wqe, soft_frame_last_psn(&part->frame));
}

void soft_outgoing_sent(struct soft_qp *qp, const struct soft_outgoing *part, int error)
{
    struct soft_requester *req = &qp->req;

    if (!(part->frame.flags & SOFT_FRAME_DIRECT))
        return;
    if (error) {
        soft_copy_token_cancel(qp->link, part->frame.copy_token, part->frame.serial);
        return;
    }
    qp->direct_parts[(req->direct_first + req->direct_count++) % SOFT_DIRECT_PARTS] = (struct soft_direct_part){
        .psn = soft_frame_last_psn(&part->frame), .serial = part->frame.serial, .copy_token = part->frame.copy_token};
    atomic_fetch_add(&qp->context->device->direct_parts, 1);
}
