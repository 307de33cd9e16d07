/* Tests of moderation: one event for several completions, or when the first of them has waited for the period. */
#include "support.h"
#include "support_threads.h"
#include "support_watched.h"

#include <sched.h>
#include <stdatomic.h>

#define LONG_US 65535u /* as long as it gets */

static int moderate(struct ibv_cq *cq, unsigned int count, unsigned int period_us)
{
    struct ibv_modify_cq_attr attr = {
        .attr_mask = IBV_CQ_ATTR_MODERATE,
        .moderate = {.cq_count = (uint16_t)count, .cq_period = (uint16_t)period_us},
    };

    return verbs_modify_cq(cq, &attr);
}

static void arm(struct watched *watched, bool solicited_only)
{
    CHECK_EQ(verbs_req_notify_cq(watched->cq, solicited_only), 0);
}

static void poll_all(struct watched *watched)
{
    struct ibv_wc wc;

    while (verbs_poll_cq(watched->cq, 1, &wc) == 1)
        ;
}

/* Check that there is an event before the deadline, and no second one. */
static void expect_event(struct watched *watched)
{
    REQUIRE(wait_readable(watched->channel->fd));
    CHECK_EQ(take_event(watched), 0);
    check_no_event(watched);
    poll_all(watched);
}

/* Check that there is no event yet, unless the time is over within which there can be none. */
static void expect_none_before(struct watched *watched, uint64_t time_ns)
{
    bool readable = is_readable(watched->channel->fd);

    if (now_ns() < time_ns)
        CHECK(!readable);
}

static uint64_t after_us(uint64_t microseconds)
{
    return now_ns() + 1000 * microseconds;
}

/* The event comes with the last completion of the count, not before; and counting starts again after the event. */
static void by_count(void)
{
    static const unsigned int counts[] = {2, 3, 8};
    struct watched watched;
    unsigned int i, round, n;

    open_watched(&watched, false);
    for (i = 0; i < COUNT_OF(counts); i++) {
        CHECK_EQ(moderate(watched.cq, counts[i], LONG_US), 0);
        for (round = 0; round < 3; round++) {
            uint64_t end;

            arm(&watched, false);
            end = after_us(LONG_US);
            for (n = 1; n < counts[i]; n++) {
                deliver(&watched, n % 2);
                expect_none_before(&watched, end);
            }
            deliver(&watched, false);
            if (now_ns() < end)
                CHECK(is_readable(watched.channel->fd)); /* it did not wait for the worker thread */
            expect_event(&watched);
            deliver(&watched, true); /* not armed: for nothing */
            check_no_event(&watched);
        }
    }
    close_watched(&watched);
}

/* The first completion waits for the period, and no longer. */
static void by_period(void)
{
    static const unsigned int periods_us[] = {1, 500, 5000, LONG_US};
    struct watched watched;
    unsigned int i;

    open_watched(&watched, false);
    for (i = 0; i < COUNT_OF(periods_us); i++) {
        uint64_t earliest;

        CHECK_EQ(moderate(watched.cq, UINT16_MAX, periods_us[i]), 0);
        arm(&watched, false);
        sleep_us(2 * periods_us[0]);
        earliest = after_us(periods_us[i]);
        deliver(&watched, false);
        expect_none_before(&watched, earliest);
        REQUIRE(wait_readable(watched.channel->fd));
        CHECK(now_ns() >= earliest);
        expect_event(&watched);
    }
    close_watched(&watched);
}

/* The period begins with the first completion: a later one does not prolong it. A slow machine may exceed the period,
 * but not each time. */
static void from_the_first_one(void)
{
    enum { PERIOD_US = 30000 };
    struct watched watched;
    bool good = false;
    int attempt;

    open_watched(&watched, false);
    CHECK_EQ(moderate(watched.cq, 100, PERIOD_US), 0);
    for (attempt = 0; attempt < 20 && !good; attempt++) {
        uint64_t latest;

        arm(&watched, false);
        deliver(&watched, false);
        sleep_us(PERIOD_US / 2);
        latest = after_us(PERIOD_US);
        deliver(&watched, false);
        REQUIRE(wait_readable(watched.channel->fd));
        good = now_ns() < latest;
        expect_event(&watched);
    }
    CHECK(good);
    close_watched(&watched);
}

