/* Tests of completion queues: capacity, overrun, and extended polling. */
#include "support.h"

#include <arpa/inet.h>

#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/hooks.h"

/* The granted number of completions fits, again and again, in batches of all sizes. */
static void capacity(void)
{
    struct ibv_wc wcs[32];
    uint64_t sent = 0, seen = 0;
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *qp;
    int batch, i, n;

    home_open(&home);
    cq = home_cq(&home, 20, NULL);
    REQUIRE(cq->cqe >= 20 && cq->cqe <= 32);
    qp = make_loop(home.pd, cq, 32);
    CHECK_EQ(verbs_poll_cq(cq, 32, wcs), 0);
    for (batch = 1; batch <= cq->cqe; batch++) {
        uint64_t end = now_ns() + WAIT_S * 1000000000ull;

        for (i = 0; i < cq->cqe; i++)
            CHECK_EQ(post_nothing(qp, sent++), 0);
        CHECK_EQ(verbs_poll_cq(cq, 0, wcs), 0);
        while (seen < sent && now_ns() < end) {
            n = verbs_poll_cq(cq, batch, wcs);
            REQUIRE(n >= 0 && n <= batch);
            for (i = 0; i < n; i++) {
                REQUIRE_EQ(wcs[i].wr_id, seen++);
                REQUIRE_EQ(wcs[i].status, IBV_WC_SUCCESS);
            }
        }
        REQUIRE_EQ(seen, sent);
    }
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* One completion too many: existing completions can be polled, then the queue reports for good that some were lost.
 * Queue pairs that complete into the queue break. */
static void overrun(void)
{
    struct ibv_wc wc;
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *qp, *innocent;
    int i;

    home_open(&home);
    cq = home_cq(&home, 4, NULL);
    qp = make_loop(home.pd, cq, 16);
    innocent = make_loop(home.pd, cq, 16);
    for (i = 0; i <= cq->cqe; i++)
        CHECK_EQ(post_nothing(qp, (uint64_t)i), 0);
    CHECK(wait_state(qp, IBV_QPS_ERR));
    CHECK_EQ(qp_state(innocent), IBV_QPS_RTS);
    for (i = 0; i < cq->cqe; i++) {
        REQUIRE_EQ(verbs_poll_cq(cq, 1, &wc), 1);
        CHECK_EQ(wc.wr_id, i);
        CHECK_EQ(wc.status, IBV_WC_SUCCESS);
    }
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(verbs_poll_cq(cq, 0, &wc), 0);
    CHECK_EQ(post_nothing(innocent, 50), 0); /* the queue works no more, though there is room again */
    CHECK(wait_state(innocent, IBV_QPS_ERR));
    CHECK_EQ(verbs_poll_cq(cq, 1, &wc), -EIO);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_qp(innocent), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* If the receiver's queue overruns, the sender gets a remote error. */
static void receiver_overruns(void)
{
    struct ibv_wc wc;
    struct pair pair;
    int i, room;

    PAIR_OPEN(&pair, .cqe = 4);
    room = pair.b.recv_cq->cqe;
    for (i = 0; i <= room; i++) {
        CHECK_EQ(post_receive(&pair.b, (uint64_t)i, 8), 0);
        CHECK_EQ(post_send(&pair.a, (uint64_t)i, 8), 0);
        EXPECT(pair.a.send_cq, i, i < room ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR);
    }
    CHECK(wait_state(pair.b.qp, IBV_QPS_ERR));
    CHECK(wait_state(pair.a.qp, IBV_QPS_ERR));
    for (i = 0; i < room; i++)
        EXPECT(pair.b.recv_cq, i, IBV_WC_SUCCESS);
    CHECK_EQ(verbs_poll_cq(pair.b.recv_cq, 1, &wc), -EIO);
    pair_close(&pair);
}

static void extended_overrun(void)
{
    struct ibv_poll_cq_attr attr = {0};
    struct ibv_cq_ex *ex;
    struct home home;
    struct ibv_qp *qp;
    int i;

    home_open(&home);
    ex = home_cq_ex(&home, 4, NULL);
    qp = make_loop(home.pd, cq_of(ex), 16);
    for (i = 0; i <= ex->cqe; i++)
        CHECK_EQ(post_nothing(qp, (uint64_t)i), 0);
    CHECK(wait_state(qp, IBV_QPS_ERR));
    REQUIRE_EQ(ex->start_poll(ex, &attr), 0);
    for (i = 1; i < ex->cqe; i++)
        next_poll(ex);
    CHECK_EQ(ex->next_poll(ex), EIO);
    ex->end_poll(ex);
    CHECK_EQ(ex->start_poll(ex, &attr), EIO);
    CHECK_EQ(ex->start_poll(ex, &attr), EIO);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

static void extended_polling(void)
{
    struct ibv_poll_cq_attr attr = {0};
    struct ibv_cq_ex *ex;
    struct ibv_wc wc;
    struct home home;
    struct ibv_qp *qp;
    uint64_t i;

    home_open(&home);
    ex = home_cq_ex(&home, 8, NULL);
    qp = make_loop(home.pd, cq_of(ex), 8);
    CHECK_EQ(ex->start_poll(ex, &attr), ENOENT); /* and is over with it */
    CHECK_EQ(ex->start_poll(ex, &attr), ENOENT);
    attr.comp_mask = 1;
    CHECK_EQ(ex->start_poll(ex, &attr), EINVAL);
    for (i = 0; i < 8; i++)
        CHECK_EQ(post_nothing(qp, i), 0);
    wait_executed(qp, 8);
    for (i = 0; i < 3; i++) { /* ended on an entry: that one is done */
        start_poll(ex);
        CHECK_EQ(ex->wr_id, i);
        CHECK_EQ(ex->status, IBV_WC_SUCCESS);
        ex->end_poll(ex);
    }
    start_poll(ex);
    for (i = 3;; i++) {
        CHECK_EQ(ex->wr_id, i);
        CHECK_EQ(ex->read_opcode(ex), IBV_WC_RDMA_WRITE);
        if (i == 7)
            break;
        next_poll(ex);
    }
    CHECK_EQ(ex->next_poll(ex), ENOENT);
    ex->end_poll(ex);
    CHECK_EQ(verbs_poll_cq(cq_of(ex), 1, &wc), 0);

    CHECK_EQ(post_nothing(qp, 20), 0); /* an extended queue can be polled the basic way, too */
    CHECK_EQ(post_nothing(qp, 21), 0);
    EXPECT(cq_of(ex), 20, IBV_WC_SUCCESS);
    start_poll(ex);
    CHECK_EQ(ex->wr_id, 21);
    CHECK_EQ(ex->next_poll(ex), ENOENT);
    CHECK_EQ(post_nothing(qp, 22), 0); /* more may come while it is being polled */
    wait_executed(qp, 11);
    next_poll(ex);
    CHECK_EQ(ex->wr_id, 22);
    ex->end_poll(ex);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    home_close(&home);
}

static void extended_fields(void)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    struct ibv_cq_ex *ex;
    struct pair pair;
    int i;

    PAIR_OPEN(&pair, .one_cq = true, .unconnected = true);
    CHECK_EQ(soft_verbs.destroy_qp(pair.b.qp), 0);
    ex = home_cq_ex(&pair.own, 8, NULL);
    pair.b.qp = make_loop(pair.own.pd, cq_of(ex), 8);
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
    qp_connect(pair.b.qp, &default_link, pair.a.qp->qp_num);
    qp_connect(pair.a.qp, &default_link, pair.b.qp->qp_num);

    sge = span(&pair.a, 0, 123);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(post_receive(&pair.b, 77, 200), 0);
        wr = request_to(i ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM, 1, &sge, 1, &pair.b, 0);
        wr.imm_data = htonl(0xcafe);
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        start_poll(ex);
        CHECK_EQ(ex->wr_id, 77);
        CHECK_EQ(ex->status, IBV_WC_SUCCESS);
        CHECK_EQ(ex->read_opcode(ex), i ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV);
        CHECK_EQ(ex->read_vendor_err(ex), 0);
        CHECK_EQ(ex->read_byte_len(ex), 123);
        CHECK_EQ(ntohl(ex->read_imm_data(ex)), 0xcafe);
        CHECK_EQ(ex->read_qp_num(ex), pair.b.qp->qp_num);
        CHECK_EQ(ex->read_src_qp(ex), pair.a.qp->qp_num);
        CHECK_EQ(ex->read_wc_flags(ex), IBV_WC_WITH_IMM);
        CHECK_EQ(ex->read_slid(ex), 0);
        CHECK_EQ(ex->read_sl(ex), 0);
        CHECK_EQ(ex->read_dlid_path_bits(ex), 0);
        ex->end_poll(ex);
    }
    CHECK_EQ(post_write(&pair.b, &pair.a, 5, 9), 0);
    start_poll(ex);
    CHECK_EQ(ex->wr_id, 5);
    CHECK_EQ(ex->read_wc_flags(ex), 0);
    ex->end_poll(ex);
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_ERR), 0);
    CHECK_EQ(post_receive(&pair.b, 6, 9), 0);
    start_poll(ex);
    CHECK_EQ(ex->wr_id, 6);
    CHECK_EQ(ex->status, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(ex->read_qp_num(ex), pair.b.qp->qp_num);
    ex->end_poll(ex);
    CHECK_EQ(soft_verbs.destroy_qp(pair.b.qp), 0);
    pair.b.qp = NULL;
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
    pair_close(&pair);
}

