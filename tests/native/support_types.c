#include "support_types.h"

#include "support.h"

int init_mask(enum ibv_qp_type type)
{
    return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
}

int rtr_mask(enum ibv_qp_type type)
{
    int path = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;

    switch (type) {
    case IBV_QPT_UD:
        return IBV_QP_STATE;
    case IBV_QPT_RC:
    case IBV_QPT_XRC_RECV:
        return path | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    default:
        return path;
    }
}

int rts_mask(enum ibv_qp_type type)
{
    switch (type) {
    case IBV_QPT_RC:
    case IBV_QPT_XRC_SEND:
        return MASK_RTS;
    case IBV_QPT_XRC_RECV:
        return IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT;
    default:
        return IBV_QP_STATE | IBV_QP_SQ_PSN;
    }
}

int type_to(struct ibv_qp *qp, enum ibv_qp_state state, int mask, const struct ibv_qp_attr *link, uint32_t dest)
{
    struct ibv_qp_attr attr = *link;

    attr.qp_state = state;
    attr.port_num = 1;
    attr.qkey = TEST_QKEY;
    attr.dest_qp_num = dest;
    attr.ah_attr = path_to_self(qp->context);
    return soft_verbs.modify_qp(qp, &attr, mask);
}

void type_raise(struct ibv_qp *qp, enum ibv_qp_state state, const struct ibv_qp_attr *link, uint32_t dest)
{
    REQUIRE_EQ(type_to(qp, IBV_QPS_INIT, init_mask(qp->qp_type), link, dest), 0);
    if (state == IBV_QPS_INIT)
        return;
    REQUIRE_EQ(type_to(qp, IBV_QPS_RTR, rtr_mask(qp->qp_type), link, dest), 0);
    if (state == IBV_QPS_RTS)
        REQUIRE_EQ(type_to(qp, IBV_QPS_RTS, rts_mask(qp->qp_type), link, dest), 0);
}

void type_connect(struct ibv_qp *qp, const struct ibv_qp_attr *link, uint32_t dest)
{
    type_raise(qp, IBV_QPS_RTS, link, dest);
}

void typed_open(struct end *end, struct home *home, const struct end_options *options)
{
    bool target = options->type == IBV_QPT_XRC_RECV;
    uint32_t depth = options->depth ? options->depth : 16;
    int cqe = options->cqe ? options->cqe : 64;
    struct ibv_qp_init_attr_ex attr = {
        .cap = {depth, depth, 4, 4, 64},
        .qp_type = options->type,
        .srq = options->srq,
        .comp_mask = target ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD,
        .pd = home->pd,
        .xrcd = options->xrcd,
    };

    memset(end, 0, sizeof(*end));
    end->home = home;
    if (!options->cq && !target) {
        end->send_cq = home_cq(home, cqe, NULL);
        end->recv_cq = options->type == IBV_QPT_XRC_SEND ? NULL : home_cq(home, cqe, NULL);
    }
    attr.send_cq = options->cq ? options->cq : end->send_cq;
    attr.recv_cq = options->cq ? options->cq : end->recv_cq;
    end->qp = verbs_create_qp_ex(home->context, &attr);
    REQUIRE(end->qp != NULL);
    end->memory = calloc(1, PAIR_MEMORY);
    REQUIRE(end->memory != NULL);
    end->mr = soft_verbs.reg_mr(home->base, end->memory, PAIR_MEMORY,
                                options->access ? options->access : ACCESS_ALL | IBV_ACCESS_MW_BIND);
    REQUIRE(end->mr != NULL);
}

void typed_pair_open(struct pair *pair, const struct end_options *options, const struct ibv_qp_attr *link)
{
    memset(pair, 0, sizeof(*pair));
    home_open(&pair->own);
    typed_open(&pair->a, &pair->own, options);
    typed_open(&pair->b, &pair->own, options);
    type_connect(pair->a.qp, link, pair->b.qp->qp_num);
    type_connect(pair->b.qp, link, pair->a.qp->qp_num);
}

struct ibv_ah *make_ah(struct ibv_pd *pd, uint8_t gid_index)
{
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1};
    struct ibv_ah *ah;

    attr.grh.sgid_index = gid_index;
    attr.grh.hop_limit = 64;
    attr.grh.traffic_class = 0x2c;
    attr.grh.flow_label = 0xabcde;
    REQUIRE_EQ(soft_verbs.query_gid(pd->context, 1, gid_index, &attr.grh.dgid), 0);
    ah = soft_verbs.create_ah(pd, &attr);
    REQUIRE(ah != NULL);
    return ah;
}

struct ibv_send_wr datagram(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count,
                            struct ibv_ah *ah, uint32_t qp_num)
{
    struct ibv_send_wr wr = request(opcode, wr_id, list, count);

    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = qp_num;
    wr.wr.ud.remote_qkey = TEST_QKEY;
    return wr;
}

int post_room(struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
    struct ibv_sge sge = span(end, offset, length);

    return post_receive_list(end, wr_id, &sge, 1);
}

int srq_post_room(struct ibv_srq *srq, const struct end *end, uint64_t wr_id, size_t offset, uint32_t length)
{
    struct ibv_sge sge = span(end, offset, length);
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

    return verbs_post_srq_recv(srq, &wr, &bad);
}

void expect_empty_at(struct ibv_cq *cq, struct check_place place)
{
    struct ibv_wc wc;

    check_equal(verbs_poll_cq(cq, 1, &wc), 0, place, "poll_cq", "nothing");
}
