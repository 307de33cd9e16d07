/* Tests of attributes of queue pairs and completion queues: refused, granted and reported values. */
#include "support.h"

/* One way to make a valid change of state invalid. */
struct spoiled {
    const char *what;
    enum ibv_qp_state to;
    void (*spoil)(struct ibv_qp_attr *attr);
};

#define SPOIL(name, statement)                 \
    static void name(struct ibv_qp_attr *attr) \
    {                                          \
        statement;                             \
    }

SPOIL(pkey_index, attr->pkey_index = 1)
SPOIL(port_zero, attr->port_num = 0)
SPOIL(port_two, attr->port_num = 2)
SPOIL(access_unknown, attr->qp_access_flags |= IBV_ACCESS_MW_BIND)
SPOIL(access_high, attr->qp_access_flags |= 1u << 31)
SPOIL(no_grh, attr->ah_attr.is_global = 0)
SPOIL(sgid_index, attr->ah_attr.grh.sgid_index = 2)
SPOIL(path_port, attr->ah_attr.port_num = 2)
SPOIL(mtu_zero, attr->path_mtu = (enum ibv_mtu)0)
SPOIL(mtu_large, attr->path_mtu = (enum ibv_mtu)6)
SPOIL(dest_qp_num, attr->dest_qp_num = 1u << 24)
SPOIL(rq_psn, attr->rq_psn = 1u << 24)
SPOIL(sq_psn, attr->sq_psn = 1u << 24)
SPOIL(max_rd_atomic, attr->max_rd_atomic = 17)
SPOIL(max_dest_rd_atomic, attr->max_dest_rd_atomic = 17)
SPOIL(min_rnr_timer, attr->min_rnr_timer = 32)
SPOIL(timeout, attr->timeout = 32)
SPOIL(retry_cnt, attr->retry_cnt = 8)
SPOIL(rnr_retry, attr->rnr_retry = 8)
SPOIL(nothing, (void)attr)

static const struct spoiled spoiled[] = {
    {"pkey_index", IBV_QPS_INIT, pkey_index},
    {"port_num 0", IBV_QPS_INIT, port_zero},
    {"port_num 2", IBV_QPS_INIT, port_two},
    {"access flags", IBV_QPS_INIT, access_unknown},
    {"high access flags", IBV_QPS_INIT, access_high},
    {"no GRH", IBV_QPS_RTR, no_grh},
    {"sgid_index", IBV_QPS_RTR, sgid_index},
    {"port of the path", IBV_QPS_RTR, path_port},
    {"path_mtu 0", IBV_QPS_RTR, mtu_zero},
    {"path_mtu 6", IBV_QPS_RTR, mtu_large},
    {"dest_qp_num", IBV_QPS_RTR, dest_qp_num},
    {"rq_psn", IBV_QPS_RTR, rq_psn},
    {"max_dest_rd_atomic", IBV_QPS_RTR, max_dest_rd_atomic},
    {"min_rnr_timer", IBV_QPS_RTR, min_rnr_timer},
    {"sq_psn", IBV_QPS_RTS, sq_psn},
    {"max_rd_atomic", IBV_QPS_RTS, max_rd_atomic},
    {"timeout", IBV_QPS_RTS, timeout},
    {"retry_cnt", IBV_QPS_RTS, retry_cnt},
    {"rnr_retry", IBV_QPS_RTS, rnr_retry},
};

static int change(struct ibv_qp *qp, enum ibv_qp_state to, void (*spoil)(struct ibv_qp_attr *))
{
    static const int masks[] = {[IBV_QPS_INIT] = MASK_INIT, [IBV_QPS_RTR] = MASK_RTR, [IBV_QPS_RTS] = MASK_RTS};
    struct ibv_qp_attr attr = default_link;

    attr.qp_state = to;
    attr.port_num = 1;
    attr.dest_qp_num = qp->qp_num;
    attr.ah_attr = path_to_self(qp->context);
    spoil(&attr);
    return soft_verbs.modify_qp(qp, &attr, masks[to]);
}

static void values(void)
{
    struct pair pair;
    int to;
    size_t i;

    PAIR_OPEN(&pair, .unconnected = true);
    for (to = IBV_QPS_INIT; to <= IBV_QPS_RTS; to++) {
        for (i = 0; i < COUNT_OF(spoiled); i++) {
            if (spoiled[i].to != (enum ibv_qp_state)to)
                continue;
            if (!CHECK_EQ(change(pair.a.qp, spoiled[i].to, spoiled[i].spoil), EINVAL))
                printf("with a bad %s\n", spoiled[i].what);
            CHECK_EQ(qp_state(pair.a.qp), to - 1);
        }
        CHECK_EQ(change(pair.a.qp, (enum ibv_qp_state)to, nothing), 0);
    }
    pair_close(&pair);
}

