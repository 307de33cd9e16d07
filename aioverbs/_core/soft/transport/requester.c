/* The requester of a queue pair: how its requests are sent, repeated and completed, in whichever thread it is done.
 *
 * There is one for all peers, local or remote, which differ where a request leaves (requester_transmit). A peer of this
 * device answers in the same call, so that its requests go one by one. To a remote one they leave one after the other
 * without waiting for answers (soft_answered), and are repeated from the oldest one on where answers do not come
 * (go-back-N), as by reliable connections of the architecture.
 *
 * All under sq_lock and in a grace section, but for what says that it waits; rq_lock, of the peer, is taken inside of it,
 * and no other sq_lock: a peer that breaks is kicked when all locks were given back. Which requests are in flight is said
 * by the queue pair's window, and its counters move by the functions of soft/objects/psn_window.h alone: what an answer
 * tells is first looked up there. */
#include "soft/transport/requester.h"

#include <assert.h>
#include <string.h>
#include <time.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
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
#include "soft/objects/read_cache_entry.h"
#include "soft/objects/shared_keys.h"
#include "soft/objects/work_queue.h"
#include "soft/objects/worker_thread.h"
#include "soft/transport/loopback.h"
#include "soft/transport/request.h"
#include "soft/transport/responder.h"

/* From here on the peer moves the bytes itself where it can: one copy, but a system call and a list more. */
#define DIRECT_BYTES 8192u

/* How often it is looked at most seldom whether a peer has left memory. */
#define LOOK_AGAIN_NS 10000000u

/* How long what nobody answers waits for its way before it is dropped. */
#define UNRELIABLE_NS 200000000u

/* A part of a request, as it is to be sent. */
struct part {
    struct soft_frame frame;
    struct iovec data[SOFT_MAX_SGE];
    unsigned int count;
};

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

/* Requests that no peer hears of. */
static enum ibv_wc_status execute_locally(struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (wqe->opcode == IBV_WR_BIND_MW)
        return soft_mw_bind(qp, wqe) ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR;
    return soft_mw_invalidate(qp, qp->pd, wqe->imm_data) ? IBV_WC_SUCCESS : IBV_WC_LOC_QP_OP_ERR;
}

