/* Tests of work queues: capacity, chains, signalling and order. */
#include "support.h"

#include <sched.h>

#include "soft/api/device.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/objects/qp.h"

/* Post sends until the queue is full; return their number. They are signalled if `signalled`. */
static int fill_send_queue(struct pair *pair, bool signalled)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, NULL, 0);
    int count, answer = 0;

    wr.send_flags = signalled ? IBV_SEND_SIGNALED : 0;
    for (count = 0; count < 1000 && !(answer = post(pair->a.qp, &wr)); count++)
        wr.wr_id++;
    CHECK_EQ(answer, ENOMEM);
    return count;
}

static int granted_sends(struct pair *pair)
{
    struct ibv_qp_init_attr granted;
    struct ibv_qp_attr attr;

    CHECK_EQ(soft_verbs.query_qp(pair->a.qp, &attr, IBV_QP_CAP, &granted), 0);
    return (int)granted.cap.max_send_wr;
}

/* A request occupies its place until its completion is polled, not only until it is executed. */
static void signalled_places(void)
{
    struct pair pair;
    int depth, i, round;

    PAIR_OPEN(&pair, .cap = {6, 6, 1, 1, 0});
    depth = granted_sends(&pair);
    for (round = 0; round < 3; round++) {
        CHECK_EQ(fill_send_queue(&pair, true), depth);
        settle(pair.own.context);
        CHECK_EQ(fill_send_queue(&pair, true), 0);
        for (i = 1; i <= depth; i++) {
            EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
            if (i == 3) { /* exactly those that were polled are free again */
                CHECK_EQ(fill_send_queue(&pair, true), 3);
                break;
            }
        }
        for (i = 4; i <= depth; i++)
            EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        for (i = 1; i <= 3; i++)
            EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
    }
    EXPECT_NOTHING(pair.a.send_cq);
    pair_close(&pair);
}

/* Requests without a completion keep their places until one after them completes. */
static void unsignalled_places(void)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 99, NULL, 0);
    struct pair pair;
    int depth;

    PAIR_OPEN(&pair, .cap = {8, 8, 1, 1, 0});
    depth = granted_sends(&pair);
    CHECK_EQ(fill_send_queue(&pair, false), depth);
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(post(pair.a.qp, &wr), ENOMEM); /* full for good: nothing will ever be polled */
    pair_close(&pair);

    PAIR_OPEN(&pair, .cap = {8, 8, 1, 1, 0});
    wr.send_flags = 0;
    while (--depth)
        CHECK_EQ(post(pair.a.qp, &wr), 0);
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr_id = 100;
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    CHECK_EQ(post(pair.a.qp, &wr), ENOMEM);
    EXPECT(pair.a.send_cq, 100, IBV_WC_SUCCESS); /* frees them all */
    CHECK_EQ(fill_send_queue(&pair, false), granted_sends(&pair));
    pair_close(&pair);
}

static void signal_all(void)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, NULL, 0);
    struct pair pair;
    int i;

    PAIR_OPEN(&pair, .sig_all = true);
    wr.send_flags = 0;
    for (i = 0; i < 5; i++, wr.wr_id++)
        CHECK_EQ(post(pair.a.qp, &wr), 0);
    for (i = 0; i < 5; i++)
        EXPECT(pair.a.send_cq, i + 1, IBV_WC_SUCCESS);
    pair_close(&pair);
}

static void receive_places(void)
{
    struct ibv_qp_init_attr granted;
    struct ibv_qp_attr attr;
    struct pair pair;
    uint32_t i;

    PAIR_OPEN(&pair, .cap = {8, 8, 1, 1, 0});
    CHECK_EQ(soft_verbs.query_qp(pair.b.qp, &attr, IBV_QP_CAP, &granted), 0);
    for (i = 0; i < granted.cap.max_recv_wr; i++)
        CHECK_EQ(post_receive(&pair.b, i, 8), 0);
    CHECK_EQ(post_receive(&pair.b, i, 8), ENOMEM);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(post_receive(&pair.b, i, 8), ENOMEM); /* used, but not yet polled */
    EXPECT(pair.b.recv_cq, 0, IBV_WC_SUCCESS);
    CHECK_EQ(post_receive(&pair.b, i, 8), 0);
    CHECK_EQ(post_receive(&pair.b, i, 8), ENOMEM);
    pair_close(&pair);
}

