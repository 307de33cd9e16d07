/* Tests of asynchronous events: raised, taken, acknowledged, or dropped with their object. */
#include "support.h"
#include "support_async.h"
#include "support_fork.h"
#include "support_srq.h"
#include "support_threads.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "soft/api/device.h"
#include "soft/objects/async_event.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/qp.h"
#include "soft/objects/srq.h"

static struct soft_context *soft_of(struct home *home)
{
    return to_soft_context(home->context);
}

static void raise_qp(struct ibv_qp *qp, enum ibv_event_type type)
{
    soft_raise_event(to_soft_context(qp->context), &to_soft_qp(qp)->events, type);
}

static void raise_cq(struct ibv_cq *cq)
{
    soft_raise_event(to_soft_context(cq->context), &to_soft_cq(cq)->events, IBV_EVENT_CQ_ERR);
}

static void open_quiet(struct home *home)
{
    home_open(home);
    async_nonblocking(home->context);
}

/* ---- One at a time ---------------------------------------------------------------------------------------- */

static void no_pending_event(void)
{
    struct home home;

    home_open(&home);
    CHECK_EQ(fcntl(home.context->async_fd, F_GETFL) & O_NONBLOCK, 0); /* as libibverbs hands it out */
    CHECK_EQ(fcntl(home.context->async_fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    async_nonblocking(home.context);
    EXPECT_NO_ASYNC(home.context);
    home_close(&home);
}

/* Each type of event names its object, or the port if there is none. */
static void each_type_with_its_object(void)
{
    static const enum ibv_event_type of_qp[] = {
        IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
        IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED, IBV_EVENT_QP_LAST_WQE_REACHED,
    };
    static const enum ibv_event_type of_srq[] = {IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED};
    static const enum ibv_event_type of_port[] = {IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_DEVICE_FATAL};
    struct soft_srq srq = {0};
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct home home;
    size_t i;

    open_quiet(&home);
    cq = home_cq(&home, 8, NULL);
    qp = make_qp(home.pd, cq, 4);
    srq.srq = (struct ibv_srq){.context = home.context, .mutex = PTHREAD_MUTEX_INITIALIZER};
    REQUIRE_EQ(pthread_cond_init(&srq.srq.cond, NULL), 0);
    srq.events.element = &srq.srq;
    for (i = 0; i < COUNT_OF(of_qp); i++) {
        raise_qp(qp, of_qp[i]);
        EXPECT_ASYNC(home.context, of_qp[i], qp);
        CHECK_EQ(qp->events_completed, i + 1);
    }
    for (i = 0; i < COUNT_OF(of_srq); i++) {
        soft_raise_event(soft_of(&home), &srq.events, of_srq[i]);
        EXPECT_ASYNC(home.context, of_srq[i], &srq.srq);
        CHECK_EQ(srq.srq.events_completed, i + 1);
    }
    for (i = 0; i < COUNT_OF(of_port); i++) {
        soft_raise_event(soft_of(&home), &soft_of(&home)->events.own, of_port[i]);
        EXPECT_ASYNC_PORT(home.context, of_port[i]);
    }
    raise_cq(cq);
    EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, cq);
    CHECK_EQ(cq->async_events_completed, 1);
    CHECK_EQ(cq->comp_events_completed, 0);
    EXPECT_NO_ASYNC(home.context);
    CHECK_EQ(pthread_cond_destroy(&srq.srq.cond), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* An object breaks, as by a fault of the hardware. */
static void broken_objects(void)
{
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct home home;
    struct ibv_wc wc;

    open_quiet(&home);
    cq = home_cq(&home, 8, NULL);
    qp = make_loop(home.pd, cq, 4);
    CHECK_EQ(soft_break_qp(qp), 0);
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, qp);
    CHECK_EQ(qp_state(qp), IBV_QPS_ERR);
    CHECK_EQ(soft_break_cq(cq), 0);
    EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, cq);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* ---- Several ---------------------------------------------------------------------------------------------- */

/* An event that is raised again while pending becomes its object's latest; after it was taken, it is pending anew. */
static void raised_again(void)
{
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct home home;
    int i;

    open_quiet(&home);
    cq = home_cq(&home, 8, NULL);
    qp = make_qp(home.pd, cq, 4);
    raise_qp(qp, IBV_EVENT_COMM_EST);
    raise_qp(qp, IBV_EVENT_SQ_DRAINED);
    raise_qp(qp, IBV_EVENT_QP_FATAL);
    raise_qp(qp, IBV_EVENT_COMM_EST);
    EXPECT_ASYNC(home.context, IBV_EVENT_SQ_DRAINED, qp);
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, qp);
    EXPECT_ASYNC(home.context, IBV_EVENT_COMM_EST, qp);
    EXPECT_NO_ASYNC(home.context);
    for (i = 0; i < 3; i++) {
        raise_qp(qp, IBV_EVENT_SQ_DRAINED);
        raise_qp(qp, IBV_EVENT_SQ_DRAINED);
        EXPECT_ASYNC(home.context, IBV_EVENT_SQ_DRAINED, qp);
        EXPECT_NO_ASYNC(home.context);
    }
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* Objects take turns, so that one with many events does not delay those of the others. */
static void events_keep_their_order(void)
{
    struct ibv_qp *a, *b;
    struct ibv_cq *cq;
    struct home home;

    open_quiet(&home);
    cq = home_cq(&home, 8, NULL);
    a = make_qp(home.pd, cq, 4);
    b = make_qp(home.pd, cq, 4);
    raise_qp(a, IBV_EVENT_COMM_EST);
    raise_qp(a, IBV_EVENT_SQ_DRAINED);
    raise_qp(a, IBV_EVENT_QP_FATAL);
    raise_cq(cq);
    raise_qp(b, IBV_EVENT_COMM_EST);
    raise_qp(b, IBV_EVENT_QP_FATAL);
    EXPECT_ASYNC(home.context, IBV_EVENT_COMM_EST, a);
    EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, cq);
    EXPECT_ASYNC(home.context, IBV_EVENT_COMM_EST, b);
    EXPECT_ASYNC(home.context, IBV_EVENT_SQ_DRAINED, a);
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, b);
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, a);
    EXPECT_NO_ASYNC(home.context);
    CHECK_EQ(soft_verbs.destroy_qp(a), 0);
    CHECK_EQ(soft_verbs.destroy_qp(b), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* Events that were not taken are dropped with their object, wherever that is in the list; others stay. */
static void destroying_an_object_drops_its_events(void)
{
    enum { PAIRS = 4 };
    static const int removed[][3] = {{0, 1, -1}, {1, 2, -1}, {3, 2, -1}, {0, 3, -1}, {1, 3, 0}, {2, 0, 3}};
    size_t i;
    int n;

    for (i = 0; i < COUNT_OF(removed); i++) {
        struct ibv_qp *qps[PAIRS];
        struct ibv_cq *cq;
        struct home home;

        open_quiet(&home);
        cq = home_cq(&home, 8, NULL);
        for (n = 0; n < PAIRS; n++) {
            qps[n] = make_qp(home.pd, cq, 4);
            raise_qp(qps[n], IBV_EVENT_COMM_EST);
            raise_qp(qps[n], IBV_EVENT_QP_FATAL);
        }
        for (n = 0; n < 3 && removed[i][n] >= 0; n++) {
            CHECK_EQ(soft_verbs.destroy_qp(qps[removed[i][n]]), 0);
            qps[removed[i][n]] = NULL;
        }
        raise_cq(cq); /* goes behind those that are left */
        for (n = 0; n < PAIRS; n++)
            if (qps[n])
                EXPECT_ASYNC(home.context, IBV_EVENT_COMM_EST, qps[n]);
        EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, cq);
        for (n = 0; n < PAIRS; n++) {
            if (!qps[n])
                continue;
            CHECK(is_readable(home.context->async_fd));
            CHECK_EQ(soft_verbs.destroy_qp(qps[n]), 0);
        }
        EXPECT_NO_ASYNC(home.context); /* not readable any more, either */
        CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
        home_close(&home);
    }
}

