/* Tests of resizing completion queues: no completion is lost or reordered, and memory returns to its allocator. */
#include "support.h"
#include "support_threads.h"

#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#define TYPE_CQ (1ull << 32 | 5)
#define MAX_CQE (1 << 22)

/* Check the granted size: at least `cqe`, and less than twice. */
static void check_size(const struct ibv_cq *cq, int cqe)
{
    CHECK(cq->cqe >= cqe && cq->cqe < 2 * cqe);
}

/* Fill the queue: it takes exactly as many completions as it reports. */
static void fill(struct ibv_cq *cq, struct ibv_qp *qp, uint64_t *sent, uint64_t seen)
{
    while (*sent - seen < (uint64_t)cq->cqe)
        REQUIRE_EQ(post_nothing(qp, (*sent)++), 0);
    wait_executed(qp, (uint32_t)*sent);
}

static void take(struct ibv_cq *cq, uint64_t *seen, int count)
{
    while (count--)
        EXPECT(cq, (*seen)++, IBV_WC_SUCCESS);
}

/* Larger and smaller, with completions in it, from every position of the ring. */
static void grown_and_shrunk(void)
{
    static const int sizes[] = {64, 8, 32, 1, 128, 16, 9, 200, 2, 33};
    uint64_t sent = 0, seen = 0;
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *qp;
    size_t i, round;

    home_open(&home);
    cq = home_cq(&home, 4, NULL);
    qp = make_loop(home.pd, cq, 256);
    for (round = 0; round < 3; round++) {
        for (i = 0; i < COUNT_OF(sizes); i++) {
            int left = sizes[i] < cq->cqe ? sizes[i] : cq->cqe;

            fill(cq, qp, &sent, seen);
            take(cq, &seen, cq->cqe - left); /* what fits in both stays */
            CHECK_EQ(soft_verbs.resize_cq(cq, sizes[i]), 0);
            check_size(cq, sizes[i]);
            fill(cq, qp, &sent, seen);
            take(cq, &seen, cq->cqe);
        }
        EXPECT_NOTHING(cq);
    }
    CHECK_EQ(qp_state(qp), IBV_QPS_RTS);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* A resized queue overruns at its new size. */
static void overrun_at_the_new_size(void)
{
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *qp;
    struct ibv_wc wc;
    uint64_t sent = 0, seen = 0;

    home_open(&home);
    cq = home_cq(&home, 64, NULL);
    qp = make_loop(home.pd, cq, 128);
    CHECK_EQ(soft_verbs.resize_cq(cq, 4), 0);
    fill(cq, qp, &sent, seen);
    CHECK_EQ(qp_state(qp), IBV_QPS_RTS);
    CHECK_EQ(post_nothing(qp, 99), 0);
    CHECK(wait_state(qp, IBV_QPS_ERR));
    CHECK_EQ(soft_verbs.resize_cq(cq, 32), 0); /* more room does not bring back what was lost */
    take(cq, &seen, 4);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* An invalid size, or one too small for the completions in the queue, changes nothing. */
static void refused_sizes(void)
{
    static const int impossible[] = {0, -1, INT32_MIN, MAX_CQE + 1, INT32_MAX};
    uint64_t sent = 0, seen = 0;
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *qp;
    size_t i;
    int cqe;

    home_open(&home);
    cq = home_cq(&home, 16, NULL);
    qp = make_loop(home.pd, cq, 64);
    cqe = cq->cqe;
    for (i = 0; i < COUNT_OF(impossible); i++)
        CHECK_EQ(soft_verbs.resize_cq(cq, impossible[i]), EINVAL);
    fill(cq, qp, &sent, seen);
    CHECK_EQ(soft_verbs.resize_cq(cq, cqe - 1), EINVAL); /* though 16 would be granted */
    take(cq, &seen, 6);
    CHECK_EQ(soft_verbs.resize_cq(cq, cqe - 7), EINVAL);
    CHECK_EQ(soft_verbs.resize_cq(cq, 1), EINVAL);
    CHECK_EQ(cq->cqe, cqe);
    fill(cq, qp, &sent, seen);
    take(cq, &seen, cqe);
    EXPECT_NOTHING(cq);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

static void resize_in_session(void *argument)
{
    struct ibv_cq_ex *ex = argument;

    start_poll(ex);
    CHECK_EQ(soft_verbs.resize_cq(cq_of(ex), 64), EBUSY);
    CHECK_EQ(ex->cqe, 4);
    CHECK_EQ(ex->wr_id, 1);
    ex->end_poll(ex);
}

/* Resizing is refused during a poll session, which refers to an entry of the ring. */
static void in_a_session(void)
{
    struct soft_counts counts;
    struct ibv_cq_ex *ex;
    struct home home;
    struct ibv_qp *qp;
    char *text;

    home_open(&home);
    ex = home_cq_ex(&home, 4, NULL);
    qp = make_loop(home.pd, cq_of(ex), 8);
    CHECK_EQ(post_nothing(qp, 1), 0);
    text = stderr_of(resize_in_session, ex);
    CHECK(strstr(text, "resize_cq on completion queue") != NULL);
    free(text);
    soft_get_counts(home.context, &counts);
    CHECK_EQ(counts.overlaps, 1);
    CHECK_EQ(soft_verbs.resize_cq(cq_of(ex), 64), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

/* ---- Memory ------------------------------------------------------------------------------------------------ */

/* Ring memory that a parent domain's allocator returned. */
struct store {
    struct ibv_cq *cq; /* while it is resized: not inside of it when the allocator is called */
    void *live[8];
    unsigned int given, taken_back;
    enum { GOOD, NOTHING, DIRTY, MISALIGNED, DEFAULT } answer; /* from now on */
};

static void poll_meanwhile(struct store *store)
{
    struct ibv_wc wc;

    if (store->cq)
        CHECK_EQ(verbs_poll_cq(store->cq, 0, &wc), 0);
}

static void *store_alloc(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct store *store = pd_context;
    void *memory;
    size_t i;

    (void)pd;
    if (type != TYPE_CQ)
        return IBV_ALLOCATOR_USE_DEFAULT;
    poll_meanwhile(store);
    CHECK(size % page == 0 && alignment == page);
    if (store->answer == NOTHING) {
        errno = ENOSPC;
        return NULL;
    }
    if (store->answer == DEFAULT)
        return IBV_ALLOCATOR_USE_DEFAULT;
    REQUIRE_EQ(posix_memalign(&memory, alignment, size + alignment), 0);
    memset(memory, store->answer == DIRTY, size + alignment);
    if (store->answer == MISALIGNED)
        memory = (char *)memory + 64;
    for (i = 0; store->live[i]; i++)
        REQUIRE(i + 1 < COUNT_OF(store->live));
    store->live[i] = memory;
    store->given++;
    return memory;
}

static void store_free(struct ibv_pd *pd, void *pd_context, void *address, uint64_t type)
{
    struct store *store = pd_context;
    size_t i;

    (void)pd;
    CHECK_EQ(type, TYPE_CQ);
    poll_meanwhile(store);
    for (i = 0; i < COUNT_OF(store->live) && store->live[i] != address; i++)
        ;
    if (!CHECK(i < COUNT_OF(store->live)))
        return;
    store->live[i] = NULL;
    store->taken_back++;
    free((void *)((uintptr_t)address & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1))); /* before it was misaligned */
}

/* New memory is allocated once, and the old one freed when it is unused; a failed allocation changes nothing. */
static void memory_of_an_allocator(void)
{
    struct store store = {0};
    struct ibv_parent_domain_init_attr attr = {
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = store_alloc,
        .free = store_free,
        .pd_context = &store,
    };
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 8, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD};
    uint64_t sent = 0, seen = 0;
    struct home home;
    struct ibv_cq *cq;
    struct ibv_qp *qp;

    home_open(&home);
    attr.pd = home.base;
    attr.td = home.td;
    cq_attr.parent_domain = verbs_alloc_parent_domain(home.context, &attr);
    REQUIRE(cq_attr.parent_domain != NULL);
    cq = cq_of(verbs_create_cq_ex(home.context, &cq_attr));
    REQUIRE(cq != NULL);
    qp = make_loop(home.pd, cq, 256);
    CHECK_EQ(store.given, 1);
    store.cq = cq;

    fill(cq, qp, &sent, seen);
    CHECK_EQ(soft_verbs.resize_cq(cq, 200), 0);
    CHECK_EQ(store.given, 2);
    CHECK_EQ(store.taken_back, 1);
    fill(cq, qp, &sent, seen);
    take(cq, &seen, cq->cqe);

    store.answer = NOTHING;
    CHECK_EQ(soft_verbs.resize_cq(cq, 16), ENOSPC);
    store.answer = DIRTY;
    CHECK_EQ(soft_verbs.resize_cq(cq, 16), EINVAL);
    store.answer = MISALIGNED;
    CHECK_EQ(soft_verbs.resize_cq(cq, 16), EINVAL);
    CHECK_EQ(store.given - store.taken_back, 1);
    check_size(cq, 200);
    store.answer = GOOD;
    fill(cq, qp, &sent, seen);
    CHECK_EQ(soft_verbs.resize_cq(cq, 16), EINVAL); /* too many are there */
    CHECK_EQ(store.given - store.taken_back, 1);
    take(cq, &seen, cq->cqe);

    store.answer = DEFAULT; /* from here to there and back */
    CHECK_EQ(soft_verbs.resize_cq(cq, 16), 0);
    CHECK_EQ(store.given, store.taken_back);
    fill(cq, qp, &sent, seen);
    store.answer = GOOD;
    CHECK_EQ(soft_verbs.resize_cq(cq, 32), 0);
    CHECK_EQ(store.given - store.taken_back, 1);
    take(cq, &seen, 16);
    EXPECT_NOTHING(cq);

    store.cq = NULL;
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(store.given, store.taken_back);
    CHECK_EQ(soft_verbs.dealloc_pd(cq_attr.parent_domain), 0);
    home_close(&home);
}

/* ---- While others complete and poll ------------------------------------------------------------------------- */

#define PUSHERS 2
#define MESSAGES 2000u
#define ROOM 16u /* of each queue pair; no size is below what all of them fill */

struct bustle {
    struct home home;
    struct ibv_cq *cq;
    struct ibv_qp *qps[PUSHERS];
    atomic_uint polled[PUSHERS]; /* of each one's requests: what limits how many it posts */
    atomic_bool failed, done;
    unsigned int resizes;
};

struct busy {
    struct bustle *bustle;
    enum { PUSHER, POLLER, RESIZER } role;
    unsigned int which;
};

static bool goes_on(struct bustle *bustle, uint64_t end)
{
    if (now_ns() < end)
        return !atomic_load(&bustle->failed);
    CHECK(!"it takes too long");
    atomic_store(&bustle->failed, true);
    return false;
}

static void push(struct bustle *bustle, unsigned int which, uint64_t end)
{
    unsigned int sent = 0;

    while (sent < MESSAGES && goes_on(bustle, end)) {
        if (sent - atomic_load(&bustle->polled[which]) < ROOM) {
            CHECK_EQ(post_nothing(bustle->qps[which], (uint64_t)which << 32 | sent), 0);
            sent++;
        } else {
            sched_yield();
        }
    }
}

static void resize(struct bustle *bustle, unsigned int *seed)
{
    static const int sizes[] = {PUSHERS * ROOM, 4 * PUSHERS * ROOM, 200, 64};

    CHECK_EQ(soft_verbs.resize_cq(bustle->cq, sizes[next_random(seed, COUNT_OF(sizes))]), 0);
    bustle->resizes++;
}

static void poll(struct bustle *bustle, uint64_t end)
{
    unsigned int left = PUSHERS * MESSAGES, seed = 11;
    struct ibv_wc wcs[5];

    while (left && goes_on(bustle, end)) {
        int n = verbs_poll_cq(bustle->cq, 1 + (int)next_random(&seed, COUNT_OF(wcs)), wcs), i;

        if (!CHECK(n >= 0))
            atomic_store(&bustle->failed, true);
        for (i = 0; i < n; i++) {
            unsigned int which = (unsigned int)(wcs[i].wr_id >> 32);

            CHECK_EQ(wcs[i].status, IBV_WC_SUCCESS);
            REQUIRE(which < PUSHERS);
            CHECK_EQ((uint32_t)wcs[i].wr_id, atomic_fetch_add(&bustle->polled[which], 1));
            left--;
        }
        if (n <= 0)
            sched_yield();
        if (bustle->home.td && next_random(&seed, 8) == 0)
            resize(bustle, &seed); /* the queue is this thread's alone */
    }
    atomic_store(&bustle->done, true);
}

static void be_busy(void *argument)
{
    struct busy *busy = argument;
    struct bustle *bustle = busy->bustle;
    uint64_t end = now_ns() + 2 * WAIT_S * 1000000000ull;
    unsigned int seed = 5;

    if (busy->role == PUSHER)
        push(bustle, busy->which, end);
    else if (busy->role == POLLER)
        poll(bustle, end);
    else
        do {
            resize(bustle, &seed);
            sleep_us(next_random(&seed, 50));
        } while (!atomic_load(&bustle->done) && goes_on(bustle, end));
}

static void other_queues_are_not_affected(void)
{
    struct bustle bustle = {0};
    struct busy busy[PUSHERS + 2];
    unsigned int i;

    home_open(&bustle.home);
    bustle.cq = home_cq(&bustle.home, PUSHERS * ROOM, NULL);
    for (i = 0; i < PUSHERS; i++) {
        bustle.qps[i] = make_loop(bustle.home.base, bustle.cq, 2 * ROOM);
        busy[i] = (struct busy){&bustle, PUSHER, i};
    }
    busy[PUSHERS] = (struct busy){&bustle, POLLER, 0};
    busy[PUSHERS + 1] = (struct busy){&bustle, RESIZER, 0};
    run_threads(PUSHERS + (bustle.home.td ? 1 : 2), be_busy, busy, sizeof(busy[0]));
    CHECK(bustle.resizes > 0);
    EXPECT_NOTHING(bustle.cq);
    for (i = 0; i < PUSHERS; i++) {
        CHECK_EQ(qp_state(bustle.qps[i]), IBV_QPS_RTS);
        CHECK_EQ(soft_verbs.destroy_qp(bustle.qps[i]), 0);
    }
    CHECK_EQ(soft_verbs.destroy_cq(bustle.cq), 0);
    home_close(&bustle.home);
}

/* Destroying a queue pair removes its completions, also from a resized queue. */
static void purged_afterwards(void)
{
    struct ibv_qp *stays, *goes;
    struct ibv_cq *cq;
    struct home home;
    uint64_t i;

    home_open(&home);
    cq = home_cq(&home, 16, NULL);
    stays = make_loop(home.pd, cq, 16);
    goes = make_loop(home.pd, cq, 16);
    for (i = 0; i < 5; i++) {
        CHECK_EQ(post_nothing(stays, i), 0);
        CHECK_EQ(post_nothing(goes, 100 + i), 0);
    }
    wait_executed(stays, 5);
    wait_executed(goes, 5);
    CHECK_EQ(soft_verbs.resize_cq(cq, 10), 0);
    CHECK_EQ(soft_verbs.destroy_qp(goes), 0);
    CHECK_EQ(soft_verbs.resize_cq(cq, 4), EINVAL);
    CHECK_EQ(soft_verbs.resize_cq(cq, 5), 0);
    for (i = 0; i < 5; i++)
        EXPECT(cq, i, IBV_WC_SUCCESS);
    EXPECT_NOTHING(cq);
    CHECK_EQ(soft_verbs.destroy_qp(stays), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

CHECK_MAIN(CASE(grown_and_shrunk), CASE(overrun_at_the_new_size), CASE(refused_sizes), CASE(in_a_session),
           CASE(memory_of_an_allocator), CASE(other_queues_are_not_affected), CASE(purged_afterwards))