/* A chain is posted up to the first invalid request, which the call returns. */
static void chains(void)
{
    struct ibv_send_wr wrs[5], *bad;
    struct ibv_recv_wr recvs[5], *bad_recv;
    struct pair pair;
    int i;

    PAIR_OPEN(&pair, 0);
    for (i = 0; i < 5; i++) {
        recvs[i] = (struct ibv_recv_wr){.wr_id = (uint64_t)i, .next = i < 4 ? &recvs[i + 1] : NULL};
        wrs[i] = request(IBV_WR_SEND, (uint64_t)i, NULL, 0);
        wrs[i].next = i < 4 ? &wrs[i + 1] : NULL;
    }
    recvs[3].num_sge = 1000;
    CHECK_EQ(verbs_post_recv(pair.b.qp, recvs, &bad_recv), EINVAL);
    CHECK(bad_recv == &recvs[3]);
    recvs[3].num_sge = 0;
    CHECK_EQ(verbs_post_recv(pair.b.qp, &recvs[3], &bad_recv), 0);
    wrs[2].opcode = IBV_WR_TSO;
    CHECK_EQ(verbs_post_send(pair.a.qp, wrs, &bad), EOPNOTSUPP);
    CHECK(bad == &wrs[2]);
    for (i = 0; i < 2; i++) {
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        EXPECT(pair.b.recv_cq, i, IBV_WC_SUCCESS);
    }
    EXPECT_NOTHING(pair.a.send_cq);
    wrs[2].opcode = IBV_WR_SEND;
    CHECK_EQ(verbs_post_send(pair.a.qp, &wrs[2], &bad), 0);
    for (i = 2; i < 5; i++) {
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        EXPECT(pair.b.recv_cq, i, IBV_WC_SUCCESS);
    }
    pair_close(&pair);
}

/* A chain that is longer than the queue. */
static void chain_into_a_full_queue(void)
{
    struct ibv_send_wr wrs[40], *bad;
    struct pair pair;
    int depth, i;

    PAIR_OPEN(&pair, .cap = {16, 1, 1, 1, 0});
    depth = granted_sends(&pair);
    REQUIRE(depth < 40);
    for (i = 0; i < 40; i++) {
        wrs[i] = request(IBV_WR_RDMA_WRITE, (uint64_t)i, NULL, 0);
        wrs[i].next = i < 39 ? &wrs[i + 1] : NULL;
    }
    CHECK_EQ(verbs_post_send(pair.a.qp, wrs, &bad), ENOMEM);
    CHECK(bad == &wrs[depth]);
    for (i = 0; i < depth; i++)
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
    EXPECT_NOTHING(pair.a.send_cq);
    pair_close(&pair);
}