/* ---- Waiting for one -------------------------------------------------------------------------------------- */

struct taker {
    struct ibv_context *context;
    struct ibv_async_event event;
    int expected_errno;
    atomic_bool started, done;
};

static void *take_in_thread(void *argument)
{
    struct taker *taker = argument;

    atomic_store(&taker->started, true);
    errno = 0;
    CHECK_EQ(soft_verbs.get_async_event(taker->context, &taker->event), taker->expected_errno ? -1 : 0);
    CHECK_EQ(errno, taker->expected_errno);
    atomic_store(&taker->done, true);
    return NULL;
}

static void wait_for(atomic_bool *flag)
{
    while (!atomic_load(flag))
        sleep_us(100);
}

/* On a blocking descriptor the call waits for the event. */
static void blocking(void)
{
    struct taker taker = {0};
    pthread_t thread;
    struct home home;

    home_open(&home);
    taker.context = home.context;
    REQUIRE_EQ(pthread_create(&thread, NULL, take_in_thread, &taker), 0);
    wait_for(&taker.started);
    sleep_us(5000);
    CHECK(!atomic_load(&taker.done));
    soft_raise_event(soft_of(&home), &soft_of(&home)->events.own, IBV_EVENT_PORT_ERR);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(taker.event.event_type, IBV_EVENT_PORT_ERR);
    CHECK(!is_readable(home.context->async_fd));
    home_close(&home);
}