static void query(void)
{
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr;
    struct pair pair;

    PAIR_OPEN(&pair, .sig_all = true, .unconnected = true);
    memset(&attr, 0xff, sizeof(attr));
    CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, IBV_QP_STATE, &init_attr), 0);
    CHECK_EQ(attr.qp_state, IBV_QPS_RESET);
    CHECK_EQ(pair.a.qp->state, IBV_QPS_RESET);
    CHECK(init_attr.send_cq == pair.a.send_cq && init_attr.recv_cq == pair.a.recv_cq);
    CHECK(init_attr.srq == NULL);
    CHECK_EQ(init_attr.qp_type, IBV_QPT_RC);
    CHECK_EQ(init_attr.sq_sig_all, 1);
    CHECK(init_attr.cap.max_send_wr >= 16 && init_attr.cap.max_recv_wr >= 16);
    CHECK(init_attr.cap.max_send_sge >= 4 && init_attr.cap.max_recv_sge >= 4);
    CHECK(init_attr.cap.max_inline_data >= 64);
    CHECK(!memcmp(&init_attr.cap, &attr.cap, sizeof(attr.cap)));

    qp_connect(pair.a.qp, &default_link, pair.b.qp->qp_num);
    CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, IBV_QP_STATE, &init_attr), 0);
    CHECK_EQ(attr.qp_state, IBV_QPS_RTS);
    CHECK_EQ(attr.cur_qp_state, IBV_QPS_RTS);
    CHECK_EQ(attr.path_mtu, default_link.path_mtu);
    CHECK_EQ(attr.path_mig_state, IBV_MIG_MIGRATED);
    CHECK_EQ(attr.dest_qp_num, pair.b.qp->qp_num);
    CHECK_EQ(attr.qp_access_flags, default_link.qp_access_flags);
    CHECK_EQ(attr.sq_psn, default_link.sq_psn);
    CHECK_EQ(attr.rq_psn, default_link.rq_psn);
    CHECK_EQ(attr.max_rd_atomic, 16);
    CHECK_EQ(attr.max_dest_rd_atomic, 16);
    CHECK_EQ(attr.min_rnr_timer, default_link.min_rnr_timer);
    CHECK_EQ(attr.timeout, default_link.timeout);
    CHECK_EQ(attr.retry_cnt, 7);
    CHECK_EQ(attr.rnr_retry, 7);
    CHECK_EQ(attr.port_num, 1);
    CHECK_EQ(attr.pkey_index, 0);
    CHECK_EQ(attr.ah_attr.is_global, 1);
    CHECK_EQ(attr.ah_attr.grh.sgid_index, 1);
    CHECK_EQ(attr.sq_draining, 0);

    qp_connect(pair.b.qp, &default_link, pair.a.qp->qp_num);
    pair_close(&pair);
}

/* Sequence numbers count packets of the path's MTU, of which an empty message takes one. */
static void sequence_numbers(void)
{
    static const uint32_t lengths[] = {0, 1, 1023, 1024, 1025, 2048, 3000}; /* with 1 KiB a packet */
    static const uint32_t packets[] = {1, 1, 1, 1, 2, 2, 3};
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr;
    uint32_t psn = default_link.sq_psn;
    struct pair pair;
    size_t i;

    PAIR_OPEN(&pair, 0);
    for (i = 0; i < COUNT_OF(lengths); i++) {
        CHECK_EQ(post_write(&pair.a, &pair.b, i, lengths[i]), 0);
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        psn = (psn + packets[i]) & 0xffffff;
        CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, IBV_QP_SQ_PSN, &init_attr), 0);
        CHECK_EQ(attr.sq_psn, psn);
        CHECK_EQ(soft_verbs.query_qp(pair.b.qp, &attr, IBV_QP_RQ_PSN, &init_attr), 0);
        CHECK_EQ(attr.rq_psn, psn);
    }
    CHECK_EQ(qp_to(pair.a.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, IBV_QP_SQ_PSN, &init_attr), 0);
    CHECK_EQ(attr.sq_psn, 0);
    CHECK_EQ(attr.rq_psn, 0);
    pair_close(&pair);
}

