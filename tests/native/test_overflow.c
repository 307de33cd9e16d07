/* Tests of completion queues that break: one asynchronous event, and errors for good. */
#include "support.h"
#include "support_threads.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

static void open_quiet(struct home *home)
{
    home_open(home);
    REQUIRE_EQ(fcntl(home->context->async_fd, F_SETFL, O_NONBLOCK), 0);
}

static void expect_no_event(const struct home *home)
{
    struct ibv_async_event event;

    CHECK(!is_readable(home->context->async_fd));
    errno = 0;
    CHECK_EQ(soft_verbs.get_async_event(home->context, &event), -1);
    CHECK_EQ(errno, EAGAIN);
}

/* Take the next CQ_ERR, which must be of this queue; other events (queue pairs break, too) are acknowledged. */
static struct ibv_async_event take_error(const struct home *home, const struct ibv_cq *cq)
{
    struct ibv_async_event event;

    for (;;) {
        REQUIRE(wait_readable(home->context->async_fd));
        REQUIRE_EQ(soft_verbs.get_async_event(home->context, &event), 0);
        if (event.event_type == IBV_EVENT_CQ_ERR)
            break;
        soft_verbs.ack_async_event(&event);
    }
    CHECK(event.element.cq == cq);
    return event;
}

/* Take and acknowledge all events. Return the number of CQ_ERR. */
static int drain_events(const struct home *home)
{
    struct ibv_async_event event;
    int errors = 0;

    while (soft_verbs.get_async_event(home->context, &event) == 0) {
        errors += event.event_type == IBV_EVENT_CQ_ERR;
        soft_verbs.ack_async_event(&event);
    }
    return errors;
}

static void overflow(struct ibv_qp *qp, const struct ibv_cq *cq)
{
    int i;

    for (i = 0; i <= cq->cqe; i++)
        CHECK_EQ(post_nothing(qp, 1), 0);
    CHECK(wait_state(qp, IBV_QPS_ERR));
}

/* A queue breaks when it overruns, not when it becomes full; one event is raised. */
static void raised_once(void)
{
    struct ibv_async_event event;
    struct ibv_qp *qp, *other;
    struct ibv_cq *cq;
    struct home home;
    struct ibv_wc wc;
    int i;

    open_quiet(&home);
    cq = home_cq(&home, 4, NULL);
    qp = make_loop(home.pd, cq, 16);
    other = make_loop(home.pd, cq, 16);
    for (i = 0; i < cq->cqe; i++)
        CHECK_EQ(post_nothing(qp, (uint64_t)i), 0);
    wait_executed(qp, (uint32_t)cq->cqe);
    expect_no_event(&home);
    CHECK_EQ(post_nothing(other, 9), 0);
    event = take_error(&home, cq);
    soft_verbs.ack_async_event(&event);
    CHECK(wait_state(other, IBV_QPS_ERR));

    CHECK_EQ(post_nothing(other, 9), 0); /* flushed, and lost as well */
    for (i = 0; i < cq->cqe; i++)
        EXPECT(cq, i, IBV_WC_SUCCESS);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(post_nothing(qp, 9), 0);
    CHECK(wait_state(qp, IBV_QPS_ERR));
    CHECK_EQ(soft_break_cq(cq), 0);
    settle(home.context);
    CHECK_EQ(drain_events(&home), 0);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_qp(other), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* Each queue has an event of its own. */
static void of_each_queue(void)
{
    enum { QUEUES = 3 };
    struct ibv_cq *cqs[QUEUES];
    struct ibv_qp *qps[QUEUES];
    struct home home;
    int i;

    open_quiet(&home);
    for (i = 0; i < QUEUES; i++) {
        cqs[i] = home_cq(&home, 4, NULL);
        qps[i] = make_loop(home.pd, cqs[i], 16);
    }
    for (i = 0; i < QUEUES; i++) {
        struct ibv_async_event event;

        overflow(qps[i], cqs[i]);
        event = take_error(&home, cqs[i]);
        soft_verbs.ack_async_event(&event);
    }
    CHECK_EQ(drain_events(&home), 0);
    for (i = 0; i < QUEUES; i++) {
        CHECK_EQ(soft_verbs.destroy_qp(qps[i]), 0);
        CHECK_EQ(soft_verbs.destroy_cq(cqs[i]), 0);
    }
    home_close(&home);
}

/* A queue that is broken on demand, without being full: its completions can be polled, and no further ones come. */
static void broken_on_demand(void)
{
    struct ibv_comp_channel *channel;
    struct ibv_async_event event;
    struct home home;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_wc wc;

    open_quiet(&home);
    channel = soft_verbs.create_comp_channel(home.context);
    REQUIRE(channel != NULL);
    cq = home_cq(&home, 16, channel);
    qp = make_loop(home.pd, cq, 16);
    CHECK_EQ(post_nothing(qp, 1), 0);
    wait_executed(qp, 1);
    CHECK_EQ(verbs_req_notify_cq(cq, 1), 0);
    CHECK_EQ(soft_break_cq(cq), 0);
    CHECK(is_readable(channel->fd)); /* a sleeping thread is woken */
    event = take_error(&home, cq);
    soft_verbs.ack_async_event(&event);
    CHECK_EQ(soft_break_cq(cq), 0);
    CHECK_EQ(drain_events(&home), 0);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(post_nothing(qp, 2), 0);
    CHECK(wait_state(qp, IBV_QPS_ERR));
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(channel), 0);
    home_close(&home);
}