static void on_signal(int number)
{
    (void)number;
}

/* A signal ends the wait, as it ends a read. */
static void interrupted(void)
{
    struct sigaction action = {.sa_handler = on_signal}, before;
    struct taker taker = {.expected_errno = EINTR};
    pthread_t thread;
    struct home home;

    home_open(&home);
    taker.context = home.context;
    REQUIRE_EQ(sigaction(SIGUSR1, &action, &before), 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, take_in_thread, &taker), 0);
    wait_for(&taker.started);
    while (!atomic_load(&taker.done)) { /* again, where it came before the wait began */
        sleep_us(2000);
        CHECK_EQ(pthread_kill(thread, SIGUSR1), 0);
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    REQUIRE_EQ(sigaction(SIGUSR1, &before, NULL), 0);
    home_close(&home);
}

/* ---- Acknowledging, and destruction ------------------------------------------------------------------------ */

struct destroyer {
    struct ibv_qp *qp; /* or */
    struct ibv_cq *cq;
    atomic_bool started, done;
};

static void *destroy_in_thread(void *argument)
{
    struct destroyer *destroyer = argument;

    atomic_store(&destroyer->started, true);
    if (destroyer->qp)
        CHECK_EQ(soft_verbs.destroy_qp(destroyer->qp), 0);
    else
        CHECK_EQ(soft_verbs.destroy_cq(destroyer->cq), 0);
    atomic_store(&destroyer->done, true);
    return NULL;
}

