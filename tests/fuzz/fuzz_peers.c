/* Hostile fabric peers behind the parser: frames are well-formed, but in any order, with any numbers, and to queue
 * pairs of all types. Meanwhile queue pairs are reset, regions registered again and shared receive queues replaced.
 *
 *     fuzz_peers {inline,thread} SECONDS [SEED]
 *
 * A run fails if a sanitizer or an assertion stops it; if a receive counts bytes that no peer sent; if a receive
 * posted to a shared queue neither completes nor is there at the end; or if the completion queue overruns. Threads
 * take part, so a seed makes runs similar, not identical. */
#include "support.h"
#include "support_fabric.h"
#include "support_srq.h"
#include "support_types.h"

#include <sched.h>
#include <unistd.h>

#include "soft/fabric/stream.h"
#include "soft/objects/cq.h"

enum {
    ROOM = 40 + 5 * 4096, /* bytes of a receive */
    SLOTS = 16,           /* receives, and sends, of each queue */
    REMOTE = 1 << 18,     /* bytes of the region whose key the peers have */
    OWN = 1 << 16,        /* bytes that each queue pair sends, and reads into */
    REQUESTERS = 2,
    STALE = 'S', /* initial contents of a receive */
    SENT = 0xa5,
};

/* The peers' queue pair number 100 + i is the other end of the i-th queue pair. */
enum { RC, RC_SHARED, UC, UC_SHARED, UD, TARGET, INITIATOR, QPS };
/* Receive queues: first the first five queue pairs' own ones (if any), then shared ones. */
enum { SHARED = UD + 1, XRC_A, XRC_B, QUEUES };

static const enum ibv_qp_type types[QPS] = {IBV_QPT_RC, IBV_QPT_RC,       IBV_QPT_UC,      IBV_QPT_UC,
                                            IBV_QPT_UD, IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND};

static struct home home;
static struct ibv_cq *cq;
static struct ibv_qp *qps[QPS]; /* const once the peers run */
static struct ibv_srq *srqs[QUEUES];
static struct ibv_xrcd *xrcd;
static struct ibv_ah *ah;
static struct ibv_mr *rooms, *own, *remote;
static uint8_t remote_memory[REMOTE];
static uint8_t memory[QUEUES][SLOTS][ROOM], own_memory[QPS][2][OWN];
static bool posted[QUEUES][SLOTS];
static unsigned int sends[QPS];
static uint8_t payload[SOFT_DIRECT_FRAGMENT]; /* data of all requests; const once the peers run */
static uint64_t outcomes[3];                  /* completions: successful, flushed, others */
static const union ibv_gid peer_gids[2] = {{.raw = {0xfe, 0x80, [15] = 1}}, {.raw = {[10] = 0xff, 0xff, 127, 9, 9, 9}}};
static union ibv_gid gids[2]; /* GIDs of the device; const once the peers run */

static atomic_uint rkey, srq_numbers[2], lives[QPS];
static atomic_bool over;
static atomic_ullong requests, answers;
static uint64_t seed;

static _Thread_local uint64_t state;

static uint32_t any(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)(state >> 16) % below : 0;
}

static bool one_in(uint32_t count)
{
    return !any(count);
}

static void seed_thread(void)
{
    static atomic_uint threads;
    unsigned int i, number = atomic_fetch_add(&threads, 1);

    state = seed * 0x9e3779b97f4a7c15u + number + 1;
    for (i = 0; i < 16; i++)
        any(1);
}

/* ---- A peer that sends requests
 * ------------------------------------------------------------------------------------- */

struct flow {
    unsigned int life;
    uint32_t psn, total, offset, key, srqn;
    uint64_t address;
    uint8_t opcode;
};

/* A device of its own, with a fabric only. Both requesting peers claim the same identity; one of them also responds. */
struct requester {
    struct node *node;
    struct sender sender; /* its link leads to the device */
    struct flow flows[QPS];
};

