/* Tests that count locks: `build.py` routes this program's calls of pthread's locks, those of the device included,
 * through the functions below. On a thread domain posting and polling take no lock, whichever thread executes. */
#include "support.h"
#include "support_srq.h"

#include <pthread.h>
#include <time.h>

#define COUNT 200u

/* Locks of this thread only. */
static _Thread_local unsigned int calls;

#define COUNTED(name, parameters, arguments) \
    int __real_##name parameters;            \
    int __wrap_##name parameters;            \
    int __wrap_##name parameters             \
    {                                        \
        calls++;                             \
        return __real_##name arguments;      \
    }

COUNTED(pthread_mutex_lock, (pthread_mutex_t * mutex), (mutex))
COUNTED(pthread_mutex_trylock, (pthread_mutex_t * mutex), (mutex))
COUNTED(pthread_mutex_timedlock, (pthread_mutex_t * mutex, const struct timespec *until), (mutex, until))
COUNTED(pthread_rwlock_rdlock, (pthread_rwlock_t * lock), (lock))
COUNTED(pthread_rwlock_wrlock, (pthread_rwlock_t * lock), (lock))
COUNTED(pthread_cond_wait, (pthread_cond_t * cond, pthread_mutex_t *mutex), (cond, mutex))
COUNTED(pthread_cond_timedwait, (pthread_cond_t * cond, pthread_mutex_t *mutex, const struct timespec *until),
        (cond, mutex, until))
COUNTED(pthread_cond_signal, (pthread_cond_t * cond), (cond))
COUNTED(pthread_cond_broadcast, (pthread_cond_t * cond), (cond))

/* Check the locks taken by `times` verbs since `calls` was `before`. */
static void check_calls(unsigned int before, unsigned int times, struct check_place place, const char *what)
{
    unsigned int count = calls - before;

    if (variant->thread_domain)
        check_equal(count, 0, place, what, "none");
    else
        check_true(count >= times, place, what);
}
#define CHECK_CALLS(before, times) check_calls(before, times, HERE, "locks of " #times " verbs")

static void sends(void)
{
    struct pair pair;
    struct ibv_wc wc;
    unsigned int i, before, posts = 0, polls = 0;

    PAIR_OPEN(&pair, .cap = {COUNT, COUNT, 1, 1, 0}, .cqe = (int)COUNT);
    for (i = 0; i < COUNT; i++) {
        before = calls;
        REQUIRE_EQ(post_receive(&pair.b, i, 8), 0);
        REQUIRE_EQ(post_send(&pair.a, i, 8), 0);
        posts += calls - before;
        before = calls;
        REQUIRE(wait_completion(pair.a.send_cq, &wc) && wait_completion(pair.b.recv_cq, &wc));
        polls += calls - before;
    }
    CHECK_CALLS(calls - posts, 2 * COUNT);
    CHECK_CALLS(calls - polls, 2 * COUNT);
    /* Many that wait for the worker thread at once, which may be asleep. */
    before = calls;
    for (i = 0; i < COUNT; i++)
        REQUIRE_EQ(post_write(&pair.a, &pair.b, i, 8), 0);
    CHECK_CALLS(before, COUNT);
    for (i = 0; i < COUNT; i++)
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
    /* What is flushed, and so kicked by the receives that come too late. */
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_ERR), 0);
    before = calls;
    for (i = 0; i < COUNT; i++)
        REQUIRE_EQ(post_receive(&pair.b, i, 8), 0);
    CHECK_CALLS(before, COUNT);
    for (i = 0; i < COUNT; i++)
        EXPECT(pair.b.recv_cq, i, IBV_WC_WR_FLUSH_ERR);
    pair_close(&pair);
}

static void extended_polling(void)
{
    struct home home;
    struct ibv_cq_ex *cq;
    struct ibv_qp *qp;
    unsigned int i, before;

    home_open(&home);
    cq = home_cq_ex(&home, 8, NULL);
    qp = make_loop(home.pd, cq_of(cq), 8);
    before = calls;
    for (i = 0; i < COUNT; i++) {
        REQUIRE_EQ(post_nothing(qp, i), 0);
        start_poll(cq);
        CHECK_EQ(cq->wr_id, i);
        cq->end_poll(cq);
    }
    CHECK_CALLS(before, 2 * COUNT);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(cq)), 0);
    home_close(&home);
}

static void shared_receives(void)
{
    struct home home;
    struct ibv_srq *srq;
    unsigned int i, before;

    home_open(&home);
    srq = make_srq(&home, COUNT);
    before = calls;
    for (i = 0; i < COUNT; i++)
        REQUIRE_EQ(srq_post(srq, i), 0);
    CHECK_CALLS(before, COUNT);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* ---- List of requests for the worker thread ------------------------------------------------------------------ */

/* Queue pairs are destroyed and reset while they are on the worker thread's list, between others that go on. */
static void removing_a_queue_from_a_list(void)
{
    enum { QUEUE_PAIRS = 8, DEPTH = 4 };
    struct ibv_qp *qps[QUEUE_PAIRS];
    struct home home;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    unsigned int round, i;

    home_open(&home);
    cq = home_cq(&home, QUEUE_PAIRS * DEPTH, NULL);
    for (i = 0; i < QUEUE_PAIRS; i++)
        qps[i] = make_loop(home.pd, cq, DEPTH);
    for (round = 0; round < COUNT; round++) {
        unsigned int leaver = round % QUEUE_PAIRS, left = QUEUE_PAIRS - 1;

        for (i = 0; i < QUEUE_PAIRS; i++)
            REQUIRE_EQ(post_nothing(qps[i], i), 0);
        if (round % 3) {
            CHECK_EQ(soft_verbs.destroy_qp(qps[leaver]), 0);
            qps[leaver] = make_loop(home.pd, cq, DEPTH);
        } else {
            CHECK_EQ(qp_to(qps[leaver], IBV_QPS_RESET), 0);
            qp_connect(qps[leaver], &default_link, qps[leaver]->qp_num);
        }
        for (; left; left--) {
            REQUIRE(wait_completion(cq, &wc));
            CHECK_EQ(wc.status, IBV_WC_SUCCESS);
            CHECK(wc.wr_id != leaver);
        }
    }
    for (i = 0; i < QUEUE_PAIRS; i++)
        CHECK_EQ(soft_verbs.destroy_qp(qps[i]), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

CHECK_MAIN(CASE(sends), CASE(extended_polling), CASE(shared_receives), CASE(removing_a_queue_from_a_list))
