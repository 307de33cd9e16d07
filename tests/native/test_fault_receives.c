/* Tests of fault plans for receives: the effect of each status on both ends, for every kind of message that uses a
 * receive. */
#include "support.h"
#include "support_async.h"
#include "support_srq.h"
#include "support_types.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define FIRST(n) ((struct soft_strike){.first = (n)})

/* Two ends, and the queues where the receives of the second are posted and complete. */
struct road {
    struct home home, far; /* of the shared queue; only an XRC road across contexts has `far` */
    struct end from, to, room;
    struct ibv_xrcd *xrcd, *other_xrcd;
    struct ibv_srq *srq;
    uint32_t srq_number; /* XRC */
    struct ibv_cq *recv_cq;
    struct ibv_ah *ah;
    enum ibv_qp_type type; /* the sender's */
};

static void connect_ends(struct road *road)
{
    type_connect(road->from.qp, &default_link, road->to.qp->qp_num);
    type_connect(road->to.qp, &default_link, road->from.qp->qp_num);
}

static struct ibv_xrcd *open_by(struct ibv_context *context, int fd)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = O_CREAT};
    struct ibv_xrcd *xrcd = verbs_open_xrcd(context, &attr);

    REQUIRE(xrcd != NULL);
    return xrcd;
}

/* Open a target in one context, and the shared queue with its domain, memory and completions in the same or in another
 * one. */
static void open_xrc(struct road *road, bool across)
{
    int fd = memfd_create("domain", MFD_CLOEXEC);
    struct home *far = &road->home;

    REQUIRE(fd >= 0);
    if (across) {
        far = &road->far;
        home_open(far);
        async_nonblocking(far->context);
    }
    road->xrcd = open_by(road->home.context, fd);
    road->other_xrcd = open_by(far->context, fd);
    close(fd);
    road->recv_cq = home_cq(far, 16, NULL);
    road->srq = try_xrc_srq(far, road->other_xrcd, road->recv_cq, 16);
    REQUIRE(road->srq != NULL);
    REQUIRE_EQ(verbs_get_srq_num(road->srq, &road->srq_number), 0);
    TYPED_OPEN(&road->room, far, .type = IBV_QPT_RC);
    TYPED_OPEN(&road->from, &road->home, .type = IBV_QPT_XRC_SEND);
    TYPED_OPEN(&road->to, &road->home, .type = IBV_QPT_XRC_RECV, .xrcd = road->xrcd);
}

enum way { RC, RC_BY_SRQ, UC, UC_BY_SRQ, UD, UD_BY_SRQ, XRC, XRC_ACROSS, WAYS };

static bool is_told(enum way way)
{
    return way == RC || way == RC_BY_SRQ || way == XRC || way == XRC_ACROSS;
}

static void road_open(struct road *road, enum way way)
{
    static const enum ibv_qp_type types[WAYS] = {IBV_QPT_RC, IBV_QPT_RC, IBV_QPT_UC,       IBV_QPT_UC,
                                                 IBV_QPT_UD, IBV_QPT_UD, IBV_QPT_XRC_SEND, IBV_QPT_XRC_SEND};

    memset(road, 0, sizeof(*road));
    road->type = types[way];
    home_open(&road->home);
    async_nonblocking(road->home.context);
    if (way == XRC || way == XRC_ACROSS) {
        open_xrc(road, way == XRC_ACROSS);
    } else {
        if (way == RC_BY_SRQ || way == UC_BY_SRQ || way == UD_BY_SRQ)
            road->srq = make_srq(&road->home, 16);
        TYPED_OPEN(&road->from, &road->home, .type = road->type);
        TYPED_OPEN(&road->to, &road->home, .type = road->type, .srq = road->srq);
        road->recv_cq = road->to.recv_cq;
    }
    road->ah = make_ah(road->home.base, 1);
    connect_ends(road);
}

static void road_close(struct road *road)
{
    CHECK_EQ(soft_verbs.destroy_ah(road->ah), 0);
    end_close(&road->from);
    end_close(&road->to);
    if (road->srq)
        CHECK_EQ(soft_verbs.destroy_srq(road->srq), 0);
    if (road->xrcd) {
        end_close(&road->room);
        CHECK_EQ(soft_verbs.destroy_cq(road->recv_cq), 0);
        CHECK_EQ(verbs_close_xrcd(road->other_xrcd), 0);
        CHECK_EQ(verbs_close_xrcd(road->xrcd), 0);
    }
    if (road->far.context)
        home_close(&road->far);
    home_close(&road->home);
}