/* A handler that took an event may still use its object: destruction waits until each taken event is acknowledged. */
static void check_that_it_waits(struct home *home, struct destroyer *destroyer, struct ibv_async_event *events,
                                int count)
{
    pthread_t thread;
    int i;

    REQUIRE_EQ(pthread_create(&thread, NULL, destroy_in_thread, destroyer), 0);
    wait_for(&destroyer->started);
    for (i = 0; i < count; i++) {
        sleep_us(5000);
        CHECK(!atomic_load(&destroyer->done));
        soft_verbs.ack_async_event(&events[i]);
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    EXPECT_NO_ASYNC(home->context);
}

static void destroying_waits(void)
{
    struct ibv_async_event events[2];
    struct destroyer destroyer = {0};
    struct ibv_cq *cq;
    struct home home;

    open_quiet(&home);
    cq = home_cq(&home, 8, NULL);
    destroyer.qp = make_qp(home.pd, cq, 4);
    raise_qp(destroyer.qp, IBV_EVENT_COMM_EST);
    raise_qp(destroyer.qp, IBV_EVENT_SQ_DRAINED);
    REQUIRE_EQ(soft_verbs.get_async_event(home.context, &events[0]), 0);
    REQUIRE_EQ(soft_verbs.get_async_event(home.context, &events[1]), 0);
    raise_qp(destroyer.qp, IBV_EVENT_QP_FATAL); /* not taken, so destruction does not wait for it */
    check_that_it_waits(&home, &destroyer, events, 2);

    destroyer = (struct destroyer){.cq = cq};
    raise_cq(cq);
    REQUIRE_EQ(soft_verbs.get_async_event(home.context, &events[0]), 0);
    check_that_it_waits(&home, &destroyer, events, 1);
    home_close(&home);
}

/* Destruction does not wait for acknowledged events, whatever their order and number. */
static void acknowledged_before(void)
{
    struct ibv_async_event events[3];
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct home home;
    int i;

    open_quiet(&home);
    cq = home_cq(&home, 8, NULL);
    qp = make_qp(home.pd, cq, 4);
    for (i = 0; i < 3; i++) {
        raise_qp(qp, IBV_EVENT_QP_FATAL);
        raise_cq(cq);
        REQUIRE_EQ(soft_verbs.get_async_event(home.context, &events[i]), 0);
        EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, cq);
    }
    for (i = 2; i >= 0; i--)
        soft_verbs.ack_async_event(&events[i]);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* A context can be closed while events of its port are pending, or were taken and never acknowledged. */
static void closing(void)
{
    struct ibv_async_event event;
    struct home home;

    open_quiet(&home);
    soft_raise_event(soft_of(&home), &soft_of(&home)->events.own, IBV_EVENT_PORT_ERR);
    soft_raise_event(soft_of(&home), &soft_of(&home)->events.own, IBV_EVENT_PORT_ACTIVE);
    CHECK_EQ(soft_verbs.get_async_event(home.context, &event), 0);
    home_close(&home);
}

/* ---- The port and the device ------------------------------------------------------------------------------- */

static void check_port(struct home *home, enum ibv_port_state state, int phys_state)
{
    struct ibv_port_attr attr;

    CHECK_EQ(verbs_query_port(home->context, 1, &attr), 0);
    CHECK_EQ(attr.state, state);
    CHECK_EQ(attr.phys_state, phys_state);
}

/* The port is the device's: each context gets an event, but only of a change. */
static void port_goes_down_and_up(void)
{
    struct home homes[2], later;
    int i, round;

    open_quiet(&homes[0]);
    open_quiet(&homes[1]);
    CHECK_EQ(soft_set_port(homes[0].context, true), 0);
    EXPECT_NO_ASYNC(homes[0].context);
    for (round = 0; round < 2; round++) {
        CHECK_EQ(soft_set_port(homes[round].context, false), 0);
        CHECK_EQ(soft_set_port(homes[0].context, false), 0);
        open_quiet(&later);
        EXPECT_NO_ASYNC(later.context);
        check_port(&later, IBV_PORT_DOWN, 3);
        home_close(&later); /* and is not told any more */
        for (i = 0; i < 2; i++) {
            check_port(&homes[i], IBV_PORT_DOWN, 3);
            EXPECT_ASYNC_PORT(homes[i].context, IBV_EVENT_PORT_ERR);
            EXPECT_NO_ASYNC(homes[i].context);
        }
        CHECK_EQ(soft_set_port(homes[1 - round].context, true), 0);
        for (i = 0; i < 2; i++) {
            check_port(&homes[i], IBV_PORT_ACTIVE, 5);
            EXPECT_ASYNC_PORT(homes[i].context, IBV_EVENT_PORT_ACTIVE);
            EXPECT_NO_ASYNC(homes[i].context);
        }
    }
    home_close(&homes[0]);
    CHECK_EQ(soft_set_port(homes[1].context, false), 0);
    CHECK_EQ(soft_set_port(homes[1].context, true), 0);
    EXPECT_ASYNC_PORT(homes[1].context, IBV_EVENT_PORT_ERR);
    EXPECT_ASYNC_PORT(homes[1].context, IBV_EVENT_PORT_ACTIVE);
    home_close(&homes[1]);
}

/* Contexts can be closed in any order. */
static void contexts_come_and_go(void)
{
    static const int orders[][3] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {1, 2, 0}};
    struct home homes[3];
    size_t i;
    int n, m;

    for (i = 0; i < COUNT_OF(orders); i++) {
        for (n = 0; n < 3; n++)
            open_quiet(&homes[n]);
        for (n = 0; n < 3; n++) {
            CHECK_EQ(soft_set_port(homes[orders[i][n]].context, false), 0);
            CHECK_EQ(soft_set_port(homes[orders[i][n]].context, true), 0);
            for (m = n; m < 3; m++) {
                EXPECT_ASYNC_PORT(homes[orders[i][m]].context, IBV_EVENT_PORT_ERR);
                EXPECT_ASYNC_PORT(homes[orders[i][m]].context, IBV_EVENT_PORT_ACTIVE);
            }
            home_close(&homes[orders[i][n]]);
        }
    }
}

