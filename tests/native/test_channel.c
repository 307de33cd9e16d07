/* Completion channels: when an event comes, when none does, and how it is taken. */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

/* A pair whose receiving end has its receives told to a channel. */
struct watched {
    struct home home;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq, *silent;
    struct ibv_qp *sender, *receiver;
};

static struct ibv_qp *make_qp(struct watched *watched, struct ibv_cq *cq)
{
    struct ibv_qp_init_attr attr = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *qp = soft_verbs.create_qp(watched->home.pd, &attr);

    REQUIRE(qp != NULL);
    return qp;
}

static void open_watched(struct watched *watched, bool blocking)
{
    memset(watched, 0, sizeof(*watched));
    home_open(&watched->home);
    watched->channel = soft_verbs.create_comp_channel(watched->home.context);
    REQUIRE(watched->channel != NULL);
    CHECK(watched->channel->context == watched->home.context);
    if (!blocking)
        REQUIRE_EQ(fcntl(watched->channel->fd, F_SETFL, O_NONBLOCK), 0);
    watched->cq = home_cq(&watched->home, 32, watched->channel);
    CHECK(watched->cq->channel == watched->channel);
    watched->silent = home_cq(&watched->home, 32, NULL);
    watched->sender = make_qp(watched, watched->silent);
    watched->receiver = make_qp(watched, watched->cq);
    qp_connect(watched->sender, &default_link, watched->receiver->qp_num);
    qp_connect(watched->receiver, &default_link, watched->sender->qp_num);
}

static void close_watched(struct watched *watched)
{
    CHECK_EQ(soft_verbs.destroy_qp(watched->sender), 0);
    CHECK_EQ(soft_verbs.destroy_qp(watched->receiver), 0);
    CHECK_EQ(soft_verbs.destroy_cq(watched->cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(watched->silent), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(watched->channel), 0);
    home_close(&watched->home);
}

/* One message, which completes on the watched queue by the time this returns. */
static void deliver(struct watched *watched, bool solicited)
{
    struct ibv_send_wr wr = request(IBV_WR_SEND, 1, NULL, 0);
    struct ibv_recv_wr recv = {.wr_id = 2}, *bad;

    wr.send_flags |= solicited ? IBV_SEND_SOLICITED : 0;
    CHECK_EQ(verbs_post_recv(watched->receiver, &recv, &bad), 0);
    CHECK_EQ(post(watched->sender, &wr), 0);
    EXPECT(watched->silent, 1, IBV_WC_SUCCESS); /* the sender is told after the receiver */
}

static int take(struct watched *watched)
{
    struct ibv_cq *cq = NULL;
    void *context;
    int answer = soft_verbs.get_cq_event(watched->channel, &cq, &context);

    if (!answer) {
        CHECK(cq == watched->cq && context == watched->cq->cq_context);
        soft_verbs.ack_cq_events(cq, 1);
    }
    return answer;
}

static void check_no_event(struct watched *watched)
{
    CHECK(!is_readable(watched->channel->fd));
    errno = 0;
    CHECK_EQ(take(watched), -1);
    CHECK_EQ(errno, EAGAIN);
}

/* One event per arming, whatever comes; the descriptor is readable exactly while it waits. */
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
        CHECK_EQ(take(&watched), 0);
        check_no_event(&watched);
        deliver(&watched, false);
        check_no_event(&watched);
    }
    close_watched(&watched);
}

/* Armings are not counted: twice is as good as once. */
static void armed_twice(void)
{
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    deliver(&watched, false);
    CHECK_EQ(take(&watched), 0);
    check_no_event(&watched);

    /* But an event that waits does not keep the queue from being armed for the next one. */
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    CHECK_EQ(take(&watched), 0);
    CHECK(is_readable(watched.channel->fd));
    CHECK_EQ(take(&watched), 0);
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
    CHECK_EQ(take(&watched), 0);
    check_no_event(&watched);

    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0); /* for any is more than for solicited ones */
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    deliver(&watched, false);
    CHECK_EQ(take(&watched), 0);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 1), 0);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    CHECK_EQ(take(&watched), 0);
    close_watched(&watched);
}

/* An error is worth an event, asked for or not. */
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
    CHECK_EQ(take(&watched), 0);
    EXPECT(watched.cq, 2, IBV_WC_WR_FLUSH_ERR);
    close_watched(&watched);
}

/* A send's completion, too, arms off. */
static void sends_raise_events(void)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 5, NULL, 0);
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    CHECK_EQ(post(watched.receiver, &wr), 0);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(take(&watched), 0);
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

