/* Tests of fault plans for messages: requests and receives that complete with a status, lost and delayed messages. */
#include "support.h"

#include "soft/api/device.h"
#include "soft/base/settings.h"
#include "soft/fault/fault.h"
#include "soft/objects/context.h"

#define FIRST(n) ((struct soft_strike){.first = (n)})
#define ALWAYS ((struct soft_strike){.first = 1, .every = 1})

static struct soft_fault_record only_record(struct ibv_context *context)
{
    struct soft_fault_record record = {0};

    REQUIRE_EQ(soft_fault_records(context, 0, &record, 1), 1);
    return record;
}

/* Reconnect a broken queue pair and its peer. */
static void reconnect(struct pair *pair)
{
    REQUIRE_EQ(qp_to(pair->a.qp, IBV_QPS_RESET), 0);
    REQUIRE_EQ(qp_to(pair->b.qp, IBV_QPS_RESET), 0);
    qp_connect(pair->a.qp, &default_link, pair->b.qp->qp_num);
    qp_connect(pair->b.qp, &default_link, pair->a.qp->qp_num);
}

/* ---- Requests ---------------------------------------------------------------------------------------------- */

/* The n-th request completes with the status and does nothing; those behind it are flushed. The peer receives
 * nothing. */
static void request_with_status(void)
{
    static const enum ibv_wc_status statuses[] = {IBV_WC_LOC_QP_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_REM_ACCESS_ERR,
                                                  IBV_WC_GENERAL_ERR, IBV_WC_WR_FLUSH_ERR};
    struct soft_fault_record records[COUNT_OF(statuses)];
    struct pair pair;
    size_t i;

    PAIR_OPEN(&pair, 0);
    for (i = 0; i < COUNT_OF(statuses); i++) {
        struct ibv_wc wc;

        memset(pair.a.memory, 'a', 8);
        memset(pair.b.memory, 'b', 8);
        REQUIRE_EQ(soft_fault_request(pair.own.context, pair.a.qp->qp_num, false, FIRST(2), statuses[i], 77), 0);
        CHECK_EQ(post_nothing(pair.b.qp, 9), 0); /* another queue pair's are not counted */
        EXPECT(pair.b.send_cq, 9, IBV_WC_SUCCESS);
        CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
        CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
        CHECK_EQ(post_write(&pair.a, &pair.b, 3, 8), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        wc = EXPECT(pair.a.send_cq, 2, statuses[i]);
        CHECK_EQ(wc.vendor_err, 77);
        CHECK_EQ(wc.qp_num, pair.a.qp->qp_num);
        EXPECT(pair.a.send_cq, 3, IBV_WC_WR_FLUSH_ERR);
        CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_ERR);
        CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS);
        CHECK_EQ(pair.b.memory[0], 'b');
        reconnect(&pair);
        CHECK_EQ(post_write(&pair.a, &pair.b, 4, 8), 0); /* the rule is spent */
        EXPECT(pair.a.send_cq, 4, IBV_WC_SUCCESS);
        CHECK_EQ(pair.b.memory[0], 'a');
    }
    CHECK_EQ(soft_fault_records(pair.own.context, 0, records, COUNT_OF(records)), COUNT_OF(statuses));
    for (i = 0; i < COUNT_OF(statuses); i++) {
        CHECK_EQ(records[i].what, SOFT_RECORD_REQUEST);
        CHECK_EQ(records[i].which, pair.a.qp->qp_num);
        CHECK_EQ(records[i].ordinal, 2);
        CHECK_EQ(records[i].value, statuses[i]);
    }
    pair_close(&pair);
}

/* An unsignalled request completes, too, with an error. */
static void unsignalled_request(void)
{
    struct ibv_send_wr wr;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    wr = request(IBV_WR_RDMA_WRITE, 1, NULL, 0);
    wr.send_flags = 0;
    REQUIRE_EQ(soft_fault_request(pair.own.context, 0, false, FIRST(1), IBV_WC_FATAL_ERR, 0), 0);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_FATAL_ERR);
    pair_close(&pair);
}

/* Rules for all queue pairs count them together. */
static void requests_of_all(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_request(pair.own.context, 0, false, FIRST(3), IBV_WC_GENERAL_ERR, 0), 0);
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(post_nothing(pair.b.qp, 2), 0);
    EXPECT(pair.b.send_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(post_nothing(pair.a.qp, 3), 0);
    EXPECT(pair.a.send_cq, 3, IBV_WC_GENERAL_ERR);
    CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS);
    pair_close(&pair);
}

