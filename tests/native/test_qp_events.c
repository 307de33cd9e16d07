/* Tests of asynchronous events of queue pairs: once each, and only if no completion reports the same. */
#include "support.h"
#include "support_async.h"
#include "support_srq.h"
#include "support_types.h"

#include <pthread.h>
#include <stdatomic.h>

#include "soft/api/device.h"
#include "soft/base/id_table.h"
#include "soft/objects/context.h"
#include "soft/objects/qp.h"

static void open_pair(struct pair *pair, enum ibv_qp_type type)
{
    TYPED_PAIR_OPEN(pair, .type = type);
    async_nonblocking(pair->own.context);
}

static void expect_silence(struct ibv_context *context)
{
    settle(context);
    EXPECT_NO_ASYNC(context);
}

/* ---- COMM_EST ---------------------------------------------------------------------------------------------- */

/* Leave b in RTR; a sends. */
static void half_connect(struct pair *pair)
{
    type_connect(pair->a.qp, &default_link, pair->b.qp->qp_num);
    type_raise(pair->b.qp, IBV_QPS_RTR, &default_link, pair->a.qp->qp_num);
}

static void established(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC};
    struct pair pair;
    size_t i;
    int round;

    for (i = 0; i < COUNT_OF(types); i++) {
        open_pair(&pair, types[i]);
        for (round = 0; round < 2; round++) { /* a connection that is made anew says so anew */
            CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RESET), 0);
            CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
            half_connect(&pair);
            EXPECT_NO_ASYNC(pair.own.context);
            CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
            EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
            EXPECT_ASYNC(pair.own.context, IBV_EVENT_COMM_EST, pair.b.qp);
            CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
            EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
            CHECK_EQ(type_to(pair.b.qp, IBV_QPS_RTS, rts_mask(types[i]), &default_link, 0), 0);
            CHECK_EQ(post_write(&pair.a, &pair.b, 3, 8), 0);
            EXPECT(pair.a.send_cq, 3, IBV_WC_SUCCESS);
            expect_silence(pair.own.context);
        }
        pair_close(&pair);
    }
}

/* No event in RTS, where the application knows that the connection is established; none for datagrams. */
static void not_established(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;
    struct ibv_ah *ah;

    open_pair(&pair, IBV_QPT_RC);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    expect_silence(pair.own.context);
    pair_close(&pair);

    open_pair(&pair, IBV_QPT_UD);
    ah = make_ah(pair.own.base, 1);
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
    type_raise(pair.b.qp, IBV_QPS_RTR, &default_link, 0);
    sge = span(&pair.a, 0, 8);
    wr = datagram(IBV_WR_SEND, 1, &sge, 1, ah, pair.b.qp->qp_num);
    CHECK_EQ(post_room(&pair.b, 2, 0, 100), 0);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.b.recv_cq, 2, IBV_WC_SUCCESS);
    expect_silence(pair.own.context);
    CHECK_EQ(soft_verbs.destroy_ah(ah), 0);
    pair_close(&pair);
}

/* ---- Refusals ---------------------------------------------------------------------------------------------- */

enum refusal { WRONG_KEY, NO_RIGHT, MISALIGNED, REFUSALS };

static void check_refusal(struct pair *pair, enum refusal refusal)
{
    struct ibv_sge sge = span(&pair->a, 0, 8);
    struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair->b, 0);
    bool access = refusal == WRONG_KEY;

    if (refusal == WRONG_KEY)
        wr.wr.rdma.rkey ^= 1;
    if (refusal == MISALIGNED)
        wr = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &sge, 1, &pair->b, 4);
    if (refusal == NO_RIGHT) {
        struct ibv_qp_attr attr = {.qp_access_flags = 0};

        CHECK_EQ(soft_verbs.modify_qp(pair->b.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
    }
    CHECK_EQ(post(pair->a.qp, &wr), 0);
    EXPECT(pair->a.send_cq, 1, access ? IBV_WC_REM_ACCESS_ERR : IBV_WC_REM_INV_REQ_ERR);
    EXPECT_ASYNC(pair->own.context, access ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR, pair->b.qp);
}

/* The responder's application has no other way to learn of the refusal; the event is raised again after each reset. */
static void refused_requests(void)
{
    struct pair pair;
    int refusal;

    open_pair(&pair, IBV_QPT_RC);
    for (refusal = 0; refusal < 2 * REFUSALS; refusal++) {
        check_refusal(&pair, (enum refusal)(refusal % REFUSALS));
        CHECK(wait_state(pair.b.qp, IBV_QPS_ERR));
        expect_silence(pair.own.context);
        CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RESET), 0);
        CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
        qp_connect(pair.a.qp, &default_link, pair.b.qp->qp_num);
        qp_connect(pair.b.qp, &default_link, pair.a.qp->qp_num);
    }
    pair_close(&pair);
}