/* The loss of the device is reported once, to the context that lost it; pending events can still be taken. */
static void device_is_lost(void)
{
    struct home homes[2];

    open_quiet(&homes[0]);
    open_quiet(&homes[1]);
    CHECK_EQ(soft_set_port(homes[0].context, false), 0);
    CHECK_EQ(soft_lose(homes[0].context), 0);
    CHECK_EQ(soft_lose(homes[0].context), 0);
    CHECK_EQ(soft_set_port(homes[1].context, true), 0);
    EXPECT_ASYNC_PORT(homes[0].context, IBV_EVENT_PORT_ERR);
    EXPECT_ASYNC_PORT(homes[0].context, IBV_EVENT_DEVICE_FATAL);
    EXPECT_NO_ASYNC(homes[0].context); /* nor of the port, which is gone */
    EXPECT_ASYNC_PORT(homes[1].context, IBV_EVENT_PORT_ERR);
    EXPECT_ASYNC_PORT(homes[1].context, IBV_EVENT_PORT_ACTIVE);
    EXPECT_NO_ASYNC(homes[1].context);
    home_close(&homes[0]);
    home_close(&homes[1]);
}

/* ---- Elsewhere --------------------------------------------------------------------------------------------- */

struct inherited {
    struct home home;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_async_event taken;
};

static void in_the_child(void *argument)
{
    struct inherited *inherited = argument;
    struct ibv_async_event event;

    CHECK_EQ(soft_verbs.get_async_event(inherited->home.context, &event), -1);
    CHECK_EQ(errno, ENODEV);
    soft_verbs.ack_async_event(&inherited->taken);
    CHECK_EQ(inherited->qp->events_completed, 0);
    CHECK_EQ(soft_set_port(inherited->home.context, false), ENODEV);
    CHECK_EQ(soft_lose(inherited->home.context), ENODEV);
    CHECK_EQ(soft_break_qp(inherited->qp), ENODEV);
    CHECK_EQ(soft_break_cq(inherited->cq), ENODEV);
    CHECK_EQ(soft_verbs.close_device(inherited->home.context), ENODEV);
}

