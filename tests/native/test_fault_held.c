/* Tests of held completions: none is lost, and none overtakes another one of its queue. */
#include "support.h"
#include "support_async.h"
#include "support_threads.h"

#include <stdatomic.h>

#include "soft/api/device.h"
#include "soft/fault/fault.h"
#include "soft/objects/context.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OWN_MEMORY 0 /* the sanitizers have theirs */
#else
#define OWN_MEMORY 1

void *__libc_malloc(size_t size);

static atomic_bool no_memory;

void *malloc(size_t size)
{
    if (!atomic_load_explicit(&no_memory, memory_order_relaxed))
        return __libc_malloc(size);
    errno = ENOMEM;
    return NULL;
}
#endif

static bool wait_held(struct ibv_context *context, size_t count)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;

    while (soft_fault_held(context) != count && now_ns() < end)
        sleep_us(100);
    return soft_fault_held(context) == count;
}

/* ---- Holding and releasing --------------------------------------------------------------------------------- */

static void held_and_released(void)
{
    struct pair pair;
    uint64_t i;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_hold(pair.own.context, 0), 0);
    for (i = 0; i < 6; i++)
        CHECK_EQ(post_nothing(pair.a.qp, i), 0);
    CHECK(wait_held(pair.own.context, 6));
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(soft_fault_release(pair.own.context, 2, false), 2);
    EXPECT(pair.a.send_cq, 0, IBV_WC_SUCCESS);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(post_nothing(pair.a.qp, 6), 0); /* is held, too */
    CHECK(wait_held(pair.own.context, 5));
    CHECK_EQ(soft_fault_release(pair.own.context, 0, false), 5);
    CHECK_EQ(soft_fault_release(pair.own.context, 1, false), 0);
    for (i = 2; i < 7; i++)
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
    CHECK_EQ(post_nothing(pair.a.qp, 7), 0); /* still */
    CHECK(wait_held(pair.own.context, 1));
    soft_fault_unhold(pair.own.context);
    CHECK_EQ(soft_fault_held(pair.own.context), 0);
    CHECK_EQ(atomic_load(&to_soft_context(pair.own.context)->special), 0);
    CHECK_EQ(post_nothing(pair.a.qp, 8), 0);
    EXPECT(pair.a.send_cq, 7, IBV_WC_SUCCESS);
    EXPECT(pair.a.send_cq, 8, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* Completions of one queue pair are held; others are delivered. */
static void held_for_one_queue_pair(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_hold(pair.own.context, pair.b.qp->qp_num), 0);
    REQUIRE_EQ(soft_fault_hold(pair.own.context, pair.b.qp->qp_num), 0); /* is held already */
    CHECK_EQ(post_receive(&pair.b, 10, 8), 0);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    CHECK_EQ(post_nothing(pair.b.qp, 2), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(wait_held(pair.own.context, 2));
    EXPECT_NOTHING(pair.b.send_cq);
    EXPECT_NOTHING(pair.b.recv_cq);
    soft_fault_clear(pair.own.context);
    EXPECT(pair.b.send_cq, 2, IBV_WC_SUCCESS);
    EXPECT(pair.b.recv_cq, 10, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* Flushed completions are held, too, behind those that were held before. */
static void flushed(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_hold(pair.own.context, pair.a.qp->qp_num), 0);
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    CHECK(wait_held(pair.own.context, 1));
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
    CHECK_EQ(post_nothing(pair.a.qp, 2), 0);
    CHECK(wait_held(pair.own.context, 2));
    soft_fault_unhold(pair.own.context);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(pair.a.send_cq, 2, IBV_WC_WR_FLUSH_ERR);
    pair_close(&pair);
}

/* The event of a held completion is raised when it is released. */
static void events_come_with_the_release(void)
{
    struct ibv_comp_channel *channel;
    struct home home;
    struct ibv_qp *qp;
    struct ibv_cq *cq, *told;
    void *context;

    home_open(&home);
    channel = soft_verbs.create_comp_channel(home.context);
    REQUIRE(channel != NULL);
    cq = home_cq(&home, 8, channel);
    qp = make_loop(home.pd, cq, 4);
    CHECK_EQ(verbs_req_notify_cq(cq, 0), 0);
    REQUIRE_EQ(soft_fault_hold(home.context, 0), 0);
    CHECK_EQ(post_nothing(qp, 1), 0);
    CHECK(wait_held(home.context, 1));
    CHECK(!is_readable(channel->fd));
    CHECK_EQ(soft_fault_release(home.context, 1, true), 1);
    CHECK(is_readable(channel->fd));
    REQUIRE_EQ(soft_verbs.get_cq_event(channel, &told, &context), 0);
    soft_verbs.ack_cq_events(told, 1);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(channel), 0);
    home_close(&home);
}

/* ---- Shuffled ----------------------------------------------------------------------------------------------- */

enum { QPS = 4, EACH = 8 };

/* Release completions of several queue pairs; return their order by queue pair, and check that of each queue pair. */
static void shuffle(struct home *home, uint64_t seed, int order[QPS * EACH])
{
    struct ibv_cq *cq = home_cq(home, QPS * EACH, NULL);
    uint64_t next[QPS] = {0};
    struct ibv_qp *qps[QPS];
    int i, n;

    for (n = 0; n < QPS; n++)
        qps[n] = make_loop(home->pd, cq, EACH);
    soft_fault_seed(home->context, seed);
    REQUIRE_EQ(soft_fault_hold(home->context, 0), 0);
    for (i = 0; i < EACH; i++)
        for (n = 0; n < QPS; n++)
            CHECK_EQ(post_nothing(qps[n], (uint64_t)i), 0);
    CHECK(wait_held(home->context, QPS * EACH));
    for (i = 0; i < QPS * EACH; i++) {
        struct ibv_wc wc;

        if (i < 10) /* one by one, or all that is left */
            CHECK_EQ(soft_fault_release(home->context, 1, true), 1);
        else if (i == 10)
            CHECK_EQ(soft_fault_release(home->context, 0, true), QPS * EACH - 10);
        REQUIRE_EQ(verbs_poll_cq(cq, 1, &wc), 1);
        for (n = 0; n < QPS - 1 && qps[n]->qp_num != wc.qp_num; n++)
            ;
        CHECK_EQ(wc.qp_num, qps[n]->qp_num);
        CHECK_EQ(wc.wr_id, next[n]++);
        order[i] = n;
    }
    soft_fault_unhold(home->context);
    for (n = 0; n < QPS; n++)
        CHECK_EQ(soft_verbs.destroy_qp(qps[n]), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
}

static void shuffled(void)
{
    int first[QPS * EACH], again[QPS * EACH];
    struct home home, second;
    bool in_order = true;
    int i;

    home_open(&home);
    shuffle(&home, 1, first);
    for (i = 0; i < QPS * EACH; i++)
        in_order = in_order && first[i] == i % QPS;
    CHECK(!in_order);
    shuffle(&home, 1, again);
    CHECK(!memcmp(first, again, sizeof(first)));
    shuffle(&home, 2, again);
    CHECK(memcmp(first, again, sizeof(first)));
    home_open(&second);
    shuffle(&second, 1, again);
    CHECK(!memcmp(first, again, sizeof(first)));
    home_close(&second);
    home_close(&home);
}

/* ---- What goes meanwhile ------------------------------------------------------------------------------------ */

/* Held completions are dropped when their queue pair is destroyed or reset. */
static void dropped_with_their_queue_pair(void)
{
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *a, *b;

    home_open(&home);
    cq = home_cq(&home, 16, NULL);
    a = make_loop(home.pd, cq, 4);
    b = make_loop(home.pd, cq, 4);
    REQUIRE_EQ(soft_fault_hold(home.context, 0), 0);
    CHECK_EQ(post_nothing(a, 1), 0);
    CHECK_EQ(post_nothing(b, 2), 0);
    CHECK_EQ(post_nothing(a, 3), 0);
    CHECK_EQ(post_nothing(b, 4), 0);
    CHECK(wait_held(home.context, 4));
    CHECK_EQ(qp_to(a, IBV_QPS_RESET), 0);
    CHECK_EQ(soft_fault_held(home.context), 2);
    qp_connect(a, &default_link, a->qp_num);
    CHECK_EQ(post_nothing(a, 5), 0);
    CHECK(wait_held(home.context, 3));
    CHECK_EQ(soft_verbs.destroy_qp(b), 0);
    CHECK_EQ(soft_fault_held(home.context), 1);
    soft_fault_unhold(home.context);
    EXPECT(cq, 5, IBV_WC_SUCCESS);
    EXPECT_NOTHING(cq);
    REQUIRE_EQ(soft_fault_hold(home.context, 0), 0);
    CHECK_EQ(post_nothing(a, 6), 0);
    CHECK(wait_held(home.context, 1));
    CHECK_EQ(soft_verbs.destroy_qp(a), 0); /* and leaves holds, which go with the context */
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* Dropping completions of receives returns the credits of the shared queue. */
static void credits_of_shared_receives(void)
{
    struct ibv_srq_init_attr srq_attr = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_qp_init_attr attr = {.cap = {.max_send_wr = 8, .max_send_sge = 1}, .qp_type = IBV_QPT_RC};
    struct ibv_recv_wr recv = {.wr_id = 1}, *bad;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_send_wr wr = request(IBV_WR_SEND, 2, NULL, 0);
    struct ibv_srq *srq;
    struct home home;
    struct ibv_qp *qp;
    int round, i;

    home_open(&home);
    attr.send_cq = send_cq = home_cq(&home, 16, NULL);
    attr.recv_cq = recv_cq = home_cq(&home, 16, NULL);
    attr.srq = srq = soft_verbs.create_srq(home.pd, &srq_attr);
    REQUIRE(srq != NULL);
    for (round = 0; round < 3; round++) {
        qp = soft_verbs.create_qp(home.pd, &attr);
        REQUIRE(qp != NULL);
        qp_connect(qp, &default_link, qp->qp_num);
        REQUIRE_EQ(soft_fault_hold(home.context, 0), 0);
        for (i = 0; i < 4; i++)
            CHECK_EQ(verbs_post_srq_recv(srq, &recv, &bad), 0);
        CHECK_EQ(verbs_post_srq_recv(srq, &recv, &bad), ENOMEM);
        for (i = 0; i < 4; i++)
            CHECK_EQ(post(qp, &wr), 0);
        CHECK(wait_held(home.context, 8));
        CHECK_EQ(verbs_post_srq_recv(srq, &recv, &bad), ENOMEM);
        if (round == 1)
            CHECK_EQ(soft_lose(home.context), 0);
        if (round == 1)
            break;
        CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
        CHECK_EQ(soft_fault_held(home.context), 0);
    }
    /* A device that is gone completes nothing more, whatever is released. */
    CHECK_EQ(soft_fault_release(home.context, 3, true), 3);
    soft_fault_unhold(home.context);
    CHECK_EQ(soft_fault_held(home.context), 0);
    EXPECT_NOTHING(send_cq);
    EXPECT_NOTHING(recv_cq);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(recv_cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(send_cq), 0);
    home_close(&home);
}

/* A completion that is released into a full queue breaks the queue as any other does. */
static void full_completion_queue(void)
{
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *qp;
    struct ibv_wc wc;
    int i;

    home_open(&home);
    async_nonblocking(home.context);
    cq = home_cq(&home, 2, NULL);
    qp = make_loop(home.pd, cq, 4);
    REQUIRE_EQ(soft_fault_hold(home.context, 0), 0);
    for (i = 0; i < 3; i++)
        CHECK_EQ(post_nothing(qp, (uint64_t)i), 0);
    CHECK(wait_held(home.context, 3));
    CHECK_EQ(soft_fault_release(home.context, 0, false), 3);
    EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, cq);
    EXPECT(cq, 0, IBV_WC_SUCCESS);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    soft_fault_unhold(home.context);
    CHECK_EQ(post_nothing(qp, 4), 0); /* the queue pair learns of it */
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, qp);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

#if OWN_MEMORY
/* Without memory a completion is delivered at once, after those of its queue that were held. */
static void without_memory(void)
{
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *a, *b;

    home_open(&home);
    cq = home_cq(&home, 16, NULL);
    a = make_loop(home.pd, cq, 8);
    b = make_loop(home.pd, cq, 8);
    REQUIRE_EQ(soft_fault_hold(home.context, 0), 0);
    CHECK_EQ(post_nothing(a, 1), 0);
    CHECK_EQ(post_nothing(b, 2), 0);
    CHECK_EQ(post_nothing(a, 3), 0);
    CHECK(wait_held(home.context, 3));
    atomic_store(&no_memory, true);
    CHECK_EQ(soft_fault_loss(home.context, 0, (struct soft_strike){.first = 1}), ENOMEM);
    CHECK_EQ(post_nothing(a, 4), 0);
    EXPECT(cq, 1, IBV_WC_SUCCESS);
    EXPECT(cq, 3, IBV_WC_SUCCESS);
    EXPECT(cq, 4, IBV_WC_SUCCESS);
    atomic_store(&no_memory, false);
    CHECK_EQ(soft_fault_held(home.context), 1);
    CHECK_EQ(post_nothing(a, 5), 0);
    CHECK(wait_held(home.context, 2));
    soft_fault_unhold(home.context);
    EXPECT(cq, 2, IBV_WC_SUCCESS);
    EXPECT(cq, 5, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.destroy_qp(a), 0);
    CHECK_EQ(soft_verbs.destroy_qp(b), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}
#endif

/* ---- At the same time ---------------------------------------------------------------------------------------- */

struct racer {
    struct home *home;
    atomic_uint *working;
    bool holds;
};

static void hold_and_release(struct racer *racer)
{
    unsigned int state = 1;

    while (atomic_load(racer->working)) {
        REQUIRE_EQ(soft_fault_hold(racer->home->context, 0), 0);
        sleep_us(50);
        soft_fault_release(racer->home->context, next_random(&state, 5), next_random(&state, 2));
        soft_fault_unhold(racer->home->context);
    }
}

/* Each completion comes once and in order, while others are held and queue pairs are destroyed. */
static void race(void *argument)
{
    struct racer *racer = argument;
    struct ibv_cq *cq;
    int round, i;

    if (racer->holds) {
        hold_and_release(racer);
        return;
    }
    cq = soft_verbs.create_cq(racer->home->context, 16, NULL, NULL, 0);
    REQUIRE(cq != NULL);
    for (round = 0; round < SCALED(20); round++) {
        struct ibv_qp *qp = make_loop(racer->home->base, cq, 8);

        for (i = 0; i < 40; i++) {
            CHECK_EQ(post_nothing(qp, (uint64_t)i), 0);
            if (i >= 7)
                EXPECT(cq, (uint64_t)i - 7, IBV_WC_SUCCESS);
        }
        CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    }
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    atomic_fetch_sub(racer->working, 1);
}

static void racing(void)
{
    atomic_uint working = 2;
    struct home home;
    struct racer racers[] = {{&home, &working, true}, {&home, &working, false}, {&home, &working, false}};

    home_open(&home);
    run_threads(COUNT_OF(racers), race, racers, sizeof(racers[0]));
    CHECK_EQ(soft_fault_held(home.context), 0);
    home_close(&home);
}

#if OWN_MEMORY
#define MEMORY_CASE CASE(without_memory),
#else
#define MEMORY_CASE
#endif

CHECK_MAIN(CASE(held_and_released), CASE(held_for_one_queue_pair), CASE(flushed), CASE(events_come_with_the_release),
           CASE(shuffled), CASE(dropped_with_their_queue_pair), CASE(credits_of_shared_receives),
           CASE(full_completion_queue), MEMORY_CASE CASE(racing))
