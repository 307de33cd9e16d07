/* Tests of queue pairs that take from a shared receive queue: polling frees places, the limit event is raised, and each
 * message reaches its receiver. */
#include "support.h"
#include "support_srq.h"
#include "support_threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define LINES 2

/* Lines: pairs of a sender and a receiver, with queues of their own; the receivers share their receives. */
struct lines {
    struct home home;        /* of the receivers and the shared queue */
    struct home ends[LINES]; /* of the senders and of both ends' completions, so that each has a thread to itself */
    struct ibv_cq *send_cqs[LINES], *recv_cqs[LINES];
    struct ibv_qp *senders[LINES], *receivers[LINES];
    struct ibv_srq *srq;
    uint64_t memory[LINES * 1500]; /* a word for each receive: a late poller has not read its word yet */
    struct ibv_mr *mr;
};

static struct ibv_qp *make_receiver(const struct lines *lines, struct ibv_cq *cq)
{
    struct ibv_qp_init_attr attr = {
        .send_cq = cq,
        .recv_cq = cq,
        .srq = lines->srq,
        .cap = {.max_send_wr = 1, .max_send_sge = 1, .max_recv_wr = 8},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *qp = soft_verbs.create_qp(lines->home.base, &attr);

    REQUIRE(qp != NULL);
    CHECK_EQ(attr.cap.max_recv_wr, 0); /* it has no receives of its own */
    return qp;
}

static void lines_open(struct lines *lines, uint32_t depth)
{
    int i;

    memset(lines, 0, sizeof(*lines));
    home_open(&lines->home);
    lines->srq = make_srq(&lines->home, depth);
    lines->mr = soft_verbs.reg_mr(lines->home.base, lines->memory, sizeof(lines->memory), ACCESS_ALL);
    REQUIRE(lines->mr != NULL);
    for (i = 0; i < LINES; i++) {
        home_open(&lines->ends[i]);
        lines->send_cqs[i] = home_cq(&lines->ends[i], 64, NULL);
        lines->recv_cqs[i] = soft_verbs.create_cq(lines->home.context, 1024, NULL, NULL, 0);
        REQUIRE(lines->recv_cqs[i] != NULL);
        lines->senders[i] = make_qp(lines->ends[i].pd, lines->send_cqs[i], 32);
        lines->receivers[i] = make_receiver(lines, lines->recv_cqs[i]);
        qp_connect(lines->senders[i], &default_link, lines->receivers[i]->qp_num);
        qp_connect(lines->receivers[i], &default_link, lines->senders[i]->qp_num);
    }
}

/* Objects that the test destroyed itself are NULL. */
static void lines_close(struct lines *lines)
{
    int i;

    for (i = 0; i < LINES; i++) {
        CHECK_EQ(soft_verbs.destroy_qp(lines->senders[i]), 0);
        if (lines->receivers[i])
            CHECK_EQ(soft_verbs.destroy_qp(lines->receivers[i]), 0);
        CHECK_EQ(soft_verbs.destroy_cq(lines->send_cqs[i]), 0);
        CHECK_EQ(soft_verbs.destroy_cq(lines->recv_cqs[i]), 0);
        home_close(&lines->ends[i]);
    }
    if (lines->srq) {
        CHECK_EQ(atomic_load(&to_soft_srq(lines->srq)->outstanding), 0);
        CHECK_EQ(soft_verbs.destroy_srq(lines->srq), 0);
    }
    CHECK_EQ(soft_verbs.dereg_mr(lines->mr), 0);
    home_close(&lines->home);
}

/* Post a receive for one word, at the place of its number. */
static int post_one(struct lines *lines, uint64_t wr_id)
{
    struct ibv_sge sge = {(uintptr_t)&lines->memory[wr_id % COUNT_OF(lines->memory)], 8, lines->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

    return verbs_post_srq_recv(lines->srq, &wr, &bad);
}

static int send_word(struct lines *lines, int line, uint64_t wr_id, uint64_t word)
{
    struct ibv_sge sge = {(uintptr_t)&word, 8, 0};
    struct ibv_send_wr wr = request(IBV_WR_SEND, wr_id, &sge, 1);

    wr.send_flags |= IBV_SEND_INLINE;
    return post(lines->senders[line], &wr);
}

/* ---- One thread -------------------------------------------------------------------------------------------- */

/* Receives go to the receiver that needs one next; each receiver's completion queue reports its own. */
static void receives_are_shared(void)
{
    struct lines lines;
    struct ibv_wc wc;
    uint64_t i;

    lines_open(&lines, 4);
    CHECK_EQ(soft_verbs.destroy_srq(lines.srq), EBUSY);
    for (i = 0; i < 4; i++)
        CHECK_EQ(post_one(&lines, i), 0);
    for (i = 0; i < 40; i++) {
        int line = i % 3 == 0;

        CHECK_EQ(post_one(&lines, i + 4), ENOMEM);
        CHECK_EQ(send_word(&lines, line, i, 1000 + i), 0);
        EXPECT(lines.send_cqs[line], i, IBV_WC_SUCCESS);
        CHECK_EQ(post_one(&lines, i + 4), ENOMEM); /* taken, but not polled */
        wc = EXPECT(lines.recv_cqs[line], i, IBV_WC_SUCCESS);
        CHECK_EQ(wc.qp_num, lines.receivers[line]->qp_num);
        CHECK_EQ(lines.memory[i], 1000 + i);
        CHECK_EQ(post_one(&lines, i + 4), 0);
    }
    for (i = 40; i < 44; i++) {
        CHECK_EQ(send_word(&lines, 0, i, i), 0);
        EXPECT(lines.send_cqs[0], i, IBV_WC_SUCCESS);
        EXPECT(lines.recv_cqs[0], i, IBV_WC_SUCCESS);
    }
    lines_close(&lines);
}

/* A message without a receive waits until one is posted; the queue pair has no receives of its own. */
static void sender_waits_for_receives(void)
{
    struct ibv_recv_wr wr = {0}, *bad;
    struct lines lines;

    lines_open(&lines, 4);
    CHECK_EQ(verbs_post_recv(lines.receivers[0], &wr, &bad), EINVAL);
    CHECK_EQ(send_word(&lines, 0, 1, 5), 0);
    EXPECT_NOTHING(lines.send_cqs[0]);
    CHECK_EQ(post_one(&lines, 2), 0);
    EXPECT(lines.send_cqs[0], 1, IBV_WC_SUCCESS);
    EXPECT(lines.recv_cqs[0], 2, IBV_WC_SUCCESS);
    CHECK_EQ(lines.memory[2], 5);
    lines_close(&lines);
}

/* Completions that are removed with a queue pair free their places; receives that were not taken stay for the
 * others. */
static void places_of_a_destroyed_queue_pair(void)
{
    struct lines lines;
    uint64_t i;

    lines_open(&lines, 4);
    for (i = 0; i < 4; i++)
        CHECK_EQ(post_one(&lines, i), 0);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(send_word(&lines, 0, i, 1), 0);
        EXPECT(lines.send_cqs[0], i, IBV_WC_SUCCESS);
    }
    CHECK_EQ(post_one(&lines, 4), ENOMEM);
    CHECK_EQ(qp_to(lines.receivers[0], IBV_QPS_RESET), 0);
    CHECK_EQ(post_one(&lines, 4), 0);
    CHECK_EQ(post_one(&lines, 5), 0);
    CHECK_EQ(post_one(&lines, 6), ENOMEM);
    for (i = 2; i < 6; i++) {
        CHECK_EQ(send_word(&lines, 1, i, 1), 0);
        EXPECT(lines.send_cqs[1], i, IBV_WC_SUCCESS);
    }
    CHECK_EQ(soft_verbs.destroy_qp(lines.receivers[1]), 0);
    lines.receivers[1] = NULL;
    EXPECT_NOTHING(lines.recv_cqs[1]);
    lines_close(&lines); /* which checks that nothing is outstanding */
}

/* ---- Events ------------------------------------------------------------------------------------------------- */

static void expect_event(struct lines *lines, enum ibv_event_type type, struct ibv_async_event *event)
{
    REQUIRE(wait_readable(lines->home.context->async_fd));
    REQUIRE_EQ(soft_verbs.get_async_event(lines->home.context, event), 0);
    CHECK_EQ(event->event_type, type);
    if (type == IBV_EVENT_SRQ_LIMIT_REACHED || type == IBV_EVENT_SRQ_ERR)
        CHECK(event->element.srq == lines->srq);
}

/* The established connections raise no event here: all of them are in RTS. */
static void limit_event(void)
{
    struct ibv_async_event event;
    struct lines lines;
    uint64_t i;

    lines_open(&lines, 8);
    for (i = 0; i < 8; i++)
        CHECK_EQ(post_one(&lines, i), 0);
    CHECK_EQ(srq_arm(lines.srq, 7), 0);
    for (i = 0; i < 4; i++) {
        CHECK(!is_readable(lines.home.context->async_fd) == (i < 2));
        CHECK_EQ(send_word(&lines, 0, i, 1), 0);
        EXPECT(lines.send_cqs[0], i, IBV_WC_SUCCESS);
        EXPECT(lines.recv_cqs[0], i, IBV_WC_SUCCESS);
    }
    expect_event(&lines, IBV_EVENT_SRQ_LIMIT_REACHED, &event);
    CHECK(!is_readable(lines.home.context->async_fd)); /* once */
    soft_verbs.ack_async_event(&event);
    CHECK_EQ(srq_arm(lines.srq, 4), 0);
    for (i = 4; i < 8; i++) {
        CHECK_EQ(send_word(&lines, 1, i, 1), 0);
        EXPECT(lines.send_cqs[1], i, IBV_WC_SUCCESS);
        EXPECT(lines.recv_cqs[1], i, IBV_WC_SUCCESS);
    }
    expect_event(&lines, IBV_EVENT_SRQ_LIMIT_REACHED, &event);
    soft_verbs.ack_async_event(&event);
    lines_close(&lines);
}

static void *destroy_it(void *argument)
{
    struct lines *lines = argument;

    CHECK_EQ(soft_verbs.destroy_srq(lines->srq), 0);
    lines->srq = NULL;
    return NULL;
}

/* Destruction waits for an event that was taken, and drops one that was not. */
static void destruction_waits_for_events(void)
{
    struct ibv_async_event event;
    struct soft_counts counts;
    struct lines lines;
    pthread_t thread;
    int i;

    lines_open(&lines, 4);
    for (i = 0; i < LINES; i++) {
        CHECK_EQ(soft_verbs.destroy_qp(lines.receivers[i]), 0);
        lines.receivers[i] = NULL;
    }
    CHECK_EQ(srq_post(lines.srq, 1), 0);
    CHECK_EQ(srq_arm(lines.srq, 1), 0);
    srq_expect(lines.srq, 1);
    expect_event(&lines, IBV_EVENT_SRQ_LIMIT_REACHED, &event);
    CHECK_EQ(soft_break_srq(lines.srq), 0); /* a second one, which is not taken */
    CHECK(is_readable(lines.home.context->async_fd));
    REQUIRE_EQ(pthread_create(&thread, NULL, destroy_it, &lines), 0);
    sleep_us(10000);
    soft_get_counts(lines.home.context, &counts);
    CHECK_EQ(counts.srqs, 1); /* still there */
    soft_verbs.ack_async_event(&event);
    REQUIRE_EQ(pthread_join(thread, NULL), 0);
    CHECK(lines.srq == NULL);
    CHECK(!is_readable(lines.home.context->async_fd));
    lines_close(&lines);
}

/* A queue that breaks raises one event, and provides no receives any more. */
static void broken_queue(void)
{
    struct ibv_qp_attr link = default_link;
    struct ibv_async_event event;
    struct lines lines;
    struct ibv_wc wc;
    int i;

    link.rnr_retry = 1;
    lines_open(&lines, 4);
    CHECK_EQ(qp_to(lines.senders[0], IBV_QPS_RESET), 0);
    CHECK_EQ(qp_to(lines.receivers[0], IBV_QPS_RESET), 0);
    qp_connect(lines.senders[0], &link, lines.receivers[0]->qp_num);
    qp_connect(lines.receivers[0], &link, lines.senders[0]->qp_num);
    CHECK_EQ(post_one(&lines, 1), 0);
    CHECK_EQ(soft_break_srq(lines.srq), 0);
    CHECK_EQ(soft_break_srq(lines.srq), 0);
    expect_event(&lines, IBV_EVENT_SRQ_ERR, &event);
    soft_verbs.ack_async_event(&event);
    CHECK(!is_readable(lines.home.context->async_fd));
    CHECK_EQ(send_word(&lines, 0, 1, 1), 0);
    EXPECT(lines.send_cqs[0], 1, IBV_WC_RNR_RETRY_EXC_ERR);
    for (i = 0; i < LINES; i++)
        CHECK_EQ(verbs_poll_cq(lines.recv_cqs[i], 1, &wc), 0);
    soft_srq_credit(to_soft_srq(lines.srq), 1); /* the lost receive's, for the last check */
    lines_close(&lines);
}

/* ---- Threads ------------------------------------------------------------------------------------------------ */

struct storm {
    struct lines lines;
    uint64_t each; /* messages of a line */
    atomic_uint *seen;
    atomic_ullong received;
    atomic_bool give_up;
};

struct part {
    struct storm *storm;
    int line; /* or LINES: the thread that posts and resizes */
    unsigned int seed;
};

/* Send and receive on one line, with as many requests in flight as its send queue takes. */
static void run_line(struct part *part)
{
    uint64_t end = now_ns() + 4 * WAIT_S * 1000000000ull, sent = 0, done = 0, received = 0;
    struct storm *storm = part->storm;
    struct lines *lines = &storm->lines;
    struct ibv_wc wc;

    while (done < storm->each || received < storm->each) {
        if (sent < storm->each && sent - done < 8 && CHECK_EQ(send_word(lines, part->line, sent, sent), 0))
            sent++;
        if (verbs_poll_cq(lines->send_cqs[part->line], 1, &wc) == 1) {
            CHECK_EQ(wc.status, IBV_WC_SUCCESS);
            CHECK_EQ(wc.wr_id, done);
            done++;
        }
        if (verbs_poll_cq(lines->recv_cqs[part->line], 1, &wc) == 1) {
            CHECK_EQ(wc.status, IBV_WC_SUCCESS);
            CHECK_EQ(wc.qp_num, lines->receivers[part->line]->qp_num);
            if (CHECK(wc.wr_id < LINES * storm->each))
                atomic_fetch_add(&storm->seen[wc.wr_id], 1);
            received++;
            atomic_fetch_add(&storm->received, 1);
        } else {
            sched_yield();
        }
        if (now_ns() > end) {
            CHECK(!"the line hangs");
            atomic_store(&storm->give_up, true);
            return;
        }
    }
}

static void feed(struct part *part)
{
    struct storm *storm = part->storm;
    uint64_t wr_id = 0;

    while (wr_id < LINES * storm->each && !atomic_load(&storm->give_up)) {
        int error = post_one(&storm->lines, wr_id);

        if (error == ENOMEM)
            sched_yield();
        else if (CHECK_EQ(error, 0))
            wr_id++;
        else
            return;
        if (next_random(&part->seed, 20) == 0) {
            error = srq_resize(storm->lines.srq, 1u << next_random(&part->seed, 7));
            CHECK(error == 0 || error == EINVAL);
        }
    }
}

static void take_part(void *argument)
{
    struct part *part = argument;

    if (part->line < LINES)
        run_line(part);
    else
        feed(part);
}

/* Two queue pairs on two threads take receives that a third thread posts and resizes. */
static void storm_on_one_queue(void)
{
    struct storm *storm = calloc(1, sizeof(*storm));
    struct part parts[LINES + 1] = {{storm, 0, 1}, {storm, 1, 2}, {storm, 2, 3}};
    uint64_t i;

    REQUIRE(storm != NULL);
    storm->each = variant->options.delay_ns ? 300 : SCALED(1500);
    storm->seen = calloc(LINES * storm->each, sizeof(*storm->seen));
    REQUIRE(storm->seen != NULL);
    lines_open(&storm->lines, 16);
    run_threads(LINES + 1, take_part, parts, sizeof(parts[0]));
    for (i = 0; i < LINES * storm->each; i++)
        if (storm->seen[i] != 1 && !CHECK_EQ(storm->seen[i], 1))
            break;
    lines_close(&storm->lines);
    free(storm->seen);
    free(storm);
}

CHECK_MAIN(CASE(receives_are_shared), CASE(sender_waits_for_receives), CASE(places_of_a_destroyed_queue_pair),
           CASE(limit_event), CASE(destruction_waits_for_events), CASE(broken_queue), CASE(storm_on_one_queue))