/* A retried request counts once. */
static void retries_are_not_requests(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_request(pair.own.context, pair.a.qp->qp_num, false, FIRST(2), IBV_WC_GENERAL_ERR, 0), 0);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0); /* no receive is there */
    sleep_us(2000);
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(post_receive(&pair.b, 5, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(pair.b.recv_cq, 5, IBV_WC_SUCCESS);
    CHECK_EQ(post_send(&pair.a, 2, 8), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_GENERAL_ERR);
    pair_close(&pair);
}

/* ---- Receives ---------------------------------------------------------------------------------------------- */

/* Receives count as messages arrive for them: the receiver gets the status, the sender a remote error. */
static void receive_with_status(void)
{
    struct soft_fault_record record;
    struct pair pair;
    struct ibv_wc wc;
    int i;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_request(pair.own.context, pair.b.qp->qp_num, true, FIRST(2), IBV_WC_LOC_PROT_ERR, 5), 0);
    memset(pair.a.memory, 'a', 8);
    for (i = 0; i < 3; i++)
        CHECK_EQ(post_receive(&pair.b, 10 + (uint64_t)i, 8), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0); /* comes for no receive */
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(post_send(&pair.a, 2, 8), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    EXPECT(pair.b.recv_cq, 10, IBV_WC_SUCCESS);
    memset(pair.b.memory, 'b', 8);
    CHECK_EQ(post_send(&pair.a, 3, 8), 0);
    EXPECT(pair.a.send_cq, 3, IBV_WC_REM_OP_ERR);
    wc = EXPECT(pair.b.recv_cq, 11, IBV_WC_LOC_PROT_ERR);
    CHECK_EQ(wc.vendor_err, 5);
    EXPECT(pair.b.recv_cq, 12, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(pair.b.memory[0], 'b');
    CHECK(wait_state(pair.b.qp, IBV_QPS_ERR));
    record = only_record(pair.own.context);
    CHECK_EQ(record.what, SOFT_RECORD_RECEIVE);
    CHECK_EQ(record.which, pair.b.qp->qp_num);
    CHECK_EQ(record.ordinal, 2);
    CHECK_EQ(record.value, IBV_WC_LOC_PROT_ERR);
    pair_close(&pair);
}

/* A message without a receive does not count. */
static void receiver_not_ready(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_request(pair.own.context, 0, true, FIRST(2), IBV_WC_GENERAL_ERR, 0), 0);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    sleep_us(2000);
    CHECK_EQ(post_receive(&pair.b, 10, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(pair.b.recv_cq, 10, IBV_WC_SUCCESS);
    soft_fault_clear(pair.own.context);
    pair_close(&pair);
}

/* ---- Losses ------------------------------------------------------------------------------------------------ */

/* Lost attempts are repeated, as long as retries are left. */
static void lost_and_tried_again(void)
{
    struct soft_fault_record records[4];
    struct pair pair;
    size_t i;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_loss(pair.own.context, pair.a.qp->qp_num, (struct soft_strike){2, 1, 3}), 0);
    memset(pair.a.memory, 'a', 8);
    CHECK_EQ(post_nothing(pair.b.qp, 9), 0);
    EXPECT(pair.b.send_cq, 9, IBV_WC_SUCCESS);
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(pair.b.memory[7], 'a');
    CHECK_EQ(soft_fault_records(pair.own.context, 0, records, 4), 3);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(records[i].what, SOFT_RECORD_LOSS);
        CHECK_EQ(records[i].which, pair.a.qp->qp_num);
        CHECK_EQ(records[i].ordinal, 2 + i);
    }
    pair_close(&pair);
}

/* On a cut link no peer answers. */
static void cut_link(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_fault_loss_at_random(pair.own.context, 1000000), 0);
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_RETRY_EXC_ERR);
    CHECK_EQ(soft_fault_records(pair.own.context, 0, NULL, 0), 1 + default_link.retry_cnt);
    REQUIRE_EQ(soft_fault_loss_at_random(pair.own.context, 0), 0);
    reconnect(&pair);
    CHECK_EQ(post_nothing(pair.a.qp, 2), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* If the port is down, the same happens for all contexts; when it is up again, requests go on. */
static void port_down(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    CHECK_EQ(soft_set_port(pair.own.context, false), 0);
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_RETRY_EXC_ERR);
    reconnect(&pair);
    CHECK_EQ(post_nothing(pair.a.qp, 2), 0);
    CHECK_EQ(soft_set_port(pair.own.context, true), 0); /* long before the retries are used up */
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    pair_close(&pair);
}

enum { REQUESTS = 60 };