/* The timer of a count that was reached in time does not shorten the next period. */
static void earlier_alarms(void)
{
    enum { PERIOD_US = 20000 };
    struct watched watched;
    int round;

    open_watched(&watched, false);
    CHECK_EQ(moderate(watched.cq, 2, PERIOD_US), 0);
    for (round = 0; round < 3; round++) {
        uint64_t earliest;

        arm(&watched, false);
        deliver(&watched, false);
        deliver(&watched, false);
        expect_event(&watched);
        sleep_us(PERIOD_US / 2);
        arm(&watched, false);
        earliest = after_us(PERIOD_US);
        deliver(&watched, false);
        REQUIRE(wait_readable(watched.channel->fd));
        CHECK(now_ns() >= earliest);
        expect_event(&watched);
        sleep_us(PERIOD_US / 2);
        check_no_event(&watched);
    }
    close_watched(&watched);
}

/* Without moderation the first completion raises an event at once. */
static void switched_off(void)
{
    static const unsigned int off[][2] = {{0, 0}, {0, LONG_US}, {1, LONG_US}, {100, 0}, {1, 0}};
    struct watched watched;
    unsigned int i;

    open_watched(&watched, false);
    for (i = 0; i < COUNT_OF(off); i++) {
        CHECK_EQ(moderate(watched.cq, off[i][0], off[i][1]), 0);
        arm(&watched, false);
        deliver(&watched, false);
        CHECK(is_readable(watched.channel->fd));
        expect_event(&watched);
        CHECK_EQ(moderate(watched.cq, 50, LONG_US), 0);
    }
    close_watched(&watched);
}

/* New limits apply to completions that wait already. */
static void changed_while_some_wait(void)
{
    static const unsigned int enough[][2] = {{0, 0}, {1, 100}, {100, 0}, {3, LONG_US}, {2, LONG_US}, {100, 1}};
    struct watched watched;
    unsigned int i, n;
    uint64_t earliest;

    open_watched(&watched, false);
    for (i = 0; i < COUNT_OF(enough); i++) {
        uint64_t end = after_us(LONG_US);

        CHECK_EQ(moderate(watched.cq, 50, LONG_US), 0);
        arm(&watched, false);
        for (n = 0; n < 3; n++)
            deliver(&watched, false);
        expect_none_before(&watched, end);
        sleep_us(1); /* the shortest period is over */
        CHECK_EQ(moderate(watched.cq, enough[i][0], enough[i][1]), 0);
        CHECK(is_readable(watched.channel->fd));
        expect_event(&watched);
    }

    CHECK_EQ(moderate(watched.cq, 50, 20000), 0); /* and longer than before, too */
    arm(&watched, false);
    earliest = after_us(60000);
    deliver(&watched, false);
    CHECK_EQ(moderate(watched.cq, 50, 60000), 0);
    if (!is_readable(watched.channel->fd)) { /* it was changed in time */
        REQUIRE(wait_readable(watched.channel->fd));
        CHECK(now_ns() >= earliest);
    }
    expect_event(&watched);

    CHECK_EQ(moderate(watched.cq, 0, 0), 0); /* no completion waits: no event */
    check_no_event(&watched);
    arm(&watched, false);
    CHECK_EQ(moderate(watched.cq, 50, LONG_US), 0);
    CHECK_EQ(moderate(watched.cq, 0, 0), 0);
    check_no_event(&watched);
    deliver(&watched, false);
    expect_event(&watched);
    close_watched(&watched);
}

