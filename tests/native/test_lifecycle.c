/* Tests of queue pairs that leave RTS: drained, flushed, reset, destroyed. */
#include "support.h"
#include "support_threads.h"

/* In ERR all posted requests are flushed, in order, at once. */
static void posting_in_error(void)
{
    struct pair pair;
    uint64_t i;

    PAIR_OPEN(&pair, 0);
    CHECK_EQ(post_receive(&pair.a, 1, 8), 0);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
    EXPECT(pair.a.recv_cq, 1, IBV_WC_WR_FLUSH_ERR);
    for (i = 2; i < 40; i += 2) { /* more than the queues hold at a time */
        CHECK_EQ(post_receive(&pair.a, i, 8), 0);
        CHECK_EQ(post_send(&pair.a, i + 1, 8), 0);
        CHECK_EQ(EXPECT(pair.a.recv_cq, i, IBV_WC_WR_FLUSH_ERR).qp_num, pair.a.qp->qp_num);
        EXPECT(pair.a.send_cq, i + 1, IBV_WC_WR_FLUSH_ERR);
    }
    CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS); /* a queue pair without messages does not notice */
    pair_close(&pair);
}

/* ERR from INIT and RTR flushes the posted requests. */
static void error_from_early_states(void)
{
    struct pair pair;
    int rtr;

    for (rtr = 0; rtr < 2; rtr++) {
        PAIR_OPEN(&pair, .unconnected = true);
        CHECK_EQ(qp_to_init(pair.a.qp, &default_link), 0);
        CHECK_EQ(post_receive(&pair.a, 1, 8), 0);
        if (rtr)
            CHECK_EQ(qp_to_rtr(pair.a.qp, &default_link, pair.b.qp->qp_num), 0);
        CHECK_EQ(post_receive(&pair.a, 2, 8), 0);
        CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
        EXPECT(pair.a.recv_cq, 1, IBV_WC_WR_FLUSH_ERR);
        EXPECT(pair.a.recv_cq, 2, IBV_WC_WR_FLUSH_ERR);
        pair_close(&pair);
    }
}

/* Flushing does not wait for the delay of the worker thread. */
static void flushing_completes_at_once(void)
{
    struct pair pair;
    uint64_t i;

    PAIR_OPEN(&pair, 0);
    if (variant->options.mode == SOFT_THREAD)
        CHECK_EQ(soft_set_delay(pair.own.context, UINT64_MAX), 0); /* never */
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_ERR), 0);
    for (i = 0; i < 3; i++)
        CHECK_EQ(post_write(&pair.a, &pair.b, i, 8), 0);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
    for (i = 0; i < 3; i++)
        EXPECT(pair.a.send_cq, i, IBV_WC_WR_FLUSH_ERR);
    pair_close(&pair);
}

/* A queue pair in RTR receives, but does not send. */
static void receiving_before_sending(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, .unconnected = true);
    qp_connect(pair.a.qp, &default_link, pair.b.qp->qp_num);
    CHECK_EQ(qp_to_init(pair.b.qp, &default_link), 0);
    CHECK_EQ(post_receive(&pair.b, 1, 8), 0);
    CHECK_EQ(qp_to_rtr(pair.b.qp, &default_link, pair.a.qp->qp_num), 0);
    CHECK_EQ(post_send(&pair.a, 2, 8), 0);
    EXPECT(pair.b.recv_cq, 1, IBV_WC_SUCCESS);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(post_send(&pair.b, 3, 8), EINVAL);
    CHECK_EQ(qp_to_rts(pair.b.qp, &default_link), 0);
    CHECK_EQ(post_write(&pair.b, &pair.a, 4, 8), 0);
    EXPECT(pair.b.send_cq, 4, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* In SQD posted sends wait, receiving goes on; RTS sends them, in order. */
static void drained(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(post_receive(&pair.a, 3, 8), 0);
    CHECK_EQ(post_send(&pair.b, 4, 8), 0);
    EXPECT(pair.a.recv_cq, 3, IBV_WC_SUCCESS);
    EXPECT(pair.b.send_cq, 4, IBV_WC_SUCCESS);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 5, 8), 0);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
    EXPECT(pair.a.send_cq, 5, IBV_WC_WR_FLUSH_ERR);
    pair_close(&pair);
}