/* A change of access flags in RTS affects later requests. */
static void access_changes(void)
{
    struct ibv_qp_attr attr = {.qp_access_flags = IBV_ACCESS_REMOTE_READ};
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.modify_qp(pair.b.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
    CHECK_EQ(post_write(&pair.a, &pair.b, 2, 8), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_REM_INV_REQ_ERR);
    pair_close(&pair);
}

static void queue_pair_creation(void)
{
    struct ibv_qp_init_attr good = {.qp_type = IBV_QPT_RC}, attr;
    struct ibv_srq srq = {0};
    struct home home, other;
    struct ibv_cq *foreign;
    struct ibv_qp *qp;
    int context;

    home_open(&home);
    home_open(&other);
    foreign = home_cq(&other, 4, NULL);
    good.send_cq = good.recv_cq = home_cq(&home, 4, NULL);
    good.qp_context = &context;
    good.cap = (struct ibv_qp_cap){3, 5, 2, 3, 10};

    attr = good, attr.send_cq = NULL;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.recv_cq = foreign;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.qp_type = IBV_QPT_RAW_PACKET;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EOPNOTSUPP);
    attr = good, attr.qp_type = IBV_QPT_XRC_RECV; /* has no protection domain, and needs an XRC domain */
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.srq = &srq; /* of another context */
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.cap.max_send_wr = 1u << 30;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.cap.max_recv_wr = 1u << 30;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.cap.max_send_sge = 1000;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.cap.max_recv_sge = 1000;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);
    attr = good, attr.cap.max_inline_data = 1u << 20;
    CHECK_REFUSED(soft_verbs.create_qp(home.pd, &attr), EINVAL);

    attr = good;
    qp = soft_verbs.create_qp(home.pd, &attr);
    REQUIRE(qp != NULL);
    CHECK(attr.cap.max_send_wr >= 3 && attr.cap.max_recv_wr >= 5); /* what was granted */
    CHECK(attr.cap.max_send_sge >= 2 && attr.cap.max_recv_sge >= 3);
    CHECK(attr.cap.max_inline_data >= 10);
    CHECK(qp->context == home.context && qp->pd == home.pd && qp->qp_context == &context);
    CHECK(qp->send_cq == good.send_cq && qp->recv_cq == good.recv_cq && qp->srq == NULL);
    CHECK_EQ(qp->qp_type, IBV_QPT_RC);
    CHECK_EQ(qp->state, IBV_QPS_RESET);
    CHECK(qp->qp_num > 1 && qp->qp_num <= 0xffffff);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(good.send_cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(foreign), 0);
    home_close(&other);
    home_close(&home);
}

static void extended_queue_pair_creation(void)
{
    struct verbs_context *verbs;
    struct ibv_qp_init_attr_ex good = {.qp_type = IBV_QPT_RC}, attr;
    struct home home, other;
    struct ibv_qp *qp;

    home_open(&home);
    home_open(&other);
    verbs = verbs_context_of(home.context);
    good.send_cq = good.recv_cq = home_cq(&home, 4, NULL);
    good.cap = (struct ibv_qp_cap){3, 5, 2, 3, 10};
    good.comp_mask = IBV_QP_INIT_ATTR_PD;
    good.pd = home.pd;

    attr = good, attr.comp_mask = 0;
    CHECK_REFUSED(verbs->create_qp_ex(home.context, &attr), EINVAL);
    attr = good, attr.pd = other.pd;
    CHECK_REFUSED(verbs->create_qp_ex(home.context, &attr), EINVAL);
    attr = good, attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    CHECK_REFUSED(verbs->create_qp_ex(home.context, &attr), EOPNOTSUPP);
    attr = good, attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
    CHECK_REFUSED(verbs->create_qp_ex(home.context, &attr), EOPNOTSUPP);
    attr = good, attr.comp_mask |= 1 << 20;
    CHECK_REFUSED(verbs->create_qp_ex(home.context, &attr), EOPNOTSUPP);

    attr = good;
    qp = verbs->create_qp_ex(home.context, &attr);
    REQUIRE(qp != NULL);
    CHECK(qp->pd == home.pd && attr.cap.max_recv_wr >= 5);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(good.send_cq), 0);
    home_close(&other);
    home_close(&home);
}

/* A queue pair without a send or receive queue has no capacity there. */
static void empty_queues(void)
{
    struct ibv_send_wr send = request(IBV_WR_SEND, 1, NULL, 0);
    struct pair pair;

    PAIR_OPEN(&pair, .cap = {.max_recv_wr = 1});
    CHECK_EQ(post(pair.a.qp, &send), ENOMEM);
    CHECK_EQ(post_receive_list(&pair.a, 2, NULL, 0), 0);
    pair_close(&pair);
    PAIR_OPEN(&pair, .cap = {.max_send_wr = 1});
    CHECK_EQ(post(pair.a.qp, &send), 0);
    CHECK_EQ(post_receive_list(&pair.a, 2, NULL, 0), ENOMEM);
    pair_close(&pair);
}

