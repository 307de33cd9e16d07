/* Tests of errors that break a connection: status, side, and the outcome of all posted requests. */
#include "support.h"

#include <sys/mman.h>

#define BIG (64u << 20)

enum fault {
    LOCAL_KEY,
    LOCAL_KEY_OF_A_READ,
    TOO_LONG,
    ATOMIC_TOO_SHORT,
    ATOMIC_TOO_LONG,
    NO_READS_AGREED,
    NO_ATOMICS_AGREED,
    REMOTE_KEY,
    REMOTE_KEY_OF_A_READ,
    REMOTE_KEY_OF_AN_ATOMIC,
    READS_REFUSED,
    ATOMICS_REFUSED,
    ATOMIC_MISALIGNED,
    RECEIVE_TOO_SHORT,
    RECEIVE_KEY,
    FAULTS
};

static const struct {
    const char *name;
    enum ibv_wc_status status;
    bool breaks_peer;
    enum ibv_wc_status receive; /* of the peer's first receive, where it was taken */
} faults[FAULTS] = {
    [LOCAL_KEY] = {"LOCAL_KEY", IBV_WC_LOC_PROT_ERR, false, 0},
    [LOCAL_KEY_OF_A_READ] = {"LOCAL_KEY_OF_A_READ", IBV_WC_LOC_PROT_ERR, false, 0},
    [TOO_LONG] = {"TOO_LONG", IBV_WC_LOC_LEN_ERR, false, 0},
    [ATOMIC_TOO_SHORT] = {"ATOMIC_TOO_SHORT", IBV_WC_LOC_LEN_ERR, false, 0},
    [ATOMIC_TOO_LONG] = {"ATOMIC_TOO_LONG", IBV_WC_LOC_LEN_ERR, false, 0},
    [NO_READS_AGREED] = {"NO_READS_AGREED", IBV_WC_LOC_QP_OP_ERR, false, 0},
    [NO_ATOMICS_AGREED] = {"NO_ATOMICS_AGREED", IBV_WC_LOC_QP_OP_ERR, false, 0},
    [REMOTE_KEY] = {"REMOTE_KEY", IBV_WC_REM_ACCESS_ERR, true, 0},
    [REMOTE_KEY_OF_A_READ] = {"REMOTE_KEY_OF_A_READ", IBV_WC_REM_ACCESS_ERR, true, 0},
    [REMOTE_KEY_OF_AN_ATOMIC] = {"REMOTE_KEY_OF_AN_ATOMIC", IBV_WC_REM_ACCESS_ERR, true, 0},
    [READS_REFUSED] = {"READS_REFUSED", IBV_WC_REM_INV_REQ_ERR, true, 0},
    [ATOMICS_REFUSED] = {"ATOMICS_REFUSED", IBV_WC_REM_INV_REQ_ERR, true, 0},
    [ATOMIC_MISALIGNED] = {"ATOMIC_MISALIGNED", IBV_WC_REM_INV_REQ_ERR, true, 0},
    [RECEIVE_TOO_SHORT] = {"RECEIVE_TOO_SHORT", IBV_WC_REM_INV_REQ_ERR, true, IBV_WC_LOC_LEN_ERR},
    [RECEIVE_KEY] = {"RECEIVE_KEY", IBV_WC_REM_OP_ERR, true, IBV_WC_LOC_PROT_ERR},
};

static struct ibv_qp_attr link_of(enum fault fault, bool of_the_peer)
{
    struct ibv_qp_attr link = default_link;

    if (!of_the_peer && (fault == NO_READS_AGREED || fault == NO_ATOMICS_AGREED))
        link.max_rd_atomic = 0;
    if (of_the_peer && (fault == READS_REFUSED || fault == ATOMICS_REFUSED))
        link.max_dest_rd_atomic = 0;
    link.min_rnr_timer = 0; /* a send that finds no receive stays where it is */
    return link;
}