/* Return which attempts of two pairs' requests are lost at random. */
static size_t lose_some(struct pair *pair, uint64_t seed, uint64_t ordinals[2][REQUESTS])
{
    static struct soft_fault_record records[4096];
    size_t from = soft_fault_records(pair->own.context, 0, NULL, 0), count, lost[2] = {0, 0};
    int i;

    soft_fault_seed(pair->own.context, seed);
    for (i = 0; i < REQUESTS; i++) {
        CHECK_EQ(post_nothing(pair->a.qp, 1), 0);
        CHECK_EQ(post_nothing(pair->b.qp, 2), 0);
        EXPECT(pair->a.send_cq, 1, IBV_WC_SUCCESS);
        EXPECT(pair->b.send_cq, 2, IBV_WC_SUCCESS);
    }
    memset(ordinals, 0, 2 * sizeof(ordinals[0]));
    count = soft_fault_records(pair->own.context, from, records, 4096) - from;
    for (i = 0; i < (int)count; i++) {
        int end = records[i].which == pair->b.qp->qp_num;

        CHECK_EQ(records[i].what, SOFT_RECORD_LOSS);
        REQUIRE(lost[end] < REQUESTS);
        ordinals[end][lost[end]++] = records[i].ordinal;
    }
    return count;
}

/* The same seed loses the same attempts, in the same context and in another one. */
static void lost_at_random(void)
{
    uint64_t first[2][REQUESTS], again[2][REQUESTS];
    struct ibv_qp_attr link = default_link;
    struct pair pair, second;
    size_t count;

    link.timeout = 4; /* 65 us */
    PAIR_OPEN(&pair, .link = &link);
    REQUIRE_EQ(soft_fault_loss_at_random(pair.own.context, 200000), 0);
    count = lose_some(&pair, 7, first);
    CHECK(count > 2 * REQUESTS / 16 && count < REQUESTS);
    CHECK(memcmp(first[0], first[1], sizeof(first[0]))); /* each its own */
    CHECK_EQ(lose_some(&pair, 7, again), count);
    CHECK(!memcmp(first, again, sizeof(first)));
    lose_some(&pair, 8, again);
    CHECK(memcmp(first, again, sizeof(first)));
    soft_fault_clear(pair.own.context);
    PAIR_OPEN(&second, .link = &link);
    REQUIRE_EQ(soft_fault_loss_at_random(second.own.context, 200000), 0);
    CHECK_EQ(lose_some(&second, 7, again), count);
    CHECK(!memcmp(first, again, sizeof(first)));
    pair_close(&second);
    pair_close(&pair);
}

/* ---- Delays ------------------------------------------------------------------------------------------------ */

/* Requests are delayed as the seed determines, and keep their order. */
static void delayed_requests(void)
{
    struct pair pair;
    uint64_t begin, i;

    PAIR_OPEN(&pair, 0);
    if (variant->options.mode == SOFT_INLINE) {
        CHECK_EQ(soft_fault_jitter(pair.own.context, 1000), EINVAL);
        pair_close(&pair);
        return;
    }
    REQUIRE_EQ(soft_fault_jitter(pair.own.context, 40000000), 0);
    begin = now_ns();
    for (i = 0; i < 12; i++)
        CHECK_EQ(post_nothing(pair.a.qp, i), 0);
    for (i = 0; i < 12; i++)
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
    CHECK(now_ns() - begin > 10000000); /* the latest of twelve: fixed, since the seed is */
    REQUIRE_EQ(soft_fault_jitter(pair.own.context, 0), 0);
    CHECK_EQ(atomic_load(&to_soft_context(pair.own.context)->special), 0);
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    pair_close(&pair);
}

/* The longest delay means never, whatever delay is added to it. */
static void delays_beyond_the_limit(void)
{
    struct pair pair;
    uint64_t i;

    if (variant->options.mode == SOFT_INLINE)
        return;
    PAIR_OPEN(&pair, 0);
    REQUIRE_EQ(soft_set_delay(pair.own.context, UINT64_MAX), 0);
    REQUIRE_EQ(soft_fault_jitter(pair.own.context, 1000000), 0);
    for (i = 0; i < 4; i++) /* none of which draws a delay of 0 */
        CHECK_EQ(post_nothing(pair.a.qp, i), 0);
    REQUIRE_EQ(soft_set_delay(pair.own.context, 0), 0);
    REQUIRE_EQ(soft_fault_jitter(pair.own.context, INT64_MAX), 0);
    for (i = 0; i < 4; i++)
        CHECK_EQ(post_nothing(pair.b.qp, i), 0);
    EXPECT_NOTHING(pair.a.send_cq);
    EXPECT_NOTHING(pair.b.send_cq);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0); /* to be flushed they need not wait */
    for (i = 0; i < 4; i++)
        EXPECT(pair.a.send_cq, i, IBV_WC_WR_FLUSH_ERR);
    pair_close(&pair);
}

CHECK_MAIN(CASE(request_with_status), CASE(unsignalled_request), CASE(requests_of_all), CASE(retries_are_not_requests),
           CASE(receive_with_status), CASE(receiver_not_ready), CASE(lost_and_tried_again), CASE(cut_link),
           CASE(port_down), CASE(lost_at_random), CASE(delayed_requests), CASE(delays_beyond_the_limit))