static void completion_queue_creation(void)
{
    struct ibv_comp_channel *foreign;
    struct home home, other;
    struct ibv_cq *cq;
    int context;

    home_open(&home);
    home_open(&other);
    foreign = soft_verbs.create_comp_channel(other.context);
    REQUIRE(foreign != NULL);
    CHECK_REFUSED(soft_verbs.create_cq(home.context, 0, NULL, NULL, 0), EINVAL);
    CHECK_REFUSED(soft_verbs.create_cq(home.context, -1, NULL, NULL, 0), EINVAL);
    CHECK_REFUSED(soft_verbs.create_cq(home.context, 4, NULL, NULL, 1), EINVAL);
    CHECK_REFUSED(soft_verbs.create_cq(home.context, 4, NULL, NULL, -1), EINVAL);
    CHECK_REFUSED(soft_verbs.create_cq(home.context, 4, NULL, foreign, 0), EINVAL);
    cq = soft_verbs.create_cq(home.context, 5, &context, NULL, 0);
    REQUIRE(cq != NULL);
    CHECK(cq->context == home.context && cq->cq_context == &context && cq->channel == NULL);
    CHECK(cq->cqe >= 5);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(foreign), 0);
    home_close(&other);
    home_close(&home);
}

static void extended_completion_queue_creation(void)
{
    struct ibv_cq_init_attr_ex good = {.cqe = 4, .wc_flags = IBV_WC_STANDARD_FLAGS}, attr;
    static const uint64_t unsupported[] = {
        IBV_WC_EX_WITH_CVLAN,
        IBV_WC_EX_WITH_FLOW_TAG,
        IBV_WC_EX_WITH_TM_INFO,
        1ull << 40,
    };
    struct ibv_pd *parent, *foreign;
    struct home home, other;
    struct ibv_cq_ex *cq;
    size_t i;

    home_open(&home);
    home_open(&other);
    parent = home_parent(&home, NULL);
    foreign = home_parent(&other, NULL);
    for (i = 0; i < COUNT_OF(unsupported); i++) {
        attr = good, attr.wc_flags |= unsupported[i];
        CHECK_REFUSED(verbs_create_cq_ex(home.context, &attr), EOPNOTSUPP);
    }
    attr = good, attr.comp_mask = 1 << 2;
    CHECK_REFUSED(verbs_create_cq_ex(home.context, &attr), EOPNOTSUPP);
    attr = good, attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attr.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    CHECK_REFUSED(verbs_create_cq_ex(home.context, &attr), EOPNOTSUPP);
    attr.flags = 1 << 9;
    CHECK_REFUSED(verbs_create_cq_ex(home.context, &attr), EOPNOTSUPP);
    attr = good, attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
    CHECK_REFUSED(verbs_create_cq_ex(home.context, &attr), EINVAL); /* NULL */
    attr.parent_domain = home.base;                                 /* not a parent domain */
    CHECK_REFUSED(verbs_create_cq_ex(home.context, &attr), EINVAL);
    attr.parent_domain = foreign;
    CHECK_REFUSED(verbs_create_cq_ex(home.context, &attr), EINVAL);

    attr = good, attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD | IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attr.parent_domain = parent;
    attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    cq = verbs_create_cq_ex(home.context, &attr);
    REQUIRE(cq != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(parent), EBUSY);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(cq)), 0);

    attr = good, attr.flags = UINT32_MAX; /* not looked at without its bit */
    attr.parent_domain = home.base;
    cq = verbs_create_cq_ex(home.context, &attr);
    REQUIRE(cq != NULL);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(cq)), 0);

    CHECK_EQ(soft_verbs.dealloc_pd(foreign), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(parent), 0);
    home_close(&other);
    home_close(&home);
}

/* A freed number is not reused soon, so that a stale one does not reach a new object. */
static void numbers_rest(void)
{
    enum { ROUNDS = 300 };
    uint32_t numbers[ROUNDS];
    struct pair pair;
    int i, j;

    PAIR_OPEN(&pair, .unconnected = true);
    for (i = 0; i < ROUNDS; i++) {
        struct end end;

        end_open(&end, &pair.own, &(struct pair_options){.memory = 64});
        numbers[i] = end.qp->qp_num;
        CHECK(end.qp->qp_num != pair.a.qp->qp_num && end.qp->qp_num != pair.b.qp->qp_num);
        for (j = 0; j < i; j++)
            CHECK(numbers[j] != numbers[i]);
        end_close(&end);
    }
    pair_close(&pair);
}

CHECK_MAIN(CASE(values), CASE(query), CASE(sequence_numbers), CASE(access_changes), CASE(queue_pair_creation),
           CASE(extended_queue_pair_creation), CASE(empty_queues), CASE(completion_queue_creation),
           CASE(extended_completion_queue_creation), CASE(numbers_rest))
