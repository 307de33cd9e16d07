/* Tests of completion channels: when an event comes, and when none does. */
#include "support.h"
#include "support_watched.h"

#include <fcntl.h>

#include "soft/objects/comp_channel.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/hooks.h"

/* One event per arming, whatever the number of completions; the descriptor is readable exactly while the event is
 * pending. */
static void one_shot(void)
{
    struct watched watched;
    int i;

    open_watched(&watched, false);
    check_no_event(&watched);
    deliver(&watched, false);
    check_no_event(&watched); /* not armed */
    for (i = 0; i < 3; i++) {
        CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
        check_no_event(&watched); /* those that are there already do not count */
        deliver(&watched, false);
        CHECK(is_readable(watched.channel->fd));
        deliver(&watched, true);
        CHECK(is_readable(watched.channel->fd));
        CHECK_EQ(take_event(&watched), 0);
        check_no_event(&watched);
        deliver(&watched, false);
        check_no_event(&watched);
    }
    close_watched(&watched);
}

/* Arming twice is the same as arming once. */
static void armed_twice(void)
{
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    deliver(&watched, false);
    CHECK_EQ(take_event(&watched), 0);
    check_no_event(&watched);

    /* But an event that waits does not keep the queue from being armed for the next one. */
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    CHECK_EQ(take_event(&watched), 0);
    CHECK(is_readable(watched.channel->fd));
    CHECK_EQ(take_event(&watched), 0);
    check_no_event(&watched);
    close_watched(&watched);
}

static void solicited_only(void)
{
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    deliver(&watched, false);
    check_no_event(&watched);
    deliver(&watched, true);
    CHECK_EQ(take_event(&watched), 0);
    check_no_event(&watched);

    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0); /* for any is more than for solicited ones */
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    deliver(&watched, false);
    CHECK_EQ(take_event(&watched), 0);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    CHECK_EQ(take_event(&watched), 0);
    close_watched(&watched);
}

/* A completion is solicited if the other side sent a message, or a write with immediate, as solicited. Completions of
 * own requests are not, unless they failed. */
static void what_is_solicited(void)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE_WITH_IMM, 1, NULL, 0);
    struct ibv_recv_wr recv = {.wr_id = 2}, *bad;
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    CHECK_EQ(verbs_post_recv(watched.receiver, &recv, &bad), 0);
    CHECK_EQ(post(watched.sender, &wr), 0);
    EXPECT(watched.cq, 2, IBV_WC_SUCCESS);
    check_no_event(&watched);
    wr.send_flags |= IBV_SEND_SOLICITED;
    CHECK_EQ(verbs_post_recv(watched.receiver, &recv, &bad), 0);
    CHECK_EQ(post(watched.sender, &wr), 0);
    EXPECT(watched.cq, 2, IBV_WC_SUCCESS);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(take_event(&watched), 0);

    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    wr.opcode = IBV_WR_RDMA_WRITE;
    CHECK_EQ(post(watched.receiver, &wr), 0);
    EXPECT(watched.cq, 1, IBV_WC_SUCCESS);
    check_no_event(&watched);
    CHECK_EQ(qp_to(watched.receiver, IBV_QPS_ERR), 0);
    CHECK_EQ(post_nothing(watched.receiver, 3), 0);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(take_event(&watched), 0);
    close_watched(&watched);
}

/* An error raises an event, solicited or not. */
static void errors_are_solicited(void)
{
    struct ibv_recv_wr recv = {.wr_id = 2}, *bad;
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    CHECK_EQ(verbs_post_recv(watched.receiver, &recv, &bad), 0);
    check_no_event(&watched);
    CHECK_EQ(qp_to(watched.receiver, IBV_QPS_ERR), 0);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(take_event(&watched), 0);
    EXPECT(watched.cq, 2, IBV_WC_WR_FLUSH_ERR);
    close_watched(&watched);
}

/* The completion of a send disarms the queue, too. */
static void sends_raise_events(void)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 5, NULL, 0);
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    CHECK_EQ(post(watched.receiver, &wr), 0);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(take_event(&watched), 0);
    EXPECT(watched.cq, 5, IBV_WC_SUCCESS);
    close_watched(&watched);
}

static void queue_without_channel(void)
{
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.silent, 0), EINVAL);
    close_watched(&watched);
}