/* What the fault plan makes of a request, the first time that it is tried; else whether it can be sent at all. */
static enum ibv_wc_status begin_request(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_segment *segments,
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

static const struct soft_wqe *entry(const struct soft_qp *qp, uint32_t counter)
{
    return soft_ring_entry(&qp->sq, counter);
}

static bool under_way(const struct soft_qp *qp)
{
    return !soft_window_is_idle(&qp->window);
}

static uint64_t timeout_from_now(const struct soft_qp *qp)
{
    if (!soft_is_reliable(qp))
        return soft_now_ns() + UNRELIABLE_NS;
    return qp->attr.timeout ? soft_now_ns() + (4096ull << qp->attr.timeout) : UINT64_MAX;
}

/* The request at window.taken is tried now, if not well. The first attempt and each repetition have the whole timeout,
 * 4.096 us * 2^timeout; with timeout 0 nothing is ever sent again, and only a change of state ends the wait. */
static void expect_answer(struct soft_qp *qp)
{
    qp->waiting = true;
    if (qp->out.deadline == UINT64_MAX)
        qp->out.deadline = timeout_from_now(qp);
}

/* Return whether the worker thread comes back for the queue pair. With a remote peer it runs since the path was set. */
static bool has_clock(struct soft_qp *qp)
{
    return soft_is_remote(qp) || !soft_engine_start(qp->context);
}

/* ---- What the peer may move -------------------------------------------------------------------------------- */

/* The user may use memory of a request again when it completes, and memory of a region when that was given back. So
 * the lease of each part is taken back before: that of an acknowledged request before it completes, and all of them
 * before anything is refused, flushed, repeated (which may move the same memory), reset or destroyed. Where the peer
 * has not left the memory, none of that happens yet, and nothing has changed but leases that were taken back: the
 * requester looks again later. An honest peer never makes it wait for an answer, since it leaves before it answers. */

static struct soft_moving *moving_at(struct soft_outbound *out, uint32_t at)
{
    return &out->moving[at % SOFT_MOVING];
}

/* Take back the leases of so many parts, from the oldest one on; those stay that the peer is just at. */
static bool take_back(struct soft_qp *qp, uint32_t count)
{
    struct soft_outbound *out = &qp->out;
    uint32_t end = out->moving_first + count, at = end, left = end;

    while (at-- != out->moving_first) {
        struct soft_moving *moving = moving_at(out, at);

        if (soft_lease_close(qp->link, moving->lease, moving->serial))
            continue;
        if (!moving->asked_back)
            moving->asked_back = soft_now_ns();
        *moving_at(out, --left) = *moving;
    }
    count = left - out->moving_first;
    out->moving_first = left;
    out->moving_count -= count;
    atomic_fetch_sub(&qp->context->device->moving, count);
    return left == end;
}

/* Since when the peer has been waited for, of which at least one lease was asked back. */
static uint64_t waiting_since(struct soft_qp *qp)
{
    struct soft_outbound *out = &qp->out;
    uint64_t first = soft_now_ns();
    uint32_t i;

    for (i = 0; i < out->moving_count; i++) {
        uint64_t asked_back = moving_at(out, out->moving_first + i)->asked_back;

        if (asked_back && asked_back < first)
            first = asked_back;
    }
    return first;
}

/* The same. True: the peer has left the memory of all these parts, or had the time that it may take. */
static bool stop_moving(struct soft_qp *qp, uint32_t count)
{
    uint32_t others = qp->out.moving_count - count;

    if (take_back(qp, count))
        return true;
    if (soft_lease_may_stay(qp->link, waiting_since(qp)))
        return false;
    soft_lease_give_up(qp->link);
    return take_back(qp, qp->out.moving_count - others);
}

static bool stop_moving_all(struct soft_qp *qp)
{
    return stop_moving(qp, qp->out.moving_count);
}

/* When the peer may have left the memory that it is waited for to leave: soon, and then less and less often. */
static uint64_t look_again(struct soft_qp *qp)
{
    uint64_t since = waiting_since(qp), now = soft_now_ns(), delay = SOFT_YIELD_NS / 2 + (now - since) / 4;

    return now + (delay < LOOK_AGAIN_NS ? delay : LOOK_AGAIN_NS);
}

/* Those up to this sequence number were answered. Whether the peer has left their memory. */
static bool moved(struct soft_qp *qp, uint32_t psn)
{
    struct soft_outbound *out = &qp->out;
    uint32_t count = 0;

    while (count < out->moving_count &&
           ((psn - moving_at(out, out->moving_first + count)->psn) & SOFT_PSN_MASK) <= SOFT_PSN_MASK / 2)
        count++;
    return stop_moving(qp, count);
}

/* All is to be sent again, or nothing. The peer has left all memory. */
static void go_back(struct soft_qp *qp)
{
    struct soft_outbound *out = &qp->out;

    assert(!out->moving_count);
    soft_window_rewind(&qp->window);
    out->asked.page = 0;
    out->deadline = UINT64_MAX;
    out->rewind = false;
}

/* Fail the request at window.taken, and the queue with it. The user is told of this request now, and may use its memory
 * again; and that of those behind it soon, which are flushed. The peer has left all of it. */
static void requester_fail(struct soft_qp *qp, enum ibv_wc_status status)
{
    const struct soft_wqe *wqe = entry(qp, qp->window.taken);

    go_back(qp);
    qp->waiting = false;
    soft_window_refuse(&qp->window);
    soft_complete_request(qp, wqe, status, 0, 0);
}

void soft_ask_no_more(struct soft_qp *qp)
{
    assert_held(&qp->sq_lock);
    go_back(qp);
    qp->out.refused = false;
    qp->out.pause = 0;
    qp->waiting = false;
    if (qp->link)
        soft_link_forget(qp->link, qp);
}

void soft_ask_settle(struct soft_qp *qp)
{
    bool settled = false;

    while (!settled) {
        soft_lock_take(&qp->sq_lock);
        settled = stop_moving_all(qp);
        soft_lock_give(&qp->sq_lock);
        if (!settled)
            nanosleep(&(struct timespec){.tv_nsec = SOFT_YIELD_NS}, NULL);
    }
}

static uint32_t length_of(const struct soft_wqe *wqe)
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

/* ---- What need not be asked ------------------------------------------------------------------------------- */

static struct soft_licence *licence_of(struct soft_qp *qp, uint32_t key)
{
    return &qp->out.licences[(key >> 8) % SOFT_LICENCES];
}

/* The answer to this read may have a licence with it. One is asked for at a time. */
static void ask_for_licence(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t psn)
{
    struct soft_licence *asked = &qp->out.asked;

    if (wqe->opcode == IBV_WR_RDMA_READ && qp->qp.qp_type == IBV_QPT_RC && !asked->page &&
        soft_licence_note(qp->link, wqe->rkey, qp->attr.dest_qp_num, asked))
        asked->psn = psn;
}

static void take_licence(struct soft_qp *qp, const struct soft_frame *frame)
{
    struct soft_licence *asked = &qp->out.asked;

    if (!asked->page || asked->psn != frame->psn)
        return;
    if (frame->flags & SOFT_FRAME_LICENCE) {
        asked->address = frame->address;
        asked->length = frame->compare_add;
        *licence_of(qp, asked->key) = *asked;
    }
    asked->page = 0;
}

/* Whether the peer need not be asked for this. */
static bool is_licensed(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length)
{
    const struct soft_licence *licence = licence_of(qp, wqe->rkey);
    uint64_t offset = wqe->remote_addr - licence->address;

    return wqe->opcode == IBV_WR_RDMA_READ && licence->page && licence->key == wqe->rkey &&
           length - 1 < SOFT_LICENSED_BYTES && offset <= licence->length && length <= licence->length - offset &&
           soft_is_up(qp) && !atomic_load_explicit(&qp->context->special, memory_order_relaxed) &&
           !soft_link_is_disturbed(qp->link);
}

/* Reads that are done together. */
struct run {
    struct soft_licensed_read reads[SOFT_LICENSED_READS];
    struct iovec pieces[SOFT_LICENSED_PIECES];
    unsigned int count, piece_count;
    uint32_t bytes;
};

static void add(struct soft_qp *qp, struct run *run, const struct soft_wqe *wqe, const struct soft_request *request)
{
    unsigned int i;

    for (i = 0; i < request->local_count; i++)
        run->pieces[run->piece_count++] = (struct iovec){request->local[i].address, request->local[i].length};
    run->reads[run->count++] =
        (struct soft_licensed_read){licence_of(qp, wqe->rkey), wqe->remote_addr, request->length};
    run->bytes += request->length;
}

/* Those that are posted behind the first one, as far as they are of its kind. */
static void add_others(struct soft_qp *qp, struct run *run)
{
    uint32_t at;

    for (at = qp->window.sent + 1; at != qp->window.posted && run->count < SOFT_LICENSED_READS; at++) {
        const struct soft_wqe *wqe = entry(qp, at);
        struct soft_segment segments[SOFT_MAX_SGE];
        struct soft_request request = {.from = qp, .wqe = wqe};

        if (!is_licensed(qp, wqe, length_of(wqe)) || (wqe->due_ns && wqe->due_ns > soft_now_ns()) ||
            run->piece_count + wqe->num_sge > SOFT_LICENSED_PIECES ||
            soft_resolve(qp, wqe, segments, &request) != IBV_WC_SUCCESS ||
            run->bytes + request.length > SOFT_LICENSED_RUN)
            return;
        add(qp, run, wqe, &request);
    }
}

/* Reads without asking, where all before is done, so that what was written before is seen. The peer hears nothing of
 * it: no sequence number is used. False: the peer is to be asked, for the first of them. */
static bool read_alone(struct soft_qp *qp, const struct soft_wqe *wqe, const struct soft_request *request,
                       int64_t *left)
{
    struct run run;
    unsigned int i;

    run.count = run.piece_count = run.bytes = 0;
    add(qp, &run, wqe, request);
    add_others(qp, &run);
    if (!soft_licence_read(qp->link, qp->attr.dest_qp_num, run.reads, run.count, run.pieces, run.piece_count)) {
        licence_of(qp, wqe->rkey)->page = 0;
        return false;
    }
    for (i = 0; i < run.count && atomic_load(&qp->state) == IBV_QPS_RTS; i++) {
        soft_end_request(qp, entry(qp, qp->window.taken), IBV_WC_SUCCESS, 0, run.reads[i].length, 0);
        *left -= SOFT_REQUEST_COST + (int64_t)run.reads[i].length;
    }
    return true;
}

/* ---- One part ---------------------------------------------------------------------------------------------- */

/* `part` bytes of the request's memory, from `offset` on. */
static void cut(struct part *part, const struct soft_request *request, uint32_t offset)
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

/* What stands in every part of a request. */
static void part_fill(struct part *part, const struct soft_qp *qp, const struct soft_request *request)
{
    const struct soft_wqe *wqe = request->wqe;
    struct soft_frame *frame = &part->frame;

    *frame = (struct soft_frame){
        .kind = SOFT_FRAME_REQUEST,
        .opcode = wqe->opcode,
        .flags = wqe->flags & IBV_SEND_SOLICITED ? SOFT_FRAME_SOLICITED : 0,
        .transport = (uint8_t)qp->qp.qp_type,
        .from = qp->qp.qp_num,
        .token = qp->out.token,
        .psn = request->psn,
        .total = request->length,
        .offset = request->offset,
    };
    if (wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || wqe->opcode == IBV_WR_SEND_WITH_IMM ||
        wqe->opcode == IBV_WR_SEND_WITH_INV)
        frame->imm = wqe->imm_data;
    part->count = 0;
}

static void aim_datagram(struct soft_frame *frame, const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    frame->to = (uint32_t)wqe->remote_addr;
    frame->key = wqe->rkey & 0x80000000u ? qp->attr.qkey : wqe->rkey;
    frame->sgid_index = wqe->path.sgid_index;
    frame->flow_label = wqe->path.flow_label;
    frame->hop_limit = wqe->path.hop_limit;
    frame->traffic_class = wqe->path.traffic_class;
    memcpy(frame->dgid, wqe->dgid.raw, sizeof(frame->dgid));
}

/* Where to. */
static void aim(struct soft_frame *frame, const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (qp->qp.qp_type == IBV_QPT_UD) {
        aim_datagram(frame, qp, wqe);
        return;
    }
    frame->to = qp->attr.dest_qp_num;
    frame->sgid_index = qp->attr.ah_attr.grh.sgid_index;
    if (wqe->opcode == IBV_WR_RDMA_WRITE || wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
        soft_is_answered(wqe->opcode)) {
        frame->address = wqe->remote_addr + frame->offset;
        frame->key = wqe->rkey;
    }
    if (soft_is_atomic(wqe->opcode)) {
        frame->compare_add = wqe->compare_add;
        frame->swap = wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? wqe->swap : 0;
    }
    if (soft_is_answered(wqe->opcode))
        frame->reads = qp->window.reads + !frame->offset;
    if (qp->qp.qp_type == IBV_QPT_XRC_SEND)
        frame->srqn = wqe->remote_srqn;
}

/* Whether some of its memory is another process's, which takes back what its threads are at, but no leases. */
static bool wqe_uses_shared_memory(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    const struct ibv_sge *sge = (const struct ibv_sge *)(wqe + 1);
    unsigned int i;

    for (i = 0; i < wqe->num_sge; i++)
        if (soft_shared_is_others(qp->pd, sge[i].lkey))
            return true;
    return false;
}

/* Has the peer move it: false where all leases are in use, or it cannot; or where it was sent before: its parts are to
 * be no larger than they were, for the peer may have done some of them. */
static bool offer(struct soft_qp *qp, struct part *part, uint8_t *list, const struct soft_request *request)
{
    struct soft_frame_segment segments[SOFT_MAX_SGE];
    struct soft_outbound *out = &qp->out;
    struct soft_frame *frame = &part->frame;
    uint32_t left = request->length - frame->offset;
    unsigned int i;

    if (left < DIRECT_BYTES || soft_window_repeats(&qp->window) || out->moving_count == SOFT_MOVING ||
        !soft_is_reliable(qp) || (request->wqe->flags & IBV_SEND_INLINE) || !soft_link_direct(qp->link) ||
        wqe_uses_shared_memory(qp, request->wqe) || soft_lease_open(qp->link, &frame->lease, &frame->serial))
        return false;
    frame->flags |= SOFT_FRAME_DIRECT;
    frame->part = left < SOFT_DIRECT_FRAGMENT ? left : SOFT_DIRECT_FRAGMENT;
    cut(part, request, frame->offset);
    for (i = 0; i < part->count; i++)
        segments[i] = (struct soft_frame_segment){(uintptr_t)part->data[i].iov_base, (uint32_t)part->data[i].iov_len};
    soft_segments_pack(segments, part->count, list);
    frame->segments = (uint16_t)part->count;
    frame->size = part->count * SOFT_SEGMENT_SIZE;
    part->data[0] = (struct iovec){list, frame->size};
    part->count = 1;
    return true;
}

/* Its bytes go over the stream; a read's come back there. */
static void carry(struct part *part, const struct soft_wqe *wqe, const struct soft_request *request)
{
    struct soft_frame *frame = &part->frame;
    uint32_t left = request->length - frame->offset;

    frame->part = left < SOFT_FRAGMENT ? left : SOFT_FRAGMENT;
    if (soft_is_answered(wqe->opcode))
        return;
    frame->size = frame->part;
    cut(part, request, frame->offset);
}

static void mark_ends(struct soft_frame *frame)
{
    if (!frame->offset)
        frame->flags |= SOFT_FRAME_FIRST;
    if (frame->offset + frame->part == frame->total)
        frame->flags |= SOFT_FRAME_LAST;
}

/* The last way of a datagram is kept: most queues send to one place for a while. That of a connection is its path. */
static struct soft_link *way(struct soft_qp *qp, const struct soft_wqe *wqe)
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

/* The next part of a request to a remote peer, which may be in `list`. */
static void part_make(struct soft_qp *qp, struct part *part, uint8_t *list, const struct soft_request *request)
{
    part_fill(part, qp, request);
    aim(&part->frame, qp, request->wqe);
    if (!offer(qp, part, list, request))
        carry(part, request->wqe, request);
    mark_ends(&part->frame);
    part->frame.packets = soft_packets(qp, part->frame.part);
    ask_for_licence(qp, request->wqe, soft_frame_last_psn(&part->frame));
}

/* It left, or could not. */
static void part_left(struct soft_qp *qp, const struct part *part, int error)
{
    struct soft_outbound *out = &qp->out;

    if (!(part->frame.flags & SOFT_FRAME_DIRECT))
        return;
    if (error) {
        soft_lease_cancel(qp->link, part->frame.lease, part->frame.serial);
        return;
    }
    out->moving[(out->moving_first + out->moving_count++) % SOFT_MOVING] = (struct soft_moving){
        .psn = soft_frame_last_psn(&part->frame), .serial = part->frame.serial, .lease = part->frame.lease};
    atomic_fetch_add(&qp->context->device->moving, 1);
}

/* With this read or atomic, how many the queue pair would have in flight, were its peer not to answer at once: those
 * that are posted behind it, as many as it was told to have, up to the first that is fenced. */
static uint32_t reads_in_flight(const struct soft_qp *qp)
{
    uint32_t next, count = 1;

    for (next = qp->window.sent + 1; next != qp->window.posted && count < qp->attr.max_rd_atomic; next++) {
        const struct soft_wqe *wqe = entry(qp, next);

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

/* ---- A queue ----------------------------------------------------------------------------------------------- */

/* In ERR and SQE. */
static uint64_t flush(struct soft_qp *qp)
{
    int64_t left = SOFT_QUEUE_TURN;

    if (!stop_moving_all(qp))
        return look_again(qp);
    soft_ask_no_more(qp);
    while (soft_has_posted(qp)) {
        if (left <= 0)
            return 0;
        soft_end_request(qp, entry(qp, qp->window.taken), IBV_WC_WR_FLUSH_ERR, 0, 0, 0);
        left -= SOFT_REQUEST_COST;
    }
    return UINT64_MAX;
}

/* Nobody will tell what became of an unreliable connection's request, or of a datagram. */
static void requester_drop(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length)
{
    go_back(qp);
    qp->waiting = false;
    soft_end_request(qp, wqe, IBV_WC_SUCCESS, 0, length, soft_packets(qp, length));
}

/* The request at window.taken is tried no more. The peer has left all memory. */
static void requester_give_up(struct soft_qp *qp, enum ibv_wc_status status)
{
    const struct soft_wqe *wqe = entry(qp, qp->window.taken);

    if (soft_is_reliable(qp)) {
        requester_fail(qp, status);
        return;
    }
    if (qp->link)
        soft_link_forget(qp->link, qp);
    requester_drop(qp, wqe, length_of(wqe));
}

/* Nobody answered in time, and the peer has left all memory. */
static void repeat(struct soft_qp *qp)
{
    if (soft_is_reliable(qp) && qp->retries_left) {
        qp->retries_left--;
        go_back(qp);
    } else {
        requester_give_up(qp, IBV_WC_RETRY_EXC_ERR);
    }
}

/* The peer has no receive for the request at window.taken: that one, and what came after it, is to be sent again. It
 * did nothing of all that. */
static void requester_rnr(struct soft_qp *qp, uint64_t delay_ns)
{
    if (qp->attr.rnr_retry != 7) { /* 7: without end */
        if (!qp->rnr_left) {
            requester_fail(qp, IBV_WC_RNR_RETRY_EXC_ERR);
            return;
        }
        qp->rnr_left--;
    }
    if (!has_clock(qp)) {
        requester_fail(qp, IBV_WC_GENERAL_ERR);
        return;
    }
    go_back(qp);
    soft_window_undo(&qp->window);
    qp->waiting = qp->out.refused = true;
    qp->out.pause = soft_now_ns() + delay_ns;
}

/* The peer refused the request at window.taken, and did not do what came after it. */
static void requester_refused(struct soft_qp *qp, const struct soft_reply *reply)
{
    if (reply->kind == SOFT_RNR)
        requester_rnr(qp, reply->rnr_ns);
    else
        requester_fail(qp, reply->status);
}

/* The peer made progress that it never made before: what is left has all its time and all its repetitions again. */
static void progressed(struct soft_qp *qp)
{
    qp->retries_left = qp->attr.retry_cnt;
    qp->rnr_left = qp->attr.rnr_retry;
    qp->out.deadline = UINT64_MAX;
    qp->waiting = false;
    if (under_way(qp))
        expect_answer(qp);
}

/* Complete the request at window.taken, which left whole, and was done. */
static void requester_complete(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length)
{
    soft_window_acknowledge(&qp->window, soft_packets(qp, length), soft_is_answered(wqe->opcode));
    soft_complete_request(qp, wqe, IBV_WC_SUCCESS, 0, length);
}

/* Return whether the request at `sent` left before, if not whole, or in vain: where the queue drains, it is brought to
 * its end. */
static bool has_begun(const struct soft_qp *qp)
{
    return qp->window.offset || soft_window_repeats(&qp->window) || qp->out.refused;
}

/* Return whether the request at `sent` may leave before all before it are answered. A peer of this device answers at
 * once, so what it did not answer is lost, and so would be all behind it. */
static bool may_leave(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    unsigned int state = atomic_load(&qp->state);

    if (state != IBV_QPS_RTS && !(state == IBV_QPS_SQD && has_begun(qp)))
        return false;
    if (qp->window.offset || !under_way(qp))
        return true;
    if (!soft_is_remote(qp) || soft_is_local(wqe->opcode) ||
        (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS))
        return false;
    if (qp->window.reads && (wqe->flags & IBV_SEND_FENCE))
        return false;
    return !soft_is_answered(wqe->opcode) || qp->window.reads < qp->attr.max_rd_atomic;
}

/* Return whether the window has room for the next part of the request at `sent`, however large that part becomes. Else
 * the answers to what is in flight make room. */
static bool fits_window(const struct soft_qp *qp, uint32_t length)
{
    uint32_t part = length - qp->window.offset;

    if (part > SOFT_DIRECT_FRAGMENT)
        part = SOFT_DIRECT_FRAGMENT;
    return soft_window_has_room(&qp->window, soft_packets(qp, part));
}

/* Return whether the peer that a request goes to is of another device. */
static bool goes_far(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (qp->qp.qp_type == IBV_QPT_UD)
        return !soft_gid_is_local(qp->context->device, &wqe->dgid);
    return qp->link;
}

/* The one place where requests leave: `part` over the link, to a remote peer, whose answer comes later; else, to the
 * responder of a peer of this device, which answers at once in `reply`. 0, or why not now, as soft_link_send. What is
 * lost on its way has left. */
static inline int requester_transmit(struct soft_qp *qp, const struct soft_request *request, const struct part *part,
                                     struct soft_reply *reply)
{
    if (!soft_is_up(qp))
        return 0;
    if ((atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS) &&
        soft_fault_loses(qp))
        return 0;
    if (part)
        return soft_link_send(qp->link, qp, &part->frame, part->data, part->count);
    soft_loopback_deliver(request, reply);
    return 0;
}

/* The request at window.taken is tried now, if not well, and waits for an answer, or for its way. */
static void requester_wait(struct soft_qp *qp)
{
    expect_answer(qp);
    if (qp->out.deadline != UINT64_MAX && !has_clock(qp))
        requester_give_up(qp, IBV_WC_GENERAL_ERR);
}

/* Send the request at `sent`, as a whole, to a peer of this device: it is in flight only where that does not answer.
 * Return a peer that it broke, or NULL. */
static struct soft_qp *send_near(struct soft_qp *qp, struct soft_request *request)
{
    struct soft_reply reply = {.kind = SOFT_SILENT};
    const struct soft_wqe *wqe = request->wqe;

    request->total = request->length;
    request->packets = soft_packets(qp, request->length);
    if (qp->qp.qp_type == IBV_QPT_UD)
        request->sgid = &qp->context->device->gids[wqe->path.sgid_index];
    if (soft_is_answered(wqe->opcode))
        request->reads = reads_in_flight(qp);
    requester_transmit(qp, request, NULL, &reply);
    qp->out.refused = false;
    if (!soft_is_reliable(qp)) {
        requester_drop(qp, wqe, request->length); /* or it arrived */
    } else if (reply.kind == SOFT_ACK) {
        if (qp->waiting) /* else no attempt was in vain */
            progressed(qp);
        soft_end_request(qp, wqe, IBV_WC_SUCCESS, 0, request->length, request->packets);
    } else if (reply.kind == SOFT_SILENT) {
        soft_window_send(&qp->window, request->length, request->packets, true, soft_is_answered(wqe->opcode));
        requester_wait(qp);
    } else {
        requester_refused(qp, &reply);
    }
    return reply.broken;
}

/* Send what comes next of the request at `sent` to a remote peer, or do without. Return whether more may follow at
 * once. */
static bool send_far(struct soft_qp *qp, const struct soft_request *request, int64_t *left)
{
    const struct soft_wqe *wqe = request->wqe;
    uint8_t list[SOFT_MAX_SGE * SOFT_SEGMENT_SIZE];
    struct part part;
    int error = EHOSTUNREACH;

    /* Not where it was sent before: the peer counts it as one of the sequence. */
    if (!request->offset && !soft_window_repeats(&qp->window) && is_licensed(qp, wqe, request->length)) {
        if (qp->window.reads && qp->window.sent - qp->window.taken == qp->window.reads)
            return false; /* it comes sooner when those before it, which are like it, are answered */
        if (!under_way(qp) && read_alone(qp, wqe, request, left))
            return true;
    }
    if (!fits_window(qp, request->length))
        return false;
    if (way(qp, wqe)) {
        part_make(qp, &part, list, request);
        error = requester_transmit(qp, request, &part, NULL);
        part_left(qp, &part, error);
    }
    if (!error) {
        *left -= part.frame.part;
        qp->out.refused = false;
        soft_window_send(&qp->window, part.frame.part, part.frame.packets, part.frame.flags & SOFT_FRAME_LAST,
                         soft_is_answered(wqe->opcode));
    }
    if (soft_is_reliable(qp) || (error ? error != EHOSTUNREACH : qp->window.offset)) {
        requester_wait(qp);
        return !error || !qp->waiting; /* else it is kicked, or repeats in its time */
    }
    requester_drop(qp, wqe, request->length); /* or it arrives */
    return true;
}

/* Sends until something speaks against it; `*again` is when that ends by itself. False: the turn is over, at the latest
 * where a peer of this device broke, which is to be kicked first: the next datagram may break another one. */
static bool requester_send(struct soft_qp *qp, uint64_t *again, struct soft_qp **broken)
{
    struct soft_window *window = &qp->window;
    int64_t left = SOFT_QUEUE_TURN;

    while (left > 0 && soft_has_posted(qp)) {
        const struct soft_wqe *wqe = entry(qp, window->sent);
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
        if (status != IBV_WC_SUCCESS && under_way(qp)) {
            qp->out.rewind |=
                request.offset != 0; /* its memory went in the middle; else those before are answered first */
            return true;
        }
        left -= SOFT_REQUEST_COST;
        if (status != IBV_WC_SUCCESS || soft_is_local(wqe->opcode)) {
            soft_end_request(qp, wqe, status, vendor_err, 0, 0);
        } else if (qp->qp.qp_type == IBV_QPT_UD && request.length > SOFT_MTU) {
            requester_drop(qp, wqe, request.length); /* it goes nowhere, which is no error (C10-93.1.1) */
        } else if (!goes_far(qp, wqe)) {
            left -= request.length;
            *broken = send_near(qp, &request);
            if (*broken)
                return false;
            if (qp->out.pause)
                return true;
        } else if (!send_far(qp, &request, &left)) {
            return true;
        }
    }
    return left > 0;
}

/* Under sq_lock, in SQD with no request under way. */
static void sq_drained(struct soft_qp *qp)
{
    assert_held(&qp->sq_lock);
    if (qp->drain_notify)
        soft_raise(qp->context, &qp->events, IBV_EVENT_SQ_DRAINED);
    qp->drain_notify = false;
}

static uint64_t requester_run(struct soft_qp *qp, struct soft_qp **broken)
{
    struct soft_outbound *out = &qp->out;
    uint64_t again = UINT64_MAX;
    unsigned int state;

    assert_held(&qp->sq_lock);
    for (;;) {
        state = atomic_load(&qp->state);
        if (state == IBV_QPS_ERR || state == IBV_QPS_SQE)
            return flush(qp);
        if (state != IBV_QPS_RTS && state != IBV_QPS_SQD)
            return UINT64_MAX;
        if (out->rewind) {
            if (!stop_moving_all(qp))
                return look_again(qp);
            go_back(qp);
        }
        if (out->pause) {
            if (out->pause > soft_now_ns())
                return out->pause;
            out->pause = 0;
        }
        if (out->deadline != UINT64_MAX && out->deadline <= soft_now_ns()) {
            if (!stop_moving_all(qp))
                return look_again(qp);
            repeat(qp);
            continue;
        }
        if (!requester_send(qp, &again, broken))
            return 0;
        if (atomic_load(&qp->state) != state || out->rewind)
            continue; /* it failed, or is to begin again */
        if (out->pause)
            return out->pause;
        if (state == IBV_QPS_SQD && !under_way(qp) && !has_begun(qp)) {
            /* What waits for its way has not begun: it does so anew, with all its time, and perhaps by another way. */
            soft_ask_no_more(qp);
            sq_drained(qp);
        }
        return again < out->deadline ? again : out->deadline;
    }
}

/* ---- Execution ------------------------------------------------------------------------------------------- */

/* Under rq_lock: complete every posted receive as flushed. */
static void flush_receives(struct soft_qp *qp)
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

/* A shared receive queue has nothing to flush: its user is told that this queue pair takes nothing from it any more.
 * Under rq_lock, in ERR. */
static void last_wqe_reached(struct soft_qp *qp)
{
    assert_held(&qp->rq_lock);
    if (qp->srq && !qp->last_wqe)
        soft_raise(qp->context, &qp->events, IBV_EVENT_QP_LAST_WQE_REACHED);
    qp->last_wqe = true;
}

uint64_t soft_execute(struct soft_qp *qp)
{
    struct soft_qp *broken = NULL;
    uint64_t again;

    if (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_LOST)
        return UINT64_MAX;
    soft_lock_take(&qp->sq_lock);
    again = requester_run(qp, &broken);
    soft_lock_give(&qp->sq_lock);
    if (atomic_load(&qp->state) == IBV_QPS_ERR) {
        soft_lock_take(&qp->rq_lock);
        /* Once more, now that it cannot change: a queue pair that was reset has new receives. */
        if (atomic_load(&qp->state) == IBV_QPS_ERR) {
            flush_receives(qp);
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

/* ---- Answers ----------------------------------------------------------------------------------------------- */

/* What is left has all its time again. An answer gives it only where it tells of more than any one since what is in
 * flight left: else a peer that repeats itself would keep a request from ending for as long as it likes. */
static void put_off(struct soft_qp *qp)
{
    qp->out.deadline = UINT64_MAX;
    expect_answer(qp);
}

/* Bytes of an answer go to the memory of the request, from `offset` on. It may have gone meanwhile. */
static enum ibv_wc_status requester_copy_response(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t offset,
                                                  const uint8_t *data, uint32_t length)
{
    struct soft_segment segments[SOFT_MAX_SGE];
    struct soft_request request = {.from = qp, .wqe = wqe};
    enum ibv_wc_status status = soft_resolve(qp, wqe, segments, &request);
    struct part part = {.frame = {.part = length}};
    unsigned int i;

    if (status != IBV_WC_SUCCESS)
        return status;
    cut(&part, &request, offset);
    for (i = 0; i < part.count; data += part.data[i++].iov_len)
        memcpy(part.data[i].iov_base, data, part.data[i].iov_len);
    return IBV_WC_SUCCESS;
}

/* Complete the requests whose packets are all among the oldest in flight, so many, up to the first that needs data.
 * What is left is at window.taken. */
static void requester_acknowledge(struct soft_qp *qp, uint32_t packets)
{
    bool some = false;

    while (qp->window.sent != qp->window.taken) {
        const struct soft_wqe *wqe = entry(qp, qp->window.taken);
        uint32_t length = length_of(wqe), count = soft_packets(qp, length);

        /* A read of no bytes is acknowledged as all others are. */
        if ((soft_is_answered(wqe->opcode) && length) || count > packets)
            break;
        packets -= count;
        requester_complete(qp, wqe, length);
        some = true;
        if (atomic_load(&qp->state) == IBV_QPS_ERR)
            return; /* its completion found no room */
    }
    if (some)
        progressed(qp);
}

/* Take an answer with data: it is that of the next part of the read or atomic at window.taken, or none at all. The
 * packet that it ends with is in flight, so the whole answer can only come for a request that left whole. */
static bool requester_response(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *payload)
{
    uint32_t packets = soft_window_locate(&qp->window, frame->psn), length;
    enum ibv_wc_status status = IBV_WC_SUCCESS;
    const struct soft_wqe *wqe;
    bool more;

    if (!packets)
        return true;
    wqe = entry(qp, qp->window.taken);
    if (!soft_is_answered(wqe->opcode))
        return true;
    length = length_of(wqe);
    if (soft_packets(qp, qp->window.received + frame->part) != packets) /* one before it was lost, or it is repeated */
        return true;
    if (frame->part > length - qp->window.received)
        return false;
    take_licence(qp, frame);
    if (!(frame->flags & SOFT_FRAME_DIRECT))
        status = requester_copy_response(qp, wqe, qp->window.received, payload, frame->part);
    if (status != IBV_WC_SUCCESS) {
        if (stop_moving_all(qp))
            requester_fail(qp, status);
        else
            qp->out.rewind = true; /* it fails when it is to be sent again */
        return true;
    }
    more = soft_window_receive(&qp->window, frame->part);
    put_off(qp);
    if (qp->window.received == length)
        requester_complete(qp, wqe, length);
    if (more && atomic_load(&qp->state) != IBV_QPS_ERR)
        progressed(qp);
    return true;
}

/* Do what an answer tells, under sq_lock. One to a packet that is not in flight is about what is over, or about
 * nothing, and is dropped; so is one with data for more packets than are in flight. So is one that comes while the peer
 * is at memory that it would set free: then all is asked again, when the peer has left it. */
static bool read_answer(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *payload)
{
    uint32_t packets = soft_window_locate(&qp->window, frame->psn);
    uint32_t data = frame->part ? soft_packets(qp, frame->part) : 0;
    bool done = frame->opcode == SOFT_FRAME_ACK;

    if (!packets || data > packets)
        return true;
    if (!(done ? moved(qp, frame->psn) : stop_moving_all(qp))) {
        qp->out.rewind = true;
        return true;
    }
    if (soft_window_hear(&qp->window, packets))
        put_off(qp); /* of a long message, each part has all the time */
    if (data) {
        requester_acknowledge(qp, packets - data);
        return atomic_load(&qp->state) == IBV_QPS_ERR || requester_response(qp, frame, payload);
    }
    requester_acknowledge(qp, done ? packets : packets - 1);
    if (done || !under_way(qp) || atomic_load(&qp->state) == IBV_QPS_ERR)
        return true;
    requester_refused(qp, &(struct soft_reply){.kind = frame->opcode == SOFT_FRAME_RNR ? SOFT_RNR : SOFT_NAK,
                                               .status = frame->status,
                                               .rnr_ns = frame->address});
    return true;
}

/* Return whether the queue pair awaits answers. One that broke does not, even before its requests are flushed: they are
 * neither done nor refused any more. Whoever broke it has it flushed. */
static bool awaits_answers(const struct soft_qp *qp)
{
    unsigned int state = atomic_load(&qp->state);

    return soft_is_reliable(qp) && soft_is_up(qp) && (state == IBV_QPS_RTS || state == IBV_QPS_SQD);
}

bool soft_answered(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload)
{
    struct soft_device *device = soft_stream_device(soft_link_stream(by));
    struct soft_qp *qp = soft_table_find(&device->qps, frame->to);
    bool honest = true, more = false;

    if (!qp)
        return true; /* it was destroyed */
    soft_lock_take(&qp->sq_lock);
    if (qp->link == by && qp->out.token == frame->token && awaits_answers(qp)) {
        honest = read_answer(qp, frame, payload);
        more = atomic_load(&qp->state) == IBV_QPS_ERR || qp->out.pause || qp->out.rewind || soft_has_posted(qp) ||
               qp->drain_notify;
    }
    soft_lock_give(&qp->sq_lock);
    if (more)
        soft_kick(qp);
    if (!honest)
        soft_stream_refuse(soft_link_stream(by), "an answer has more data than was asked for");
    return honest;
}

/* ---- Memory that goes ---------------------------------------------------------------------------------------- */

static bool uses(const struct soft_qp *qp, const struct soft_mr *mr)
{
    uint32_t at, end = qp->window.sent + (qp->window.offset != 0);
    unsigned int i;

    for (at = qp->window.taken; at != end; at++) {
        const struct soft_wqe *wqe = entry(qp, at);
        const struct ibv_sge *sge = (const struct ibv_sge *)(wqe + 1);

        for (i = 0; i < wqe->num_sge && !(wqe->flags & IBV_SEND_INLINE); i++)
            if (sge[i].lkey == mr->mr.lkey)
                return qp->pd->domain == mr->pd->domain;
    }
    return false;
}

/* Take back the leases of a queue pair of the context, or, where that is NULL, of one that uses the region, in a grace
 * section. False: its peer is just at some of that memory; `last`: it is waited for no longer. It sends nothing more
 * before the peer has left, so who asks again and again has nothing new to wait for. */
static bool requester_release_mr(struct soft_qp *qp, const struct soft_context *context, const struct soft_mr *mr,
                                 bool last)
{
    bool left = true, kick = false;

    soft_lock_take(&qp->sq_lock);
    if (qp->out.moving_count && (context ? qp->context == context : uses(qp, mr))) {
        left = stop_moving_all(qp);
        if (!left && last) {
            soft_lease_give_up(qp->link);
            left = stop_moving_all(qp);
        }
        kick = !left && !qp->out.rewind;
        qp->out.rewind |= kick;
    }
    soft_lock_give(&qp->sq_lock);
    if (kick) /* from here on its own timer looks for when it may go on */
        soft_kick(qp);
    return left;
}

static void wait_left(struct soft_device *device, const struct soft_context *context, const struct soft_mr *mr)
{
    uint64_t end = soft_now_ns() + SOFT_LEASE_NS;
    bool left = !atomic_load(&device->moving), last = false;

    while (!left) {
        uint32_t number;

        left = true;
        for (number = SOFT_FIRST_QPN; number < soft_table_end(&device->qps); number++) {
            struct grace_reader *grace = grace_enter(); /* one at a time: others wait for grace periods */
            struct soft_qp *qp = soft_table_find(&device->qps, number);

            if (qp && !requester_release_mr(qp, context, mr, last))
                left = false;
            grace_leave(grace);
        }
        if (!left)
            nanosleep(&(struct timespec){.tv_nsec = SOFT_YIELD_NS}, NULL);
        last = soft_now_ns() >= end;
    }
}

void soft_ask_without(struct soft_device *device, const struct soft_mr *mr)
{
    wait_left(device, NULL, mr);
}

void soft_ask_end(const struct soft_context *context)
{
    wait_left(context->device, context, NULL);
}
