/* Tests of receivers that are not ready, and of peers that do not answer. */
#include "support.h"
#include "support_threads.h"

static const uint64_t rnr_units_us[32] = {
    655360, 10,   20,   30,   40,    60,    80,    120,   160,   240,   320,   480,    640,    960,    1280,   1920,
    2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

/* The sender retries until a receive is posted. */
static void receive_posted_late(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;

    link.min_rnr_timer = 5; /* 60 us */
    PAIR_OPEN(&pair, .link = &link);
    memcpy(pair.a.memory, "late", 5);
    CHECK_EQ(post_send(&pair.a, 1, 5), 0);
    CHECK_EQ(post_send(&pair.a, 2, 5), 0);
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(post_receive(&pair.b, 3, 5), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(pair.b.recv_cq, 3, IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.b.memory, "late", 5));
    EXPECT_NOTHING(pair.a.send_cq); /* the second one waits in its turn */
    CHECK_EQ(post_receive(&pair.b, 4, 5), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    EXPECT(pair.b.recv_cq, 4, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* The same for a write with immediate; nothing is written before there is a receive. */
static void write_with_imm_waits_too(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    pair.a.memory[0] = 9;
    sge = span(&pair.a, 0, 1);
    wr = request_to(IBV_WR_RDMA_WRITE_WITH_IMM, 1, &sge, 1, &pair.b, 0);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(post_receive(&pair.b, 2, 0), 0);
    EXPECT(pair.b.recv_cq, 2, IBV_WC_SUCCESS);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(pair.b.memory[0], 9);
    pair_close(&pair);
}

/* rnr_retry more attempts, each after the time that the receiver requested; then an error. */
static void rnr_retries_run_out(void)
{
    static const struct {
        uint8_t retries, timer;
    } table[] = {{0, 20}, {1, 12}, {3, 14}, {6, 1}};
    size_t i;

    for (i = 0; i < COUNT_OF(table); i++) {
        struct ibv_qp_attr link = default_link;
        struct pair pair;
        uint64_t begin;

        link.rnr_retry = table[i].retries;
        link.min_rnr_timer = table[i].timer;
        PAIR_OPEN(&pair, .link = &link);
        CHECK_EQ(post_receive(&pair.a, 5, 8), 0);
        begin = now_ns();
        CHECK_EQ(post_send(&pair.a, 1, 8), 0);
        CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
        CHECK(now_ns() - begin >= 1000 * rnr_units_us[table[i].timer] * table[i].retries);
        EXPECT(pair.a.send_cq, 2, IBV_WC_WR_FLUSH_ERR);
        EXPECT(pair.a.recv_cq, 5, IBV_WC_WR_FLUSH_ERR);
        CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_ERR);
        CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS); /* the receiver has done nothing wrong */
        pair_close(&pair);
    }
}

/* The timers' codes, by one retry each; the long ones would take too long. */
static void rnr_timer_codes(void)
{
    uint8_t code;

    for (code = 1; code <= 16; code++) {
        struct ibv_qp_attr link = default_link;
        struct pair pair;
        uint64_t begin;

        link.rnr_retry = 1;
        link.min_rnr_timer = code;
        PAIR_OPEN(&pair, .link = &link);
        begin = now_ns();
        CHECK_EQ(post_send(&pair.a, 1, 8), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
        CHECK(now_ns() - begin >= 1000 * rnr_units_us[code]);
        pair_close(&pair);
    }
}

/* A delivered message resets the RNR retries. */
static void rnr_retries_are_per_message(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;
    uint64_t i;

    link.rnr_retry = 1;
    link.min_rnr_timer = 0; /* 655 ms, in which the receive is posted */
    PAIR_OPEN(&pair, .link = &link);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(post_send(&pair.a, i, 8), 0);
        wait_begun(pair.a.qp);
        CHECK_EQ(post_receive(&pair.b, i, 8), 0);
        end_wait(pair.a.qp);
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
    }
    pair_close(&pair);
}

/* 7 stands for "without end": far more retries than any count allows. */
static void endless_rnr_retries(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0); /* every 10 us */
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    EXPECT_NOTHING(pair.a.send_cq); /* for 10 ms */
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RTS);
    CHECK_EQ(post_receive(&pair.b, 2, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* Many queue pairs wait at once, each for its own time, and some are destroyed before: the others are woken in time and
 * in order. */
static void many_timers(void)
{
    enum { WAITING = 1000 };
    static struct waiting {
        struct ibv_qp *qp;
        uint64_t earliest_ns, latest_ns; /* when it is due */
    } waiting[WAITING];
    uint64_t order[WAITING];
    unsigned int seed = 5;
    struct home home;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    int i, j, left = 0;

    home_open(&home);
    cq = home_cq(&home, WAITING, NULL);
    for (i = 0; i < WAITING; i++) {
        struct ibv_send_wr wr = request(IBV_WR_SEND, (uint64_t)i, NULL, 0);
        struct ibv_qp_attr link = default_link;
        uint64_t wait_ns;

        link.rnr_retry = 1;
        link.min_rnr_timer = (uint8_t)(20 + next_random(&seed, 6)); /* 10 to 61 ms */
        wait_ns = 1000 * rnr_units_us[link.min_rnr_timer];
        waiting[i].qp = make_qp(home.pd, cq, 1);
        qp_connect(waiting[i].qp, &link, waiting[i].qp->qp_num);
        waiting[i].earliest_ns = now_ns() + wait_ns;
        CHECK_EQ(post(waiting[i].qp, &wr), 0);
        waiting[i].latest_ns = now_ns() + wait_ns; /* in inline mode: it was tried in the call */
        if (i % 2) {
            struct waiting *victim = &waiting[next_random(&seed, (unsigned int)i)];

            if (victim->qp)
                CHECK_EQ(soft_verbs.destroy_qp(victim->qp), 0);
            victim->qp = NULL;
        }
    }
    for (i = 0; i < WAITING; i++)
        left += waiting[i].qp != NULL;
    for (i = 0; i < left; i++) {
        REQUIRE(wait_completion(cq, &wc));
        CHECK_EQ(wc.status, IBV_WC_RNR_RETRY_EXC_ERR);
        CHECK(now_ns() >= waiting[wc.wr_id].earliest_ns);
        order[i] = wc.wr_id;
        for (j = 0; variant->options.mode == SOFT_INLINE && j < i; j++)
            CHECK(waiting[order[j]].earliest_ns <= waiting[order[i]].latest_ns);
    }
    for (i = 0; i < WAITING; i++)
        if (waiting[i].qp)
            CHECK_EQ(soft_verbs.destroy_qp(waiting[i].qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* Leaving RTS ends the wait for a receiver. */
static void rnr_wait_ends_with_the_state(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;

    link.min_rnr_timer = 0; /* 655 ms: the change must not wait for it */
    PAIR_OPEN(&pair, .link = &link);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    settle(pair.own.context);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_WR_FLUSH_ERR);
    pair_close(&pair);
}

/* Reason why a queue pair in RTS gets no response. */
enum silence {
    NO_SUCH_NUMBER,
    DESTROYED,
    PEER_IN_RESET,
    PEER_IN_INIT,
    PEER_IN_ERR,
    WRONG_PSN,
    CONNECTED_TO_ANOTHER,
    FOREIGN_GID,
    SILENCES
};

static void arrange(struct pair *pair, enum silence why, const struct ibv_qp_attr *link)
{
    struct ibv_qp_attr other = *link;
    uint32_t number = pair->b.qp->qp_num;

    switch (why) {
    case NO_SUCH_NUMBER:
        number = 0xfffff0;
        break;
    case DESTROYED:
        CHECK_EQ(soft_verbs.destroy_qp(pair->b.qp), 0);
        pair->b.qp = NULL;
        break;
    case PEER_IN_RESET:
        break;
    case PEER_IN_INIT:
        CHECK_EQ(qp_to_init(pair->b.qp, link), 0);
        break;
    case PEER_IN_ERR:
        qp_connect(pair->b.qp, link, pair->a.qp->qp_num);
        CHECK_EQ(qp_to(pair->b.qp, IBV_QPS_ERR), 0);
        break;
    case WRONG_PSN:
        other.rq_psn ^= 1;
        qp_connect(pair->b.qp, &other, pair->a.qp->qp_num);
        break;
    case CONNECTED_TO_ANOTHER:
        qp_connect(pair->b.qp, link, pair->b.qp->qp_num);
        break;
    default:
        qp_connect(pair->b.qp, link, pair->a.qp->qp_num);
        break;
    }
    if (why == FOREIGN_GID) {
        struct ibv_qp_attr attr = *link;

        REQUIRE_EQ(qp_to_init(pair->a.qp, link), 0);
        attr.qp_state = IBV_QPS_RTR;
        attr.dest_qp_num = number;
        attr.ah_attr = path_to_self(pair->own.context);
        attr.ah_attr.grh.dgid.raw[15] ^= 0x55;
        REQUIRE_EQ(soft_verbs.modify_qp(pair->a.qp, &attr, MASK_RTR), 0);
        REQUIRE_EQ(qp_to_rts(pair->a.qp, link), 0);
        return;
    }
    qp_connect(pair->a.qp, link, number);
}

/* The first attempt and each retry wait for the whole timeout, 4.096 us * 2^code. */
static void no_response(void)
{
    static const struct {
        uint8_t timeout, retries;
    } table[] = {{7, 2}, {9, 0}, {8, 7}};
    size_t i;
    int why;

    for (why = 0; why < SILENCES; why++) {
        for (i = 0; i < (why ? 1 : COUNT_OF(table)); i++) {
            struct ibv_qp_attr link = default_link;
            struct pair pair;
            uint64_t begin;

            link.timeout = table[i].timeout;
            link.retry_cnt = table[i].retries;
            PAIR_OPEN(&pair, .unconnected = true);
            arrange(&pair, (enum silence)why, &link);
            CHECK_EQ(post_receive(&pair.a, 5, 8), 0);
            begin = now_ns();
            CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
            CHECK_EQ(post_send(&pair.a, 2, 8), 0);
            EXPECT(pair.a.send_cq, 1, IBV_WC_RETRY_EXC_ERR);
            CHECK(now_ns() - begin >= (table[i].retries + 1u) * (4096ull << table[i].timeout));
            EXPECT(pair.a.send_cq, 2, IBV_WC_WR_FLUSH_ERR);
            EXPECT(pair.a.recv_cq, 5, IBV_WC_WR_FLUSH_ERR);
            CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_ERR);
            if (pair.b.qp)
                EXPECT_NOTHING(pair.b.recv_cq);
            pair_close(&pair);
        }
    }
}

/* A peer that becomes ready in time answers. */
static void peer_comes_up(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;

    link.timeout = 20; /* 4.3 s, in which the peer comes up */
    PAIR_OPEN(&pair, .unconnected = true);
    qp_connect(pair.a.qp, &link, pair.b.qp->qp_num);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    wait_begun(pair.a.qp);
    CHECK_EQ(qp_to_init(pair.b.qp, &link), 0);
    CHECK_EQ(qp_to_rtr(pair.b.qp, &link, pair.a.qp->qp_num), 0); /* receiving is enough */
    end_wait(pair.a.qp);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* A response resets the retries. */
static void retries_are_per_request(void)
{
    struct ibv_qp_attr link = default_link, next = default_link;
    struct pair pair;

    link.timeout = next.timeout = 20; /* 4.3 s, in which the peer comes up */
    link.retry_cnt = 1;
    next.rq_psn = (link.rq_psn + 1) & 0xffffff; /* after one message */
    PAIR_OPEN(&pair, .unconnected = true);
    qp_connect(pair.a.qp, &link, pair.b.qp->qp_num);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    wait_begun(pair.a.qp);
    qp_connect(pair.b.qp, &link, pair.a.qp->qp_num);
    end_wait(pair.a.qp);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
    wait_begun(pair.a.qp);
    qp_connect(pair.b.qp, &next, pair.a.qp->qp_num);
    end_wait(pair.a.qp);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* Timeout 0: the request is sent once, and only a change of state ends it. */
static void timeout_zero(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;
    int end;

    for (end = 0; end < 3; end++) {
        link.timeout = 0;
        link.retry_cnt = 0;
        PAIR_OPEN(&pair, .unconnected = true);
        qp_connect(pair.a.qp, &link, pair.b.qp->qp_num);
        CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
        CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
        wait_begun(pair.a.qp);
        EXPECT_NOTHING(pair.a.send_cq);
        qp_connect(pair.b.qp, &link, pair.a.qp->qp_num);
        EXPECT_NOTHING(pair.a.send_cq); /* it was lost, and is not sent again */
        CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RTS);
        if (end == 0) {
            CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
            EXPECT(pair.a.send_cq, 1, IBV_WC_WR_FLUSH_ERR);
            EXPECT(pair.a.send_cq, 2, IBV_WC_WR_FLUSH_ERR);
        } else if (end == 1) {
            CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RESET), 0);
            qp_connect(pair.a.qp, &link, pair.b.qp->qp_num);
            CHECK_EQ(post_write(&pair.a, &pair.b, 3, 8), 0);
            EXPECT(pair.a.send_cq, 3, IBV_WC_SUCCESS);
        } /* else it is destroyed with both */
        pair_close(&pair);
    }
}

CHECK_MAIN(CASE(receive_posted_late), CASE(write_with_imm_waits_too), CASE(rnr_retries_run_out), CASE(rnr_timer_codes),
           CASE(rnr_retries_are_per_message), CASE(endless_rnr_retries), CASE(many_timers),
           CASE(rnr_wait_ends_with_the_state), CASE(no_response), CASE(peer_comes_up), CASE(retries_are_per_request),
           CASE(timeout_zero))
