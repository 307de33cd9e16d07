/* Tests of pending events of completion channels: taken, waited for, acknowledged, or dropped with their queue. */
#include "support.h"
#include "support_watched.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "soft/api/device.h"
#include "soft/base/lock_order.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/worker_thread.h"

/* An event that was not taken is dropped with its queue, and the descriptor becomes unreadable. */
static void destroying_a_queue_drops_its_events(void)
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
    watched.receiver = make_qp(watched.home.pd, watched.cq, 16);
    close_watched(&watched);
}

/* The same among events of other queues, which stay in their order. */
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
            qp = make_qp(watched.home.pd, cqs[q], 16);
            CHECK_EQ(qp_to_init(qp, &default_link), 0);
            CHECK_EQ(verbs_post_recv(qp, &recv, &bad), 0);
            CHECK_EQ(qp_to(qp, IBV_QPS_ERR), 0);
            EXPECT(cqs[q], 1, IBV_WC_WR_FLUSH_ERR);
            CHECK_EQ(soft_verbs.destroy_qp(qp), 0); /* the device is done with it: the event is there */
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
        CHECK_EQ(take_event(&watched), 0);
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
    CHECK_EQ(take_event(taker->watched), 0);
    atomic_store(&taker->done, true);
    return NULL;
}

/* On a blocking descriptor the call waits for the event. */
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
    CHECK_EQ(take_event(taker->watched), -1);
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

/* A handler that took an event may still use the queue: destroying it waits for the acknowledgement. */
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
    watched.receiver = make_qp(watched.home.pd, watched.cq, 16);
    close_watched(&watched);
}

static int poll_once(void *argument)
{
    struct ibv_wc wc;

    return verbs_poll_cq(argument, 1, &wc);
}

static int moderate(void *argument)
{
    struct ibv_modify_cq_attr attr = {
        .attr_mask = IBV_CQ_ATTR_MODERATE,
        .moderate = {.cq_count = 2, .cq_period = 1},
    };

    return verbs_modify_cq(argument, &attr);
}

/* Wait until the destroying thread has left the queue and waits for the acknowledgement. */
static void wait_leaving(struct ibv_cq *cq)
{
    struct soft_worker *worker = &to_soft_context(cq->context)->worker;
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    bool leaving = false;

    while (!leaving) {
        REQUIRE(now_ns() < end);
        sched_yield();
        soft_mutex_take(&worker->lock);
        leaving = to_soft_cq(cq)->timer.cancelled;
        soft_mutex_give(&worker->lock);
    }
    wait_left(&to_soft_cq(cq)->half);
}

/* The handler may poll before it acknowledges the event: with locks that works; without, it is refused at worst. */
static void polling_before_acknowledging(void)
{
    struct destroyer destroyer = {0};
    uint32_t reserved;
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
    reserved = to_soft_context(watched.home.context)->worker.reserved;
    destroyer.cq = cq;
    REQUIRE_EQ(pthread_create(&thread, NULL, destroy_in_thread, &destroyer), 0);
    while (!atomic_load(&destroyer.started))
        sleep_us(100);
    wait_leaving(cq);
    n = call_elsewhere(poll_once, cq);
    CHECK(n == 0 || (variant->thread_domain && n == -EBUSY));
    n = call_elsewhere(moderate, cq);
    CHECK(n == 0 || (variant->thread_domain && n == EBUSY));
    CHECK(!atomic_load(&destroyer.done));
    soft_verbs.ack_cq_events(cq, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(to_soft_context(watched.home.context)->worker.reserved, reserved);
    watched.cq = home_cq(&watched.home, 8, watched.channel);
    watched.receiver = make_qp(watched.home.pd, watched.cq, 16);
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

CHECK_MAIN(CASE(destroying_a_queue_drops_its_events), CASE(events_of_others_stay), CASE(blocking), CASE(interrupted),
           CASE(destroying_waits), CASE(polling_before_acknowledging), CASE(acknowledged_together))