/* Several queues on one channel: each event names its own, first come first served. */
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
            struct ibv_qp_init_attr attr = {
                .send_cq = cqs[(i + round) % QUEUES],
                .recv_cq = cqs[(i + round) % QUEUES],
                .cap = {1, 1, 1, 1, 0},
                .qp_type = IBV_QPT_RC,
            };
            struct ibv_send_wr wr = request(IBV_WR_SEND, 1, NULL, 0);

            qps[i] = soft_verbs.create_qp(pair.own.pd, &attr);
            REQUIRE(qps[i] != NULL);
            qp_connect(qps[i], &default_link, qps[i]->qp_num);
            CHECK_EQ(qp_to(qps[i], IBV_QPS_ERR), 0);
            CHECK_EQ(post(qps[i], &wr), 0);
            EXPECT(attr.send_cq, 1, IBV_WC_WR_FLUSH_ERR);
            while (i == 0 && !is_readable(channel->fd))
                settle();
            settle(); /* so that the events come one by one */
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

/* An event that nobody took goes with its queue, and so does the readiness of the descriptor. */
static void events_go_with_their_queue(void)
{
    struct watched watched;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    CHECK(is_readable(watched.channel->fd));
    CHECK_EQ(soft_verbs.destroy_qp(watched.receiver), 0);
    CHECK_EQ(soft_verbs.destroy_cq(watched.cq), 0);
    CHECK(!is_readable(watched.channel->fd));
    watched.cq = home_cq(&watched.home, 8, watched.channel);
    watched.receiver = make_qp(&watched, watched.cq);
    close_watched(&watched);
}

/* The same in the midst of others, whose events stay, each in its turn. */
static void events_of_others_stay(void)
{
    enum { QUEUES = 4 };
    static const int removed[][2] = {{0, 1}, {1, 2}, {2, 3}, {3, 0}, {3, 2}, {1, 3}};
    size_t i;
    int q;

    for (i = 0; i < COUNT_OF(removed); i++) {
        struct ibv_cq *cqs[QUEUES], *cq;
        struct watched watched;
        void *context;

        open_watched(&watched, false);
        for (q = 0; q < QUEUES; q++) {
            struct ibv_recv_wr recv = {.wr_id = 1}, *bad;
            struct ibv_qp *qp;

            cqs[q] = home_cq(&watched.home, 4, watched.channel);
            CHECK_EQ(verbs_req_notify_cq(cqs[q], 0), 0);
            qp = make_qp(&watched, cqs[q]);
            CHECK_EQ(qp_to_init(qp, &default_link), 0);
            CHECK_EQ(verbs_post_recv(qp, &recv, &bad), 0);
            CHECK_EQ(qp_to(qp, IBV_QPS_ERR), 0);
            EXPECT(cqs[q], 1, IBV_WC_WR_FLUSH_ERR);
            settle(); /* the event comes after the completion */
            CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
        }
        for (q = 0; q < 2; q++) {
            CHECK_EQ(soft_verbs.destroy_cq(cqs[removed[i][q]]), 0);
            cqs[removed[i][q]] = NULL;
        }
        CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
        deliver(&watched, false); /* goes behind those that are left */
        for (q = 0; q < QUEUES; q++) {
            if (!cqs[q])
                continue;
            REQUIRE_EQ(soft_verbs.get_cq_event(watched.channel, &cq, &context), 0);
            CHECK(cq == cqs[q]);
            soft_verbs.ack_cq_events(cq, 1);
            CHECK_EQ(soft_verbs.destroy_cq(cqs[q]), 0);
        }
        CHECK_EQ(take(&watched), 0);
        check_no_event(&watched);
        close_watched(&watched);
    }
}

struct taker {
    struct watched *watched;
    atomic_bool started, done;
};

static void *take_in_thread(void *argument)
{
    struct taker *taker = argument;

    atomic_store(&taker->started, true);
    CHECK_EQ(take(taker->watched), 0);
    atomic_store(&taker->done, true);
    return NULL;
}

/* On a descriptor that blocks, the call waits for the event. */
static void blocking(void)
{
    struct watched watched;
    struct taker taker = {.watched = &watched};
    pthread_t thread;

    open_watched(&watched, true);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, take_in_thread, &taker), 0);
    while (!atomic_load(&taker.started))
        sleep_us(100);
    sleep_us(5000);
    CHECK(!atomic_load(&taker.done));
    deliver(&watched, false);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(atomic_load(&taker.done));
    CHECK(!is_readable(watched.channel->fd));
    close_watched(&watched);
}

static void on_signal(int number)
{
    (void)number;
}

static void *take_until_interrupted(void *argument)
{
    struct taker *taker = argument;

    atomic_store(&taker->started, true);
    errno = 0;
    CHECK_EQ(take(taker->watched), -1);
    CHECK_EQ(errno, EINTR);
    atomic_store(&taker->done, true);
    return NULL;
}