/* Only completions count that would raise an event without moderation. */
static void solicited_ones(void)
{
    struct watched watched;
    uint64_t end;
    int i;

    open_watched(&watched, false);
    CHECK_EQ(moderate(watched.cq, 2, LONG_US), 0);
    arm(&watched, true);
    for (i = 0; i < 5; i++)
        deliver(&watched, false);
    settle(watched.cq->context);
    check_no_event(&watched);
    end = after_us(LONG_US);
    deliver(&watched, true);
    for (i = 0; i < 3; i++)
        deliver(&watched, false);
    expect_none_before(&watched, end);
    deliver(&watched, true);
    if (now_ns() < end)
        CHECK(is_readable(watched.channel->fd));
    expect_event(&watched);

    CHECK_EQ(moderate(watched.cq, 2, 1000), 0); /* nor does the period begin before the first of them */
    arm(&watched, true);
    deliver(&watched, false);
    settle(watched.cq->context);
    check_no_event(&watched);
    deliver(&watched, true);
    expect_event(&watched);
    close_watched(&watched);
}

/* An error counts like another completion, on each kind of arming. */
static void errors(void)
{
    struct ibv_recv_wr recv = {.wr_id = 2}, *bad;
    struct watched watched;
    uint64_t end;
    int i;

    open_watched(&watched, false);
    CHECK_EQ(moderate(watched.cq, 3, LONG_US), 0);
    CHECK_EQ(qp_to(watched.receiver, IBV_QPS_ERR), 0);
    for (i = 0; i < 2; i++) {
        arm(&watched, i);
        end = after_us(LONG_US);
        CHECK_EQ(verbs_post_recv(watched.receiver, &recv, &bad), 0);
        EXPECT(watched.cq, 2, IBV_WC_WR_FLUSH_ERR);
        CHECK_EQ(verbs_post_recv(watched.receiver, &recv, &bad), 0);
        EXPECT(watched.cq, 2, IBV_WC_WR_FLUSH_ERR);
        expect_none_before(&watched, end);
        CHECK_EQ(verbs_post_recv(watched.receiver, &recv, &bad), 0);
        EXPECT(watched.cq, 2, IBV_WC_WR_FLUSH_ERR);
        expect_event(&watched);
    }
    close_watched(&watched);
}

/* Arming again while completions are counted does not reset the count: a thread may sleep on the first arming. */
static void armed_again(void)
{
    struct watched watched;
    uint64_t end;

    open_watched(&watched, false);
    CHECK_EQ(moderate(watched.cq, 2, LONG_US), 0);
    arm(&watched, true);
    end = after_us(LONG_US);
    deliver(&watched, true);
    arm(&watched, false);
    expect_none_before(&watched, end);
    deliver(&watched, false);
    expect_event(&watched);

    CHECK_EQ(moderate(watched.cq, 50, 3000), 0);
    arm(&watched, false);
    deliver(&watched, false);
    arm(&watched, false);
    expect_event(&watched);
    close_watched(&watched);
}

/* A thread that sleeps on a queue that breaks is woken at once, also for counted completions. */
static void broken_queue(void)
{
    struct watched watched;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    uint64_t end;
    int i;

    open_watched(&watched, false);
    cq = home_cq(&watched.home, 4, watched.channel);
    CHECK_EQ(moderate(cq, 50, LONG_US), 0);
    qp = make_loop(watched.home.pd, cq, 16);
    CHECK_EQ(verbs_req_notify_cq(cq, 0), 0);
    end = after_us(LONG_US);
    for (i = 0; i < cq->cqe; i++)
        CHECK_EQ(post_nothing(qp, 1), 0);
    wait_executed(qp, (uint32_t)cq->cqe);
    expect_none_before(&watched, end);
    CHECK_EQ(post_nothing(qp, 1), 0);
    CHECK(wait_state(qp, IBV_QPS_ERR));
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(verbs_req_notify_cq(cq, 0), 0); /* once more, for threads that complete into it now */
    CHECK_EQ(post_nothing(qp, 1), 0);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    check_no_event(&watched);
    close_watched(&watched);
}

