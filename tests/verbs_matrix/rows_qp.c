/* Creating queue pairs, and querying their attributes. */
#include "probe.h"

static struct ibv_qp *report_qp(struct ibv_qp_init_attr attr)
{
    return REPORT_OBJECT(verbs->create_qp(domain(), &attr));
}

#define TYPE_ROW(asked, type)     \
    ROW(create_qp, asked)         \
    {                             \
        report_qp(qp_attr(type)); \
    }

TYPE_ROW("RC", IBV_QPT_RC)
TYPE_ROW("UC", IBV_QPT_UC)
TYPE_ROW("UD", IBV_QPT_UD)
TYPE_ROW("RAW_PACKET", IBV_QPT_RAW_PACKET)
TYPE_ROW("XRC_SEND", IBV_QPT_XRC_SEND)
TYPE_ROW("XRC_RECV without an XRC domain", IBV_QPT_XRC_RECV)
TYPE_ROW("DRIVER", IBV_QPT_DRIVER)
TYPE_ROW("an invalid type", (enum ibv_qp_type)7)

#define CAP_ROW(asked, field, value)                        \
    ROW(create_qp, asked)                                   \
    {                                                       \
        struct ibv_device_attr limits = device_attr();      \
        struct ibv_qp_init_attr attr = qp_attr(IBV_QPT_RC); \
                                                            \
        (void)limits;                                       \
        attr.cap.field = (value);                           \
        report_qp(attr);                                    \
    }

CAP_ROW("more sends than max_qp_wr", max_send_wr, (uint32_t)limits.max_qp_wr + 1)
CAP_ROW("more receives than max_qp_wr", max_recv_wr, (uint32_t)limits.max_qp_wr + 1)
CAP_ROW("more send entries than max_sge", max_send_sge, (uint32_t)limits.max_sge + 1)
CAP_ROW("more receive entries than max_sge", max_recv_sge, (uint32_t)limits.max_sge + 1)
CAP_ROW("a megabyte inline", max_inline_data, 1u << 20)
CAP_ROW("no sends", max_send_wr, 0)
CAP_ROW("no receives", max_recv_wr, 0)

ROW(create_qp, "granted values")
{
    struct ibv_qp_init_attr attr = qp_attr(IBV_QPT_RC);

    REPORT_OBJECT(verbs->create_qp(domain(), &attr));
    report("%s", attr.cap.max_send_wr >= 16 && attr.cap.max_recv_wr >= 16 && attr.cap.max_send_sge >= 4 &&
                         attr.cap.max_recv_sge >= 4 && attr.cap.max_inline_data >= 64
                     ? "as asked"
                     : "less");
}

ROW(create_qp, "without a completion queue for sends")
{
    struct ibv_qp_init_attr attr = qp_attr(IBV_QPT_RC);

    attr.send_cq = NULL;
    report_qp(attr);
}

ROW(create_qp, "without a completion queue for receives")
{
    struct ibv_qp_init_attr attr = qp_attr(IBV_QPT_RC);

    attr.recv_cq = NULL;
    report_qp(attr);
}

ROW(create_qp, "with a shared receive queue")
{
    pair_srq = shared_queue(16);
    report_qp(qp_attr(IBV_QPT_RC));
}

static struct ibv_qp_init_attr_ex attr_ex(uint32_t comp_mask)
{
    struct ibv_qp_init_attr basic = qp_attr(IBV_QPT_RC);
    struct ibv_qp_init_attr_ex attr = {
        .send_cq = basic.send_cq,
        .recv_cq = basic.recv_cq,
        .cap = basic.cap,
        .qp_type = IBV_QPT_RC,
        .comp_mask = comp_mask,
        .pd = domain(),
    };

    return attr;
}

ROW(create_qp_ex, "builders of work requests")
{
    struct ibv_qp_init_attr_ex attr = attr_ex(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);

    attr.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND;
    REPORT_OBJECT(verbs_create_qp_ex(context, &attr));
}

ROW(create_qp_ex, "create_flags: BLOCK_SELF_MCAST_LB")
{
    struct ibv_qp_init_attr_ex attr = attr_ex(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS);

    attr.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
    REPORT_OBJECT(verbs_create_qp_ex(context, &attr));
}

ROW(create_qp_ex, "a header for TSO")
{
    struct ibv_qp_init_attr_ex attr = attr_ex(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER);

    attr.max_tso_header = 64;
    REPORT_OBJECT(verbs_create_qp_ex(context, &attr));
}

ROW(create_qp_ex, "without a protection domain")
{
    struct ibv_qp_init_attr_ex attr = attr_ex(0);

    REPORT_OBJECT(verbs_create_qp_ex(context, &attr));
}

ROW(create_qp_ex, "an unknown bit in comp_mask")
{
    struct ibv_qp_init_attr_ex attr = attr_ex(IBV_QP_INIT_ATTR_PD | 1u << 31);

    REPORT_OBJECT(verbs_create_qp_ex(context, &attr));
}

ROW(query_qp, "in RESET, with its creation attributes")
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    make_end(&a, IBV_QPT_RC);
    memset(&init, 0, sizeof(init));
    REPORT_INT(verbs->query_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_CAP, &init));
    report("%s", state_name(attr.qp_state));
    report("%s", init.send_cq == a.send_cq && init.qp_type == IBV_QPT_RC ? "its queues" : "other queues");
}

ROW(query_qp, "in RTS: attributes set on the way")
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    make_pair(IBV_QPT_RC);
    REPORT_INT(verbs->query_qp(a.qp, &attr,
                               IBV_QP_STATE | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                   IBV_QP_RNR_RETRY | IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS | IBV_QP_AV,
                               &init));
    report("%s", state_name(attr.qp_state));
    report("MTU %u, timeout %u, retries %u, RNR %u %u", 128u << attr.path_mtu, attr.timeout, attr.retry_cnt,
           attr.rnr_retry, attr.min_rnr_timer);
    report("%s", attr.dest_qp_num == b.qp->qp_num ? "its peer" : "another peer");
    report("access %#x", attr.qp_access_flags);
}

ROW(query_qp, "max_rd_atomic and max_dest_rd_atomic in RTS")
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    link_attr.max_rd_atomic = link_attr.max_dest_rd_atomic = 3;
    make_pair(IBV_QPT_RC);
    REPORT_INT(verbs->query_qp(a.qp, &attr, IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC, &init));
    report("%u and %u", attr.max_rd_atomic, attr.max_dest_rd_atomic);
}

ROW(destroy_qp, "in RESET")
{
    make_end(&a, IBV_QPT_RC);
    REPORT_INT(verbs->destroy_qp(a.qp));
}

ROW(destroy_qp, "with receives posted: none completes")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post_receive(&a, 64));
    REPORT_INT(verbs->destroy_qp(a.qp));
    report_no_completion(a.recv_cq);
}

ROW(open_qp, "by a number")
{
    struct ibv_qp_open_attr attr = {
        .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_TYPE, .qp_num = 1, .qp_type = IBV_QPT_XRC_RECV};

    REPORT_OBJECT(CALL_OP(NULL, open_qp, context, &attr));
}

ROW(modify_qp_rate_limit, "a limit")
{
    struct ibv_qp_rate_limit_attr attr = {.rate_limit = 1000};

    make_pair(IBV_QPT_RC);
    REPORT_INT(CALL_OP(EOPNOTSUPP, modify_qp_rate_limit, a.qp, &attr));
}
