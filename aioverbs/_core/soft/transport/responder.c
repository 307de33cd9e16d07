/* Responder: executes the requests of a queue pair's peer, as the architecture specifies. All functions run in a grace
 * section and under the responder's rq_lock. */
#include "soft/transport/responder.h"

#include <assert.h>
#include <string.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/fabric/read_cache.h"
#include "soft/fault/injection.h"
#include "soft/objects/async_event.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/device.h"
#include "soft/objects/gids.h"
#include "soft/objects/inbound_message.h"
#include "soft/objects/limits.h"
#include "soft/objects/mr.h"
#include "soft/objects/mw.h"
#include "soft/objects/pd.h"
#include "soft/objects/qp.h"
#include "soft/objects/srq.h"
#include "soft/objects/work_queue.h"
#include "soft/objects/xrcd.h"
#include "soft/transport/request.h"

/* ---- Moving bytes ---------------------------------------------------------------------------------------- */

static void copy_pieces(const struct soft_segment *to, const struct soft_segment *from, uint64_t length)
{
    uint32_t to_offset = 0, from_offset = 0;

    while (length) {
        uint32_t part = length < UINT32_MAX ? (uint32_t)length : UINT32_MAX;

        if (part > to->length - to_offset)
            part = to->length - to_offset;
        if (part > from->length - from_offset)
            part = from->length - from_offset;
        memmove(to->address + to_offset, from->address + from_offset, part);
        length -= part;
        to_offset += part;
        from_offset += part;
        if (to_offset == to->length)
            to++, to_offset = 0;
        if (from_offset == from->length)
            from++, from_offset = 0;
    }
}

/* Copy `length` bytes; both lists have at least as many. Buffers of one process may overlap. Most messages have one
 * piece. */
static inline void copy(const struct soft_segment *to, const struct soft_segment *from, uint64_t length)
{
    if (length && length <= to->length && length <= from->length)
        memmove(to->address, from->address, length);
    else
        copy_pieces(to, from, length);
}

/* Copy the payload of a request to local memory that was checked, or the data of a response from there. Return 0 or an
 * errno. */
static inline int payload_read(const struct soft_request *request, const struct soft_segment *to,
                               const struct soft_segment *from, uint32_t length)
{
    if (request->carrier && request->carrier->read)
        return request->carrier->read(request->carrier, to, length);
    copy(to, from, length);
    return 0;
}

static inline int payload_write(const struct soft_request *request, const struct soft_segment *from, uint32_t length)
{
    if (request->carrier)
        return request->carrier->write(request->carrier, from, length);
    copy(request->local, from, length);
    return 0;
}

/* Skip `offset` bytes of the segments. */
static void skip(struct soft_segment *segments, uint32_t offset)
{
    unsigned int i = 0;

    while (offset && offset >= segments[i].length)
        offset -= segments[i++].length;
    if (i)
        memmove(segments, segments + i, (SOFT_MAX_SGE - i) * sizeof(*segments));
    segments[0].address += offset;
    segments[0].length -= offset;
}

/* ---- Answers --------------------------------------------------------------------------------------------- */

static void break_peer(struct soft_qp *peer, struct soft_reply *reply)
{
    atomic_store(&peer->state, IBV_QPS_ERR);
    soft_read_cache_invalidate_qp(peer);
    reply->broken = peer;
}

/* Refuse a request: the reply is a NAK, and the responder's queue pair breaks. If no completion reports that, an event
 * does. An unreliable connection drops what it refuses, and goes on. */
