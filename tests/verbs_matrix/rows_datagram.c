/* Address handles and datagrams. */
#include "probe.h"

ROW(create_ah, "to the device itself")
{
    struct ibv_ah_attr path = path_to_self();

    REPORT_OBJECT(verbs->create_ah(domain(), &path));
}

#define PATH_ROW(asked, field, value)                     \
    ROW(create_ah, asked)                                 \
    {                                                     \
        struct ibv_ah_attr path = path_to_self();         \
                                                          \
        path.field = (value);                             \
        REPORT_OBJECT(verbs->create_ah(domain(), &path)); \
    }

PATH_ROW("from port 0", port_num, 0)
PATH_ROW("from port 2", port_num, 2)
PATH_ROW("from a GID that is none", grh.sgid_index, 99)
PATH_ROW("without a GRH", is_global, 0)
PATH_ROW("a service level of 16", sl, 16)

ROW(create_ah, "to a multicast group")
{
    struct ibv_ah_attr path = path_to_self();

    memset(path.grh.dgid.raw, 0, sizeof(path.grh.dgid.raw));
    path.grh.dgid.raw[0] = 0xff;
    path.grh.dgid.raw[1] = 0x0e;
    REPORT_OBJECT(verbs->create_ah(domain(), &path));
}

ROW(destroy_ah, "one")
{
    REPORT_INT(verbs->destroy_ah(handle_to_self()));
}

static struct ibv_send_wr *datagram(enum ibv_wr_opcode opcode, uint32_t length)
{
    struct ibv_send_wr *wr = request(opcode, &a, &b, length);

    wr->wr.ud.ah = handle_to_self();
    wr->wr.ud.remote_qpn = b.qp->qp_num;
    wr->wr.ud.remote_qkey = QKEY;
    return wr;
}

static void report_datagram(struct ibv_send_wr *wr)
{
    if (report_int(post(&a, wr)))
        return;
    report_completions(a.send_cq, 1);
}

#define DATAGRAM_ROW(asked, opcode, length)        \
    ROW(post_send, asked)                          \
    {                                              \
        make_pair(IBV_QPT_UD);                     \
        REQUIRE_INT(post_receive(&b, 8192));       \
        report_datagram(datagram(opcode, length)); \
        report_completions(b.recv_cq, 1);          \
    }

DATAGRAM_ROW("UD: SEND", IBV_WR_SEND, 8)
DATAGRAM_ROW("UD: SEND of no bytes", IBV_WR_SEND, 0)
DATAGRAM_ROW("UD: SEND_WITH_IMM", IBV_WR_SEND_WITH_IMM, 8)
DATAGRAM_ROW("UD: SEND of an MTU", IBV_WR_SEND, 4096)

ROW(post_send, "UD: RDMA_WRITE")
{
    make_pair(IBV_QPT_UD);
    report_datagram(request(IBV_WR_RDMA_WRITE, &a, &b, 8));
}

ROW(post_send, "UD: SEND of more than an MTU")
{
    make_pair(IBV_QPT_UD);
    report_datagram(datagram(IBV_WR_SEND, 5000));
}

ROW(post_send, "UD: another Q_Key")
{
    make_pair(IBV_QPT_UD);
    REQUIRE_INT(post_receive(&b, 8192));
    struct ibv_send_wr *wr = datagram(IBV_WR_SEND, 8);
    wr->wr.ud.remote_qkey = QKEY + 1;
    report_datagram(wr);
    report_no_completion(b.recv_cq);
}

ROW(post_send, "UD: a Q_Key with the highest bit: the sender's own")
{
    make_pair(IBV_QPT_UD);
    REQUIRE_INT(post_receive(&b, 8192));
    struct ibv_send_wr *wr = datagram(IBV_WR_SEND, 8);
    wr->wr.ud.remote_qkey = 1u << 31;
    report_datagram(wr);
    report_completions(b.recv_cq, 1);
}

ROW(post_send, "UD: without a receive")
{
    make_pair(IBV_QPT_UD);
    report_datagram(datagram(IBV_WR_SEND, 8));
    REQUIRE_INT(post_receive(&b, 8192));
    report_no_completion(b.recv_cq);
}

