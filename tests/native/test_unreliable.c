/* Tests of unreliable connections: the sender does not learn of errors of the receiver, which drops messages. */
#include "support.h"
#include "support_types.h"

/* ---- Messages ---------------------------------------------------------------------------------------------- */

static void check_message(struct pair *pair, enum ibv_wr_opcode opcode, bool with_inline)
{
    bool receives = opcode != IBV_WR_RDMA_WRITE, immediate = opcode != IBV_WR_SEND && receives;
    bool writes = opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    struct ibv_sge sge = span(&pair->a, 0, with_inline ? 32 : 20000);
    struct ibv_send_wr wr = request_to(opcode, 1, &sge, 1, &pair->b, 0);
    struct ibv_wc wc;

    memset(pair->a.memory, opcode + 1, sge.length);
    memset(pair->b.memory, 0, sge.length + 1);
    wr.imm_data = 0xabcd;
    if (with_inline)
        wr.send_flags |= IBV_SEND_INLINE;
    if (receives)
        CHECK_EQ(post_room(&pair->b, 2, 0, 20001), 0);
    CHECK_EQ(post(pair->a.qp, &wr), 0);
    wc = EXPECT(pair->a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(wc.opcode, writes ? IBV_WC_RDMA_WRITE : IBV_WC_SEND);
    if (receives) {
        wc = EXPECT(pair->b.recv_cq, 2, IBV_WC_SUCCESS);
        CHECK_EQ(wc.byte_len, sge.length);
        CHECK_EQ(wc.wc_flags, immediate ? IBV_WC_WITH_IMM : 0);
        CHECK_EQ(wc.opcode, writes ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV);
        if (immediate)
            CHECK_EQ(wc.imm_data, 0xabcd);
    }
    CHECK(!memcmp(pair->a.memory, pair->b.memory, sge.length));
    CHECK_EQ(pair->b.memory[sge.length], 0);
}

static void messages(void)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
                                                 IBV_WR_RDMA_WRITE_WITH_IMM};
    struct pair pair;
    size_t i;

    TYPED_PAIR_OPEN(&pair, .type = IBV_QPT_UC);
    for (i = 0; i < 2 * COUNT_OF(opcodes); i++)
        check_message(&pair, opcodes[i / 2], i % 2);
    pair_close(&pair);
}

/* ---- What is dropped --------------------------------------------------------------------------------------- */

enum loss { BAD_KEY, OUT_OF_BOUNDS, NOT_ALLOWED, NO_RECEIVE, NO_RECEIVE_FOR_IMM, TOO_SMALL, BAD_KEY_WITH_IMM, LOSSES };

static bool has_no_receive(enum loss loss)
{
    return loss == NO_RECEIVE || loss == NO_RECEIVE_FOR_IMM;
}

static struct ibv_send_wr lost_request(struct pair *pair, enum loss loss, struct ibv_sge *sge)
{
    struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 1, sge, 1, &pair->b, 0);

    *sge = span(&pair->a, 0, 16);
    if (loss == BAD_KEY || loss == BAD_KEY_WITH_IMM)
        wr.wr.rdma.rkey ^= 1;
    if (loss == OUT_OF_BOUNDS)
        wr.wr.rdma.remote_addr += PAIR_MEMORY - 15;
    if (loss == NO_RECEIVE || loss == TOO_SMALL)
        wr.opcode = IBV_WR_SEND;
    if (loss == NO_RECEIVE_FOR_IMM || loss == BAD_KEY_WITH_IMM)
        wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    return wr;
}

/* Check that a message was dropped: the peer goes on, nothing was written, no receive was used. */
static void dropped(void)
{
    int loss;

    for (loss = 0; loss < LOSSES; loss++) {
        struct ibv_qp_attr link = default_link;
        struct ibv_send_wr wr;
        struct ibv_sge sge;
        struct pair pair;

        link.qp_access_flags = loss == NOT_ALLOWED ? 0 : REMOTE_ALL;
        typed_pair_open(&pair, &(struct end_options){.type = IBV_QPT_UC}, &link);
        wr = lost_request(&pair, (enum loss)loss, &sge);
        memset(pair.a.memory, 1, 16);
        if (!has_no_receive((enum loss)loss))
            CHECK_EQ(post_room(&pair.b, 10, 100, 8), 0);
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        EXPECT_EMPTY(pair.b.recv_cq);
        CHECK_EQ(pair.b.memory[0], 0);
        CHECK_EQ(pair.b.memory[PAIR_MEMORY - 15], 0);
        CHECK_EQ(pair.b.memory[100], 0);
        if (has_no_receive((enum loss)loss))
            CHECK_EQ(post_room(&pair.b, 10, 100, 8), 0);
        CHECK_EQ(post_send(&pair.a, 2, 8), 0);
        EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
        EXPECT(pair.b.recv_cq, 10, IBV_WC_SUCCESS);
        CHECK_EQ(pair.b.memory[100], 1);
        CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS);
        pair_close(&pair);
    }
}