/* Make the request that fails. */
static struct ibv_send_wr spoiled(enum fault fault, struct pair *pair, struct ibv_sge *list, const struct ibv_mr *big)
{
    struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 1, list, 1, &pair->b, 0);
    int i;

    list[0] = span(&pair->a, 0, 8);
    switch (fault) {
    case LOCAL_KEY:
        list[0].lkey ^= 1;
        break;
    case LOCAL_KEY_OF_A_READ:
        wr.opcode = IBV_WR_RDMA_READ;
        list[0].lkey ^= 1;
        break;
    case TOO_LONG:
        wr.num_sge = 17; /* of 64 MiB each: more than the 1 GiB of a message */
        for (i = 0; i < 17; i++)
            list[i] = (struct ibv_sge){(uintptr_t)big->addr, BIG, big->lkey};
        break;
    case NO_ATOMICS_AGREED:
    case REMOTE_KEY_OF_AN_ATOMIC:
    case ATOMICS_REFUSED:
    case ATOMIC_MISALIGNED:
    case ATOMIC_TOO_LONG:
    case ATOMIC_TOO_SHORT:
        wr = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, list, 1, &pair->b, fault == ATOMIC_MISALIGNED ? 4 : 0);
        list[0].length = fault == ATOMIC_TOO_LONG ? 9 : fault == ATOMIC_TOO_SHORT ? 7 : 8;
        if (fault == REMOTE_KEY_OF_AN_ATOMIC)
            wr.wr.atomic.rkey ^= 1;
        break;
    case REMOTE_KEY:
        wr.wr.rdma.rkey ^= 1;
        break;
    case REMOTE_KEY_OF_A_READ:
        wr.wr.rdma.rkey ^= 1;
        wr.opcode = IBV_WR_RDMA_READ;
        break;
    case NO_READS_AGREED:
    case READS_REFUSED:
        wr.opcode = IBV_WR_RDMA_READ;
        break;
    default:
        wr.opcode = IBV_WR_SEND;
        list[0].length = 9; /* the receives of the test have room for 8 bytes */
        if (fault == RECEIVE_KEY)
            list[0].length = 8;
        break;
    }
    return wr;
}

static void post_receives(struct pair *pair, enum fault fault)
{
    struct ibv_sge sge = span(&pair->b, 0, 8);

    if (fault == RECEIVE_KEY)
        sge.lkey ^= 1;
    CHECK_EQ(post_receive_list(&pair->b, 20, &sge, 1), 0);
    CHECK_EQ(post_receive(&pair->b, 21, 8), 0);
}

/* After RESET both ends work like new ones. */
static void check_recovery(struct pair *pair)
{
    CHECK_EQ(qp_to(pair->a.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(qp_to(pair->b.qp, IBV_QPS_RESET), 0);
    qp_connect(pair->a.qp, &default_link, pair->b.qp->qp_num);
    qp_connect(pair->b.qp, &default_link, pair->a.qp->qp_num);
    CHECK_EQ(post_receive(&pair->b, 30, 8), 0);
    CHECK_EQ(post_send(&pair->a, 31, 8), 0);
    EXPECT(pair->a.send_cq, 31, IBV_WC_SUCCESS);
    EXPECT(pair->b.recv_cq, 30, IBV_WC_SUCCESS);
    EXPECT_NOTHING(pair->a.send_cq);
    EXPECT_NOTHING(pair->b.recv_cq);
    EXPECT_NOTHING(pair->a.recv_cq);
    EXPECT_NOTHING(pair->b.send_cq);
}

/* `receiving`: the sender has receives posted; else the peer has a send that waits for one. */
static void run_fault(enum fault fault, bool receiving, const struct ibv_mr *big, struct home *home)
{
    struct ibv_qp_attr link_a = link_of(fault, false), link_b = link_of(fault, true);
    struct ibv_sge list[17], good = {0};
    struct ibv_send_wr wrs[3];
    struct pair pair;

    PAIR_OPEN(&pair, .homes = {home, home}, .cap = {8, 8, 17, 1, 0}, .unconnected = true);
    qp_connect(pair.a.qp, &link_a, pair.b.qp->qp_num);
    qp_connect(pair.b.qp, &link_b, pair.a.qp->qp_num);
    post_receives(&pair, fault);
    if (receiving) {
        CHECK_EQ(post_receive(&pair.a, 40, 8), 0);
        CHECK_EQ(post_receive(&pair.a, 41, 8), 0);
    } else if (faults[fault].breaks_peer) { /* otherwise nothing would end its wait */
        CHECK_EQ(post_send(&pair.b, 10, 8), 0);
        CHECK_EQ(post_write(&pair.b, &pair.a, 11, 8), 0);
        settle(home->context);
    }
    good = span(&pair.a, 0, 1);
    wrs[0] = spoiled(fault, &pair, list, big);
    wrs[1] = request_to(IBV_WR_RDMA_WRITE, 2, &good, 1, &pair.b, 100);
    wrs[1].send_flags = 0; /* a failed request completes, signalled or not */
    wrs[2] = request_to(IBV_WR_RDMA_WRITE, 3, &good, 1, &pair.b, 100);
    wrs[0].next = &wrs[1];
    wrs[1].next = &wrs[2];
    pair.a.memory[0] = 77;
    CHECK_EQ(post(pair.a.qp, wrs), 0);

    CHECK_EQ(EXPECT(pair.a.send_cq, 1, faults[fault].status).qp_num, pair.a.qp->qp_num);
    EXPECT(pair.a.send_cq, 2, IBV_WC_WR_FLUSH_ERR);
    EXPECT(pair.a.send_cq, 3, IBV_WC_WR_FLUSH_ERR);
    if (receiving) {
        EXPECT(pair.a.recv_cq, 40, IBV_WC_WR_FLUSH_ERR);
        EXPECT(pair.a.recv_cq, 41, IBV_WC_WR_FLUSH_ERR);
    }
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_ERR);
    CHECK_EQ(pair.b.memory[100], 0); /* what was flushed was not executed */

    if (faults[fault].breaks_peer) {
        EXPECT(pair.b.recv_cq, 20, faults[fault].receive ? faults[fault].receive : IBV_WC_WR_FLUSH_ERR);
        EXPECT(pair.b.recv_cq, 21, IBV_WC_WR_FLUSH_ERR);
        if (!receiving) {
            EXPECT(pair.b.send_cq, 10, IBV_WC_WR_FLUSH_ERR);
            EXPECT(pair.b.send_cq, 11, IBV_WC_WR_FLUSH_ERR);
        }
        CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_ERR);
    } else {
        EXPECT_NOTHING(pair.b.recv_cq);
        CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS);
    }
    check_recovery(&pair);
    pair_close(&pair);
}

