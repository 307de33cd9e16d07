#include "support.h"
#include "support_srq.h"

#include <fcntl.h>

struct ibv_srq *try_srq(const struct home *home, uint32_t max_wr, uint32_t max_sge)
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = max_wr, .max_sge = max_sge}};

    return soft_verbs.create_srq(home->pd, &attr);
}

struct ibv_srq *make_srq(const struct home *home, uint32_t max_wr)
{
    struct ibv_srq *srq = try_srq(home, max_wr, 4);

    REQUIRE(srq != NULL);
    return srq;
}

struct ibv_srq *try_xrc_srq(const struct home *home, struct ibv_xrcd *xrcd, struct ibv_cq *cq, uint32_t max_wr)
{
    struct ibv_srq_init_attr_ex attr = {
        .attr = {.max_wr = max_wr, .max_sge = 4},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = home->pd,
        .xrcd = xrcd,
        .cq = cq,
    };

    return verbs_create_srq_ex(home->context, &attr);
}

struct ibv_xrcd *make_xrcd(struct ibv_context *context)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        .fd = -1,
        .oflags = O_CREAT,
    };
    struct ibv_xrcd *xrcd = verbs_open_xrcd(context, &attr);

    REQUIRE(xrcd != NULL);
    return xrcd;
}

int srq_post(struct ibv_srq *srq, uint64_t wr_id)
{
    struct ibv_recv_wr wr = {.wr_id = wr_id}, *bad;

    return verbs_post_srq_recv(srq, &wr, &bad);
}

bool srq_take(struct ibv_srq *srq, struct soft_receive *receive, bool give_back)
{
    bool taken;

    REQUIRE(grace_ready());
    grace_enter();
    taken = soft_srq_take(to_soft_srq(srq), receive);
    grace_leave(grace_self);
    if (taken && give_back)
        soft_srq_credit(to_soft_srq(srq), 1);
    return taken;
}

void srq_expect(struct ibv_srq *srq, uint64_t wr_id)
{
    struct soft_receive receive;

    REQUIRE(srq_take(srq, &receive, true));
    CHECK_EQ(receive.wr_id, wr_id);
}

int srq_arm(struct ibv_srq *srq, uint32_t limit)
{
    struct ibv_srq_attr attr = {.srq_limit = limit};

    return soft_verbs.modify_srq(srq, &attr, IBV_SRQ_LIMIT);
}

int srq_resize(struct ibv_srq *srq, uint32_t max_wr)
{
    struct ibv_srq_attr attr = {.max_wr = max_wr};

    return soft_verbs.modify_srq(srq, &attr, IBV_SRQ_MAX_WR);
}

struct ibv_srq_attr srq_query(struct ibv_srq *srq)
{
    struct ibv_srq_attr attr = {0};

    CHECK_EQ(soft_verbs.query_srq(srq, &attr), 0);
    return attr;
}