/* Requests are executed in order: each one sees the effects of those before it; of reads and atomics with the fence. */
static void order(void)
{
    enum { ROUNDS = 200 };
    struct pair pair;
    uint64_t i;

    PAIR_OPEN(&pair, .cap = {64, 64, 1, 1, 0}, .cqe = 256);
    for (i = 0; i < ROUNDS; i++) {
        struct ibv_sge source = span(&pair.a, 0, 8), target = span(&pair.a, 64, 8);
        struct ibv_sge sum = span(&pair.a, 128, 8);
        struct ibv_send_wr write = request_to(IBV_WR_RDMA_WRITE, 1, &source, 1, &pair.b, 0);
        struct ibv_send_wr add = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, 2, &sum, 1, &pair.b, 0);
        struct ibv_send_wr read = request_to(IBV_WR_RDMA_READ, 3, &target, 1, &pair.b, 0);
        struct ibv_send_wr back = request_to(IBV_WR_RDMA_WRITE, 4, &target, 1, &pair.b, 8);
        uint64_t seen;

        write.send_flags = add.send_flags = 0;
        write.next = &add, add.next = &read, read.next = &back;
        add.wr.atomic.compare_add = 1000;
        back.send_flags |= IBV_SEND_FENCE;
        memcpy(pair.a.memory, &i, 8);
        CHECK_EQ(post(pair.a.qp, &write), 0);
        EXPECT(pair.a.send_cq, 3, IBV_WC_SUCCESS);
        EXPECT(pair.a.send_cq, 4, IBV_WC_SUCCESS);
        memcpy(&seen, pair.a.memory + 64, 8);
        CHECK_EQ(seen, i + 1000);
        memcpy(&seen, pair.b.memory + 8, 8);
        CHECK_EQ(seen, i + 1000);
        memcpy(&seen, pair.a.memory + 128, 8);
        CHECK_EQ(seen, i);
    }
    pair_close(&pair);
}

/* Many messages, both ways at once, over rings that wrap many times: none is lost, duplicated or reordered. */
static void both_ways(void)
{
    enum { MESSAGES = 1000, DEPTH = 8 };
    struct end *ends[2];
    struct ibv_wc wc;
    uint64_t sent[2] = {0}, done[2] = {0}, posted[2] = {0}, received[2] = {0};
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    struct pair pair;
    int side;

    PAIR_OPEN(&pair, .cap = {DEPTH, DEPTH, 1, 1, 16}, .one_cq = true);
    ends[0] = &pair.a;
    ends[1] = &pair.b;
    while (received[0] + received[1] + done[0] + done[1] < 4 * MESSAGES && now_ns() < end) {
        for (side = 0; side < 2; side++) {
            struct end *self = ends[side];

            while (posted[side] < MESSAGES && posted[side] - received[side] < DEPTH) {
                struct ibv_sge sge = span(self, 1024 + posted[side] % DEPTH * 8, 8);

                REQUIRE_EQ(post_receive_list(self, posted[side]++ << 1, &sge, 1), 0);
            }
            while (sent[side] < MESSAGES && sent[side] - done[side] < DEPTH) {
                struct ibv_sge sge = {(uintptr_t)&sent[side], 8, 0};
                struct ibv_send_wr wr = request(IBV_WR_SEND, sent[side] << 1 | 1, &sge, 1);

                wr.send_flags |= IBV_SEND_INLINE;
                REQUIRE_EQ(post(self->qp, &wr), 0);
                sent[side]++;
            }
            while (verbs_poll_cq(self->send_cq, 1, &wc) == 1) {
                uint64_t value;

                REQUIRE_EQ(wc.status, IBV_WC_SUCCESS);
                if (wc.wr_id & 1) {
                    REQUIRE_EQ(wc.wr_id >> 1, done[side]);
                    done[side]++;
                    continue;
                }
                memcpy(&value, self->memory + 1024 + received[side] % DEPTH * 8, 8);
                REQUIRE_EQ(wc.wr_id >> 1, received[side]);
                REQUIRE_EQ(value, received[side]);
                received[side]++;
            }
        }
    }
    CHECK_EQ(received[0], MESSAGES);
    CHECK_EQ(received[1], MESSAGES);
    CHECK_EQ(done[0], MESSAGES);
    CHECK_EQ(done[1], MESSAGES);
    pair_close(&pair);
}

