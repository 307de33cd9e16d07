/* Tests of draining a send queue: requests that were sent finish, others wait, and an event is raised if requested. */
#include "support.h"
#include "support_async.h"
#include "support_srq.h"
#include "support_types.h"

static int drain(struct ibv_qp *qp, bool notify)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = notify};

    return soft_verbs.modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
}

static bool is_draining(struct ibv_qp *qp)
{
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr;

    CHECK_EQ(soft_verbs.query_qp(qp, &attr, IBV_QP_STATE, &init_attr), 0);
    CHECK_EQ(attr.qp_state, IBV_QPS_SQD);
    return attr.sq_draining;
}

static void pair_of(struct pair *pair, enum ibv_qp_type type)
{
    TYPED_PAIR_OPEN(pair, .type = type);
    async_nonblocking(pair->own.context);
}

/* Wait long enough for an SQ_DRAINED that must not be raised. */
static void expect_silence(struct ibv_context *context)
{
    settle(context);
    EXPECT_NO_ASYNC(context);
}

/* Post a send that finds no receive and counts as sent, since the peer received it, before another one. */
static void begin_send(struct pair *pair, uint64_t wr_id)
{
    CHECK_EQ(post_send(&pair->a, wr_id, 8), 0);
    wait_begun(pair->a.qp);
    EXPECT_EMPTY(pair->a.send_cq);
}

/* ---- An idle queue ----------------------------------------------------------------------------------------- */

static void idle_queue_drains_at_once(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
    struct pair pair;
    size_t i;

    for (i = 0; i < COUNT_OF(types); i++) {
        struct ibv_qp_attr attr = {.en_sqd_async_notify = 1};

        pair_of(&pair, types[i]);
        CHECK_EQ(drain(pair.a.qp, true), 0);
        EXPECT_ASYNC(pair.own.context, IBV_EVENT_SQ_DRAINED, pair.a.qp);
        CHECK(!is_draining(pair.a.qp));
        expect_silence(pair.own.context);
        CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0); /* once for each way there */
        CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_EN_SQD_ASYNC_NOTIFY), EINVAL);
        expect_silence(pair.own.context);
        CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
        CHECK_EQ(drain(pair.a.qp, true), 0);
        EXPECT_ASYNC(pair.own.context, IBV_EVENT_SQ_DRAINED, pair.a.qp);
        pair_close(&pair);
    }
}

static void no_event_without_request(void)
{
    struct pair pair;

    pair_of(&pair, IBV_QPT_RC);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0);
    expect_silence(pair.own.context);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
    CHECK_EQ(drain(pair.a.qp, false), 0);
    expect_silence(pair.own.context);
    pair_close(&pair);
}

/* New requests wait for RTS; receives go on. */
static void posted_meanwhile(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC};
    struct pair pair;
    size_t i;

    for (i = 0; i < COUNT_OF(types); i++) {
        pair_of(&pair, types[i]);
        CHECK_EQ(drain(pair.a.qp, true), 0);
        EXPECT_ASYNC(pair.own.context, IBV_EVENT_SQ_DRAINED, pair.a.qp);
        CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
        CHECK_EQ(post_room(&pair.a, 2, 0, 8), 0);
        CHECK_EQ(post_send(&pair.b, 3, 8), 0);
        EXPECT(pair.b.send_cq, 3, IBV_WC_SUCCESS);
        EXPECT(pair.a.recv_cq, 2, IBV_WC_SUCCESS);
        EXPECT_NOTHING(pair.a.send_cq);
        CHECK(!is_draining(pair.a.qp));
        EXPECT_NO_ASYNC(pair.own.context);
        CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        pair_close(&pair);
    }
}

/* A queue pair breaks in SQD as in other states. */
static void broken_meanwhile(void)
{
    struct pair pair;

    pair_of(&pair, IBV_QPT_RC);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_WR_FLUSH_ERR);
    pair_close(&pair);
}

/* ---- A queue with work under way --------------------------------------------------------------------------- */

static void in_flight_requests_finish(void)
{
    struct pair pair;

    pair_of(&pair, IBV_QPT_RC);
    begin_send(&pair, 1);
    CHECK_EQ(drain(pair.a.qp, true), 0);
    CHECK_EQ(post_send(&pair.a, 2, 8), 0);
    expect_silence(pair.own.context);
    CHECK(is_draining(pair.a.qp));
    CHECK_EQ(post_room(&pair.b, 10, 0, 8), 0);
    CHECK_EQ(post_room(&pair.b, 11, 0, 8), 0);
    EXPECT_ASYNC(pair.own.context, IBV_EVENT_SQ_DRAINED, pair.a.qp);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(!is_draining(pair.a.qp));
    EXPECT_NOTHING(pair.a.send_cq);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    EXPECT_NO_ASYNC(pair.own.context);
    pair_close(&pair);
}

/* Attributes change after draining; a request that was sent before uses the old ones. */
static void attributes(void)
{
    struct ibv_qp_attr attr = {.qp_access_flags = 0, .timeout = 9};
    struct pair pair;

    pair_of(&pair, IBV_QPT_RC);
    begin_send(&pair, 1);
    CHECK_EQ(drain(pair.a.qp, true), 0);
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_TIMEOUT), EINVAL);
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_ACCESS_FLAGS), EINVAL);
    CHECK_EQ(post_room(&pair.b, 10, 0, 8), 0);
    EXPECT_ASYNC(pair.own.context, IBV_EVENT_SQ_DRAINED, pair.a.qp);
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_TIMEOUT), 0);
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_SQD);
    pair_close(&pair);
}

/* Leaving SQD before the queue is drained raises no event. */
static void leaving_sqd_early(void)
{
    static const enum ibv_qp_state ways[] = {IBV_QPS_RTS, IBV_QPS_ERR, IBV_QPS_RESET};
    struct pair pair;
    size_t i;

    for (i = 0; i < COUNT_OF(ways); i++) {
        pair_of(&pair, IBV_QPT_RC);
        begin_send(&pair, 1);
        CHECK_EQ(drain(pair.a.qp, true), 0);
        CHECK_EQ(qp_to(pair.a.qp, ways[i]), 0);
        if (ways[i] == IBV_QPS_RTS) {
            CHECK_EQ(post_room(&pair.b, 10, 0, 8), 0);
            EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
            CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0); /* no event was requested this time */
        } else if (ways[i] == IBV_QPS_ERR) {
            EXPECT(pair.a.send_cq, 1, IBV_WC_WR_FLUSH_ERR);
        }
        expect_silence(pair.own.context);
        pair_close(&pair);
    }
}

/* A request in flight may fail: then the queue pair breaks, and no event is raised. */
static void request_fails_while_draining(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;

    link.retry_cnt = 1;
    link.timeout = 14; /* 67 ms */
    typed_pair_open(&pair, &(struct end_options){.type = IBV_QPT_RC}, &link);
    async_nonblocking(pair.own.context);
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    wait_begun(pair.a.qp);
    if (!drain(pair.a.qp, true)) /* else it was faster: a slow machine */
        CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_RETRY_EXC_ERR);
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_ERR);
    expect_silence(pair.own.context);
    pair_close(&pair);
}

CHECK_MAIN(CASE(idle_queue_drains_at_once), CASE(no_event_without_request), CASE(posted_meanwhile),
           CASE(broken_meanwhile), CASE(in_flight_requests_finish), CASE(attributes), CASE(leaving_sqd_early),
           CASE(request_fails_while_draining))