/* A send that waits for a receive was sent before, and finishes; the one behind it waits. */
static void drained_while_retrying(void)
{
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr;
    struct pair pair;

    PAIR_OPEN(&pair, 0); /* again every 10 us, without end */
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    CHECK_EQ(post_send(&pair.a, 2, 8), 0);
    wait_begun(pair.a.qp);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0);
    CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, 0, &init_attr), 0);
    CHECK_EQ(attr.sq_draining, 1);
    attr = default_link, attr.qp_state = IBV_QPS_SQD;
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_RETRY_CNT), EINVAL); /* not while it drains */
    CHECK_EQ(post_receive(&pair.b, 3, 8), 0);
    CHECK_EQ(post_receive(&pair.b, 4, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, 0, &init_attr), 0);
    CHECK_EQ(attr.sq_draining, 0);
    attr = default_link, attr.qp_state = IBV_QPS_SQD;
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_RETRY_CNT), 0);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* Completions that were not polled are removed with their queue pair; those of others stay. */
static void purge(bool destroy)
{
    enum { QPS = 3, EACH = 4 };
    struct ibv_qp *qps[QPS];
    struct ibv_cq *cq;
    uint64_t i, q, left = 2 * (QPS - 1) * EACH;
    struct ibv_wc wc;
    struct home home;

    home_open(&home);
    cq = home_cq(&home, 64, NULL);
    for (q = 0; q < QPS; q++)
        qps[q] = make_loop(home.pd, cq, 8);
    for (i = 0; i < EACH; i++) { /* interleaved: a send and a receive of each in turn */
        for (q = 0; q < QPS; q++) {
            struct ibv_send_wr wr = request(IBV_WR_SEND, q << 8 | i << 1, NULL, 0);
            struct ibv_recv_wr recv = {.wr_id = q << 8 | i << 1 | 1}, *bad;

            CHECK_EQ(verbs_post_recv(qps[q], &recv, &bad), 0);
            CHECK_EQ(post(qps[q], &wr), 0);
        }
    }
    for (q = 0; q < QPS; q++)
        wait_executed(qps[q], EACH);
    REQUIRE(wait_completion(cq, &wc)); /* so that the queue does not begin at its beginning */
    left -= wc.wr_id >> 8 != 1;
    if (destroy)
        CHECK_EQ(soft_verbs.destroy_qp(qps[1]), 0);
    else
        CHECK_EQ(qp_to(qps[1], IBV_QPS_RESET), 0);
    for (i = 0; i < left; i++) {
        REQUIRE(wait_completion(cq, &wc));
        CHECK_EQ(wc.status, IBV_WC_SUCCESS);
        CHECK(wc.wr_id >> 8 == 0 || wc.wr_id >> 8 == 2);
    }
    EXPECT_NOTHING(cq);
    for (q = 0; q < QPS; q++)
        if (q != 1 || !destroy)
            CHECK_EQ(soft_verbs.destroy_qp(qps[q]), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

static void destroying_purges(void)
{
    purge(true);
}

static void resetting_purges(void)
{
    purge(false);
}

/* A reset queue pair is like a new one: its queues are empty, and it can be connected to another peer. */
static void reset_and_connect_again(void)
{
    struct pair pair, other;
    int round, i;

    PAIR_OPEN(&pair, 0);
    PAIR_OPEN(&other, .homes = {&pair.own, &pair.own}, .unconnected = true);
    for (round = 0; round < 3; round++) {
        struct end *peer = round % 2 ? &other.a : &pair.b;

        for (i = 0; i < 16; i++) { /* full */
            CHECK_EQ(post_receive(&pair.a, 1, 8), 0);
            CHECK_EQ(post_write(&pair.a, peer, 2, 8), 0);
        }
        CHECK_EQ(post_receive(&pair.a, 1, 8), ENOMEM);
        settle(pair.a.qp->context);
        CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RESET), 0);
        CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RESET);
        EXPECT_NOTHING(pair.a.send_cq);
        EXPECT_NOTHING(pair.a.recv_cq);
        CHECK_EQ(post_receive(&pair.a, 1, 8), EINVAL);
        CHECK_EQ(post_send(&pair.a, 1, 8), EINVAL);
        peer = round % 2 ? &pair.b : &other.a;
        CHECK_EQ(qp_to(peer->qp, IBV_QPS_RESET), 0);
        qp_connect(peer->qp, &default_link, pair.a.qp->qp_num);
        qp_connect(pair.a.qp, &default_link, peer->qp->qp_num);
        CHECK_EQ(post_receive(peer, 3, 8), 0);
        CHECK_EQ(post_send(&pair.a, 4, 8), 0);
        EXPECT(pair.a.send_cq, 4, IBV_WC_SUCCESS);
        EXPECT(peer->recv_cq, 3, IBV_WC_SUCCESS);
        EXPECT_NOTHING(pair.a.recv_cq);
    }
    pair_close(&other);
    pair_close(&pair);
}