/* An event that was not taken is dropped with its queue. */
static void goes_with_its_queue(void)
{
    struct ibv_cq *cq, *other;
    struct home home;

    open_quiet(&home);
    cq = home_cq(&home, 4, NULL);
    other = home_cq(&home, 4, NULL);
    CHECK_EQ(soft_break_cq(other), 0);
    CHECK_EQ(soft_break_cq(cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(other), 0);
    CHECK(is_readable(home.context->async_fd));
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    expect_no_event(&home);
    home_close(&home);
}

struct destroyer {
    struct ibv_cq *cq;
    atomic_bool started, done;
};

static void *destroy_in_thread(void *argument)
{
    struct destroyer *destroyer = argument;

    atomic_store(&destroyer->started, true);
    CHECK_EQ(soft_verbs.destroy_cq(destroyer->cq), 0);
    atomic_store(&destroyer->done, true);
    return NULL;
}

/* A taken event of either kind delays destruction until it is acknowledged. */
static void destroying_waits(void)
{
    struct destroyer destroyer = {0};
    struct ibv_comp_channel *channel;
    struct ibv_async_event event;
    struct ibv_cq *cq;
    struct home home;
    pthread_t thread;
    void *context;

    open_quiet(&home);
    channel = soft_verbs.create_comp_channel(home.context);
    REQUIRE(channel != NULL);
    cq = destroyer.cq = home_cq(&home, 4, channel);
    CHECK_EQ(verbs_req_notify_cq(cq, 0), 0);
    CHECK_EQ(soft_break_cq(cq), 0);
    event = take_error(&home, cq);
    REQUIRE_EQ(soft_verbs.get_cq_event(channel, &cq, &context), 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, destroy_in_thread, &destroyer), 0);
    while (!atomic_load(&destroyer.started))
        sleep_us(100);
    sleep_us(5000);
    CHECK(!atomic_load(&destroyer.done));
    soft_verbs.ack_cq_events(cq, 1);
    sleep_us(5000);
    CHECK(!atomic_load(&destroyer.done));
    soft_verbs.ack_async_event(&event);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(channel), 0);
    home_close(&home);
}

/* Many threads overflow one queue at the same time. */
#define RUSHERS 4u

static void rush(void *argument)
{
    struct ibv_qp *qp = *(struct ibv_qp **)argument;
    int i;

    for (i = 0; i < 8; i++)
        CHECK_EQ(post_nothing(qp, 1), 0);
}

static void raised_once_by_many(void)
{
    struct ibv_qp *qps[RUSHERS];
    struct home home;
    unsigned int i, round;

    open_quiet(&home);
    for (round = 0; round < SCALED(20u); round++) {
        struct ibv_cq *cq = home_cq(&home, 8, NULL);
        struct ibv_async_event event;

        for (i = 0; i < RUSHERS; i++)
            qps[i] = make_loop(home.base, cq, 16);
        run_threads(RUSHERS, rush, qps, sizeof(qps[0]));
        event = take_error(&home, cq);
        soft_verbs.ack_async_event(&event);
        for (i = 0; i < RUSHERS; i++)
            CHECK_EQ(soft_verbs.destroy_qp(qps[i]), 0);
        CHECK_EQ(drain_events(&home), 0);
        CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    }
    home_close(&home);
}

CHECK_MAIN(CASE(raised_once), CASE(of_each_queue), CASE(broken_on_demand), CASE(goes_with_its_queue),
           CASE(destroying_waits), CASE(raised_once_by_many))