static struct end *room_of(struct road *road)
{
    return road->xrcd ? &road->room : &road->to;
}

static int receive(struct road *road, uint64_t wr_id)
{
    return road->srq ? srq_post_room(road->srq, room_of(road), wr_id, 0, 128) : post_room(&road->to, wr_id, 0, 128);
}

static int send(struct road *road, enum ibv_wr_opcode opcode, uint64_t wr_id)
{
    struct ibv_sge sge = span(&road->from, 0, 8);
    struct ibv_send_wr wr = request_to(opcode, wr_id, &sge, 1, room_of(road), 1000);

    if (road->type == IBV_QPT_UD)
        wr = datagram(opcode, wr_id, &sge, 1, road->ah, road->to.qp->qp_num);
    wr.qp_type.xrc.remote_srqn = road->srq_number;
    return post(road->from.qp, &wr);
}

static void reconnect(struct road *road)
{
    REQUIRE_EQ(qp_to(road->from.qp, IBV_QPS_RESET), 0);
    REQUIRE_EQ(qp_to(road->to.qp, IBV_QPS_RESET), 0);
    connect_ends(road);
}

/* Return the sender's status for a failed receive, as the architecture specifies: a message that is too long is an
 * invalid request. */
static enum ibv_wc_status sender_sees(enum way way, enum ibv_wc_status status)
{
    if (!is_told(way))
        return IBV_WC_SUCCESS;
    return status == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR;
}

/* Send one message for each status: no byte arrives, the receiver breaks, and the sender gets an error if its
 * connection is reliable. */
static void each_status(struct road *road, enum way way, enum ibv_wr_opcode opcode)
{
    struct end *room = room_of(road);
    unsigned int status;
    struct ibv_wc wc;

    for (status = IBV_WC_SUCCESS + 1; status <= IBV_WC_TM_RNDV_INCOMPLETE; status++) {
        struct soft_fault_record record;
        size_t before = soft_fault_records(road->home.context, 0, NULL, 0);

        memset(road->from.memory, 'f', 8);
        memset(room->memory, 'r', 2000);
        REQUIRE_EQ(soft_fault_request(road->home.context, road->to.qp->qp_num, true, FIRST(1),
                                      (enum ibv_wc_status)status, 100 + status),
                   0);
        CHECK_EQ(receive(road, 10), 0);
        CHECK_EQ(send(road, opcode, 1), 0);
        wc = EXPECT(road->recv_cq, 10, (enum ibv_wc_status)status);
        CHECK_EQ(wc.vendor_err, 100 + status);
        CHECK_EQ(wc.qp_num, road->to.qp->qp_num);
        EXPECT(road->from.send_cq, 1, sender_sees(way, (enum ibv_wc_status)status));
        CHECK(wait_state(road->to.qp, IBV_QPS_ERR));
        CHECK_EQ(qp_state(road->from.qp), is_told(way) ? IBV_QPS_ERR : IBV_QPS_RTS);
        CHECK(room->memory[0] == 'r' && room->memory[40] == 'r' && room->memory[1000] == 'r');
        CHECK_EQ(soft_fault_records(road->home.context, before, &record, 1), before + 1);
        CHECK_EQ(record.what, SOFT_RECORD_RECEIVE);
        CHECK_EQ(record.which, road->to.qp->qp_num);
        CHECK_EQ(record.value, status);
        reconnect(road);
    }
    CHECK_EQ(receive(road, 11), 0); /* the rules are spent */
    CHECK_EQ(send(road, opcode, 2), 0);
    EXPECT(road->recv_cq, 11, IBV_WC_SUCCESS);
    EXPECT(road->from.send_cq, 2, IBV_WC_SUCCESS);
}

static void statuses(void)
{
    struct road road;
    unsigned int way;

    for (way = 0; way < WAYS; way++) {
        road_open(&road, (enum way)way);
        each_status(&road, (enum way)way, IBV_WR_SEND);
        if (road.type != IBV_QPT_UD)
            each_status(&road, (enum way)way, IBV_WR_RDMA_WRITE_WITH_IMM);
        road_close(&road);
    }
}