/* Each message sets the sequence number: after any loss the next one is delivered. */
static void no_sequence(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;
    int i;

    TYPED_PAIR_OPEN(&pair, .type = IBV_QPT_UC);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RESET), 0);
    link.sq_psn = 12345;
    type_connect(pair.a.qp, &link, pair.b.qp->qp_num);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(post_room(&pair.b, 10, 0, 8), 0);
        CHECK_EQ(post_send(&pair.a, 1, 8), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        EXPECT(pair.b.recv_cq, 10, IBV_WC_SUCCESS);
    }
    pair_close(&pair);
}

enum absence { NOBODY, OF_ANOTHER, IN_INIT, IN_RESET, IN_ERR, OTHER_TYPE, ABSENCES };

static void no_peer(void)
{
    int absence;

    for (absence = 0; absence < ABSENCES; absence++) {
        struct ibv_qp_attr link = default_link;
        struct home home;
        struct end a, b;

        home_open(&home);
        TYPED_OPEN(&a, &home, .type = IBV_QPT_UC);
        TYPED_OPEN(&b, &home, .type = absence == OTHER_TYPE ? IBV_QPT_RC : IBV_QPT_UC);
        type_connect(a.qp, &link, absence == NOBODY ? 0xabcdef : b.qp->qp_num);
        if (absence == IN_INIT)
            type_raise(b.qp, IBV_QPS_INIT, &link, a.qp->qp_num);
        else if (absence != IN_RESET)
            type_connect(b.qp, &link, absence == OF_ANOTHER ? b.qp->qp_num : a.qp->qp_num);
        if (absence == IN_ERR)
            CHECK_EQ(qp_to(b.qp, IBV_QPS_ERR), 0);
        CHECK_EQ(post_send(&a, 1, 8), 0);
        CHECK_EQ(post_write(&a, &b, 2, 8), 0);
        EXPECT(a.send_cq, 1, IBV_WC_SUCCESS);
        EXPECT(a.send_cq, 2, IBV_WC_SUCCESS);
        CHECK_EQ(qp_state(a.qp), IBV_QPS_RTS);
        end_close(&a);
        end_close(&b);
        home_close(&home);
    }
}

/* ---- Errors ------------------------------------------------------------------------------------------------ */

static void refused_at_post(void)
{
    static const enum ibv_wr_opcode wrong[] = {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
                                               IBV_WR_ATOMIC_FETCH_AND_ADD};
    struct pair pair;
    size_t i;

    TYPED_PAIR_OPEN(&pair, .type = IBV_QPT_UC);
    for (i = 0; i < COUNT_OF(wrong); i++) {
        struct ibv_sge sge = span(&pair.a, 0, 8);
        struct ibv_send_wr wr = request_to(wrong[i], 1, &sge, 1, &pair.b, 0);

        CHECK_EQ(post(pair.a.qp, &wr), EINVAL);
    }
    EXPECT_NOTHING(pair.a.send_cq);
    pair_close(&pair);
}

/* Only the send queue stops; the other direction goes on. */
static void local_error(void)
{
    struct ibv_send_wr wrs[2];
    struct ibv_sge sges[2];
    struct pair pair;

    TYPED_PAIR_OPEN(&pair, .type = IBV_QPT_UC);
    sges[0] = span(&pair.a, 0, 8);
    sges[1] = span(&pair.a, 0, 8);
    sges[0].lkey ^= 1;
    wrs[0] = request_to(IBV_WR_RDMA_WRITE, 1, &sges[0], 1, &pair.b, 0);
    wrs[1] = request_to(IBV_WR_RDMA_WRITE, 2, &sges[1], 1, &pair.b, 0);
    wrs[0].next = &wrs[1];
    CHECK_EQ(post(pair.a.qp, wrs), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_LOC_PROT_ERR);
    EXPECT(pair.a.send_cq, 2, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_SQE);
    CHECK_EQ(post_room(&pair.a, 3, 0, 8), 0);
    CHECK_EQ(post_send(&pair.b, 4, 8), 0);
    EXPECT(pair.b.send_cq, 4, IBV_WC_SUCCESS);
    EXPECT(pair.a.recv_cq, 3, IBV_WC_SUCCESS);
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RTS), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 5, 8), 0);
    EXPECT(pair.a.send_cq, 5, IBV_WC_SUCCESS);
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RTS);
    pair_close(&pair);
}

/* Invalid memory of a receive breaks the receiver; the sender does not notice. */
static void receiver_memory(void)
{
    struct ibv_sge bad;
    struct pair pair;

    TYPED_PAIR_OPEN(&pair, .type = IBV_QPT_UC);
    bad = span(&pair.b, 0, 8);
    bad.lkey ^= 1;
    CHECK_EQ(post_receive_list(&pair.b, 10, &bad, 1), 0);
    CHECK_EQ(post_room(&pair.b, 11, 0, 8), 0);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    CHECK_EQ(post_send(&pair.a, 2, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    EXPECT(pair.b.recv_cq, 10, IBV_WC_LOC_PROT_ERR);
    EXPECT(pair.b.recv_cq, 11, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_ERR);
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RTS);
    pair_close(&pair);
}

CHECK_MAIN(CASE(messages), CASE(dropped), CASE(no_sequence), CASE(no_peer), CASE(refused_at_post), CASE(local_error),
           CASE(receiver_memory))