static void responder_refuse(struct soft_qp *peer, struct soft_reply *reply, enum ibv_wc_status status, bool completed)
{
    if (!soft_is_reliable(peer) && !completed)
        return;
    break_peer(peer, reply);
    reply->kind = SOFT_NAK;
    reply->status = status;
    if (!completed)
        soft_raise_event(peer->context, &peer->events,
                         status == IBV_WC_REM_ACCESS_ERR ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
}

/* Decode an RNR timer of 5 bits. The table is in units of 10 us; 0 is the longest. */
static uint64_t rnr_delay_ns(uint8_t timer)
{
    static const uint32_t units[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                       48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                       2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

    return units[timer & 31] * 10000ull;
}

/* ---- Receives -------------------------------------------------------------------------------------------- */

/* Queues and protection domain that a request is executed with. */
struct responder {
    struct soft_qp *peer;
    struct soft_srq *srq;     /* shared receive queue; NULL: the queue pair's own */
    struct soft_cq *cq;       /* completion queue of receives */
    const struct soft_pd *pd; /* domain of remote keys; the receives of a shared queue belong to its own domain */
    struct soft_reply *reply;
};

static bool has_posted_receive(const struct responder *at)
{
    if (at->srq)
        return soft_srq_has_receive(at->srq);
    return at->peer->rq.consumed != atomic_load_explicit(at->peer->rq.posted, memory_order_acquire);
}

/* Take a receive for the message, until it completes or is returned. Return false if there is none. */
static bool take_recv_wqe(const struct responder *at)
{
    struct soft_inbound *in = &at->peer->in;
    struct soft_recv_wqe *recv_wqe = &in->recv_wqe;
    struct soft_ring *ring = &at->peer->rq;
    const struct soft_rwqe *rwqe;

    assert(!in->has_recv_wqe);
    if (at->srq) {
        if (!soft_srq_take(at->srq, recv_wqe->copy))
            return false; /* none is posted, or another queue pair took it */
        recv_wqe->wr_id = recv_wqe->copy->wr_id;
        recv_wqe->num_sge = recv_wqe->copy->num_sge;
        recv_wqe->sges = recv_wqe->copy->sges;
        recv_wqe->index = 0; /* shared queues count credits, not indices */
    } else {
        if (!has_posted_receive(at))
            return false;
        rwqe = soft_ring_entry(ring, ring->consumed);
        recv_wqe->wr_id = rwqe->wr_id;
        recv_wqe->num_sge = (uint32_t)rwqe->num_sge;
        recv_wqe->sges = (const struct ibv_sge *)(rwqe + 1);
        recv_wqe->index = ring->consumed++;
    }
    in->srq = at->srq;
    in->has_recv_wqe = true;
    return true;
}

/* Return the receive to its queue: no data of the message arrived, or the message is discarded. The next message gets
 * it. */
static void return_recv_wqe(struct soft_qp *peer)
{
    struct soft_inbound *in = &peer->in;

    assert(in->has_recv_wqe);
    in->has_recv_wqe = false;
    if (in->srq) {
        soft_srq_return(in->srq, in->recv_wqe.copy);
    } else {
        assert(in->recv_wqe.index + 1 == peer->rq.consumed); /* no other message takes a receive meanwhile */
        peer->rq.consumed--;
    }
}

static void responder_rnr(const struct responder *at)
{
    if (!soft_is_reliable(at->peer))
        return; /* dropped */
    at->reply->kind = SOFT_RNR;
    at->reply->rnr_ns = rnr_delay_ns(at->peer->attr.min_rnr_timer);
}

static uint64_t room_of(const struct ibv_sge *sges, uint32_t count)
{
    uint64_t room = 0;
    uint32_t i;

    for (i = 0; i < count; i++)
        room += sges[i].length;
    return room;
}

/* Find the memory of the receive for a message of `length` bytes. */
static enum ibv_wc_status resolve_receive(const struct responder *at, uint64_t length, struct soft_segment *segments)
{
    const struct soft_recv_wqe *recv_wqe = &at->peer->in.recv_wqe;
    struct soft_device *device = at->peer->context->device;
    uint64_t room = 0;
    unsigned int count = 0, i;

    if (room_of(recv_wqe->sges, recv_wqe->num_sge) < length)
        return IBV_WC_LOC_LEN_ERR;
    for (i = 0; room < length; room += recv_wqe->sges[i++].length) {
        const struct ibv_sge *sge = &recv_wqe->sges[i];

        if (!sge->length)
            continue;
        segments[count].length = sge->length;
        segments[count].address = soft_mr_resolve(device, at->srq ? at->srq->pd : at->pd, sge->lkey, sge->addr,
                                                  sge->length, IBV_ACCESS_LOCAL_WRITE);
        if (!segments[count++].address)
            return IBV_WC_LOC_PROT_ERR;
    }
    return IBV_WC_SUCCESS;
}

static bool carries_imm(const struct soft_request *request)
{
    return request->wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || request->wqe->opcode == IBV_WR_SEND_WITH_IMM;
}

static void complete_receive(const struct responder *at, const struct soft_request *request, enum ibv_wc_status status,
                             uint32_t vendor_err, uint32_t byte_len)
{
    const struct soft_recv_wqe *recv_wqe = &at->peer->in.recv_wqe;
    struct soft_cqe cqe = {
        .wr_id = recv_wqe->wr_id,
        .qp = at->srq && at->srq->type == IBV_SRQT_XRC ? NULL : at->peer,
        .srq = at->srq,
        .byte_len = byte_len,
        .qp_num = at->peer->qp.qp_num,
        .src_qp = request->src_qp,
        .wqe_index = recv_wqe->index,
        .vendor_err = vendor_err,
        .status = (uint8_t)status,
        .opcode = request->wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
        .solicited = request->wqe->flags & IBV_SEND_SOLICITED,
    };

    assert(at->peer->in.has_recv_wqe);
    at->peer->in.has_recv_wqe = false;
    if (carries_imm(request) || request->wqe->opcode == IBV_WR_SEND_WITH_INV)
        cqe.imm_data = request->wqe->imm_data;
    if (carries_imm(request))
        cqe.wc_flags = IBV_WC_WITH_IMM;
    else if (request->wqe->opcode == IBV_WR_SEND_WITH_INV)
        cqe.wc_flags = IBV_WC_WITH_INV;
    if (at->peer->qp.qp_type == IBV_QPT_UD)
        cqe.wc_flags |= IBV_WC_GRH;
    /* Use the fault plan of the completion queue's context, which may differ from the XRC target's. */
    if (soft_complete(to_soft_context(at->cq->ex.context), at->cq, &cqe))
        return;
    responder_refuse(at->peer, at->reply, IBV_WC_REM_OP_ERR, true);
    soft_raise_event(at->peer->context, &at->peer->events, IBV_EVENT_QP_FATAL);
}

/* Return the status that the fault plan has for a receive, before the receive is used. */
static enum ibv_wc_status planned_status(const struct responder *at, uint32_t *vendor_err)
{
    *vendor_err = 0;
    if (!(atomic_load_explicit(&at->peer->context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS))
        return IBV_WC_SUCCESS;
    return soft_fault_status(at->peer, true, vendor_err);
}

/* ---- Messages -------------------------------------------------------------------------------------------- */

static enum ibv_wc_status remote_status(enum ibv_wc_status receive)
{
    return receive == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR;
}

/* Execute a send, or a part of one. `from` has the data, with a GRH before it for datagrams. */
static void respond_message(const struct responder *at, const struct soft_request *request,
                            const struct soft_segment *from, uint32_t length)
{
    uint32_t total = request->total + (length - request->length), vendor_err = 0;
    bool first = !request->offset, last = request->offset + request->length == request->total;
    struct soft_segment segments[SOFT_MAX_SGE];
    enum ibv_wc_status status = IBV_WC_SUCCESS;
    int error = 0;

    if (first && !take_recv_wqe(at)) {
        responder_rnr(at);
        return;
    }
    /* Its shared receive queue was destroyed; or an unreliable message was too long. */
    if (!at->peer->in.has_recv_wqe) {
        responder_refuse(at->peer, at->reply, IBV_WC_REM_INV_REQ_ERR, false);
        return;
    }
    assert(at->peer->in.srq == at->srq); /* all parts name the same queue, and destroying that drops the receive */
    at->reply->kind = SOFT_ACK;
    if (first)
        status = planned_status(at, &vendor_err);
    if (status == IBV_WC_SUCCESS) {
        status = resolve_receive(at, total, segments);
        if (status == IBV_WC_LOC_LEN_ERR && !soft_is_reliable(at->peer) && !at->srq) {
            return_recv_wqe(at->peer); /* dropped: the receive waits for one that fits */
            return;
        }
    }
    if (status == IBV_WC_SUCCESS) {
        if (!first)
            skip(segments, request->offset);
        error = payload_read(request, segments, from, length);
    }
    if (error == ESTALE) { /* the part counts as never sent: it is sent again, or nothing is */
        if (first)
            return_recv_wqe(at->peer);
        at->reply->kind = SOFT_SILENT;
        return;
    }
    if (error)
        status = IBV_WC_LOC_PROT_ERR;
    if (status == IBV_WC_SUCCESS && !last)
        return;
    if (status == IBV_WC_SUCCESS && request->wqe->opcode == IBV_WR_SEND_WITH_INV &&
        !soft_mw_invalidate(at->peer, at->pd, request->wqe->imm_data))
        status = IBV_WC_MW_BIND_ERR;
    complete_receive(at, request, status, vendor_err, total);
    if (status != IBV_WC_SUCCESS)
        responder_refuse(at->peer, at->reply, remote_status(status), true);
}

static void respond_send(const struct responder *at, const struct soft_request *request)
{
    respond_message(at, request, request->local, request->length);
}

static uint16_t checksum(const uint8_t *header)
{
    uint32_t sum = 0;
    int i;

    for (i = 0; i < 20; i += 2)
        sum += (uint32_t)(header[i] << 8 | header[i + 1]);
    sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~(sum + (sum >> 16));
}

static void put16(uint8_t *to, uint32_t value)
{
    to[0] = (uint8_t)(value >> 8);
    to[1] = (uint8_t)value;
}

/* Write the route as RoCE v2 delivers it: for IPv4 an IP header in the last 20 bytes, else an IPv6-shaped GRH. */
static void write_grh(uint8_t *grh, const struct soft_request *request)
{
    const struct soft_wqe *wqe = request->wqe;
    const union ibv_gid *from = request->sgid, *to = &wqe->dgid;
    const uint8_t *source = from->raw, *open_target = to->raw;
    /* Payload size: UDP header, base and datagram transport headers, immediate data, data padded to 4 bytes,
     * checksum. */
    uint32_t payload = 8 + 12 + 8 + (carries_imm(request) ? 4 : 0) + ((request->length + 3) & ~3u) + 4;

    memset(grh, 0, SOFT_GRH);
    if (soft_gid_is_ipv4(to) && soft_gid_is_ipv4(from)) {
        uint8_t *ip = grh + 20;

        ip[0] = 0x45;
        ip[1] = wqe->path.traffic_class;
        put16(ip + 2, 20 + payload);
        ip[6] = 0x40; /* don't fragment */
        ip[8] = wqe->path.hop_limit;
        ip[9] = 17; /* UDP */
        memcpy(ip + 12, source + 12, 4);
        memcpy(ip + 16, open_target + 12, 4);
        put16(ip + 10, checksum(ip));
        return;
    }
    grh[0] = (uint8_t)(0x60 | wqe->path.traffic_class >> 4);
    grh[1] = (uint8_t)(wqe->path.traffic_class << 4 | (wqe->path.flow_label >> 16 & 0xf));
    put16(grh + 2, wqe->path.flow_label);
    put16(grh + 4, payload);
    grh[6] = 17;
    grh[7] = wqe->path.hop_limit;
    memcpy(grh + 8, source, 16);
    memcpy(grh + 24, open_target, 16);
}

static void respond_datagram(const struct responder *at, const struct soft_request *request)
{
    struct soft_segment from[1 + SOFT_MAX_SGE];
    uint8_t grh[SOFT_GRH];
    uint32_t i;

    write_grh(grh, request);
    from[0] = (struct soft_segment){grh, SOFT_GRH};
    for (i = 0; i < request->local_count; i++)
        from[1 + i] = request->local[i];
    respond_message(at, request, from, SOFT_GRH + request->length);
}

/* ---- One-sided requests ---------------------------------------------------------------------------------- */

/* Check the queue pair's access flags. A request that they do not allow is an invalid request, however short; one that
 * the key does not allow is an access error. */
static bool check_access(const struct responder *at, int access)
{
    bool allowed = at->peer->attr.qp_access_flags & (unsigned int)access;

    if (!allowed)
        responder_refuse(at->peer, at->reply, IBV_WC_REM_INV_REQ_ERR, false);
    return allowed;
}

/* Check the number of reads and atomics in flight against the resources that the responder was told to keep. The
 * requester states the number. Here they take no resources, so a requester that states too few gains nothing. */
static bool check_rd_atomic(const struct responder *at, const struct soft_request *request)
{
    bool enough = request->reads <= at->peer->attr.max_dest_rd_atomic;

    if (!enough)
        responder_refuse(at->peer, at->reply, IBV_WC_REM_INV_REQ_ERR, false);
    return enough;
}

/* Return the memory that a request names, or NULL: then the request is refused. For a request in parts, access to all
 * parts still to come is checked, as the first packet states their total. */
static inline uint8_t *open_target(const struct responder *at, const struct soft_request *request,
                                   struct soft_remote *remote, int access)
{
    uint8_t *address = soft_remote_open(remote, at->peer->context->device, at->peer, at->pd, request->wqe->rkey,
                                        request->wqe->remote_addr, request->total - request->offset, access);

    if (!address)
        responder_refuse(at->peer, at->reply, IBV_WC_REM_ACCESS_ERR, false);
    return address;
}

/* Handle an error of a copy: nothing if the peer gave its request up, since no response is expected; else refuse the
 * request. */
static void refuse_copy_error(const struct responder *at, int error)
{
    if (error != ESTALE)
        responder_refuse(at->peer, at->reply, IBV_WC_REM_OP_ERR, false);
}

/* Execute an RDMA write. The key of a write of no bytes is not checked. */
static void respond_write(const struct responder *at, const struct soft_request *request)
{
    struct soft_segment to = {.length = request->length};
    struct soft_remote remote;
    int error = 0;

    if (!check_access(at, IBV_ACCESS_REMOTE_WRITE))
        return;
    if (request->length) {
        to.address = open_target(at, request, &remote, IBV_ACCESS_REMOTE_WRITE);
        if (!to.address)
            return;
        error = payload_read(request, &to, request->local, request->length);
        soft_remote_close(&remote);
    }
    if (error)
        refuse_copy_error(at, error);
    else
        at->reply->kind = SOFT_ACK;
}

/* Execute the last part of an RDMA write with immediate. The receive is taken only after all checks. */
static void respond_write_with_imm(const struct responder *at, const struct soft_request *request)
{
    struct soft_segment to = {.length = request->length};
    struct soft_remote remote = {NULL};
    enum ibv_wc_status status;
    uint32_t vendor_err;
    int error = 0;

    if (!check_access(at, IBV_ACCESS_REMOTE_WRITE))
        return;
    if (!has_posted_receive(at)) {
        responder_rnr(at);
        return;
    }
    if (request->length) {
        to.address = open_target(at, request, &remote, IBV_ACCESS_REMOTE_WRITE);
        if (!to.address)
            return;
    }
    if (!take_recv_wqe(at)) {
        soft_remote_close(&remote);
        responder_rnr(at);
        return;
    }
    status = planned_status(at, &vendor_err);
    if (status == IBV_WC_SUCCESS)
        error = payload_read(request, &to, request->local, request->length);
    soft_remote_close(&remote);
    if (error) {
        return_recv_wqe(at->peer);
        refuse_copy_error(at, error);
        return;
    }
    at->reply->kind = SOFT_ACK;
    complete_receive(at, request, status, vendor_err, request->total);
    if (status != IBV_WC_SUCCESS)
        responder_refuse(at->peer, at->reply, remote_status(status), true);
}

static void respond_read(const struct responder *at, const struct soft_request *request)
{
    struct soft_segment from = {.length = request->length};
    struct soft_remote remote = {NULL};
    int error;

    if (!check_access(at, IBV_ACCESS_REMOTE_READ) || !check_rd_atomic(at, request))
        return;
    if (request->length) {
        from.address = open_target(at, request, &remote, IBV_ACCESS_REMOTE_READ);
        if (!from.address)
            return;
    }
    error = payload_write(request, &from, request->length);
    soft_remote_close(&remote);
    if (error)
        refuse_copy_error(at, error);
    else
        at->reply->kind = SOFT_ACK;
}

static void respond_atomic(const struct responder *at, const struct soft_request *request)
{
    struct soft_segment original = {.length = 8};
    struct soft_remote remote = {NULL};
    uint64_t *address, value;

    if (!check_access(at, IBV_ACCESS_REMOTE_ATOMIC) || !check_rd_atomic(at, request))
        return;
    if (request->wqe->remote_addr % 8) {
        responder_refuse(at->peer, at->reply, IBV_WC_REM_INV_REQ_ERR, false);
        return;
    }
    address = (uint64_t *)(void *)open_target(at, request, &remote, IBV_ACCESS_REMOTE_ATOMIC);
    if (!address)
        return;
    if (request->wqe->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        value = __atomic_fetch_add(address, request->wqe->compare_add, __ATOMIC_SEQ_CST);
    } else {
        value = request->wqe->compare_add; /* the comparison stores the found value here if it differs */
        __atomic_compare_exchange_n(address, &value, request->wqe->swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    soft_remote_close(&remote);
    original.address = (uint8_t *)&value;
    payload_write(request, &original, 8); /* cannot fail for eight bytes */
    at->reply->kind = SOFT_ACK;
}

/* ---- Any request ----------------------------------------------------------------------------------------- */

/* Find the shared receive queue that the request names. An XRC target has no receives and no protection domain of its
 * own: the shared queue provides both. It must be of the same XRC domain. */
static bool find_xrc_srq(struct responder *at, const struct soft_request *request)
{
    struct soft_srq *srq = soft_table_find(&at->peer->context->device->srqs, request->wqe->remote_srqn);

    if (!srq || srq->type != IBV_SRQT_XRC || srq->xrcd->shared != at->peer->xrcd->shared) {
        responder_refuse(at->peer, at->reply, IBV_WC_REM_INV_REQ_ERR, false);
        return false;
    }
    if (atomic_load(&srq->context->special) & SOFT_SPECIAL_LOST)
        return false; /* the device of the queue's context is lost: no response */
    at->srq = srq;
    at->cq = srq->cq;
    at->pd = srq->pd;
    return true;
}

static struct soft_part part_of(const struct soft_request *request)
{
    const struct soft_wqe *wqe = request->wqe;
    bool one_sided = wqe->opcode == IBV_WR_RDMA_WRITE || wqe->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ||
                     wqe->opcode == IBV_WR_RDMA_READ;

    return (struct soft_part){
        .total = request->total,
        .offset = request->offset,
        .length = request->length,
        .key = one_sided ? wqe->rkey : 0,
        .srqn = wqe->remote_srqn,
        .address = one_sided ? wqe->remote_addr - request->offset : 0,
        .opcode = wqe->opcode,
    };
}

/* Return whether the part is the next one of its message. On an unreliable connection a part out of order aborts the
 * message in progress, all of which is discarded; the part may then begin another message. */
static bool accept_in_order(struct soft_qp *peer, const struct soft_part *part)
{
    if (soft_message_fits(&peer->in.message, part))
        return true;
    if (soft_is_reliable(peer))
        return false;
    soft_inbound_abort(peer, false);
    return soft_message_fits(&peer->in.message, part);
}

void soft_respond(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply)
{
    struct responder at = {peer, peer->srq, peer->recv_cq, peer->pd, reply};
    struct soft_part part = part_of(request);

    assert_held(&peer->rq_lock);
    if (!request->again && !accept_in_order(peer, &part)) {
        responder_refuse(peer, reply, IBV_WC_REM_INV_REQ_ERR, false);
        return;
    }
    if (peer->qp.qp_type == IBV_QPT_XRC_RECV && !find_xrc_srq(&at, request))
        return;
    /* The first message arrives before the application knows that the connection is established. */
    if (peer->qp.qp_type != IBV_QPT_UD && !peer->established && atomic_load(&peer->state) == IBV_QPS_RTR) {
        peer->established = true;
        soft_raise_event(peer->context, &peer->events, IBV_EVENT_COMM_EST);
    }
    switch (request->wqe->opcode) {
    case IBV_WR_RDMA_WRITE:
        respond_write(&at, request);
        break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        if (request->offset + request->length == request->total)
            respond_write_with_imm(&at, request);
        else
            respond_write(&at, request);
        break;
    case IBV_WR_RDMA_READ:
        respond_read(&at, request);
        break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        respond_atomic(&at, request);
        break;
    default:
        if (peer->qp.qp_type == IBV_QPT_UD)
            respond_datagram(&at, request);
        else
            respond_send(&at, request);
        break;
    }
    if (!request->again && reply->kind == SOFT_ACK)
        soft_message_advance(&peer->in.message, &part);
}

static void flush_receive(struct soft_qp *qp)
{
    const struct soft_inbound *in = &qp->in;
    bool xrc = in->srq && in->srq->type == IBV_SRQT_XRC;
    struct soft_cq *cq = xrc ? in->srq->cq : qp->recv_cq;
    struct soft_cqe cqe = {
        .wr_id = in->recv_wqe.wr_id,
        .qp = xrc ? NULL : qp,
        .srq = in->srq,
        .qp_num = qp->qp.qp_num,
        .wqe_index = in->recv_wqe.index,
        .status = IBV_WC_WR_FLUSH_ERR,
        .opcode = IBV_WC_RECV,
    };

    qp->in.has_recv_wqe = false;
    soft_complete(to_soft_context(cq->ex.context), cq, &cqe);
}

void soft_inbound_abort(struct soft_qp *qp, bool flushed)
{
    assert_held(&qp->rq_lock);
    qp->in.message.in_flight = false;
    if (!qp->in.has_recv_wqe)
        return;
    if (flushed)
        flush_receive(qp);
    else
        return_recv_wqe(qp);
}

void soft_inbound_drop_srq(struct soft_device *device, const struct soft_srq *srq)
{
    uint32_t number, end = soft_table_end(&device->qps);
    struct grace_reader *grace = grace_enter();

    for (number = SOFT_FIRST_QPN; number < end; number++) {
        struct soft_qp *qp = soft_table_find(&device->qps, number);

        if (!qp || qp->qp.qp_type != IBV_QPT_XRC_RECV)
            continue;
        soft_lock_take(&qp->rq_lock);
        if (qp->in.srq == srq)
            qp->in.has_recv_wqe = false;
        soft_lock_give(&qp->rq_lock);
    }
    grace_leave(grace);
}
