/* Tests of two threads in objects that take no locks: detected, refused, counted, reported once, never executed. The
 * same calls work on objects with locks. */
#include "support.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

/* In all variants: a home on a thread domain, with an extended queue for a poll session. */
struct unlocked {
    struct check_variant like;
    struct home home;
    struct ibv_cq_ex *cq;
    struct ibv_qp *qp, *other; /* each its own peer, both on `cq` */
};

/* Open a poll session at a completion with id 1: this thread is inside of the queue on return. */
static void open_inside(struct unlocked *unlocked, bool thread_domain)
{
    unlocked->like = *variant;
    unlocked->like.thread_domain = thread_domain;
    home_open_like(&unlocked->home, &unlocked->like);
    unlocked->cq = home_cq_ex(&unlocked->home, 32, NULL);
    unlocked->qp = make_loop(unlocked->home.pd, cq_of(unlocked->cq), 8);
    unlocked->other = make_loop(unlocked->home.pd, cq_of(unlocked->cq), 8);
    CHECK_EQ(post_nothing(unlocked->qp, 1), 0);
    start_poll(unlocked->cq);
    CHECK_EQ(unlocked->cq->wr_id, 1);
}

/* Check that all objects still work, from one thread at a time. */
static int use_it(void *argument)
{
    struct unlocked *unlocked = argument;
    uint64_t i;

    for (i = 0; i < 20; i++) {
        struct ibv_recv_wr recv = {.wr_id = i << 8}, *bad;
        struct ibv_send_wr wr = request(IBV_WR_SEND, i, NULL, 0);

        CHECK_EQ(verbs_post_recv(unlocked->other, &recv, &bad), 0);
        CHECK_EQ(post(unlocked->other, &wr), 0);
        EXPECT(cq_of(unlocked->cq), i << 8, IBV_WC_SUCCESS);
        EXPECT(cq_of(unlocked->cq), i, IBV_WC_SUCCESS);
        CHECK_EQ(post_nothing(unlocked->qp, i), 0);
        start_poll(unlocked->cq);
        CHECK_EQ(unlocked->cq->wr_id, i);
        unlocked->cq->end_poll(unlocked->cq);
    }
    CHECK_EQ(qp_to(unlocked->qp, IBV_QPS_SQD), 0);
    CHECK_EQ(qp_to(unlocked->qp, IBV_QPS_RTS), 0);
    return 0;
}

static void close_unlocked(struct unlocked *unlocked)
{
    EXPECT_NOTHING(cq_of(unlocked->cq));
    use_it(unlocked);
    CHECK_EQ(call_elsewhere(use_it, unlocked), 0);
    CHECK_EQ(soft_verbs.destroy_qp(unlocked->qp), 0);
    CHECK_EQ(soft_verbs.destroy_qp(unlocked->other), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(unlocked->cq)), 0);
    home_close(&unlocked->home);
}

static uint32_t overlaps(const struct unlocked *unlocked)
{
    struct soft_counts counts;

    soft_get_counts(unlocked->home.context, &counts);
    return counts.overlaps;
}

struct intruder {
    struct unlocked *unlocked;
    pid_t thread;
    int attempts; /* how many were made */
};

/* Call each verb on a driver half of the domain, from a thread that is not inside. */
static int intrude(void *argument)
{
    struct intruder *intruder = argument;
    struct unlocked *unlocked = intruder->unlocked;
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 99, NULL, 0), *bad;
    struct ibv_recv_wr recv = {.wr_id = 98}, *bad_recv;
    struct ibv_qp_init_attr init_attr;
    struct ibv_modify_cq_attr moderation = {.attr_mask = IBV_CQ_ATTR_MODERATE};
    struct ibv_poll_cq_attr poll_attr = {0};
    struct ibv_qp *qps[2] = {unlocked->qp, unlocked->other};
    struct ibv_qp_attr attr;
    struct ibv_wc wc;
    int i;

    intruder->thread = gettid();
    for (i = 0; i < 2; i++) {
        bad = NULL, bad_recv = NULL;
        CHECK_EQ(verbs_post_send(qps[i], &wr, &bad), EBUSY);
        CHECK(bad == &wr);
        CHECK_EQ(verbs_post_recv(qps[i], &recv, &bad_recv), EBUSY);
        CHECK(bad_recv == &recv);
        CHECK_EQ(qp_to(qps[i], IBV_QPS_ERR), EBUSY);
        CHECK_EQ(qp_to(qps[i], IBV_QPS_RESET), EBUSY);
        CHECK_EQ(soft_verbs.query_qp(qps[i], &attr, IBV_QP_STATE, &init_attr), EBUSY);
        CHECK_EQ(soft_verbs.destroy_qp(qps[i]), EBUSY);
    }
    CHECK_EQ(verbs_poll_cq(cq_of(unlocked->cq), 1, &wc), -EBUSY);
    CHECK_EQ(unlocked->cq->start_poll(unlocked->cq, &poll_attr), EBUSY);
    CHECK_EQ(unlocked->cq->next_poll(unlocked->cq), EBUSY); /* of a poll that is another's */
    unlocked->cq->end_poll(unlocked->cq);
    CHECK_EQ(soft_verbs.resize_cq(cq_of(unlocked->cq), 64), EBUSY);
    CHECK_EQ(verbs_modify_cq(cq_of(unlocked->cq), &moderation), EBUSY);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(unlocked->cq)), EBUSY);
    intruder->attempts += 19;
    return 0;
}