/* Here a receive reports it. */
static void errors_reported_by_completions(void)
{
    struct pair pair;

    open_pair(&pair, IBV_QPT_RC);
    CHECK_EQ(post_room(&pair.b, 10, 0, 4), 0);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_REM_INV_REQ_ERR);
    EXPECT(pair.b.recv_cq, 10, IBV_WC_LOC_LEN_ERR);
    CHECK(wait_state(pair.b.qp, IBV_QPS_ERR));
    expect_silence(pair.own.context);
    pair_close(&pair);
}

/* ---- QP_FATAL ---------------------------------------------------------------------------------------------- */

/* A completion for a full queue is lost: events of the queue and of its queue pair report that. */
static void no_room_for_sends(void)
{
    struct ibv_cq *small;
    struct end a, b;
    struct home home;
    int i;

    home_open(&home);
    async_nonblocking(home.context);
    small = home_cq(&home, 1, NULL);
    TYPED_OPEN(&a, &home, .type = IBV_QPT_RC, .cq = small);
    TYPED_OPEN(&b, &home, .type = IBV_QPT_RC);
    qp_connect(a.qp, &default_link, b.qp->qp_num);
    qp_connect(b.qp, &default_link, a.qp->qp_num);
    for (i = 0; i <= small->cqe; i++)
        CHECK_EQ(post_write(&a, &b, (uint64_t)i, 8), 0);
    CHECK(wait_state(a.qp, IBV_QPS_ERR));
    EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, small);
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, a.qp);
    expect_silence(home.context);
    CHECK_EQ(qp_state(b.qp), IBV_QPS_RTS);
    end_close(&a);
    end_close(&b);
    CHECK_EQ(soft_verbs.destroy_cq(small), 0);
    home_close(&home);
}

/* The same for a lost completion with an error, which only the event reports. */
static void no_room_for_an_error(void)
{
    struct ibv_cq *small;
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct end a, b, c;
    struct home home;

    home_open(&home);
    async_nonblocking(home.context);
    small = home_cq(&home, 1, NULL);
    TYPED_OPEN(&a, &home, .type = IBV_QPT_RC, .cq = small);
    TYPED_OPEN(&b, &home, .type = IBV_QPT_RC);
    TYPED_OPEN(&c, &home, .type = IBV_QPT_RC, .cq = small);
    qp_connect(a.qp, &default_link, b.qp->qp_num);
    qp_connect(b.qp, &default_link, a.qp->qp_num);
    qp_connect(c.qp, &default_link, c.qp->qp_num);
    CHECK_EQ(soft_break_cq(small), 0);
    EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, small);
    sge = span(&a, 0, 8);
    sge.lkey ^= 1;
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &b, 0);
    CHECK_EQ(post(a.qp, &wr), 0);
    CHECK_EQ(post_write(&a, &b, 2, 8), 0); /* flushed: that tells nothing more */
    CHECK(wait_state(a.qp, IBV_QPS_ERR));
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, a.qp);
    expect_silence(home.context);
    CHECK_EQ(qp_to(c.qp, IBV_QPS_ERR), 0); /* as its user wished */
    CHECK_EQ(post_write(&c, &c, 3, 8), 0);
    expect_silence(home.context);
    end_close(&a);
    end_close(&b);
    end_close(&c);
    CHECK_EQ(soft_verbs.destroy_cq(small), 0);
    home_close(&home);
}

