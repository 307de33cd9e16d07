/* Tests of completion timestamps. */
#include "support.h"

#include <time.h>

#define BOTH (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

static struct ibv_cq_ex *timed_cq(const struct home *home, uint64_t wc_flags)
{
    struct ibv_cq_init_attr_ex attr = {
        .cqe = 32,
        .wc_flags = wc_flags,
        .comp_mask = home->td ? IBV_CQ_INIT_ATTR_MASK_PD : 0,
        .parent_domain = home->td ? home->pd : NULL,
    };
    struct ibv_cq_ex *cq = verbs_create_cq_ex(home->context, &attr);

    REQUIRE(cq != NULL);
    return cq;
}

static uint64_t wallclock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A timestamp is the time of the completion, however late it is polled. */
static void completion_time(void)
{
    struct ibv_cq_ex *ex;
    struct home home;
    struct ibv_qp *qp;
    uint32_t i;

    home_open(&home);
    ex = timed_cq(&home, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
    qp = make_loop(home.pd, cq_of(ex), 8);
    for (i = 1; i <= 5; i++) {
        uint64_t before = now_ns(), after;

        CHECK_EQ(post_nothing(qp, i), 0);
        wait_executed(qp, i);
        after = now_ns();
        sleep_us(2000);
        start_poll(ex);
        CHECK_EQ(ex->wr_id, i);
        CHECK(ex->read_completion_ts(ex) >= before);
        CHECK(ex->read_completion_ts(ex) <= after);
        CHECK(ex->read_completion_wallclock_ns == NULL);
        ex->end_poll(ex);
    }
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

/* Receives and errors have timestamps, too. */
static void timestamps_of_each_kind(void)
{
    uint64_t last, before = now_ns();
    struct ibv_recv_wr recv = {.wr_id = 1}, *bad;
    struct ibv_send_wr wr = request(IBV_WR_SEND, 2, NULL, 0);
    struct ibv_cq_ex *ex;
    struct home home;
    struct ibv_qp *qp;
    uint64_t i;

    home_open(&home);
    ex = timed_cq(&home, BOTH);
    qp = make_loop(home.pd, cq_of(ex), 8);
    CHECK_EQ(verbs_post_recv(qp, &recv, &bad), 0);
    CHECK_EQ(post(qp, &wr), 0);
    wait_executed(qp, 1);
    CHECK_EQ(qp_to(qp, IBV_QPS_ERR), 0);
    CHECK_EQ(post_nothing(qp, 3), 0);
    start_poll(ex);
    for (i = 1, last = before;; i++) {
        CHECK_EQ(ex->wr_id, i);
        CHECK_EQ(ex->status, i < 3 ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR);
        CHECK(ex->read_completion_ts(ex) >= last);
        last = ex->read_completion_ts(ex);
        if (i == 3)
            break;
        next_poll(ex);
    }
    CHECK(last <= now_ns());
    ex->end_poll(ex);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

/* Completions of alternating queue pairs: times never go back, on either clock, and the difference of the clocks is
 * constant during a poll session. */
static void in_order(void)
{
    enum { COUNT = 30 };
    uint64_t last = 0, last_wall = 0, apart = 0, i;
    struct ibv_qp *qps[2];
    struct ibv_cq_ex *ex;
    struct home home;

    home_open(&home);
    ex = timed_cq(&home, BOTH);
    qps[0] = make_loop(home.pd, cq_of(ex), 16);
    qps[1] = make_loop(home.base, cq_of(ex), 16);
    for (i = 0; i < COUNT; i++)
        CHECK_EQ(post_nothing(qps[i % 2], i), 0);
    start_poll(ex);
    for (i = 0; i < COUNT; i++) {
        uint64_t now = ex->read_completion_ts(ex), wall = ex->read_completion_wallclock_ns(ex);

        CHECK(now >= last && wall >= last_wall);
        CHECK(i == 0 || wall - now == apart);
        CHECK_EQ(ex->read_completion_wallclock_ns(ex), wall);
        last = now;
        last_wall = wall;
        apart = wall - now;
        if (i < COUNT - 1)
            next_poll(ex);
    }
    ex->end_poll(ex);
    CHECK_EQ(soft_verbs.destroy_qp(qps[0]), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qps[1]), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

/* The wallclock timestamp is that of CLOCK_REALTIME. That clock may be set at any moment, and a thread may lose its
 * processor: of many attempts, one is right to a millisecond. */
static void wallclock(void)
{
    struct ibv_cq_ex *ex;
    struct home home;
    struct ibv_qp *qp;
    bool good = false;
    uint32_t i;

    home_open(&home);
    ex = timed_cq(&home, BOTH);
    qp = make_loop(home.pd, cq_of(ex), 8);
    for (i = 1; i <= 50 && !good; i++) {
        int64_t apart, difference;

        CHECK_EQ(post_nothing(qp, i), 0);
        start_poll(ex);
        apart = (int64_t)(ex->read_completion_wallclock_ns(ex) - ex->read_completion_ts(ex));
        ex->end_poll(ex);
        difference = apart - (int64_t)(wallclock_ns() - now_ns());
        good = difference > -1000000 && difference < 1000000;
    }
    CHECK(good);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

/* The wallclock timestamp works without the other one. */
static void wallclock_alone(void)
{
    struct ibv_cq_ex *ex;
    struct home home;
    struct ibv_qp *qp;
    bool good = false;
    uint32_t i;

    home_open(&home);
    ex = timed_cq(&home, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);
    CHECK(ex->read_completion_ts == NULL);
    qp = make_loop(home.pd, cq_of(ex), 8);
    for (i = 1; i <= 50 && !good; i++) {
        uint64_t before = wallclock_ns(), after, wall;

        CHECK_EQ(post_nothing(qp, i), 0);
        wait_executed(qp, i);
        after = wallclock_ns();
        start_poll(ex);
        wall = ex->read_completion_wallclock_ns(ex);
        ex->end_poll(ex);
        good = wall + 1000000 >= before && wall <= after + 1000000;
    }
    CHECK(good);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

/* Basic polling does not show timestamps, and is not affected. */
static void polled_the_basic_way(void)
{
    struct ibv_cq_ex *ex;
    struct home home;
    struct ibv_qp *qp;

    home_open(&home);
    ex = timed_cq(&home, BOTH);
    qp = make_loop(home.pd, cq_of(ex), 8);
    CHECK_EQ(post_nothing(qp, 1), 0);
    EXPECT(cq_of(ex), 1, IBV_WC_SUCCESS);
    CHECK_EQ(post_nothing(qp, 2), 0);
    start_poll(ex);
    CHECK_EQ(ex->wr_id, 2);
    CHECK(ex->read_completion_ts(ex) <= now_ns());
    ex->end_poll(ex);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

CHECK_MAIN(CASE(completion_time), CASE(timestamps_of_each_kind), CASE(in_order), CASE(wallclock), CASE(wallclock_alone),
           CASE(polled_the_basic_way))
