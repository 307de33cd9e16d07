/* Delivery: finds the peer of a queue pair and executes a request there, as the responder of the architecture.
 *
 * The only part that knows where a peer is. All peers are in this process: one that is elsewhere does not answer. */
#include "soft.h"

#include <string.h>

/* ---- Moving bytes ---------------------------------------------------------------------------------------- */

/* Both lists hold `length` bytes at least. Buffers of one process may overlap. */
static void copy(const struct soft_segment *to, const struct soft_segment *from, uint32_t length)
{
    uint32_t to_offset = 0, from_offset = 0;

    while (length) {
        uint32_t part = length;

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

/* ---- The responder, under the peer's rq_lock -------------------------------------------------------------- */

static void refuse(struct soft_qp *peer, struct soft_reply *reply, enum ibv_wc_status status)
{
    atomic_store(&peer->state, IBV_QPS_ERR);
    reply->kind = SOFT_NAK;
    reply->status = status;
    reply->broken = peer;
}

/* Encoded in 5 bits, in units of 10 us; 0 is the longest. */
static uint64_t rnr_delay_ns(uint8_t timer)
{
    static const uint32_t units[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                       48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                       2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

    return units[timer & 31] * 10000ull;
}

/* The oldest posted receive, or NULL: then the reply is "receiver not ready". */
static const struct soft_rwqe *next_receive(struct soft_qp *peer, struct soft_reply *reply)
{
    if (peer->rq.taken == atomic_load_explicit(peer->rq.posted, memory_order_acquire)) {
        reply->kind = SOFT_RNR;
        reply->rnr_ns = rnr_delay_ns(peer->attr.min_rnr_timer);
        return NULL;
    }
    return soft_ring_entry(&peer->rq, peer->rq.taken);
}

static void complete_receive(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply,
                             enum ibv_wc_status status)
{
    const struct soft_rwqe *rwqe = soft_ring_entry(&peer->rq, peer->rq.taken);
    bool write = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    bool with_imm = write || request->opcode == IBV_WR_SEND_WITH_IMM;
    struct soft_cqe cqe = {
        .wr_id = rwqe->wr_id,
        .qp = peer,
        .byte_len = request->length,
        .imm_data = with_imm ? request->imm_data : 0,
        .qp_num = peer->qp.qp_num,
        .src_qp = request->from->qp.qp_num,
        .wqe_index = peer->rq.taken,
        .status = (uint16_t)status,
        .opcode = write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
        .wc_flags = with_imm ? IBV_WC_WITH_IMM : 0,
        .solicited = request->solicited,
    };

    peer->rq.taken++;
    if (!soft_cq_push(peer->recv_cq, &cqe))
        refuse(peer, reply, IBV_WC_REM_OP_ERR);
}

/* Where a message of `length` bytes goes in a posted receive. */
static enum ibv_wc_status resolve_receive(struct soft_qp *peer, const struct soft_rwqe *rwqe, uint32_t length,
                                          struct soft_segment *segments)
{
    const struct ibv_sge *sge = (const struct ibv_sge *)(rwqe + 1);
    uint64_t room = 0, i;
    unsigned int count = 0;

    for (i = 0; i < rwqe->num_sge; i++)
        room += sge[i].length;
    if (room < length)
        return IBV_WC_LOC_LEN_ERR;
    for (i = 0, room = 0; room < length; room += sge[i++].length) {
        if (!sge[i].length)
            continue;
        segments[count].length = sge[i].length;
        segments[count].address = soft_mr_resolve(peer->context->device, peer->pd, sge[i].lkey, sge[i].addr,
                                                  sge[i].length, IBV_ACCESS_LOCAL_WRITE);
        if (!segments[count++].address)
            return IBV_WC_LOC_PROT_ERR;
    }
    return IBV_WC_SUCCESS;
}

static void respond_send(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply)
{
    struct soft_segment segments[SOFT_MAX_SGE];
    const struct soft_rwqe *rwqe = next_receive(peer, reply);
    enum ibv_wc_status status;

    if (!rwqe)
        return;
    status = resolve_receive(peer, rwqe, request->length, segments);
    if (status == IBV_WC_SUCCESS)
        copy(segments, request->local, request->length);
    reply->kind = SOFT_ACK;
    complete_receive(peer, request, reply, status);
    if (status == IBV_WC_LOC_LEN_ERR)
        refuse(peer, reply, IBV_WC_REM_INV_REQ_ERR);
    else if (status != IBV_WC_SUCCESS)
        refuse(peer, reply, IBV_WC_REM_OP_ERR);
}

/* What the queue pair does not allow at all is an invalid request, however short; what the key does not allow is
 * an access error. */
static bool allows(struct soft_qp *peer, struct soft_reply *reply, int access)
{
    bool allowed = peer->attr.qp_access_flags & (unsigned int)access;

    if (!allowed)
        refuse(peer, reply, IBV_WC_REM_INV_REQ_ERR);
    return allowed;
}

/* The peer's memory that a one-sided request names, or NULL: then it is refused. */
static uint8_t *target(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply, int access)
{
    uint8_t *address =
        soft_mr_resolve(peer->context->device, peer->pd, request->rkey, request->remote_addr, request->length, access);

    if (!address)
        refuse(peer, reply, IBV_WC_REM_ACCESS_ERR);
    return address;
}

static void respond_write(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply)
{
    bool with_imm = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    struct soft_segment to = {.length = request->length};

    if (!allows(peer, reply, IBV_ACCESS_REMOTE_WRITE) || (with_imm && !next_receive(peer, reply)))
        return;
    if (request->length) { /* without a byte to write, the key is not looked at */
        to.address = target(peer, request, reply, IBV_ACCESS_REMOTE_WRITE);
        if (!to.address)
            return;
        copy(&to, request->local, request->length);
    }
    reply->kind = SOFT_ACK;
    if (with_imm)
        complete_receive(peer, request, reply, IBV_WC_SUCCESS);
}

static void respond_read(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply)
{
    struct soft_segment from = {.length = request->length};

    if (!allows(peer, reply, IBV_ACCESS_REMOTE_READ))
        return;
    if (!peer->attr.max_dest_rd_atomic) {
        refuse(peer, reply, IBV_WC_REM_INV_REQ_ERR);
        return;
    }
    if (request->length) {
        from.address = target(peer, request, reply, IBV_ACCESS_REMOTE_READ);
        if (!from.address)
            return;
        copy(request->local, &from, request->length);
    }
    reply->kind = SOFT_ACK;
}

static void respond_atomic(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply)
{
    struct soft_segment original = {.length = 8};
    uint64_t *address, value;

    if (!allows(peer, reply, IBV_ACCESS_REMOTE_ATOMIC))
        return;
    if (!peer->attr.max_dest_rd_atomic || request->remote_addr % 8) {
        refuse(peer, reply, IBV_WC_REM_INV_REQ_ERR);
        return;
    }
    address = (uint64_t *)(void *)target(peer, request, reply, IBV_ACCESS_REMOTE_ATOMIC);
    if (!address)
        return;
    if (request->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        value = __atomic_fetch_add(address, request->compare_add, __ATOMIC_SEQ_CST);
    } else {
        value = request->compare_add; /* becomes what was found, where that is another value */
        __atomic_compare_exchange_n(address, &value, request->swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    original.address = (uint8_t *)&value;
    copy(request->local, &original, 8);
    reply->kind = SOFT_ACK;
}

/* ---- Delivery -------------------------------------------------------------------------------------------- */

static bool accepts(const struct soft_qp *peer, const struct soft_request *request)
{
    unsigned int state = atomic_load(&peer->state);

    if (state != IBV_QPS_RTR && state != IBV_QPS_RTS && state != IBV_QPS_SQD)
        return false;
    /* Connected to somebody else, or out of sequence: such packets are dropped. */
    return peer->attr.dest_qp_num == request->from->qp.qp_num && soft_gid_is_local(&peer->attr.ah_attr.grh.dgid) &&
           peer->expected_psn == request->psn;
}

void soft_link_deliver(const struct soft_request *request, struct soft_reply *reply)
{
    const struct ibv_qp_attr *route = &request->from->attr;
    struct soft_qp *peer;

    reply->kind = SOFT_SILENT;
    if (!soft_gid_is_local(&route->ah_attr.grh.dgid))
        return;
    peer = soft_table_find(&request->from->context->device->qps, route->dest_qp_num);
    if (!peer)
        return;
    soft_lock_take(&peer->rq_lock);
    if (accepts(peer, request)) {
        switch (request->opcode) {
        case IBV_WR_RDMA_WRITE:
        case IBV_WR_RDMA_WRITE_WITH_IMM:
            respond_write(peer, request, reply);
            break;
        case IBV_WR_RDMA_READ:
            respond_read(peer, request, reply);
            break;
        case IBV_WR_ATOMIC_CMP_AND_SWP:
        case IBV_WR_ATOMIC_FETCH_AND_ADD:
            respond_atomic(peer, request, reply);
            break;
        default:
            respond_send(peer, request, reply);
            break;
        }
        if (reply->kind == SOFT_ACK)
            peer->expected_psn = (peer->expected_psn + request->packets) & SOFT_PSN_MASK;
    }
    soft_lock_give(&peer->rq_lock);
}
