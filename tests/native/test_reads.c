/* Tests of the number of reads and atomics that a connection may have in flight, on either side. */
#include "support.h"
#include "support_async.h"
#include "support_types.h"

enum { MOST = 8 };

struct limits {
    uint8_t out, in; /* of the requester; of the responder */
};

static void limited_open(struct pair *pair, struct limits limits)
{
    struct ibv_qp_attr link = default_link;

    PAIR_OPEN(pair, .unconnected = true);
    async_nonblocking(pair->own.context);
    link.max_rd_atomic = limits.out;
    link.max_dest_rd_atomic = limits.in;
    qp_connect(pair->a.qp, &link, pair->b.qp->qp_num);
    qp_connect(pair->b.qp, &link, pair->a.qp->qp_num);
}

struct chain {
    struct ibv_send_wr wrs[MOST];
    struct ibv_sge sges[MOST];
};

/* Post one request for each letter: r(ead), a(tomic), w(rite); upper case: with a fence. */
static int post_chain(struct pair *pair, const char *letters)
{
    struct chain chain;
    size_t i, count = strlen(letters);

    REQUIRE(count <= MOST);
    for (i = 0; i < count; i++) {
        char letter = letters[i];
        enum ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;

        if (letter == 'r' || letter == 'R')
            opcode = IBV_WR_RDMA_READ;
        if (letter == 'a' || letter == 'A')
            opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        chain.sges[i] = span(&pair->a, i * 8, 8);
        chain.wrs[i] = request_to(opcode, i, &chain.sges[i], 1, &pair->b, i * 8);
        if (letter < 'a')
            chain.wrs[i].send_flags |= IBV_SEND_FENCE;
        chain.wrs[i].next = i + 1 < count ? &chain.wrs[i + 1] : NULL;
    }
    return post(pair->a.qp, chain.wrs);
}

static void check_chain(struct limits limits, const char *letters, int failing, enum ibv_wc_status status)
{
    int i, count = (int)strlen(letters);
    struct pair pair;

    limited_open(&pair, limits);
    if (variant->options.mode == SOFT_THREAD) /* all of it is there before any is due */
        CHECK_EQ(soft_set_delay(pair.own.context, 20 * 1000 * 1000), 0);
    CHECK_EQ(post_chain(&pair, letters), 0);
    for (i = 0; i < count; i++)
        EXPECT(pair.a.send_cq, i, i < failing ? IBV_WC_SUCCESS : i == failing ? status : IBV_WC_WR_FLUSH_ERR);
    if (failing < count && status == IBV_WC_REM_INV_REQ_ERR) {
        CHECK(wait_state(pair.b.qp, IBV_QPS_ERR));
        EXPECT_ASYNC(pair.own.context, IBV_EVENT_QP_REQ_ERR, pair.b.qp);
    } else {
        CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS);
    }
    CHECK_EQ(qp_state(pair.a.qp), failing < count ? IBV_QPS_ERR : IBV_QPS_RTS);
    EXPECT_NO_ASYNC(pair.own.context);
    pair_close(&pair);
}

#define GOOD(out, in, letters) check_chain((struct limits){out, in}, letters, MOST + 1, IBV_WC_SUCCESS)
#define REFUSED(out, in, letters, failing) \
    check_chain((struct limits){out, in}, letters, failing, IBV_WC_REM_INV_REQ_ERR)

/* Without reads in flight the requester cannot send any. */
static void no_reads_allowed_by_the_requester(void)
{
    check_chain((struct limits){0, 16}, "r", 0, IBV_WC_LOC_QP_OP_ERR);
    check_chain((struct limits){0, 16}, "wa", 1, IBV_WC_LOC_QP_OP_ERR);
    GOOD(0, 16, "ww");
}

static void no_reads_allowed_by_the_responder(void)
{
    REFUSED(1, 0, "r", 0);
    REFUSED(1, 0, "wa", 1);
    GOOD(1, 0, "ww");
}

/* Requests executed one after the other count as one at a time, whatever is posted. */
static void one_at_a_time(void)
{
    GOOD(1, 1, "rrrr");
    GOOD(1, 1, "rawar");
}

static void in_a_chain(void)
{
    GOOD(4, 4, "rrrrrr");
    GOOD(16, 4, "rara");
    REFUSED(16, 4, "rrrrr", 0);
    REFUSED(16, 3, "rara", 0);
    REFUSED(4, 3, "rrrr", 0);
    REFUSED(16, 1, "wwrwr", 2); /* writes between them free nothing */
}

/* A fenced request waits for all reads before it. */
static void fenced(void)
{
    GOOD(16, 1, "rRRA");
    GOOD(16, 1, "rWr");
    GOOD(16, 2, "rrRr");
    REFUSED(16, 1, "Rr", 0);
    REFUSED(16, 1, "rRr", 1);
}

/* Each end of a connection has its limit; both can be changed in SQD. */
static void changed(void)
{
    struct ibv_qp_attr attr = {.max_rd_atomic = 1};
    struct pair pair;
    int i;

    limited_open(&pair, (struct limits){16, 1});
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_SQD), 0);
    attr.max_rd_atomic = 17;
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_MAX_QP_RD_ATOMIC), EINVAL);
    attr.max_rd_atomic = 1;
    CHECK_EQ(soft_verbs.modify_qp(pair.a.qp, &attr, IBV_QP_MAX_QP_RD_ATOMIC), 0);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
    CHECK_EQ(post_chain(&pair, "rarr"), 0);
    for (i = 0; i < 4; i++)
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
    pair_close(&pair);
}

CHECK_MAIN(CASE(no_reads_allowed_by_the_requester), CASE(no_reads_allowed_by_the_responder), CASE(one_at_a_time),
           CASE(in_a_chain), CASE(fenced), CASE(changed))