static void no_room_for_receives(void)
{
    struct ibv_cq *small;
    struct end a, b;
    struct home home;
    int i;

    home_open(&home);
    async_nonblocking(home.context);
    small = home_cq(&home, 1, NULL);
    TYPED_OPEN(&a, &home, .type = IBV_QPT_RC);
    TYPED_OPEN(&b, &home, .type = IBV_QPT_RC, .cq = small);
    qp_connect(a.qp, &default_link, b.qp->qp_num);
    qp_connect(b.qp, &default_link, a.qp->qp_num);
    for (i = 0; i <= small->cqe; i++) {
        CHECK_EQ(post_room(&b, 10, 0, 8), 0);
        CHECK_EQ(post_send(&a, (uint64_t)i, 8), 0);
        EXPECT(a.send_cq, i, i < small->cqe ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR);
    }
    CHECK(wait_state(b.qp, IBV_QPS_ERR));
    EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, small);
    EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, b.qp);
    expect_silence(home.context);
    end_close(&a);
    end_close(&b);
    CHECK_EQ(soft_verbs.destroy_cq(small), 0);
    home_close(&home);
}

/* A sender that expects no response does not notice. */
static void full_queue_without_a_response(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_UC, IBV_QPT_UD};
    struct ibv_cq *small;
    struct end a, b;
    struct home home;
    struct ibv_ah *ah;
    size_t i;
    int n;

    home_open(&home);
    async_nonblocking(home.context);
    ah = make_ah(home.base, 1);
    for (i = 0; i < COUNT_OF(types); i++) {
        small = home_cq(&home, 1, NULL);
        TYPED_OPEN(&a, &home, .type = types[i]);
        TYPED_OPEN(&b, &home, .type = types[i], .cq = small);
        type_connect(a.qp, &default_link, b.qp->qp_num);
        type_connect(b.qp, &default_link, a.qp->qp_num);
        for (n = 0; n <= small->cqe + 1; n++)
            CHECK_EQ(post_room(&b, (uint64_t)n, 0, 100), 0);
        for (n = 0; n <= small->cqe; n++) {
            struct ibv_sge sge = span(&a, 0, 8);
            struct ibv_send_wr wr = request(IBV_WR_SEND, (uint64_t)n, &sge, 1);

            if (types[i] == IBV_QPT_UD)
                wr = datagram(IBV_WR_SEND, (uint64_t)n, &sge, 1, ah, b.qp->qp_num);
            CHECK_EQ(post(a.qp, &wr), 0);
            EXPECT(a.send_cq, n, IBV_WC_SUCCESS);
        }
        EXPECT_ASYNC(home.context, IBV_EVENT_CQ_ERR, small);
        EXPECT_ASYNC(home.context, IBV_EVENT_QP_FATAL, b.qp);
        CHECK(wait_state(b.qp, IBV_QPS_ERR));
        CHECK_EQ(qp_state(a.qp), IBV_QPS_RTS);
        EXPECT(small, 0, IBV_WC_SUCCESS);
        expect_silence(home.context); /* what is flushed is lost, too */
        end_close(&a);
        end_close(&b);
        CHECK_EQ(soft_verbs.destroy_cq(small), 0);
    }
    CHECK_EQ(soft_verbs.destroy_ah(ah), 0);
    home_close(&home);
}

static void broken_by_itself(void)
{
    struct pair pair;
    int i;

    open_pair(&pair, IBV_QPT_RC);
    CHECK_EQ(post_room(&pair.a, 10, 0, 8), 0);
    for (i = 0; i < 2; i++) /* the second time it is broken already */
        CHECK_EQ(soft_break_qp(pair.a.qp), 0);
    EXPECT_ASYNC(pair.own.context, IBV_EVENT_QP_FATAL, pair.a.qp);
    EXPECT(pair.a.recv_cq, 10, IBV_WC_WR_FLUSH_ERR);
    expect_silence(pair.own.context);
    pair_close(&pair);
}

/* ---- QP_LAST_WQE_REACHED ----------------------------------------------------------------------------------- */

enum fall { MODIFIED, OWN_ERROR, BY_PEER, FALLS };