static void modify_in_session(void *argument)
{
    struct ibv_cq_ex *ex = argument;

    start_poll(ex);
    CHECK_EQ(moderate(cq_of(ex), 2, 2), EBUSY);
    ex->end_poll(ex);
}

static void refused(void)
{
    struct ibv_modify_cq_attr attr = {.moderate = {2, 2}};
    struct watched watched;
    struct ibv_cq_ex *ex;
    struct ibv_qp *qp;
    uint32_t mask;
    char *text;

    open_watched(&watched, false);
    for (mask = 0; mask < 8; mask++) {
        attr.attr_mask = mask;
        if (mask != IBV_CQ_ATTR_MODERATE)
            CHECK_EQ(verbs_modify_cq(watched.cq, &attr), EINVAL);
    }
    attr.attr_mask = IBV_CQ_ATTR_MODERATE | 1u << 31;
    CHECK_EQ(verbs_modify_cq(watched.cq, &attr), EINVAL);
    arm(&watched, false);
    deliver(&watched, false);
    expect_event(&watched); /* at once, with the queue as it was */

    ex = home_cq_ex(&watched.home, 4, watched.channel);
    qp = make_loop(watched.home.pd, cq_of(ex), 4);
    CHECK_EQ(post_nothing(qp, 1), 0);
    text = stderr_of(modify_in_session, ex);
    CHECK(strstr(text, "modify_cq on completion queue") != NULL);
    free(text);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    close_watched(&watched);
}

/* A queue without a channel accepts moderation, which has no effect. */
static void without_a_channel(void)
{
    struct watched watched;
    int i;

    open_watched(&watched, false);
    CHECK_EQ(moderate(watched.silent, 2, 1), 0);
    for (i = 0; i < 4; i++)
        deliver(&watched, false);
    EXPECT_NOTHING(watched.silent);
    CHECK_EQ(moderate(watched.silent, 0, 0), 0);
    close_watched(&watched);
}

/* ---- Races ------------------------------------------------------------------------------------------------- */

/* The period ends before, while or after the queue is destroyed. */
static void expiry_against_destruction(void)
{
    struct watched watched;
    unsigned int seed = 9, i;

    open_watched(&watched, false);
    for (i = 0; i < SCALED(400u); i++) {
        struct ibv_cq *cq = home_cq(&watched.home, 8, watched.channel), *event_cq;
        struct ibv_qp *qp = make_loop(watched.home.pd, cq, 8);
        unsigned int n, count = 1 + next_random(&seed, 3);
        void *context;

        CHECK_EQ(moderate(cq, 4, 1 + next_random(&seed, 200)), 0);
        for (n = 0; n < count; n++) {
            CHECK_EQ(verbs_req_notify_cq(cq, (int)next_random(&seed, 2)), 0);
            CHECK_EQ(post_nothing(qp, n), 0);
        }
        CHECK_EQ(qp_to(qp, IBV_QPS_ERR), 0);
        CHECK_EQ(post_nothing(qp, n), 0); /* one that counts for whatever it is armed for */
        sleep_us(next_random(&seed, 150));
        if (soft_verbs.get_cq_event(watched.channel, &event_cq, &context) == 0) {
            CHECK(event_cq == cq);
            soft_verbs.ack_cq_events(cq, 1);
        }
        CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
        CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
        CHECK(!is_readable(watched.channel->fd));
    }
    close_watched(&watched);
}

#define SENDERS 2
#define MESSAGES SCALED(1000u)

/* Threads complete into a queue; one sleeps on it and polls; another one changes the moderation all the time. */
struct traffic {
    struct watched watched;
    struct ibv_qp *qps[SENDERS];
    atomic_uint polled[SENDERS];
    atomic_bool done, failed;
};

struct driver {
    struct traffic *traffic;
    enum { SENDER, SLEEPER, MODERATOR } role;
    unsigned int which;
};

static void change_moderation(struct traffic *traffic, unsigned int *seed)
{
    CHECK_EQ(moderate(traffic->watched.cq, next_random(seed, 6), next_random(seed, 300)), 0);
}