/* If the connection is not reliable, a failed request stops only the send queue. */
static void unreliable_requests(void)
{
    static const enum way ways[] = {UC, UD};
    struct road road;
    size_t i;

    for (i = 0; i < COUNT_OF(ways); i++) {
        road_open(&road, ways[i]);
        REQUIRE_EQ(soft_fault_request(road.home.context, 0, false, FIRST(2), IBV_WC_LOC_QP_OP_ERR, 0), 0);
        CHECK_EQ(receive(&road, 10), 0);
        CHECK_EQ(receive(&road, 11), 0);
        CHECK_EQ(send(&road, IBV_WR_SEND, 1), 0);
        EXPECT(road.recv_cq, 10, IBV_WC_SUCCESS);
        CHECK_EQ(send(&road, IBV_WR_SEND, 2), 0);
        EXPECT(road.from.send_cq, 1, IBV_WC_SUCCESS);
        EXPECT(road.from.send_cq, 2, IBV_WC_LOC_QP_OP_ERR);
        CHECK(wait_state(road.from.qp, IBV_QPS_SQE));
        CHECK_EQ(qp_to(road.from.qp, IBV_QPS_RTS), 0);
        CHECK_EQ(send(&road, IBV_WR_SEND, 3), 0);
        EXPECT(road.from.send_cq, 3, IBV_WC_SUCCESS);
        EXPECT(road.recv_cq, 11, IBV_WC_SUCCESS);
        CHECK_EQ(qp_state(road.to.qp), IBV_QPS_RTS);
        road_close(&road);
    }
}

/* ---- XRC across contexts ------------------------------------------------------------------------------------ */

static bool wait_held(struct ibv_context *context, size_t count)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;

    while (soft_fault_held(context) != count && now_ns() < end)
        sleep_us(100);
    return soft_fault_held(context) == count;
}

/* The context of the completion queue holds completions, and drops them with the queue; the target's context does
 * not. */
static void held_across_contexts(void)
{
    struct ibv_context *near, *far;
    struct road road;

    road_open(&road, XRC_ACROSS);
    near = road.home.context;
    far = road.far.context;
    REQUIRE_EQ(soft_fault_hold(near, 0), 0);
    REQUIRE_EQ(soft_fault_hold(far, 0), 0);
    CHECK_EQ(receive(&road, 10), 0);
    CHECK_EQ(receive(&road, 11), 0);
    CHECK_EQ(send(&road, IBV_WR_SEND, 1), 0);
    CHECK(wait_held(near, 1));
    CHECK(wait_held(far, 1));
    soft_fault_unhold(far);
    EXPECT(road.recv_cq, 10, IBV_WC_SUCCESS);
    REQUIRE_EQ(soft_fault_hold(far, 0), 0);
    CHECK_EQ(send(&road, IBV_WR_SEND, 2), 0);
    CHECK(wait_held(near, 2));
    CHECK(wait_held(far, 1));
    CHECK_EQ(soft_verbs.destroy_srq(road.srq), 0);
    road.srq = NULL;
    CHECK_EQ(soft_fault_held(far), 0);
    soft_fault_unhold(near);
    EXPECT(road.from.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(road.from.send_cq, 2, IBV_WC_SUCCESS);
    soft_fault_unhold(far);
    EXPECT_EMPTY(road.recv_cq);
    road_close(&road);
}

/* The device of the shared queue's context is lost: nothing completes there, and no response is sent. */
static void lost_across_contexts(void)
{
    struct road road;

    road_open(&road, XRC_ACROSS);
    CHECK_EQ(receive(&road, 10), 0);
    REQUIRE_EQ(soft_lose(road.far.context), 0);
    EXPECT_ASYNC_PORT(road.far.context, IBV_EVENT_DEVICE_FATAL);
    CHECK_EQ(send(&road, IBV_WR_SEND, 1), 0);
    EXPECT(road.from.send_cq, 1, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EMPTY(road.recv_cq);
    road_close(&road);
}

CHECK_MAIN(CASE(statuses), CASE(unreliable_requests), CASE(held_across_contexts), CASE(lost_across_contexts))