static void fall(struct end *a, struct end *b, enum fall how)
{
    struct ibv_sge sge = span(how == OWN_ERROR ? b : a, 0, 8);
    struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, how == OWN_ERROR ? a : b, 0);

    if (how == MODIFIED) {
        CHECK_EQ(qp_to(b->qp, IBV_QPS_ERR), 0);
    } else if (how == OWN_ERROR) {
        sge.lkey ^= 1;
        CHECK_EQ(post(b->qp, &wr), 0);
        EXPECT(b->send_cq, 1, IBV_WC_LOC_PROT_ERR);
    } else {
        wr.wr.rdma.rkey ^= 1;
        CHECK_EQ(post(a->qp, &wr), 0);
        EXPECT(a->send_cq, 1, IBV_WC_REM_ACCESS_ERR);
        EXPECT_ASYNC(a->home->context, IBV_EVENT_QP_ACCESS_ERR, b->qp);
    }
}

/* Receives of a shared queue are not flushed: this event is raised instead. */
static void last_wqe(void)
{
    struct ibv_srq *srq;
    struct home home;
    struct end a, b;
    int i;

    home_open(&home);
    async_nonblocking(home.context);
    srq = make_srq(&home, 4);
    TYPED_OPEN(&a, &home, .type = IBV_QPT_RC);
    TYPED_OPEN(&b, &home, .type = IBV_QPT_RC, .srq = srq);
    CHECK_EQ(srq_post_room(srq, &a, 10, 0, 8), 0);
    for (i = 0; i < 2 * FALLS; i++) {
        qp_connect(a.qp, &default_link, b.qp->qp_num);
        qp_connect(b.qp, &default_link, a.qp->qp_num);
        fall(&a, &b, (enum fall)(i % FALLS));
        EXPECT_ASYNC(home.context, IBV_EVENT_QP_LAST_WQE_REACHED, b.qp);
        CHECK_EQ(qp_state(b.qp), IBV_QPS_ERR);
        CHECK_EQ(qp_to(b.qp, IBV_QPS_ERR), 0);
        expect_silence(home.context);
        EXPECT_EMPTY(b.recv_cq);
        CHECK_EQ(qp_to(a.qp, IBV_QPS_RESET), 0);
        CHECK_EQ(qp_to(b.qp, IBV_QPS_RESET), 0);
    }
    srq_expect(srq, 10); /* it belonged to no object */
    end_close(&a);
    end_close(&b);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* Each type that receives from a shared queue raises the event. */
static void last_wqe_of_each_type(void)
{
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
    struct ibv_srq *srq;
    struct home home;
    struct end end;
    size_t i;

    home_open(&home);
    async_nonblocking(home.context);
    srq = make_srq(&home, 4);
    for (i = 0; i < COUNT_OF(types); i++) {
        TYPED_OPEN(&end, &home, .type = types[i], .srq = srq);
        type_connect(end.qp, &default_link, end.qp->qp_num);
        EXPECT_NO_ASYNC(home.context);
        CHECK_EQ(qp_to(end.qp, IBV_QPS_ERR), 0);
        EXPECT_ASYNC(home.context, IBV_EVENT_QP_LAST_WQE_REACHED, end.qp);
        expect_silence(home.context);
        end_close(&end);
    }
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* A queue pair with receives of its own flushes them, and raises no such event. */
static void no_last_wqe(void)
{
    struct pair pair;

    open_pair(&pair, IBV_QPT_RC);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_ERR), 0);
    expect_silence(pair.own.context);
    pair_close(&pair);
}

/* ---- Destruction ------------------------------------------------------------------------------------------- */

struct destroyer {
    struct ibv_qp *qp;
    atomic_bool done;
};

static void *destroy(void *argument)
{
    struct destroyer *destroyer = argument;

    CHECK_EQ(soft_verbs.destroy_qp(destroyer->qp), 0);
    atomic_store(&destroyer->done, true);
    return NULL;
}