static void intrude_elsewhere(void *argument)
{
    CHECK_EQ(call_elsewhere(intrude, argument), 0);
}

/* Return the number of lines that name this queue pair or queue and both threads, and say that the call was refused. */
static int lines_about(const char *text, const char *kind, uint32_t number, pid_t one, pid_t two)
{
    char object[64], first[32], second[32];
    const char *line = text;
    int count = 0;

    snprintf(object, sizeof(object), "%s %u ", kind, number);
    snprintf(first, sizeof(first), "thread %d", one);
    snprintf(second, sizeof(second), "thread %d", two);
    while (*line) {
        const char *end = strchr(line, '\n');
        char copy[512];

        if (!end)
            break;
        snprintf(copy, sizeof(copy), "%.*s", (int)(end - line), line);
        count += strstr(copy, object) && strstr(copy, first) && strstr(copy, second) && strstr(copy, "refused");
        line = end + 1;
    }
    return count;
}

static void refused_and_reported_once(void)
{
    struct unlocked unlocked;
    struct intruder intruder = {.unlocked = &unlocked};
    char *text;
    size_t i;
    int lines = 0;

    open_inside(&unlocked, true);
    CHECK_EQ(overlaps(&unlocked), 0);
    text = stderr_of(intrude_elsewhere, &intruder);
    CHECK_EQ(overlaps(&unlocked), intruder.attempts);
    CHECK_EQ(lines_about(text, "queue pair", unlocked.qp->qp_num, intruder.thread, gettid()), 1);
    CHECK_EQ(lines_about(text, "queue pair", unlocked.other->qp_num, intruder.thread, gettid()), 1);
    CHECK_EQ(lines_about(text, "completion queue", unlocked.cq->handle, intruder.thread, gettid()), 1);
    CHECK(strstr(text, "post_send") != NULL); /* what was tried first */
    for (i = 0; text[i]; i++)
        lines += text[i] == '\n';
    CHECK_EQ(lines, 3);
    free(text);
    text = stderr_of(intrude_elsewhere, &intruder); /* each object is reported once */
    CHECK_EQ(overlaps(&unlocked), intruder.attempts);
    CHECK_EQ(strlen(text), 0);
    free(text);

    /* The one inside has noticed nothing. */
    CHECK_EQ(unlocked.cq->wr_id, 1);
    CHECK_EQ(unlocked.cq->read_opcode(unlocked.cq), IBV_WC_RDMA_WRITE);
    CHECK_EQ(unlocked.cq->next_poll(unlocked.cq), ENOENT);
    unlocked.cq->end_poll(unlocked.cq);
    CHECK_EQ(qp_state(unlocked.qp), IBV_QPS_RTS);
    close_unlocked(&unlocked);
}

/* The thread that is inside may use the domain's other objects: post while it polls. */
static void posting_while_polling(void)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 2, NULL, 0);
    struct ibv_recv_wr recv = {.wr_id = 3}, *bad;
    struct unlocked unlocked;
    int thread_domain;

    for (thread_domain = 0; thread_domain < 2; thread_domain++) {
        open_inside(&unlocked, thread_domain);
        CHECK_EQ(post(unlocked.qp, &wr), 0);
        CHECK_EQ(post(unlocked.other, &wr), 0);
        CHECK_EQ(verbs_post_recv(unlocked.qp, &recv, &bad), 0);
        CHECK_EQ(qp_state(unlocked.qp), IBV_QPS_RTS);
        next_poll(unlocked.cq);
        CHECK_EQ(unlocked.cq->wr_id, 2);
        next_poll(unlocked.cq);
        unlocked.cq->end_poll(unlocked.cq);
        CHECK_EQ(overlaps(&unlocked), 0);
        CHECK_EQ(qp_to(unlocked.qp, IBV_QPS_RESET), 0); /* takes the receive with it */
        qp_connect(unlocked.qp, &default_link, unlocked.qp->qp_num);
        close_unlocked(&unlocked);
    }
}