static void every_fault(void)
{
    void *memory = mmap(NULL, BIG, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct ibv_mr *big;
    struct home home;
    int fault;

    REQUIRE(memory != MAP_FAILED);
    home_open(&home);
    big = soft_verbs.reg_mr(home.base, memory, BIG, 0);
    REQUIRE(big != NULL);
    for (fault = 0; fault < FAULTS; fault++) {
        unsigned int before = check_failures();

        run_fault((enum fault)fault, false, big, &home);
        run_fault((enum fault)fault, true, big, &home);
        if (check_failures() != before)
            printf("with %s\n", faults[fault].name);
    }
    CHECK_EQ(soft_verbs.dereg_mr(big), 0);
    home_close(&home);
    munmap(memory, BIG);
}

/* An unsignalled request that fails completes, and frees the places of those before it. */
static void unsignalled_failure(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;
    int i;

    PAIR_OPEN(&pair, 0);
    sge = span(&pair.a, 0, 8);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair.b, 0);
    wr.send_flags = 0;
    for (i = 0; i < 3; i++)
        CHECK_EQ(post(pair.a.qp, &wr), 0);
    wr.wr_id = 2;
    wr.wr.rdma.rkey ^= 1;
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_REM_ACCESS_ERR);
    EXPECT_NOTHING(pair.a.send_cq);
    pair_close(&pair);
}

/* A failed message writes nothing: it is checked before its first byte is copied. */
static void failed_scatter_writes_nothing(void)
{
    struct ibv_sge list[2], target[2];
    struct ibv_send_wr wr;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    memset(pair.a.memory, 5, 64);
    list[0] = span(&pair.a, 0, 8);
    list[1] = span(&pair.a, 8, 8);
    list[1].lkey ^= 1;
    wr = request_to(IBV_WR_RDMA_WRITE, 1, list, 2, &pair.b, 0);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_LOC_PROT_ERR);
    CHECK_EQ(pair.b.memory[0], 0);
    check_recovery(&pair);

    memset(pair.b.memory, 0, 64);
    target[0] = span(&pair.b, 0, 8);
    target[1] = span(&pair.b, 8, 8);
    target[1].lkey ^= 1;
    list[1].lkey ^= 1;
    CHECK_EQ(post_receive_list(&pair.b, 2, target, 2), 0);
    wr.opcode = IBV_WR_SEND;
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_REM_OP_ERR);
    EXPECT(pair.b.recv_cq, 2, IBV_WC_LOC_PROT_ERR);
    CHECK_EQ(pair.b.memory[0], 0);
    pair_close(&pair);
}

CHECK_MAIN(CASE(every_fault), CASE(unsignalled_failure), CASE(failed_scatter_writes_nothing))
