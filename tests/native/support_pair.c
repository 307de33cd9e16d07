#include "support.h"

/* Sequence numbers begin shortly before their end, so that every test wraps them. */
const struct ibv_qp_attr default_link = {
    .qp_access_flags = REMOTE_ALL,
    .path_mtu = IBV_MTU_1024,
    .rq_psn = 0xfffffe,
    .sq_psn = 0xfffffe,
    .max_rd_atomic = 16,
    .max_dest_rd_atomic = 16,
    .min_rnr_timer = 1, /* 10 us */
    .timeout = 8,       /* 1 ms */
    .retry_cnt = 7,
    .rnr_retry = 7,
};

struct ibv_ah_attr path_to_self(struct ibv_context *context)
{
    struct ibv_ah_attr path = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1}};

    CHECK_EQ(soft_verbs.query_gid(context, 1, 1, &path.grh.dgid), 0);
    return path;
}

int qp_to_init(struct ibv_qp *qp, const struct ibv_qp_attr *link)
{
    struct ibv_qp_attr attr = *link;

    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    return soft_verbs.modify_qp(qp, &attr, MASK_INIT);
}

int qp_to_rtr(struct ibv_qp *qp, const struct ibv_qp_attr *link, uint32_t dest_qp_num)
{
    struct ibv_qp_attr attr = *link;

    attr.qp_state = IBV_QPS_RTR;
    attr.dest_qp_num = dest_qp_num;
    attr.ah_attr = path_to_self(qp->context);
    return soft_verbs.modify_qp(qp, &attr, MASK_RTR);
}

int qp_to_rts(struct ibv_qp *qp, const struct ibv_qp_attr *link)
{
    struct ibv_qp_attr attr = *link;

    attr.qp_state = IBV_QPS_RTS;
    return soft_verbs.modify_qp(qp, &attr, MASK_RTS);
}

int qp_to(struct ibv_qp *qp, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = {.qp_state = state};

    return soft_verbs.modify_qp(qp, &attr, IBV_QP_STATE);
}

void qp_connect(struct ibv_qp *qp, const struct ibv_qp_attr *link, uint32_t dest_qp_num)
{
    REQUIRE_EQ(qp_to_init(qp, link), 0);
    REQUIRE_EQ(qp_to_rtr(qp, link, dest_qp_num), 0);
    REQUIRE_EQ(qp_to_rts(qp, link), 0);
}

enum ibv_qp_state qp_state(struct ibv_qp *qp)
{
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr;

    if (soft_verbs.query_qp(qp, &attr, IBV_QP_STATE, &init_attr))
        return IBV_QPS_UNKNOWN;
    return attr.qp_state;
}

struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t depth)
{
    struct ibv_qp_init_attr attr = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *qp = soft_verbs.create_qp(pd, &attr);

    REQUIRE(qp != NULL);
    return qp;
}

struct ibv_qp *make_loop(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t depth)
{
    struct ibv_qp *qp = make_qp(pd, cq, depth);

    qp_connect(qp, &default_link, qp->qp_num);
    return qp;
}

static struct ibv_qp_cap cap_or_default(const struct ibv_qp_cap *cap)
{
    static const struct ibv_qp_cap unset;
    static const struct ibv_qp_cap usual = {
        .max_send_wr = 16,
        .max_recv_wr = 16,
        .max_send_sge = 4,
        .max_recv_sge = 4,
        .max_inline_data = 64,
    };

    return memcmp(cap, &unset, sizeof(unset)) ? *cap : usual;
}

void end_open(struct end *end, struct home *home, const struct pair_options *options)
{
    struct ibv_qp_init_attr attr = {
        .cap = cap_or_default(&options->cap),
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = options->sig_all,
    };
    size_t memory = options->memory ? options->memory : PAIR_MEMORY;
    int cqe = options->cqe ? options->cqe : 64;

    memset(end, 0, sizeof(*end));
    end->home = home;
    attr.send_cq = end->send_cq = home_cq(home, cqe, NULL);
    attr.recv_cq = end->recv_cq = options->one_cq ? end->send_cq : home_cq(home, cqe, NULL);
    end->qp = soft_verbs.create_qp(home->pd, &attr);
    REQUIRE(end->qp != NULL);
    end->memory = calloc(1, memory);
    REQUIRE(end->memory != NULL);
    end->mr = soft_verbs.reg_mr(home->base, end->memory, memory, ACCESS_ALL);
    REQUIRE(end->mr != NULL);
}

/* Objects that the test destroyed itself are NULL. */
void end_close(struct end *end)
{
    if (end->qp)
        CHECK_EQ(soft_verbs.destroy_qp(end->qp), 0);
    if (end->recv_cq && end->recv_cq != end->send_cq)
        CHECK_EQ(soft_verbs.destroy_cq(end->recv_cq), 0);
    if (end->send_cq)
        CHECK_EQ(soft_verbs.destroy_cq(end->send_cq), 0);
    if (end->mr)
        CHECK_EQ(soft_verbs.dereg_mr(end->mr), 0);
    free(end->memory);
}

void pair_open(struct pair *pair, const struct pair_options *options)
{
    const struct ibv_qp_attr *link = options->link ? options->link : &default_link;

    memset(pair, 0, sizeof(*pair));
    if (!options->homes[0])
        home_open(&pair->own);
    end_open(&pair->a, options->homes[0] ? options->homes[0] : &pair->own, options);
    end_open(&pair->b, options->homes[1] ? options->homes[1] : pair->a.home, options);
    if (options->unconnected)
        return;
    qp_connect(pair->a.qp, link, pair->b.qp->qp_num);
    qp_connect(pair->b.qp, link, pair->a.qp->qp_num);
}

void pair_close(struct pair *pair)
{
    end_close(&pair->a);
    end_close(&pair->b);
    if (pair->own.context)
        home_close(&pair->own);
}