static void enter_again(void *argument)
{
    struct unlocked *unlocked = argument;
    struct ibv_poll_cq_attr attr = {0};
    struct ibv_wc wc;

    CHECK_EQ(verbs_poll_cq(cq_of(unlocked->cq), 1, &wc), -EBUSY);
    CHECK_EQ(unlocked->cq->start_poll(unlocked->cq, &attr), EBUSY);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(unlocked->cq)), EBUSY);
    CHECK_EQ(qp_to(unlocked->qp, IBV_QPS_RESET), EBUSY); /* it would purge the queue */
    CHECK_EQ(soft_verbs.destroy_qp(unlocked->qp), EBUSY);
    CHECK_EQ(qp_state(unlocked->qp), IBV_QPS_RTS);
}

/* A nested call on the same object is refused even from the thread that is inside, locked or not: it never
 * deadlocks. */
static void nested_calls(void)
{
    struct unlocked unlocked;
    int thread_domain;
    char *text;

    for (thread_domain = 0; thread_domain < 2; thread_domain++) {
        open_inside(&unlocked, thread_domain);
        text = stderr_of(enter_again, &unlocked);
        CHECK_EQ(overlaps(&unlocked), 5);
        CHECK_EQ(lines_about(text, "completion queue", unlocked.cq->handle, gettid(), gettid()), 1);
        free(text);
        unlocked.cq->end_poll(unlocked.cq);
        close_unlocked(&unlocked);
    }
}

/* Another thread may use another thread domain. */
static int use_other_domain(void *argument)
{
    struct unlocked inner;

    (void)argument;
    open_inside(&inner, true);
    inner.cq->end_poll(inner.cq);
    close_unlocked(&inner);
    return 0;
}

static int use_pair(void *argument)
{
    struct pair *pair = argument;

    CHECK_EQ(post_write(&pair->a, &pair->b, 1, 64), 0);
    EXPECT(pair->a.send_cq, 1, IBV_WC_SUCCESS);
    return 0;
}

static void other_domains_are_free(void)
{
    struct ibv_td_init_attr attr = {0};
    struct home second, bare;
    struct unlocked unlocked;
    struct pair pair;

    open_inside(&unlocked, true);
    CHECK_EQ(call_elsewhere(use_other_domain, NULL), 0);
    second = bare = unlocked.home; /* a second thread domain, and none, of the same context */
    second.td = verbs_alloc_td(second.context, &attr);
    second.pd = home_parent(&second, second.td);
    REQUIRE(second.td && second.pd);
    PAIR_OPEN(&pair, .homes = {&second, &second});
    CHECK_EQ(call_elsewhere(use_pair, &pair), 0);
    pair_close(&pair);
    bare.td = NULL;
    bare.pd = bare.base;
    PAIR_OPEN(&pair, .homes = {&bare, &bare});
    CHECK_EQ(call_elsewhere(use_pair, &pair), 0);
    pair_close(&pair);
    CHECK_EQ(soft_verbs.dealloc_pd(second.pd), 0);
    CHECK_EQ(verbs_dealloc_td(second.td), 0);
    CHECK_EQ(overlaps(&unlocked), 0);
    unlocked.cq->end_poll(unlocked.cq);
    close_unlocked(&unlocked);
}

/* The device half is separate: peers write to an object while its thread is inside of the driver half. */
static int write_to_it(void *argument)
{
    struct pair *pair = argument;
    int i;

    for (i = 0; i < 50; i++) {
        CHECK_EQ(post_write(&pair->b, &pair->a, 1, 64), 0);
        EXPECT(pair->b.send_cq, 1, IBV_WC_SUCCESS);
        CHECK_EQ(post_send(&pair->b, 2, 64), 0);
        EXPECT(pair->b.send_cq, 2, IBV_WC_SUCCESS);
    }
    return 0;
}