/* Only requested fields have a function to read them. */
static void fields_by_request(void)
{
    const uint64_t all = (uint64_t)IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
                         IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    uint64_t flags = all;
    struct home home;

    home_open(&home);
    do { /* each combination of these bits, downwards */
        struct ibv_cq_init_attr_ex attr = {.cqe = 1, .wc_flags = flags};
        struct ibv_cq_ex *ex = verbs_create_cq_ex(home.context, &attr);

        REQUIRE(ex != NULL);
        CHECK(ex->start_poll && ex->next_poll && ex->end_poll);
        CHECK(ex->read_opcode && ex->read_vendor_err && ex->read_wc_flags);
        CHECK(!ex->read_byte_len == !(flags & IBV_WC_EX_WITH_BYTE_LEN));
        CHECK(!ex->read_imm_data == !(flags & IBV_WC_EX_WITH_IMM));
        CHECK(!ex->read_qp_num == !(flags & IBV_WC_EX_WITH_QP_NUM));
        CHECK(!ex->read_src_qp == !(flags & IBV_WC_EX_WITH_SRC_QP));
        CHECK(!ex->read_slid == !(flags & IBV_WC_EX_WITH_SLID));
        CHECK(!ex->read_sl == !(flags & IBV_WC_EX_WITH_SL));
        CHECK(!ex->read_dlid_path_bits == !(flags & IBV_WC_EX_WITH_DLID_PATH_BITS));
        CHECK(!ex->read_completion_ts == !(flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP));
        CHECK(!ex->read_completion_wallclock_ns == !(flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK));
        CHECK(!ex->read_cvlan && !ex->read_flow_tag && !ex->read_tm_info);
        CHECK_EQ(soft_verbs.destroy_cq(cq_of(ex)), 0);
        flags = (flags - 1) & all;
    } while (flags != all);
    home_close(&home);
}

