/* The requester whose peer is remote: requests leave one after the other without waiting for answers, and are repeated
 * from the oldest one on where answers do not come (go-back-N), as by reliable connections of the architecture.
 *
 * All under sq_lock and in a grace section, but for what says that it waits. Which requests are in flight is said by the
 * queue pair's window, and its counters move by the functions of soft/objects/psn_window.h alone: what an answer tells is first
 * looked up there. */
#include "soft/transport/requester.h"

#include <assert.h>
#include <string.h>
#include <time.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/read_cache.h"
#include "soft/fault/injection.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/limits.h"
#include "soft/objects/mr.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/objects/read_cache_entry.h"
#include "soft/objects/shared_keys.h"
#include "soft/objects/work_queue.h"
#include "soft/transport/loopback.h"
#include "soft/transport/request.h"
#include "soft/transport/send_queue.h"

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

/* The request at window.taken is tried now, if not well. */
static void expect_answer(struct soft_qp *qp)
{
    qp->waiting = true;
    if (qp->out.deadline == UINT64_MAX)
        qp->out.deadline = timeout_from_now(qp);
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
    if (!qp->link)
        return;
    go_back(qp);
    qp->out.pause = qp->out.give_up = 0;
    qp->waiting = false;
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
static void part_fill(struct part *part, const struct soft_qp *qp, const struct soft_wqe *wqe,
                      const struct soft_request *request, uint32_t offset)
{
    struct soft_frame *frame = &part->frame;

    *frame = (struct soft_frame){
        .kind = SOFT_FRAME_REQUEST,
        .opcode = wqe->opcode,
        .flags = wqe->flags & IBV_SEND_SOLICITED ? SOFT_FRAME_SOLICITED : 0,
        .transport = (uint8_t)qp->qp.qp_type,
        .from = qp->qp.qp_num,
        .token = qp->out.token,
        .psn = soft_window_psn(&qp->window),
        .total = request->length,
        .offset = offset,
    };
    if (wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || wqe->opcode == IBV_WR_SEND_WITH_IMM ||
        wqe->opcode == IBV_WR_SEND_WITH_INV)
        frame->imm = wqe->imm_data;
    part->count = 0;
}

/* Where to, of a connected one. */
static void aim(struct part *part, const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    struct soft_frame *frame = &part->frame;

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

static int requester_post_part(struct soft_qp *qp, const struct part *part)
{
    if (!soft_is_up(qp))
        return 0; /* it is lost on its way */
    if ((atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS) &&
        soft_fault_loses(qp))
        return 0;
    return soft_link_send(qp->link, qp, &part->frame, part->data, part->count);
}

/* Sends what comes next of the request at `sent`: 0, or why not now, as soft_link_send. */
static int send_part(struct soft_qp *qp, const struct soft_wqe *wqe, const struct soft_request *request)
{
    uint8_t list[SOFT_MAX_SGE * SOFT_SEGMENT_SIZE];
    struct soft_window *window = &qp->window;
    struct soft_outbound *out = &qp->out;
    struct part part;
    uint32_t last_psn;
    int error;

    part_fill(&part, qp, wqe, request, window->offset);
    aim(&part, qp, wqe);
    if (!offer(qp, &part, list, request))
        carry(&part, wqe, request);
    mark_ends(&part.frame);
    part.frame.packets = soft_packets(qp, part.frame.part);
    last_psn = (part.frame.psn + part.frame.packets - 1) & SOFT_PSN_MASK;
    ask_for_licence(qp, wqe, last_psn);
    error = requester_post_part(qp, &part);
    if (error) {
        if (part.frame.flags & SOFT_FRAME_DIRECT)
            soft_lease_cancel(qp->link, part.frame.lease, part.frame.serial);
        return error;
    }
    if (part.frame.flags & SOFT_FRAME_DIRECT) {
        out->moving[(out->moving_first + out->moving_count++) % SOFT_MOVING] =
            (struct soft_moving){.psn = last_psn, .serial = part.frame.serial, .lease = part.frame.lease};
        atomic_fetch_add(&qp->context->device->moving, 1);
    }
    soft_window_send(window, part.frame.part, part.frame.packets, part.frame.flags & SOFT_FRAME_LAST,
                     soft_is_answered(wqe->opcode));
    return 0;
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

/* Nobody will tell what became of an unreliable connection's request. */
static void requester_drop(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length)
{
    go_back(qp);
    qp->waiting = false;
    soft_end_request(qp, wqe, IBV_WC_SUCCESS, 0, length, soft_packets(qp, length));
}

/* Nobody answered in time, and the peer has left all memory. */
static void repeat(struct soft_qp *qp)
{
    const struct soft_wqe *wqe = entry(qp, qp->window.taken);

    if (!soft_is_reliable(qp)) {
        soft_link_forget(qp->link, qp);
        requester_drop(qp, wqe, length_of(wqe));
    } else if (qp->retries_left) {
        qp->retries_left--;
        go_back(qp);
    } else {
        requester_fail(qp, IBV_WC_RETRY_EXC_ERR);
    }
}

/* Whether the request at `sent` may leave before all before it are answered. */
static bool may_overtake(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    if (qp->window.offset)
        return true; /* it began */
    if (soft_is_local(wqe->opcode) ||
        (atomic_load_explicit(&qp->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS))
        return !under_way(qp);
    if (qp->window.reads && (wqe->flags & IBV_SEND_FENCE))
        return false;
    return !soft_is_answered(wqe->opcode) || qp->window.reads < qp->attr.max_rd_atomic || !under_way(qp);
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

/* What was done here alone, or cannot be sent at all, ends in its turn: when nothing is under way before it. */
static bool ends_here(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status, uint32_t vendor_err)
{
    if (status == IBV_WC_SUCCESS && !soft_is_local(wqe->opcode))
        return false;
    soft_end_request(qp, wqe, status, vendor_err, 0, 0);
    return true;
}

/* Sends until something speaks against it; `*again` is when that ends by itself. False: the turn is over. */
static bool requester_send(struct soft_qp *qp, uint64_t *again)
{
    struct soft_window *window = &qp->window;
    int64_t left = SOFT_QUEUE_TURN;

    *again = UINT64_MAX;
    while (left > 0 && soft_has_posted(qp)) {
        const struct soft_wqe *wqe = entry(qp, window->sent);
        struct soft_segment segments[SOFT_MAX_SGE];
        struct soft_request request = {.from = qp, .wqe = wqe};
        unsigned int state = atomic_load(&qp->state);
        uint32_t vendor_err = 0, before = window->offset;
        enum ibv_wc_status status;
        int error;

        if ((state != IBV_QPS_RTS && !(state == IBV_QPS_SQD && window->offset)) || !may_overtake(qp, wqe))
            return true;
        if (!window->offset && wqe->due_ns && wqe->due_ns > soft_now_ns()) {
            *again = wqe->due_ns;
            return true;
        }
        status = window->offset ? soft_resolve(qp, wqe, segments, &request)
                                : soft_begin_request(qp, wqe, segments, &request, &vendor_err);
        if (status != IBV_WC_SUCCESS && under_way(qp)) {
            if (!window->offset)
                return true;       /* it is looked at again when those before it are answered */
            qp->out.rewind = true; /* its memory went in the middle */
            return true;
        }
        if (ends_here(qp, wqe, status, vendor_err)) {
            left -= SOFT_REQUEST_COST;
            continue;
        }
        /* Not where it was sent before: the peer counts it as one of the sequence. */
        if (!window->offset && !soft_window_repeats(window) && is_licensed(qp, wqe, request.length)) {
            if (window->sent - window->taken == window->reads && window->reads)
                return true; /* it comes sooner when those before it, which are like it, are answered */
            if (!under_way(qp) && read_alone(qp, wqe, &request, &left))
                continue;
        }
        if (!fits_window(qp, request.length))
            return true;
        error = send_part(qp, wqe, &request);
        if (error == EHOSTUNREACH && !soft_is_reliable(qp)) {
            requester_drop(qp, wqe, request.length);
            continue;
        }
        expect_answer(qp);
        if (error)
            return true; /* it is kicked, or repeats in its time */
        left -= SOFT_REQUEST_COST + (int64_t)((window->offset ? window->offset : request.length) - before);
        if (!soft_is_reliable(qp) && !window->offset)
            requester_drop(qp, wqe, request.length); /* or it arrives */
    }
    return left > 0;
}

uint64_t soft_ask(struct soft_qp *qp)
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
        if (qp->waiting && out->deadline != UINT64_MAX && out->deadline <= soft_now_ns()) {
            if (!stop_moving_all(qp))
                return look_again(qp);
            repeat(qp);
            continue;
        }
        if (!requester_send(qp, &again))
            return 0;
        if (atomic_load(&qp->state) != state || out->rewind)
            continue; /* it failed, or is to begin again */
        if (state == IBV_QPS_SQD && !under_way(qp)) {
            /* What waits for its way has not begun: it does so anew, with all its time, and perhaps by another way. */
            qp->waiting = false;
            out->deadline = UINT64_MAX;
            soft_link_forget(qp->link, qp);
            soft_drained(qp);
        }
        return again < out->deadline ? again : out->deadline;
    }
}

/* ---- Answers ----------------------------------------------------------------------------------------------- */

/* What is left has all its time again. An answer gives it only where it tells of more than any one since what is in
 * flight left: else a peer that repeats itself would keep a request from ending for as long as it likes. */
static void put_off(struct soft_qp *qp)
{
    qp->out.deadline = UINT64_MAX;
    expect_answer(qp);
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

/* The peer has no receive: that request, and what came after it, is to be sent again. It did nothing of all that. */
static void requester_rnr(struct soft_qp *qp, uint64_t delay_ns)
{
    if (qp->attr.rnr_retry != 7) { /* 7: without end */
        if (!qp->rnr_left) {
            requester_fail(qp, IBV_WC_RNR_RETRY_EXC_ERR);
            return;
        }
        qp->rnr_left--;
    }
    go_back(qp);
    soft_window_undo(&qp->window);
    qp->out.pause = soft_now_ns() + delay_ns;
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
    if (frame->opcode == SOFT_FRAME_RNR)
        requester_rnr(qp, frame->address);
    else
        requester_fail(qp, frame->status);
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

/* ---- Datagrams --------------------------------------------------------------------------------------------- */

/* The last way is kept: most queues send to one place for a while. */
static struct soft_link *way(struct soft_qp *qp, const union ibv_gid *gid)
{
    if (qp->link && !soft_link_is_to(qp->link, gid)) {
        soft_link_forget(qp->link, qp);
        soft_link_put(qp->link);
        qp->link = NULL;
    }
    if (!qp->link)
        qp->link = soft_link_get(qp->context->device, gid);
    return qp->link;
}

uint64_t soft_ask_datagram(struct soft_qp *qp, const struct soft_wqe *wqe, const struct soft_request *request)
{
    struct soft_outbound *out = &qp->out;
    struct part part;
    int error;

    assert_held(&qp->sq_lock);
    if (!way(qp, &wqe->dgid))
        return 0;
    part_fill(&part, qp, wqe, request, 0);
    part.frame.to = (uint32_t)wqe->remote_addr;
    part.frame.key = wqe->rkey & 0x80000000u ? qp->attr.qkey : wqe->rkey;
    part.frame.sgid_index = wqe->path.sgid_index;
    part.frame.flow_label = wqe->path.flow_label;
    part.frame.hop_limit = wqe->path.hop_limit;
    part.frame.traffic_class = wqe->path.traffic_class;
    memcpy(part.frame.dgid, wqe->dgid.raw, sizeof(part.frame.dgid));
    carry(&part, wqe, request);
    mark_ends(&part.frame);
    part.frame.packets = 1;
    error = requester_post_part(qp, &part);
    if (error == EAGAIN || error == ENOTCONN) {
        uint64_t now = soft_now_ns();

        if (!out->give_up)
            out->give_up = now + UNRELIABLE_NS;
        if (now < out->give_up)
            return out->give_up;
        soft_link_forget(qp->link, qp);
    }
    out->give_up = 0;
    return 0;
}