static bool is_write(uint8_t opcode)
{
    return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static bool is_answered(uint8_t opcode)
{
    return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

static bool is_atomic(uint8_t opcode)
{
    return is_answered(opcode) && opcode != IBV_WR_RDMA_READ;
}

static uint32_t expected_psn(int which)
{
    struct soft_qp *qp = to_soft_qp(qps[which]);
    uint32_t psn;

    soft_lock_take(&qp->rq_lock);
    psn = qp->expected_psn;
    soft_lock_give(&qp->rq_lock);
    return psn;
}

static void begin_message(struct flow *flow, int which)
{
    static const uint8_t opcodes[] = {IBV_WR_SEND,
                                      IBV_WR_SEND,
                                      IBV_WR_SEND_WITH_IMM,
                                      IBV_WR_SEND_WITH_INV,
                                      IBV_WR_RDMA_WRITE,
                                      IBV_WR_RDMA_WRITE_WITH_IMM,
                                      IBV_WR_RDMA_READ,
                                      IBV_WR_ATOMIC_FETCH_AND_ADD,
                                      IBV_WR_ATOMIC_CMP_AND_SWP};
    uint32_t address = any(REMOTE) & ~7u;

    flow->opcode = opcodes[any(which == UD ? 3 : types[which] == IBV_QPT_UC ? 6 : sizeof(opcodes))];
    flow->total = one_in(2) ? any(5000) : 4096 * any(6) + (one_in(3) ? any(4096) : 0);
    if (one_in(64))
        flow->total = any(1 << 20);
    if (is_atomic(flow->opcode))
        flow->total = 8;
    if (which == UD)
        flow->total = any(4097);
    flow->key = one_in(32) ? any(1 << 12) : atomic_load(&rkey);
    flow->address = (uintptr_t)remote_memory + address;
    flow->srqn = one_in(32) ? any(8) : atomic_load(&srq_numbers[any(2)]);
    flow->offset = 0;
}

/* The next frame of the flow, as an honest peer sends it. */
static struct soft_frame next_part(const struct flow *flow, int which)
{
    uint32_t left = flow->total - flow->offset, length = one_in(2) ? left : 4096 * (1 + any(4));
    struct soft_frame frame = {
        .kind = SOFT_FRAME_REQUEST,
        .opcode = flow->opcode,
        .flags = one_in(4) ? SOFT_FRAME_SOLICITED : 0,
        .transport = which == TARGET ? IBV_QPT_XRC_SEND : (uint8_t)types[which],
        .to = qps[which]->qp_num,
        .from = 100 + (uint32_t)which,
        .token = any(4),
        .psn = flow->psn,
        .total = flow->total,
        .offset = flow->offset,
        .srqn = which == TARGET ? flow->srqn : 0,
        .reads = is_answered(flow->opcode) ? 1 + any(one_in(16) ? 255 : 4) : 0,
    };

    if (length > left)
        length = left;
    frame.part = length < SOFT_FRAGMENT ? length : SOFT_FRAGMENT;
    if (is_write(flow->opcode) || is_answered(flow->opcode)) {
        frame.key = flow->key;
        frame.address = flow->address + flow->offset;
    }
    if (flow->opcode == IBV_WR_SEND_WITH_INV || flow->opcode == IBV_WR_SEND_WITH_IMM ||
        flow->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        frame.imm = one_in(64) ? atomic_load(&rkey) : any(1 << 20);
    if (which == UD) {
        frame.key = TEST_QKEY;
        memcpy(frame.dgid, &gids[any(2)], sizeof(frame.dgid));
    } else if (is_atomic(flow->opcode)) {
        frame.compare_add = any(3);
        frame.swap = flow->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? any(3) : 0;
    }
    return frame;
}

/* Falsifies a frame, as a hostile peer does. */
static void falsify(struct soft_frame *frame)
{
    switch (any(12)) {
    case 0:
        frame->offset = 4096 * any(6);
        break;
    case 1:
        frame->total = 4096 * any(8);
        break;
    case 2:
        frame->total = frame->offset + frame->part;
        break;
    case 3:
        frame->psn = (frame->psn + any(64) - 32) & SOFT_PSN_MASK;
        break;
    case 4:
        frame->psn = any(1 << 24);
        break;
    case 5:
        frame->key ^= 1u << any(32);
        break;
    case 6:
        frame->address += any(2 * REMOTE) - REMOTE;
        break;
    case 7:
        frame->srqn = any(8);
        break;
    case 8:
        frame->to = qps[any(QPS)]->qp_num;
        break;
    case 9:
        frame->from = any(1 << 24);
        break;
    case 10:
        frame->opcode = (uint8_t)any(7);
        break;
    default:
        frame->part = any(SOFT_FRAGMENT + 1);
        break;
    }
}

/* Sets dependent fields of the frame, and its payload. Returns whether the frame is well-formed. */
static bool complete(struct soft_frame *frame, const struct requester *requester, uint8_t list[SOFT_SEGMENT_SIZE],
                     struct iovec *data)
{
    static uint8_t taken[SOFT_DIRECT_FRAGMENT]; /* data that the device writes to us, which is ignored */
    struct soft_frame_segment segment = {(uintptr_t)payload, frame->part};
    uint8_t bytes[SOFT_FRAME_SIZE];
    struct soft_frame parsed;

    if (!frame->offset)
        frame->flags |= SOFT_FRAME_FIRST;
    if (frame->offset + frame->part == frame->total)
        frame->flags |= SOFT_FRAME_LAST;
    frame->packets = frame->part && frame->transport != IBV_QPT_UD ? (frame->part + 4095) / 4096 : 1;
    frame->size = is_answered(frame->opcode) ? 0 : frame->part;
    *data = (struct iovec){payload, frame->size};
    if (one_in(4) && frame->part && !is_atomic(frame->opcode) && soft_link_direct(requester->sender.link)) {
        if (one_in(16) || soft_copy_token_open(requester->sender.link, &frame->copy_token, &frame->serial))
            frame->copy_token = (uint16_t)any(SOFT_COPY_TOKENS);
        if (frame->opcode == IBV_WR_RDMA_READ)
            segment.address = (uintptr_t)taken;
        if (one_in(64))
            segment.address = any(1 << 20); /* not mapped */
        soft_segments_pack(&segment, 1, list);
        frame->flags |= SOFT_FRAME_DIRECT;
        frame->segments = 1;
        frame->size = SOFT_SEGMENT_SIZE;
        *data = (struct iovec){list, SOFT_SEGMENT_SIZE};
    }
    soft_frame_pack(frame, bytes);
    return !soft_frame_parse(bytes, &parsed);
}

/* Returns whether the frame was sent. */
static bool send_to_device(struct requester *requester, const struct soft_frame *frame, const struct iovec *data)
{
    struct sender *sender = &requester->sender;
    int error;

    do {
        soft_lock_take(&sender->qp.sq_lock);
        error = soft_link_send(sender->link, &sender->qp, frame, data, 1);
        soft_lock_give(&sender->qp.sq_lock);
        if (error)
            sleep_us(50);
    } while (error && !atomic_load(&over));
    return !error;
}

static void send_request(struct requester *requester)
{
    int which = (int)any(INITIATOR);
    struct flow *flow = &requester->flows[which];
    unsigned int life = atomic_load(&lives[which]);
    uint8_t list[SOFT_SEGMENT_SIZE];
    struct soft_frame frame;
    struct iovec data;
    bool falsified = one_in(24), sent;

    if (flow->life != life || one_in(16)) {
        flow->offset = 0;
        flow->life = life;
        flow->psn = expected_psn(which);
    }
    if (!flow->offset)
        begin_message(flow, which);
    frame = next_part(flow, which);
    if (falsified)
        falsify(&frame);
    sent = complete(&frame, requester, list, &data) && send_to_device(requester, &frame, &data);
    if (frame.serial) { /* before, during or after the transfer */
        if (one_in(2))
            sleep_us(any(200));
        while (!soft_copy_token_close(requester->sender.link, frame.copy_token, frame.serial))
            sleep_us(50);
    }
    if (!sent)
        return;
    atomic_fetch_add_explicit(&requests, 1, memory_order_relaxed);
    if (falsified || one_in(64)) /* ... and sometimes again */
        return;
    flow->psn = (flow->psn + frame.packets) & SOFT_PSN_MASK;
    flow->offset += frame.part;
    if (flow->offset == flow->total)
        flow->offset = 0;
}

static void *send_requests(void *argument)
{
    struct requester *requester = argument;

    seed_thread();
    REQUIRE(grace_ready());
    while (!atomic_load(&over)) {
        send_request(requester);
        if (one_in(20000))
            soft_fabric_cut(&requester->node->device, NULL);
    }
    return NULL;
}

/* ---- A peer that responds
 * ------------------------------------------------------------------------------------------- */

/* Returns whether there is more to send. */
static bool answer(struct soft_stream *stream, const struct soft_frame *asked)
{
    static const uint8_t statuses[] = {IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR};
    static uint8_t data[SOFT_FRAGMENT];
    uint8_t bytes[SOFT_FRAME_SIZE];
    struct iovec piece = {data, 0};
    struct soft_frame parsed, frame = {
                                  .kind = SOFT_FRAME_RESPONSE,
                                  .opcode = SOFT_FRAME_ACK,
                                  .flags = asked->flags & SOFT_FRAME_DIRECT,
                                  .to = asked->from,
                                  .from = asked->to,
                                  .token = asked->token,
                                  .psn = (asked->psn + asked->packets - 1) & SOFT_PSN_MASK,
                              };

    if (is_answered(asked->opcode))
        frame.part = asked->part;
    if (one_in(8)) {
        frame.opcode = (uint8_t)any(3);
        frame.flags = one_in(8) ? SOFT_FRAME_DIRECT : 0;
        frame.psn = (frame.psn + (one_in(2) ? any(16) - 8 : any(1 << 24))) & SOFT_PSN_MASK;
        frame.part = one_in(2) || frame.opcode != SOFT_FRAME_ACK ? 0 : any(SOFT_FRAGMENT + 1);
        frame.token += one_in(8);
        frame.to = one_in(8) ? any(1 << 10) : frame.to;
    }
    if (frame.opcode != SOFT_FRAME_ACK)
        frame.flags = 0;
    if (frame.opcode == SOFT_FRAME_NAK)
        frame.status = statuses[any(sizeof(statuses))];
    if (frame.opcode == SOFT_FRAME_RNR)
        frame.address = any(100000);
    if (frame.part && one_in(8)) {
        frame.flags |= SOFT_FRAME_READ_CACHE;
        frame.address = one_in(2) ? (uintptr_t)payload : any(1 << 20);
        frame.compare_add = frame.part + any(4096);
        frame.imm = one_in(2) ? any(64) : 0; /* any of this process's own descriptors */
    }
    frame.size = frame.flags & SOFT_FRAME_DIRECT ? 0 : frame.part;
    piece.iov_len = frame.size;
    soft_frame_pack(&frame, bytes);
    if (soft_frame_parse(bytes, &parsed))
        return true;
    atomic_fetch_add_explicit(&answers, 1, memory_order_relaxed);
    soft_stream_answer(stream, &frame, &piece, frame.size ? 1 : 0);
    return !frame.size; /* there is room for one frame with data */
}

static bool on_request(struct soft_stream *stream, const struct soft_frame *asked, const uint8_t *data)
{
    int count;

    (void)data;
    if (!state)
        seed_thread();
    for (count = one_in(16) ? (int)any(20) : 1; count && answer(stream, asked); count--)
        ;
    if (!one_in(20000))
        return true;
    soft_stream_refuse(stream, "enough");
    return false;
}

static bool on_response(struct soft_link *by, const struct soft_frame *frame, const uint8_t *data)
{
    (void)by;
    (void)frame;
    (void)data;
    return true;
}

static void on_batch(struct soft_stream *stream)
{
    (void)stream;
}

static void on_kick(struct soft_qp *qp)
{
    (void)qp; /* the sender retries */
}

static bool is_expected(const struct soft_stream *from)
{
    return soft_stream_gid(from, 0)->raw[15] & 1;
}

static const struct soft_fabric_user hostile = {on_request, on_response, on_batch, on_kick, is_expected};

/* ---- The device's user
 * ---------------------------------------------------------------------------------------------- */

static void register_remote(void)
{
    remote = soft_verbs.reg_mr(home.base, remote_memory, REMOTE, ACCESS_ALL);
    REQUIRE(remote != NULL);
    atomic_store(&rkey, remote->rkey);
}

/* From RESET to RTS. */
static void bring_up(int which)
{
    struct ibv_qp *qp = qps[which];
    struct ibv_qp_attr attr = default_link;

    attr.port_num = 1;
    attr.qkey = TEST_QKEY;
    attr.path_mtu = IBV_MTU_4096;
    attr.timeout = 1 + any(10);
    attr.retry_cnt = any(3);
    attr.rnr_retry = any(3);
    attr.dest_qp_num = 100 + (uint32_t)which;
    attr.rq_psn = any(1 << 24);
    attr.sq_psn = any(1 << 24);
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1}};
    attr.ah_attr.grh.dgid = peer_gids[which % 2];
    attr.qp_state = IBV_QPS_INIT;
    REQUIRE_EQ(soft_verbs.modify_qp(qp, &attr, init_mask(qp->qp_type)), 0);
    attr.qp_state = IBV_QPS_RTR;
    REQUIRE_EQ(soft_verbs.modify_qp(qp, &attr, rtr_mask(qp->qp_type)), 0);
    attr.qp_state = IBV_QPS_RTS;
    if (soft_verbs.modify_qp(qp, &attr, rts_mask(qp->qp_type))) /* a peer may have broken it already */
        CHECK_EQ(atomic_load(&to_soft_qp(qp)->state), IBV_QPS_ERR);
    atomic_fetch_add(&lives[which], 1);
}

static void make_qp_of(int which)
{
    bool target = types[which] == IBV_QPT_XRC_RECV;
    struct ibv_qp_init_attr_ex attr = {
        .send_cq = target ? NULL : cq,
        .recv_cq = target ? NULL : cq,
        .srq = which == RC_SHARED || which == UC_SHARED ? srqs[SHARED] : NULL,
        .cap = {SLOTS, SLOTS, 4, 4, 64},
        .qp_type = types[which],
        .sq_sig_all = 1,
        .comp_mask = target ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD,
        .pd = home.pd,
        .xrcd = target ? xrcd : NULL,
    };

    qps[which] = verbs_create_qp_ex(home.context, &attr);
    REQUIRE(qps[which] != NULL);
    bring_up(which);
}

static void make_xrc_queue(int queue)
{
    srqs[queue] = try_xrc_srq(&home, xrcd, cq, SLOTS);
    REQUIRE(srqs[queue] != NULL);
    atomic_store(&srq_numbers[queue - XRC_A], to_soft_srq(srqs[queue])->number);
    memset(posted[queue], 0, sizeof(posted[queue]));
}

static bool poll_one(void)
{
    struct ibv_wc wc;
    uint32_t queue, slot, at, stale = 0;

    if (verbs_poll_cq(cq, 1, &wc) != 1)
        return false;
    outcomes[wc.status == IBV_WC_SUCCESS ? 0 : wc.status == IBV_WC_WR_FLUSH_ERR ? 1 : 2]++;
    if (wc.wr_id >> 32) {
        sends[wc.wr_id & 0xff]--;
        return true;
    }
    queue = (uint32_t)wc.wr_id / SLOTS;
    slot = (uint32_t)wc.wr_id % SLOTS;
    REQUIRE(posted[queue][slot]);
    posted[queue][slot] = false;
    if (wc.status != IBV_WC_SUCCESS || wc.opcode != IBV_WC_RECV)
        return true;
    REQUIRE(wc.byte_len <= ROOM);
    for (at = queue == UD ? SOFT_GRH : 0; at < wc.byte_len; at++)
        stale += memory[queue][slot][at] != SENT;
    REQUIRE_EQ(stale, 0);
    return true;
}

static void post_receive_to(uint32_t queue, uint32_t slot)
{
    struct ibv_sge sge = {(uintptr_t)memory[queue][slot], ROOM, rooms->lkey};
    struct ibv_recv_wr wr = {.wr_id = queue * SLOTS + slot, .sg_list = &sge, .num_sge = 1}, *bad;

    memset(memory[queue][slot], STALE, ROOM);
    posted[queue][slot] =
        !(srqs[queue] ? verbs_post_srq_recv(srqs[queue], &wr, &bad) : verbs_post_recv(qps[queue], &wr, &bad));
}

static void post_receives(void)
{
    uint32_t queue, slot;

    for (queue = 0; queue < QUEUES; queue++) {
        if (queue == RC_SHARED || queue == UC_SHARED || one_in(4)) /* these have no queue of their own */
            continue;
        for (slot = 0; slot < SLOTS; slot++)
            if (!posted[queue][slot])
                post_receive_to(queue, slot);
    }
}

static void post_send_by(int which)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
                                                 IBV_WR_ATOMIC_FETCH_AND_ADD};
    enum ibv_wr_opcode opcode = opcodes[any(which == UD ? 2 : types[which] == IBV_QPT_UC ? 3 : COUNT_OF(opcodes))];
    uint8_t *place = own_memory[which][is_answered((uint8_t)opcode)];
    struct ibv_sge sge = {(uintptr_t)place, any(which == UD ? 4097 : OWN), own->lkey};
    struct ibv_send_wr wr = {.wr_id = 1ull << 32 | (uint32_t)which, .sg_list = &sge, .num_sge = 1}, *bad;

    wr.opcode = opcode;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        sge.length = 8;
        wr.wr.atomic.remote_addr = 8 * any(1000);
        wr.wr.atomic.rkey = any(1000);
    } else if (which == UD) {
        wr.wr.ud.ah = ah;
        wr.wr.ud.remote_qpn = any(1 << 24);
        wr.wr.ud.remote_qkey = TEST_QKEY;
    } else {
        wr.wr.rdma.remote_addr = any(1 << 30);
        wr.wr.rdma.rkey = any(1000);
    }
    wr.qp_type.xrc.remote_srqn = any(8);
    sends[which] += !verbs_post_send(qps[which], &wr, &bad);
}

