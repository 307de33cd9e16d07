/* XRC: shared receive queues of a domain, which any queue pair of the domain delivers to. */
#include "probe.h"

#include <fcntl.h>

static struct ibv_xrcd *xrcd;
static struct ibv_srq *srq;
static struct ibv_cq *srq_cq;

static void make_domain(void)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};

    xrcd = REQUIRE_OBJECT(verbs_open_xrcd(context, &attr));
}

static struct ibv_srq_init_attr_ex srq_attr(void)
{
    make_domain();
    srq_cq = queue(16);
    return (struct ibv_srq_init_attr_ex){
        .attr = {.max_wr = 16, .max_sge = 4},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = domain(),
        .xrcd = xrcd,
        .cq = srq_cq,
    };
}

static struct ibv_qp *receiver(void)
{
    struct ibv_qp_init_attr_ex attr = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};

    return REQUIRE_OBJECT(verbs_create_qp_ex(context, &attr));
}

static void make_xrc_pair(void)
{
    struct ibv_srq_init_attr_ex attr = srq_attr();

    srq = REQUIRE_OBJECT(verbs_create_srq_ex(context, &attr));
    make_end(&a, IBV_QPT_XRC_SEND);
    make_end(&b, IBV_QPT_RC);
    b.qp = receiver();
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    move_to_state(b.qp, IBV_QPS_RTR, a.qp->qp_num);
}

static struct ibv_send_wr *request_to(uint32_t number)
{
    struct ibv_send_wr *wr = request(IBV_WR_SEND, &a, &b, 8);

    wr->qp_type.xrc.remote_srqn = number;
    return wr;
}

ROW(create_srq_ex, "an XRC queue")
{
    struct ibv_srq_init_attr_ex attr = srq_attr();

    REPORT_OBJECT(verbs_create_srq_ex(context, &attr));
}

ROW(create_srq_ex, "an XRC queue without a completion queue")
{
    struct ibv_srq_init_attr_ex attr = srq_attr();

    attr.comp_mask &= ~(uint32_t)IBV_SRQ_INIT_ATTR_CQ;
    REPORT_OBJECT(verbs_create_srq_ex(context, &attr));
}

ROW(get_srq_num, "of an XRC queue")
{
    struct ibv_srq_init_attr_ex attr = srq_attr();
    uint32_t number;

    REPORT_INT(verbs_get_srq_num(REQUIRE_OBJECT(verbs_create_srq_ex(context, &attr)), &number));
}

ROW(create_qp_ex, "XRC_RECV")
{
    make_domain();
    receiver();
    report("ok");
}

ROW(create_qp_ex, "XRC_SEND with receives")
{
    struct ibv_qp_init_attr basic = qp_attr(IBV_QPT_XRC_SEND);
    struct ibv_qp_init_attr_ex attr = {
        .send_cq = basic.send_cq,
        .recv_cq = basic.recv_cq,
        .cap = basic.cap,
        .qp_type = IBV_QPT_XRC_SEND,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
        .pd = domain(),
    };

    REPORT_OBJECT(verbs_create_qp_ex(context, &attr));
}

ROW(destroy_cq, "with an XRC shared receive queue")
{
    struct ibv_srq_init_attr_ex attr = srq_attr();

    REQUIRE_OBJECT(verbs_create_srq_ex(context, &attr));
    REPORT_INT(verbs->destroy_cq(srq_cq));
}

ROW(close_xrcd, "with a queue pair")
{
    make_domain();
    receiver();
    REPORT_INT(verbs_close_xrcd(xrcd));
}

ROW(modify_qp, "XRC_RECV: RESET, INIT, RTR, RTS")
{
    make_domain();
    a.qp = receiver();
    for (enum ibv_qp_state state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++)
        report_int(step(a.qp, state, a.qp->qp_num));
}

ROW(post_recv, "on an XRC_RECV queue pair")
{
    make_xrc_pair();
    report_int(post_receive(&b, 64));
}

ROW(post_send, "XRC_SEND: SEND to a shared receive queue")
{
    uint32_t number;

    make_xrc_pair();
    REQUIRE_INT(verbs_get_srq_num(srq, &number));
    REQUIRE_INT(post_shared(srq, 64));
    REPORT_INT(post(&a, request_to(number)));
    report_completions(a.send_cq, 1);
    report_completions(srq_cq, 1);
}

ROW(post_send, "XRC_SEND: SEND to an invalid number")
{
    make_xrc_pair();
    REPORT_INT(post(&a, request_to(0xfffff0)));
    report_statuses(a.send_cq, 1);
}

ROW(post_send, "XRC_SEND: RDMA_WRITE to memory of the domain of a shared receive queue")
{
    uint32_t number;

    make_xrc_pair();
    REQUIRE_INT(verbs_get_srq_num(srq, &number));
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->qp_type.xrc.remote_srqn = number;
    REPORT_INT(post(&a, wr));
    report_completions(a.send_cq, 1);
}