/* With a worker thread a request is executed by that thread, not in the call, and not before its time. */
static void execution_mode(void)
{
    uint64_t delay_ns = 50000000, begin;
    struct ibv_wc wc;
    struct pair pair;
    int count;

    PAIR_OPEN(&pair, 0);
    if (variant->options.mode == SOFT_INLINE) {
        CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
        CHECK_EQ(verbs_poll_cq(pair.a.send_cq, 1, &wc), 1); /* done when the call returned */
    } else {
        CHECK_EQ(soft_set_delay(pair.own.context, delay_ns), 0);
        begin = now_ns();
        CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
        count = verbs_poll_cq(pair.a.send_cq, 1, &wc);
        if (now_ns() - begin < delay_ns) /* else this thread was away for that long */
            REQUIRE_EQ(count, 0);
        if (!count)
            EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        CHECK(now_ns() - begin >= delay_ns);
    }
    pair_close(&pair);
}

/* Queues take turns: a queue with much to do does not delay the others until it is done. Execution begins after all is
 * posted, and all completes into one queue, which shows the order. */
static void taking_turns(void)
{
    enum { REQUESTS = 15, QUICK = 99 };
    bool threaded = variant->options.mode == SOFT_THREAD;
    struct ibv_qp *near, *far;
    struct soft_lock *busy;
    struct pair pair;
    struct end quick;
    int i, place = -1;

    PAIR_OPEN(&pair, .memory = 2 << 20);
    busy = &to_soft_qp(pair.a.qp)->sq_lock;
    near = make_qp(pair.own.pd, pair.a.send_cq, 1);
    far = make_qp(pair.own.pd, pair.a.send_cq, 1);
    qp_connect(near, &default_link, far->qp_num);
    qp_connect(far, &default_link, near->qp_num);
    quick = pair.a;
    quick.qp = near;
    if (threaded) {
        CHECK_EQ(soft_set_delay(pair.own.context, 0), 0);
        while (atomic_exchange(&busy->held, 1)) /* as if by another thread: the posting thread may not hold it */
            sched_yield();
    }
    for (i = 0; i < REQUESTS; i++)
        CHECK_EQ(post_write(&pair.a, &pair.b, (uint64_t)i, 2 << 20), 0);
    CHECK_EQ(post_write(&quick, &pair.b, QUICK, 8), 0);
    if (threaded)
        atomic_store(&busy->held, 0);
    for (i = 0; i <= REQUESTS; i++) {
        struct ibv_wc wc;

        REQUIRE(wait_completion(pair.a.send_cq, &wc));
        CHECK_EQ(wc.status, IBV_WC_SUCCESS);
        if (wc.wr_id == QUICK)
            place = i;
    }
    /* With inline execution there are no turns. */
    CHECK(threaded ? place >= 0 && place < REQUESTS : place == REQUESTS);
    CHECK_EQ(soft_verbs.destroy_qp(near), 0);
    CHECK_EQ(soft_verbs.destroy_qp(far), 0);
    pair_close(&pair);
}

/* No request is executed after the worker thread was stopped; objects can still be destroyed. */
static void halted(void)
{
    struct ibv_modify_cq_attr moderation = {IBV_CQ_ATTR_MODERATE, {2, 2}};
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    soft_halt(pair.own.context);
    soft_halt(pair.own.context);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    settle(pair.own.context);
    CHECK_EQ(verbs_poll_cq(pair.a.send_cq, 1, &wc), variant->options.mode == SOFT_INLINE ? 1 : 0);
    channel = soft_verbs.create_comp_channel(pair.own.context);
    REQUIRE(channel != NULL);
    cq = home_cq(&pair.own, 4, channel);
    CHECK_EQ(verbs_modify_cq(cq, &moderation), ECANCELED); /* the thread would run its timer */
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(channel), 0);
    pair_close(&pair);
}

CHECK_MAIN(CASE(signalled_places), CASE(unsignalled_places), CASE(signal_all), CASE(receive_places), CASE(chains),
           CASE(chain_into_a_full_queue), CASE(order), CASE(both_ways), CASE(taking_turns), CASE(execution_mode),
           CASE(halted))