/* A child of a fork has a device of its own: using its parent's events changes nothing. */
static void after_a_fork(void)
{
    struct inherited inherited;

    open_quiet(&inherited.home);
    inherited.cq = home_cq(&inherited.home, 8, NULL);
    inherited.qp = make_qp(inherited.home.pd, inherited.cq, 4);
    raise_qp(inherited.qp, IBV_EVENT_COMM_EST);
    CHECK_EQ(soft_verbs.get_async_event(inherited.home.context, &inherited.taken), 0);
    raise_qp(inherited.qp, IBV_EVENT_QP_FATAL);
    in_child(in_the_child, &inherited);
    soft_verbs.ack_async_event(&inherited.taken);
    EXPECT_ASYNC(inherited.home.context, IBV_EVENT_QP_FATAL, inherited.qp);
    check_port(&inherited.home, IBV_PORT_ACTIVE, 5);
    CHECK_EQ(soft_verbs.destroy_qp(inherited.qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(inherited.cq), 0);
    home_close(&inherited.home);
}

struct racer {
    struct home *home;
    atomic_bool *stop;
    bool takes;
};

/* Use the object of an event before acknowledging, while another thread destroys that object. */
static void handle(const struct ibv_async_event *event)
{
    struct ibv_recv_wr recv = {.wr_id = 1}, *bad;
    struct ibv_wc wc;
    int error;

    if (event->event_type == IBV_EVENT_CQ_ERR) {
        sleep_us(50);
        CHECK(verbs_poll_cq(event->element.cq, 1, &wc) >= 0);
        CHECK_EQ(soft_verbs.resize_cq(event->element.cq, 16), 0);
    }
    if (event->event_type == IBV_EVENT_SRQ_ERR) {
        sleep_us(50);
        CHECK_EQ(srq_post(event->element.srq, 1), 0);
        CHECK_EQ(srq_resize(event->element.srq, 16), 0);
        CHECK_EQ(srq_arm(event->element.srq, 2), 0);
    }
    if (event->event_type != IBV_EVENT_QP_FATAL && event->event_type != IBV_EVENT_COMM_EST)
        return;
    sleep_us(50); /* to be late for some of them */
    error = verbs_post_recv(event->element.qp, &recv, &bad);
    CHECK(error == 0 || error == ENOMEM || error == EINVAL);
    error = post_nothing(event->element.qp, 2);
    CHECK(error == 0 || error == ENOMEM || error == EINVAL);
    error = qp_to(event->element.qp, IBV_QPS_ERR);
    CHECK(error == 0 || error == EINVAL);
}

static void race(void *argument)
{
    struct racer *racer = argument;
    struct ibv_async_event event;
    struct home on_base = *racer->home;
    unsigned int seed = 7;
    struct ibv_wc wc;
    int i;

    on_base.pd = on_base.base;
    if (racer->takes) {
        while (!atomic_load(racer->stop) || is_readable(racer->home->context->async_fd))
            if (!soft_verbs.get_async_event(racer->home->context, &event)) {
                handle(&event);
                soft_verbs.ack_async_event(&event);
            }
        return;
    }
    for (i = 0; i < SCALED(200); i++) {
        struct ibv_cq *cq = soft_verbs.create_cq(racer->home->context, 4, NULL, NULL, 0);
        struct ibv_srq *srq = make_srq(&on_base, 4);
        struct ibv_qp *qp;

        REQUIRE(cq != NULL);
        qp = make_qp(racer->home->base, cq, 1);
        raise_cq(cq);
        CHECK_EQ(soft_break_srq(srq), 0);
        CHECK_EQ(soft_break_qp(qp), 0);
        raise_qp(qp, IBV_EVENT_COMM_EST);
        CHECK_EQ(soft_set_port(racer->home->context, i % 2), 0);
        sleep_us(next_random(&seed, 100));
        CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
        CHECK_EQ(verbs_poll_cq(cq, 1, &wc), 0); /* nothing of what is gone */
        CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
        CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    }
    CHECK_EQ(soft_set_port(racer->home->context, true), 0);
    atomic_store(racer->stop, true);
}

/* Objects raise events and are destroyed while other threads take, handle and acknowledge them. */
static void racing(void)
{
    atomic_bool stop = false;
    struct home home;
    struct racer racers[] = {{&home, &stop, false}, {&home, &stop, true}, {&home, &stop, true}};

    open_quiet(&home);
    run_threads(COUNT_OF(racers), race, racers, sizeof(racers[0]));
    EXPECT_NO_ASYNC(home.context);
    home_close(&home);
}

CHECK_MAIN(CASE(no_pending_event), CASE(each_type_with_its_object), CASE(broken_objects), CASE(raised_again),
           CASE(events_keep_their_order), CASE(destroying_an_object_drops_its_events), CASE(blocking),
           CASE(interrupted), CASE(destroying_waits), CASE(acknowledged_before), CASE(closing),
           CASE(port_goes_down_and_up), CASE(contexts_come_and_go), CASE(device_is_lost), CASE(after_a_fork),
           CASE(racing))