/* Spin for a time that differs with each call. */
static void spin(unsigned int *seed, unsigned int below_ns)
{
    uint64_t until;

    *seed = *seed * 1103515245u + 12345u;
    until = now_ns() + (*seed >> 16) % below_ns;
    while (now_ns() < until)
        ;
}

/* Receives that are posted after a reset must not be flushed by the error before it. */
static void reset_right_after_error(void)
{
    unsigned int seed = 1;
    struct pair pair;
    struct ibv_wc wc;
    int i;

    PAIR_OPEN(&pair, .unconnected = true);
    for (i = 0; i < (int)SCALED(1000); i++) {
        REQUIRE_EQ(qp_to_init(pair.a.qp, &default_link), 0);
        REQUIRE_EQ(post_receive(&pair.a, 1, 8), 0);
        REQUIRE_EQ(verbs_poll_cq(pair.a.recv_cq, 1, &wc), 0);
        REQUIRE_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
        spin(&seed, 20000); /* somewhere on the worker thread's way to it */
        REQUIRE_EQ(qp_to(pair.a.qp, IBV_QPS_RESET), 0);
    }
    EXPECT_NOTHING(pair.a.recv_cq);
    pair_close(&pair);
}

/* Posted requests are dropped with their queue pair, whatever they wait for. */
static void destroyed_with_posted_requests(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;
    uint64_t i;
    int why;

    for (why = 0; why < 4; why++) {
        link.min_rnr_timer = 12;
        PAIR_OPEN(&pair, .link = &link);
        if (why == 0 && variant->options.mode == SOFT_THREAD)
            CHECK_EQ(soft_set_delay(pair.own.context, 3600ull * 1000000000u), 0);
        if (why == 2)
            CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0);
        if (why == 3)
            CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
        for (i = 0; i < 5; i++) {
            CHECK_EQ(post_send(&pair.a, i, 8), 0); /* finds no receive */
            CHECK_EQ(post_receive(&pair.a, i, 8), 0);
        }
        pair_close(&pair);
    }
}

/* The same while the device retries every 10 us. */
static void destroyed_while_retrying(void)
{
    unsigned int seed = 1;
    struct home home;
    struct pair pair;
    int i;

    home_open(&home);
    for (i = 0; i < (int)SCALED(600); i++) {
        PAIR_OPEN(&pair, .homes = {&home, &home}, .memory = 64);
        CHECK_EQ(post_send(&pair.a, 1, 8), 0);
        CHECK_EQ(post_send(&pair.b, 1, 8), 0);
        spin(&seed, 50000);
        pair_close(&pair);
    }
    home_close(&home);
}

CHECK_MAIN(CASE(posting_in_error), CASE(error_from_early_states), CASE(flushing_completes_at_once),
           CASE(receiving_before_sending), CASE(drained), CASE(drained_while_retrying), CASE(destroying_purges),
           CASE(resetting_purges), CASE(reset_and_connect_again), CASE(reset_right_after_error),
           CASE(destroyed_with_posted_requests), CASE(destroyed_while_retrying))