/* One queue serves queue pairs of all kinds of domains. */
static void shared_queue(void)
{
    enum { QPS = 5, ROUNDS = 20 };
    struct ibv_qp *qps[QPS];
    uint64_t seen[QPS] = {0};
    struct home home;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    uint64_t i, q;

    home_open(&home);
    cq = home_cq(&home, QPS * ROUNDS, NULL);
    for (q = 0; q < QPS; q++)
        qps[q] = make_loop(q % 2 ? home.pd : home.base, cq, ROUNDS);
    for (i = 0; i < ROUNDS; i++)
        for (q = 0; q < QPS; q++)
            CHECK_EQ(post_nothing(qps[q], q << 32 | i), 0);
    for (i = 0; i < QPS * ROUNDS; i++) {
        REQUIRE(wait_completion(cq, &wc));
        q = wc.wr_id >> 32;
        REQUIRE(q < QPS);
        CHECK_EQ(wc.wr_id & 0xffffffff, seen[q]++); /* in order for each of them */
        CHECK_EQ(wc.qp_num, qps[q]->qp_num);
    }
    for (q = 0; q < QPS; q++)
        CHECK_EQ(soft_verbs.destroy_qp(qps[q]), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

static unsigned int looks, thorough_looks;

static bool count_look(struct soft_device *device, bool all)
{
    (void)device;
    looks++;
    thorough_looks += all;
    return false;
}

/* Polling an empty queue also reads from peers, at the stream that was last active; polling a queue with completions
 * does not. */
static void an_empty_queue_asks_peers(void)
{
    struct soft_device *device;
    const struct soft_hooks *before;
    struct soft_hooks counting;
    struct ibv_wc wcs[2];
    struct ibv_cq *cq;
    struct home home;
    struct ibv_qp *qp;

    home_open(&home);
    device = to_soft_context(home.context)->device;
    before = device->hooks;
    counting = *before;
    counting.poll_peers = count_look;
    looks = thorough_looks = 0;
    cq = home_cq(&home, 4, NULL);
    device->hooks = &counting; /* before a thread reads them */
    qp = make_loop(home.pd, cq, 4);
    CHECK_EQ(verbs_poll_cq(cq, 1, wcs), 0);
    CHECK_EQ(looks, 1);
    CHECK_EQ(thorough_looks, 0);
    CHECK_EQ(post_nothing(qp, 1), 0);
    CHECK_EQ(post_nothing(qp, 2), 0);
    wait_executed(qp, 2);
    CHECK_EQ(looks, 1);
    CHECK_EQ(verbs_poll_cq(cq, 1, wcs), 1);
    CHECK_EQ(verbs_poll_cq(cq, 2, wcs), 1);
    CHECK_EQ(looks, 1);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
    device->hooks = before;
}

CHECK_MAIN(CASE(an_empty_queue_asks_peers), CASE(capacity), CASE(overrun), CASE(receiver_overruns),
           CASE(extended_overrun), CASE(extended_polling), CASE(extended_fields), CASE(fields_by_request),
           CASE(shared_queue))