static void peers_do_not_overlap(void)
{
    struct check_variant like = *variant;
    struct home mine, theirs;
    struct unlocked unlocked;
    struct pair pair;
    int i;

    like.thread_domain = true;
    open_inside(&unlocked, true);
    mine = unlocked.home;
    home_open_like(&theirs, &like);
    PAIR_OPEN(&pair, .homes = {&mine, &theirs}, .cap = {64, 64, 1, 1, 0});
    for (i = 0; i < 50; i++)
        CHECK_EQ(post_receive(&pair.a, (uint64_t)i, 64), 0);
    CHECK_EQ(call_elsewhere(write_to_it, &pair), 0); /* while this thread is inside */
    unlocked.cq->end_poll(unlocked.cq);
    for (i = 0; i < 50; i++)
        EXPECT(pair.a.recv_cq, i, IBV_WC_SUCCESS);
    CHECK_EQ(overlaps(&unlocked), 0);
    pair_close(&pair);
    home_close(&theirs);
    close_unlocked(&unlocked);
}

/* A single-threaded queue without a thread domain is checked alone; the queue pairs on it have locks. */
static int poll_single(void *argument)
{
    struct unlocked *unlocked = argument;
    struct ibv_wc wc;

    CHECK_EQ(post_nothing(unlocked->qp, 2), 0);
    CHECK_EQ(qp_state(unlocked->qp), IBV_QPS_RTS);
    CHECK_EQ(verbs_poll_cq(cq_of(unlocked->cq), 1, &wc), -EBUSY);
    CHECK_EQ(soft_verbs.destroy_qp(unlocked->qp), EBUSY);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(unlocked->cq)), EBUSY);
    return 0;
}

static void intrude_single(void *argument)
{
    CHECK_EQ(call_elsewhere(poll_single, argument), 0);
}

static void single_threaded_queue(void)
{
    struct ibv_cq_init_attr_ex attr = {
        .cqe = 32,
        .wc_flags = IBV_WC_STANDARD_FLAGS,
        .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
        .flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
    };
    struct unlocked unlocked;

    unlocked.like = *variant;
    unlocked.like.thread_domain = false;
    home_open_like(&unlocked.home, &unlocked.like);
    unlocked.cq = verbs_create_cq_ex(unlocked.home.context, &attr);
    REQUIRE(unlocked.cq != NULL);
    unlocked.qp = make_loop(unlocked.home.pd, cq_of(unlocked.cq), 8);
    unlocked.other = make_loop(unlocked.home.pd, cq_of(unlocked.cq), 8);
    CHECK_EQ(post_nothing(unlocked.qp, 1), 0);
    start_poll(unlocked.cq);
    free(stderr_of(intrude_single, &unlocked));
    CHECK_EQ(overlaps(&unlocked), 3);
    next_poll(unlocked.cq);
    CHECK_EQ(unlocked.cq->wr_id, 2);
    unlocked.cq->end_poll(unlocked.cq);
    close_unlocked(&unlocked);
}

/* With locks, other threads post, query and modify at once, and poll when the thread inside has left. */
static int use_locked(void *argument)
{
    struct unlocked *unlocked = argument;

    CHECK_EQ(post_nothing(unlocked->qp, 2), 0);
    CHECK_EQ(qp_to(unlocked->other, IBV_QPS_SQD), 0);
    CHECK_EQ(qp_state(unlocked->other), IBV_QPS_SQD);
    CHECK_EQ(qp_to(unlocked->other, IBV_QPS_RTS), 0);
    return 0;
}

struct waiter {
    struct unlocked *unlocked;
    atomic_bool started, done;
};

static void *poll_locked(void *argument)
{
    struct waiter *waiter = argument;

    atomic_store(&waiter->started, true);
    EXPECT(cq_of(waiter->unlocked->cq), 2, IBV_WC_SUCCESS);
    atomic_store(&waiter->done, true);
    return NULL;
}

static void locked_objects(void)
{
    struct unlocked unlocked;
    struct waiter waiter = {.unlocked = &unlocked};
    pthread_t thread;

    open_inside(&unlocked, false);
    CHECK_EQ(call_elsewhere(use_locked, &unlocked), 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, poll_locked, &waiter), 0);
    while (!atomic_load(&waiter.started))
        sleep_us(100);
    sleep_us(5000);
    CHECK(!atomic_load(&waiter.done));
    CHECK_EQ(unlocked.cq->wr_id, 1);
    unlocked.cq->end_poll(unlocked.cq);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(overlaps(&unlocked), 0);
    close_unlocked(&unlocked);
}

CHECK_MAIN(CASE(refused_and_reported_once), CASE(posting_while_polling), CASE(nested_calls),
           CASE(other_domains_are_free), CASE(peers_do_not_overlap), CASE(single_threaded_queue), CASE(locked_objects))