static void post_sends(void)
{
    int which;

    for (which = 0; which < QPS; which++)
        while (which != TARGET && sends[which] < SLOTS && !one_in(4))
            post_send_by(which);
}

/* The receives complete, or go back to the shared queue. Completions that have arrived must be polled first, for
 * otherwise the receives of the shared queue could not be counted. An XRC target has no completions of its own. */
static void reset(int which)
{
    struct soft_qp *qp = to_soft_qp(qps[which]);
    bool shared = which == RC_SHARED || which == UC_SHARED, holds = shared;

    if (shared)
        CHECK_EQ(qp_to(qps[which], IBV_QPS_ERR), 0);
    while (holds) {
        while (poll_one())
            ;
        soft_lock_take(&qp->rq_lock);
        holds = qp->in.has_recv_wqe;
        soft_lock_give(&qp->rq_lock);
    }
    while (poll_one())
        ;
    CHECK_EQ(qp_to(qps[which], IBV_QPS_RESET), 0);
    if (which <= UD && !shared)
        memset(posted[which], 0, sizeof(posted[which]));
    sends[which] = 0;
}

static void do_something(void)
{
    int which, queue;

    for (which = 0; which < QPS; which++) {
        if (atomic_load(&to_soft_qp(qps[which])->state) == IBV_QPS_ERR || one_in(500)) {
            reset(which);
            bring_up(which);
        }
    }
    if (one_in(100)) {
        REQUIRE_EQ(soft_verbs.dereg_mr(remote), 0);
        register_remote();
    }
    if (one_in(200)) {
        queue = XRC_A + (int)any(2);
        REQUIRE_EQ(soft_verbs.destroy_srq(srqs[queue]), 0);
        make_xrc_queue(queue);
    }
    post_receives();
    post_sends();
    for (which = 0; which < 64 && poll_one(); which++)
        ;
    REQUIRE(!atomic_load(&to_soft_cq(cq)->overrun));
}