/* Several queues on one channel: each event names its queue, in the order of the completions. */
static void several_queues(void)
{
    enum { QUEUES = 4 };
    struct ibv_comp_channel *channel;
    struct ibv_cq *cqs[QUEUES], *cq;
    struct pair pair;
    void *context;
    int i, round;

    PAIR_OPEN(&pair, .unconnected = true);
    channel = soft_verbs.create_comp_channel(pair.own.context);
    REQUIRE(channel && fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
    for (i = 0; i < QUEUES; i++) {
        struct ibv_cq_init_attr_ex attr = {.cqe = 8, .cq_context = &cqs[i], .channel = channel};

        cqs[i] = cq_of(verbs_create_cq_ex(pair.own.context, &attr));
        REQUIRE(cqs[i] != NULL);
        CHECK_EQ(verbs_req_notify_cq(cqs[i], 0), 0);
    }
    for (round = 0; round < 3; round++) {
        struct ibv_qp *qps[QUEUES];

        for (i = 0; i < QUEUES; i++) {
            struct ibv_cq *its_cq = cqs[(i + round) % QUEUES];

            qps[i] = make_loop(pair.own.pd, its_cq, 1);
            CHECK_EQ(qp_to(qps[i], IBV_QPS_ERR), 0);
            CHECK_EQ(post_nothing(qps[i], 1), 0);
            EXPECT(its_cq, 1, IBV_WC_WR_FLUSH_ERR);
        }
        for (i = 0; i < QUEUES; i++) {
            CHECK(is_readable(channel->fd));
            REQUIRE_EQ(soft_verbs.get_cq_event(channel, &cq, &context), 0);
            CHECK(cq == cqs[(i + round) % QUEUES] && context == &cqs[(i + round) % QUEUES]);
            soft_verbs.ack_cq_events(cq, 1);
            CHECK_EQ(verbs_req_notify_cq(cq, 0), 0);
        }
        CHECK(!is_readable(channel->fd));
        for (i = 0; i < QUEUES; i++)
            CHECK_EQ(soft_verbs.destroy_qp(qps[i]), 0);
    }
    for (i = 0; i < QUEUES; i++) {
        CHECK_EQ(soft_verbs.destroy_comp_channel(channel), EBUSY);
        CHECK_EQ(soft_verbs.destroy_cq(cqs[i]), 0);
    }
    CHECK_EQ(soft_verbs.destroy_comp_channel(channel), 0);
    pair_close(&pair);
}

/* ---- A thread that reads what peers sent, and takes an event of that --------------------------------------------- */

static struct ibv_comp_channel *wakeup;
static struct ibv_cq *woken[2];
static struct ibv_qp *ended[2];
static unsigned int reads;

static bool is_wakeup(const struct soft_device *device, const struct soft_channel *channel)
{
    (void)device;
    return &channel->channel == wakeup;
}

/* Have two queues get completions, as frames of peers do. */
static bool read_peers(struct soft_device *device, bool all)
{
    unsigned int i;

    (void)device;
    if (!all || reads++)
        return false;
    for (i = 0; i < 2; i++) {
        CHECK_EQ(post_nothing(ended[i], 1), 0);
        EXPECT(woken[i], 1, IBV_WC_WR_FLUSH_ERR);
    }
    CHECK(!is_readable(wakeup->fd));
    return true;
}

/* The descriptor tells only of the events that are left. */
static void events_of_the_thread_that_reads(void)
{
    const struct soft_hooks *before;
    struct soft_device *device;
    struct soft_hooks hooks;
    struct ibv_cq *cq;
    struct pair pair;
    void *context;
    unsigned int i;

    PAIR_OPEN(&pair, .unconnected = true);
    device = to_soft_context(pair.own.context)->device;
    before = device->hooks;
    hooks = *before;
    hooks.is_wakeup_channel = is_wakeup;
    hooks.poll_peers = read_peers;
    device->hooks = &hooks;
    reads = 0;
    wakeup = soft_verbs.create_comp_channel(pair.own.context);
    REQUIRE(wakeup && fcntl(wakeup->fd, F_SETFL, O_NONBLOCK) == 0);
    for (i = 0; i < 2; i++) {
        woken[i] = home_cq(&pair.own, 8, wakeup);
        CHECK_EQ(verbs_req_notify_cq(woken[i], 0), 0);
        ended[i] = make_loop(pair.own.pd, woken[i], 1);
        CHECK_EQ(qp_to(ended[i], IBV_QPS_ERR), 0);
    }
    for (i = 0; i < 2; i++) {
        REQUIRE_EQ(soft_verbs.get_cq_event(wakeup, &cq, &context), 0);
        CHECK(cq == woken[i]);
        CHECK(is_readable(wakeup->fd) == !i);
        soft_verbs.ack_cq_events(cq, 1);
    }
    CHECK_EQ(soft_verbs.get_cq_event(wakeup, &cq, &context), -1);
    CHECK_EQ(errno, EAGAIN);
    CHECK_EQ(reads, 2);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(soft_verbs.destroy_qp(ended[i]), 0);
        CHECK_EQ(soft_verbs.destroy_cq(woken[i]), 0);
    }
    CHECK_EQ(soft_verbs.destroy_comp_channel(wakeup), 0);
    device->hooks = before;
    pair_close(&pair);
}

/* A queue that overruns wakes a sleeping thread: no further completion may come. */
static void overrun_raises_an_event(void)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, NULL, 0);
    struct watched watched;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    int i;

    open_watched(&watched, false);
    cq = home_cq(&watched.home, 4, watched.channel);
    qp = make_qp(watched.home.pd, cq, 16);
    qp_connect(qp, &default_link, qp->qp_num);
    for (i = 0; i < cq->cqe; i++)
        CHECK_EQ(post(qp, &wr), 0);
    wait_executed(qp, (uint32_t)cq->cqe);
    CHECK_EQ(verbs_req_notify_cq(cq, 0), 0);
    check_no_event(&watched);
    CHECK_EQ(post(qp, &wr), 0);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    close_watched(&watched);
}

CHECK_MAIN(CASE(one_shot), CASE(armed_twice), CASE(solicited_only), CASE(what_is_solicited), CASE(errors_are_solicited),
           CASE(sends_raise_events), CASE(queue_without_channel), CASE(several_queues),
           CASE(events_of_the_thread_that_reads), CASE(overrun_raises_an_event))
