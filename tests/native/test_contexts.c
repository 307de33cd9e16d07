/* Tests of several contexts at once, with the same or different execution modes, connected to each other. */
#include "support.h"

static const struct check_variant others[] = {
    {"inline", {.mode = SOFT_INLINE}, false},
    {"inline-td", {.mode = SOFT_INLINE}, true},
    {"thread", {.mode = SOFT_THREAD}, false},
    {"thread-td", {.mode = SOFT_THREAD}, true},
    {"delayed", {.mode = SOFT_THREAD, .delay_ns = 300000}, true},
};

/* A home of the running variant and one of another, with a pair across them. */
struct bridge {
    struct home here, there;
    struct pair pair;
};

static void open_bridge(struct bridge *bridge, size_t other, const struct ibv_qp_attr *link)
{
    home_open(&bridge->here);
    home_open_like(&bridge->there, &others[other]);
    PAIR_OPEN(&bridge->pair, .homes = {&bridge->here, &bridge->there}, .link = link);
    CHECK(bridge->pair.a.qp->context != bridge->pair.b.qp->context);
}

static void close_bridge(struct bridge *bridge)
{
    pair_close(&bridge->pair);
    home_close(&bridge->here);
    home_close(&bridge->there);
}

/* Every operation from one end to the other. */
static void exchange(struct end *from, struct end *to)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
                                                 IBV_WR_ATOMIC_CMP_AND_SWP};
    struct ibv_sge sge = span(from, 0, 8);
    size_t i;

    memset(from->memory, 1, 64);
    memset(to->memory, 2, 64);
    CHECK_EQ(post_receive(to, 10, 64), 0);
    CHECK_EQ(post_send(from, 11, 64), 0);
    EXPECT(from->send_cq, 11, IBV_WC_SUCCESS);
    CHECK_EQ(EXPECT(to->recv_cq, 10, IBV_WC_SUCCESS).byte_len, 64);
    CHECK_EQ(to->memory[63], 1);
    for (i = 0; i < COUNT_OF(opcodes); i++) {
        struct ibv_send_wr wr = request_to(opcodes[i], i, &sge, 1, to, 64);

        CHECK_EQ(post(from->qp, &wr), 0);
        EXPECT(from->send_cq, i, IBV_WC_SUCCESS);
    }
}

static void connected(void)
{
    struct bridge bridge;
    size_t other;

    for (other = 0; other < COUNT_OF(others); other++) {
        open_bridge(&bridge, other, NULL);
        exchange(&bridge.pair.a, &bridge.pair.b);
        exchange(&bridge.pair.b, &bridge.pair.a);
        close_bridge(&bridge);
    }
}

/* A send before its receive, each way: the sender's device retries. */
static void not_ready(void)
{
    struct ibv_sge a, b;
    struct bridge bridge;
    size_t other;

    for (other = 0; other < COUNT_OF(others); other++) {
        open_bridge(&bridge, other, NULL);
        a = span(&bridge.pair.a, 64, 8); /* beside what is being sent */
        b = span(&bridge.pair.b, 64, 8);
        CHECK_EQ(post_send(&bridge.pair.a, 1, 8), 0);
        CHECK_EQ(post_send(&bridge.pair.b, 2, 8), 0);
        settle(bridge.pair.a.qp->context);
        CHECK_EQ(post_receive_list(&bridge.pair.a, 3, &a, 1), 0);
        CHECK_EQ(post_receive_list(&bridge.pair.b, 4, &b, 1), 0);
        EXPECT(bridge.pair.a.send_cq, 1, IBV_WC_SUCCESS);
        EXPECT(bridge.pair.b.send_cq, 2, IBV_WC_SUCCESS);
        EXPECT(bridge.pair.a.recv_cq, 3, IBV_WC_SUCCESS);
        EXPECT(bridge.pair.b.recv_cq, 4, IBV_WC_SUCCESS);
        close_bridge(&bridge);
    }
}

/* An error breaks both ends, and each device flushes its own. */
static void broken(void)
{
    struct ibv_qp_attr link = default_link;
    struct bridge bridge;
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    size_t other;
    int way;

    link.min_rnr_timer = 0; /* a send without a receive stays where it is */
    for (other = 0; other < COUNT_OF(others); other++) {
        for (way = 0; way < 2; way++) {
            struct end *from, *to;

            open_bridge(&bridge, other, &link);
            from = way ? &bridge.pair.b : &bridge.pair.a;
            to = way ? &bridge.pair.a : &bridge.pair.b;
            CHECK_EQ(post_receive(to, 5, 8), 0);
            CHECK_EQ(post_send(to, 6, 8), 0);
            settle(bridge.pair.a.qp->context);
            sge = span(from, 0, 8);
            wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, to, 0);
            wr.wr.rdma.rkey ^= 1;
            CHECK_EQ(post(from->qp, &wr), 0);
            EXPECT(from->send_cq, 1, IBV_WC_REM_ACCESS_ERR);
            EXPECT(to->recv_cq, 5, IBV_WC_WR_FLUSH_ERR);
            EXPECT(to->send_cq, 6, IBV_WC_WR_FLUSH_ERR);
            CHECK_EQ(qp_state(from->qp), IBV_QPS_ERR);
            CHECK_EQ(qp_state(to->qp), IBV_QPS_ERR);
            close_bridge(&bridge);
        }
    }
}