/* A queue pair exists until its taken events are acknowledged. */
static void destruction_waits(void)
{
    struct ibv_async_event event;
    struct destroyer destroyer = {0};
    struct pair pair;
    pthread_t thread;

    open_pair(&pair, IBV_QPT_RC);
    destroyer.qp = pair.b.qp;
    CHECK_EQ(soft_break_qp(pair.b.qp), 0);
    REQUIRE(wait_readable(pair.own.context->async_fd));
    REQUIRE_EQ(soft_verbs.get_async_event(pair.own.context, &event), 0);
    CHECK_EQ(event.event_type, IBV_EVENT_QP_FATAL);
    REQUIRE(event.element.qp == pair.b.qp);
    pair.b.qp = NULL;
    REQUIRE_EQ(pthread_create(&thread, NULL, destroy, &destroyer), 0);
    sleep_us(10000);
    CHECK(!atomic_load(&destroyer.done));
    soft_verbs.ack_async_event(&event);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(atomic_load(&destroyer.done));
    EXPECT_NO_ASYNC(pair.own.context);
    pair_close(&pair);
}

/* Wait until the destroying thread has left the queue pair, and waits for the acknowledgement or soon will. */
static void wait_leaving(struct ibv_qp *qp)
{
    struct soft_table *qps = &to_soft_context(qp->context)->device->qps;
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;

    while (soft_table_find(qps, qp->qp_num)) {
        REQUIRE(now_ns() < end);
        sched_yield();
    }
    wait_left(&to_soft_qp(qp)->half); /* its thread domain's, which its completion queues share */
}

/* Calls on the queue pair meanwhile are refused, and leave neither a completion nor an event of a freed object. */
static void used_while_it_is_destroyed(void)
{
    struct ibv_recv_wr recv = {.wr_id = 2}, *bad;
    struct ibv_async_event event;
    struct destroyer destroyer = {0};
    struct end gone;
    struct pair pair;
    pthread_t thread;

    open_pair(&pair, IBV_QPT_RC);
    CHECK_EQ(soft_break_qp(pair.b.qp), 0);
    REQUIRE(wait_readable(pair.own.context->async_fd));
    REQUIRE_EQ(soft_verbs.get_async_event(pair.own.context, &event), 0);
    gone = pair.b;
    destroyer.qp = pair.b.qp;
    pair.b.qp = NULL;
    REQUIRE_EQ(pthread_create(&thread, NULL, destroy, &destroyer), 0);
    wait_leaving(gone.qp);
    CHECK_EQ(post_send(&gone, 1, 8), EINVAL);
    CHECK_EQ(verbs_post_recv(gone.qp, &recv, &bad), EINVAL);
    CHECK_EQ(qp_to(gone.qp, IBV_QPS_ERR), EINVAL);
    CHECK_EQ(qp_to(gone.qp, IBV_QPS_RESET), EINVAL);
    CHECK_EQ(qp_to_init(gone.qp, &default_link), EINVAL);
    CHECK_EQ(soft_break_qp(gone.qp), 0);
    CHECK(!atomic_load(&destroyer.done));
    soft_verbs.ack_async_event(&event);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    EXPECT_NOTHING(pair.b.send_cq);
    EXPECT_NOTHING(pair.b.recv_cq);
    EXPECT_NO_ASYNC(pair.own.context);
    pair_close(&pair);
}

/* An event that was not taken is dropped with the queue pair. */
static void event_never_taken(void)
{
    struct pair pair;

    open_pair(&pair, IBV_QPT_RC);
    CHECK_EQ(soft_break_qp(pair.a.qp), 0);
    CHECK(wait_readable(pair.own.context->async_fd));
    CHECK_EQ(soft_verbs.destroy_qp(pair.a.qp), 0);
    pair.a.qp = NULL;
    EXPECT_NO_ASYNC(pair.own.context);
    pair_close(&pair);
}

CHECK_MAIN(CASE(established), CASE(not_established), CASE(refused_requests), CASE(errors_reported_by_completions),
           CASE(no_room_for_sends), CASE(no_room_for_an_error), CASE(no_room_for_receives),
           CASE(full_queue_without_a_response), CASE(broken_by_itself), CASE(last_wqe), CASE(last_wqe_of_each_type),
           CASE(no_last_wqe), CASE(destruction_waits), CASE(used_while_it_is_destroyed), CASE(event_never_taken))