ROW(post_send, "UD: a receive too short for the message")
{
    make_pair(IBV_QPT_UD);
    REQUIRE_INT(post_receive(&b, 44));
    report_datagram(datagram(IBV_WR_SEND, 8));
    report_no_completion(b.recv_cq);
    report("%s", state_name(state_of(b.qp)));
}

ROW(post_send, "UD: a receive too short for the GRH")
{
    make_pair(IBV_QPT_UD);
    REQUIRE_INT(post_receive(&b, 20));
    report_datagram(datagram(IBV_WR_SEND, 0));
    report_no_completion(b.recv_cq);
    report("%s", state_name(state_of(b.qp)));
}

ROW(post_send, "UD: a receive with a bad key")
{
    make_pair(IBV_QPT_UD);
    b.mr->lkey += 0x500000;
    REQUIRE_INT(post_receive(&b, 8192));
    report_datagram(datagram(IBV_WR_SEND, 8));
    report_no_completion(b.recv_cq);
    report("%s", state_name(state_of(b.qp)));
}

ROW(post_send, "UD: a bad lkey")
{
    make_pair(IBV_QPT_UD);
    struct ibv_send_wr *wr = datagram(IBV_WR_SEND, 8);
    wr->sg_list->lkey += 0x500000;
    report_datagram(wr);
    report("%s", state_name(state_of(a.qp)));
}

ROW(post_send, "UD: to a number without a queue pair")
{
    make_pair(IBV_QPT_UD);
    struct ibv_send_wr *wr = datagram(IBV_WR_SEND, 8);
    wr->wr.ud.remote_qpn = 0xfffff0;
    report_datagram(wr);
}

ROW(post_send, "UD: to a queue pair in ERR")
{
    make_pair(IBV_QPT_UD);
    REQUIRE_INT(step(b.qp, IBV_QPS_ERR, 0));
    report_datagram(datagram(IBV_WR_SEND, 8));
}

ROW(post_send, "UD: to an RC queue pair")
{
    make_end(&a, IBV_QPT_UD);
    make_end(&b, IBV_QPT_RC);
    move_to_state(a.qp, IBV_QPS_RTS, 0);
    move_to_state(b.qp, IBV_QPS_RTS, a.qp->qp_num);
    REQUIRE_INT(post_receive(&b, 8192));
    report_datagram(datagram(IBV_WR_SEND, 8));
    report_no_completion(b.recv_cq);
}

ROW(post_send, "UD: an address handle of another protection domain")
{
    make_pair(IBV_QPT_UD);
    REQUIRE_INT(post_receive(&b, 8192));
    struct ibv_send_wr *wr = datagram(IBV_WR_SEND, 8);
    struct ibv_ah_attr path = path_to_self();
    struct ibv_pd *other = REQUIRE_OBJECT(verbs->alloc_pd(context));
    wr->wr.ud.ah = REQUIRE_OBJECT(verbs->create_ah(other, &path));
    report_datagram(wr);
    report_no_completion(b.recv_cq);
}

ROW(post_send, "UD: to itself")
{
    make_pair(IBV_QPT_UD);
    REQUIRE_INT(post_receive(&a, 8192));
    struct ibv_send_wr *wr = datagram(IBV_WR_SEND, 8);
    wr->wr.ud.remote_qpn = a.qp->qp_num;
    report_datagram(wr);
    report_completions(a.recv_cq, 1);
}

ROW(modify_qp, "UD: SQE after a bad lkey, then RTS")
{
    make_pair(IBV_QPT_UD);
    struct ibv_send_wr *wr = datagram(IBV_WR_SEND, 8);
    wr->sg_list->lkey += 0x500000;
    REQUIRE_INT(post(&a, wr));
    report_statuses(a.send_cq, 1);
    report("%s", state_name(state_of(a.qp)));
    report_int(step_as(a.qp, IBV_QPS_RTS, 0, link_attr, IBV_QP_STATE));
}