/* A signal ends the wait, as it ends a read. */
static void interrupted(void)
{
    struct sigaction action = {.sa_handler = on_signal}, before;
    struct watched watched;
    struct taker taker = {.watched = &watched};
    pthread_t thread;

    open_watched(&watched, true);
    REQUIRE_EQ(sigaction(SIGUSR1, &action, &before), 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, take_until_interrupted, &taker), 0);
    while (!atomic_load(&taker.started))
        sleep_us(100);
    while (!atomic_load(&taker.done)) { /* again, where it came before the wait began */
        sleep_us(2000);
        CHECK_EQ(pthread_kill(thread, SIGUSR1), 0);
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    REQUIRE_EQ(sigaction(SIGUSR1, &before, NULL), 0);
    close_watched(&watched);
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

/* Who took an event may still look at the queue: destroying it waits for the acknowledgement. */
static void destroying_waits(void)
{
    struct destroyer destroyer = {0};
    struct watched watched;
    pthread_t thread;
    struct ibv_cq *cq;
    void *context;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    REQUIRE_EQ(soft_verbs.get_cq_event(watched.channel, &cq, &context), 0);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    REQUIRE_EQ(soft_verbs.get_cq_event(watched.channel, &cq, &context), 0);
    CHECK_EQ(soft_verbs.destroy_qp(watched.receiver), 0);
    destroyer.cq = cq;
    REQUIRE_EQ(pthread_create(&thread, NULL, destroy_in_thread, &destroyer), 0);
    while (!atomic_load(&destroyer.started))
        sleep_us(100);
    sleep_us(5000);
    CHECK(!atomic_load(&destroyer.done));
    soft_verbs.ack_cq_events(cq, 1);
    sleep_us(5000);
    CHECK(!atomic_load(&destroyer.done)); /* one of two */
    soft_verbs.ack_cq_events(cq, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    watched.cq = home_cq(&watched.home, 8, watched.channel);
    watched.receiver = make_qp(&watched, watched.cq);
    close_watched(&watched);
}

static int poll_once(void *argument)
{
    struct ibv_wc wc;

    return verbs_poll_cq(argument, 1, &wc);
}

/* What it waits for may be a handler that took the event and polls before he acknowledges it: with locks, that works;
 * without, it is refused at worst. */
static void polling_before_acknowledging(void)
{
    struct destroyer destroyer = {0};
    struct watched watched;
    pthread_t thread;
    struct ibv_cq *cq;
    void *context;
    int n;

    open_watched(&watched, false);
    CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
    deliver(&watched, false);
    REQUIRE_EQ(soft_verbs.get_cq_event(watched.channel, &cq, &context), 0);
    CHECK_EQ(soft_verbs.destroy_qp(watched.receiver), 0); /* takes the completion with it */
    destroyer.cq = cq;
    REQUIRE_EQ(pthread_create(&thread, NULL, destroy_in_thread, &destroyer), 0);
    while (!atomic_load(&destroyer.started))
        sleep_us(100);
    sleep_us(5000);
    n = call_elsewhere(poll_once, cq);
    CHECK(n == 0 || (variant->thread_domain && n == -EBUSY));
    CHECK(!atomic_load(&destroyer.done));
    soft_verbs.ack_cq_events(cq, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    watched.cq = home_cq(&watched.home, 8, watched.channel);
    watched.receiver = make_qp(&watched, watched.cq);
    close_watched(&watched);
}

/* A queue that overran wakes who sleeps on it: there may be nothing else to come. */
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
    qp = make_qp(&watched, cq);
    qp_connect(qp, &default_link, qp->qp_num);
    for (i = 0; i < cq->cqe; i++)
        CHECK_EQ(post(qp, &wr), 0);
    settle(), settle();
    CHECK_EQ(verbs_req_notify_cq(cq, 0), 0);
    check_no_event(&watched);
    CHECK_EQ(post(qp, &wr), 0);
    CHECK(wait_readable(watched.channel->fd));
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    close_watched(&watched);
}

/* Several events acknowledged at once. */
static void acknowledged_together(void)
{
    struct watched watched;
    struct ibv_cq *cq;
    void *context;
    unsigned int i;

    open_watched(&watched, false);
    for (i = 0; i < 5; i++) {
        CHECK_EQ(verbs_req_notify_cq(watched.cq, 0), 0);
        deliver(&watched, false);
        REQUIRE_EQ(soft_verbs.get_cq_event(watched.channel, &cq, &context), 0);
    }
    soft_verbs.ack_cq_events(watched.cq, i);
    close_watched(&watched);
}

CHECK_MAIN(CASE(one_shot), CASE(armed_twice), CASE(solicited_only), CASE(errors_are_solicited),
           CASE(sends_raise_events), CASE(queue_without_channel), CASE(several_queues),
           CASE(events_go_with_their_queue), CASE(events_of_others_stay), CASE(blocking), CASE(interrupted),
           CASE(destroying_waits), CASE(polling_before_acknowledging), CASE(overrun_raises_an_event),
           CASE(acknowledged_together))