/* ---- Main
 * ----------------------------------------------------------------------------------------------------------- */

static void open_all(enum soft_mode mode)
{
    struct check_variant like = {"fuzz", {.mode = mode}, false};
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1, .hop_limit = 1}};
    int which;

    new_directory();
    like.options.settings = &settings;
    home_open_like(&home, &like);
    cq = home_cq(&home, 1024, NULL);
    rooms = soft_verbs.reg_mr(home.base, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
    own = soft_verbs.reg_mr(home.base, own_memory, sizeof(own_memory), IBV_ACCESS_LOCAL_WRITE);
    REQUIRE(rooms && own);
    register_remote();
    attr.grh.dgid = peer_gids[0];
    ah = soft_verbs.create_ah(home.base, &attr);
    REQUIRE(ah != NULL);
    xrcd = make_xrcd(home.context);
    srqs[SHARED] = make_srq(&home, SLOTS);
    make_xrc_queue(XRC_A);
    make_xrc_queue(XRC_B);
    for (which = 0; which < QPS; which++)
        make_qp_of(which);
    memcpy(gids, to_soft_context(home.context)->device->gids, sizeof(gids));
    memset(payload, SENT, sizeof(payload));
}

/* Nothing is in flight any more: each receive of a shared queue that did not complete must still be there. */
static void check_receives(int queue)
{
    const struct soft_srq *srq = to_soft_srq(srqs[queue]);
    uint32_t slot, expected = 0;

    for (slot = 0; slot < SLOTS; slot++)
        expected += posted[queue][slot];
    CHECK_EQ(atomic_load(srq->posted) - srq->consumed, expected);
    CHECK_EQ(atomic_load(&srq->outstanding), expected);
}