/* Keys of one context's domain do not serve queue pairs of another's. */
static void keys_do_not_cross(void)
{
    struct bridge bridge;
    struct ibv_send_wr wr;
    struct ibv_sge sge;

    open_bridge(&bridge, 0, NULL);
    sge = (struct ibv_sge){(uintptr_t)bridge.pair.b.memory, 8, bridge.pair.b.mr->lkey};
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &bridge.pair.b, 0);
    CHECK_EQ(post(bridge.pair.a.qp, &wr), 0);
    EXPECT(bridge.pair.a.send_cq, 1, IBV_WC_LOC_PROT_ERR);
    close_bridge(&bridge);

    open_bridge(&bridge, 2, NULL);
    sge = span(&bridge.pair.a, 0, 8);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &bridge.pair.a, 64); /* the sender's own key */
    CHECK_EQ(post(bridge.pair.a.qp, &wr), 0);
    EXPECT(bridge.pair.a.send_cq, 1, IBV_WC_REM_ACCESS_ERR);
    close_bridge(&bridge);
}

/* One context is closed while the other still sends to it. */
static void one_context_closes_first(void)
{
    struct ibv_qp_attr link = default_link;
    struct bridge bridge;
    size_t other;

    link.timeout = 9; /* 2 ms */
    link.retry_cnt = 2;
    for (other = 0; other < COUNT_OF(others); other++) {
        open_bridge(&bridge, other, &link);
        CHECK_EQ(post_write(&bridge.pair.a, &bridge.pair.b, 1, 8), 0);
        EXPECT(bridge.pair.a.send_cq, 1, IBV_WC_SUCCESS);
        CHECK_EQ(post_write(&bridge.pair.b, &bridge.pair.a, 2, 8), 0); /* perhaps still to be done */
        CHECK_EQ(soft_verbs.close_device(bridge.there.context), EBUSY);
        end_close(&bridge.pair.b);
        memset(&bridge.pair.b, 0, sizeof(bridge.pair.b));
        home_close(&bridge.there);
        CHECK_EQ(post_send(&bridge.pair.a, 3, 8), 0);
        EXPECT(bridge.pair.a.send_cq, 3, IBV_WC_RETRY_EXC_ERR);
        pair_close(&bridge.pair);
        home_close(&bridge.here);
    }
}

/* Many contexts at a time, each with its own thread if it has one. */
static void many(void)
{
    struct home homes[12];
    struct pair pairs[12];
    size_t i, round;

    for (i = 0; i < COUNT_OF(homes); i++)
        home_open_like(&homes[i], &others[i % COUNT_OF(others)]);
    for (i = 0; i < COUNT_OF(pairs); i++) {
        struct home *next = &homes[(i + 1) % COUNT_OF(homes)];

        PAIR_OPEN(&pairs[i], .homes = {&homes[i], next}, .memory = 4096);
    }
    for (round = 0; round < 20; round++) {
        for (i = 0; i < COUNT_OF(pairs); i++)
            CHECK_EQ(post_write(&pairs[i].a, &pairs[i].b, round, 4096), 0);
        for (i = 0; i < COUNT_OF(pairs); i++)
            EXPECT(pairs[i].a.send_cq, round, IBV_WC_SUCCESS);
    }
    for (i = 0; i < COUNT_OF(pairs); i++)
        pair_close(&pairs[i]);
    for (i = 0; i < COUNT_OF(homes); i++)
        home_close(&homes[i]);
}

/* Numbers of queue pairs are the device's, not a context's: a peer is found by number alone. */
static void numbers_are_unique_per_device(void)
{
    struct bridge bridge;

    open_bridge(&bridge, 2, NULL);
    CHECK(bridge.pair.a.qp->qp_num != bridge.pair.b.qp->qp_num);
    CHECK(bridge.here.context->device == bridge.there.context->device);
    close_bridge(&bridge);
}

CHECK_MAIN(CASE(connected), CASE(not_ready), CASE(broken), CASE(keys_do_not_cross), CASE(one_context_closes_first),
           CASE(many), CASE(numbers_are_unique_per_device))