static void send_all(struct traffic *traffic, unsigned int which)
{
    uint64_t end = now_ns() + 2 * WAIT_S * 1000000000ull;
    unsigned int sent = 0, seed = which;

    while (sent < MESSAGES && now_ns() < end && !atomic_load(&traffic->failed)) {
        if (sent - atomic_load(&traffic->polled[which]) < 8) {
            CHECK_EQ(post_nothing(traffic->qps[which], (uint64_t)which << 32 | sent), 0);
            sent++;
        } else {
            sched_yield();
        }
        if (next_random(&seed, 16) == 0)
            sleep_us(next_random(&seed, 100));
    }
    CHECK_EQ(sent, MESSAGES);
}

static unsigned int take_completions(struct traffic *traffic)
{
    struct ibv_wc wcs[4];
    unsigned int count = 0;
    int n, i;

    while ((n = verbs_poll_cq(traffic->watched.cq, COUNT_OF(wcs), wcs)) > 0) {
        for (i = 0; i < n; i++) {
            CHECK_EQ(wcs[i].status, IBV_WC_SUCCESS);
            CHECK_EQ((uint32_t)wcs[i].wr_id, atomic_fetch_add(&traffic->polled[wcs[i].wr_id >> 32], 1));
        }
        count += (unsigned int)n;
    }
    CHECK_EQ(n, 0);
    return count;
}

/* Arm, poll earlier completions, and sleep: a completion after the arming ends the sleep. */
static void sleep_and_poll(struct traffic *traffic)
{
    unsigned int left = SENDERS * MESSAGES, seed = 1;

    for (;;) {
        arm(&traffic->watched, false);
        left -= take_completions(traffic);
        if (!left)
            break;
        if (traffic->watched.home.td && next_random(&seed, 2))
            change_moderation(traffic, &seed); /* the queue is this thread's alone */
        if (!CHECK(wait_readable(traffic->watched.channel->fd)))
            break;
        CHECK_EQ(take_event(&traffic->watched), 0);
    }
    atomic_store(&traffic->failed, left > 0);
    atomic_store(&traffic->done, true);
}

static void drive(void *argument)
{
    struct driver *driver = argument;
    struct traffic *traffic = driver->traffic;
    unsigned int seed = 2;

    if (driver->role == SENDER)
        send_all(traffic, driver->which);
    else if (driver->role == SLEEPER)
        sleep_and_poll(traffic);
    else
        while (!atomic_load(&traffic->done)) {
            change_moderation(traffic, &seed);
            sleep_us(next_random(&seed, 200));
        }
}

static void no_lost_wakeups(void)
{
    struct driver drivers[SENDERS + 2];
    struct traffic traffic = {0};
    unsigned int i;

    open_watched(&traffic.watched, false);
    for (i = 0; i < SENDERS; i++) {
        traffic.qps[i] = make_loop(traffic.watched.home.base, traffic.watched.cq, 16);
        drivers[i] = (struct driver){&traffic, SENDER, i};
    }
    drivers[SENDERS] = (struct driver){&traffic, SLEEPER, 0};
    drivers[SENDERS + 1] = (struct driver){&traffic, MODERATOR, 0};
    run_threads(SENDERS + (traffic.watched.home.td ? 1 : 2), drive, drivers, sizeof(drivers[0]));
    for (i = 0; i < SENDERS; i++)
        CHECK_EQ(soft_verbs.destroy_qp(traffic.qps[i]), 0);
    close_watched(&traffic.watched);
}

CHECK_MAIN(CASE(by_count), CASE(by_period), CASE(from_the_first_one), CASE(earlier_alarms), CASE(switched_off),
           CASE(changed_while_some_wait), CASE(solicited_ones), CASE(errors), CASE(armed_again), CASE(broken_queue),
           CASE(refused), CASE(without_a_channel), CASE(expiry_against_destruction), CASE(no_lost_wakeups))