static void close_all(void)
{
    int which, queue;

    for (which = 0; which < QPS; which++) {
        reset(which);
        CHECK_EQ(soft_verbs.destroy_qp(qps[which]), 0);
    }
    while (poll_one())
        ;
    for (queue = SHARED; queue < QUEUES; queue++) {
        check_receives(queue);
        CHECK_EQ(soft_verbs.destroy_srq(srqs[queue]), 0);
    }
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    CHECK_EQ(soft_verbs.destroy_ah(ah), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.dereg_mr(remote), 0);
    CHECK_EQ(soft_verbs.dereg_mr(own), 0);
    CHECK_EQ(soft_verbs.dereg_mr(rooms), 0);
    home_close(&home);
    CHECK_EQ(rmdir(directory()), 0);
}

static void open_requester(struct requester *requester, unsigned int number)
{
    requester->node = node_open_at(peer_gids, 0);
    requester->node->device.fabric->user = &hostile;
    sender_open(&requester->sender, requester->node, &gids[number % 2], number);
}

int main(int argc, char **argv)
{
    static struct requester requesters[REQUESTERS];
    pthread_t threads[REQUESTERS];
    unsigned int i;
    uint64_t end;

    if (argc < 3 || argc > 4 || (strcmp(argv[1], "inline") && strcmp(argv[1], "thread"))) {
        fprintf(stderr, "usage: %s {inline,thread} SECONDS [SEED]\n", argv[0]);
        return 2;
    }
    seed = argc > 3 ? strtoull(argv[3], NULL, 0) : now_ns();
    seed_thread();
    open_all(strcmp(argv[1], "inline") ? SOFT_THREAD : SOFT_INLINE);
    for (i = 0; i < REQUESTERS; i++)
        open_requester(&requesters[i], i);
    REQUIRE_EQ(soft_fabric_listen(&requesters[0].node->device), 0);
    for (i = 0; i < REQUESTERS; i++)
        REQUIRE_EQ(pthread_create(&threads[i], NULL, send_requests, &requesters[i]), 0);
    end = now_ns() + strtoull(argv[2], NULL, 0) * 1000000000u;
    while (now_ns() < end)
        do_something();
    atomic_store(&over, true);
    for (i = 0; i < REQUESTERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
        sender_close(&requesters[i].sender);
        node_close(requesters[i].node);
    }
    close_all();
    printf("%s, seed %llu: %llu requests, %llu answers; %llu completions were good, %llu flushed, %llu others\n",
           argv[1], (unsigned long long)seed, (unsigned long long)requests, (unsigned long long)answers,
           (unsigned long long)outcomes[0], (unsigned long long)outcomes[1], (unsigned long long)outcomes[2]);
    return check_failures() != 0;
}
