/* Tests of extended reliable connections: targets without receives, where each request names the shared queue to
 * use. */
#include "support.h"
#include "support_async.h"
#include "support_srq.h"
#include "support_types.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

struct net {
    struct home home;
    struct ibv_xrcd *xrcd;
    struct ibv_cq *cq; /* of receives */
    struct ibv_srq *srq;
    uint32_t number; /* of the shared queue */
    struct end from, to;
};

static uint32_t number_of(struct ibv_srq *srq)
{
    uint32_t number = 0;

    CHECK_EQ(verbs_get_srq_num(srq, &number), 0);
    return number;
}

static void connect_ends(struct end *from, struct end *to, const struct ibv_qp_attr *link)
{
    type_connect(from->qp, link, to->qp->qp_num);
    type_connect(to->qp, link, from->qp->qp_num);
}

static void net_open_with(struct net *net, const struct ibv_qp_attr *link)
{
    memset(net, 0, sizeof(*net));
    home_open(&net->home);
    async_nonblocking(net->home.context);
    net->xrcd = make_xrcd(net->home.context);
    net->cq = home_cq(&net->home, 64, NULL);
    net->srq = try_xrc_srq(&net->home, net->xrcd, net->cq, 16);
    REQUIRE(net->srq != NULL);
    net->number = number_of(net->srq);
    TYPED_OPEN(&net->from, &net->home, .type = IBV_QPT_XRC_SEND);
    TYPED_OPEN(&net->to, &net->home, .type = IBV_QPT_XRC_RECV, .xrcd = net->xrcd);
    connect_ends(&net->from, &net->to, link);
}

static void net_open(struct net *net)
{
    net_open_with(net, &default_link);
}

static void net_close(struct net *net)
{
    end_close(&net->from);
    end_close(&net->to);
    if (net->srq)
        CHECK_EQ(soft_verbs.destroy_srq(net->srq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(net->cq), 0);
    CHECK_EQ(verbs_close_xrcd(net->xrcd), 0);
    home_close(&net->home);
}

static int send_to(struct end *from, uint32_t srq, enum ibv_wr_opcode opcode, uint64_t wr_id, uint32_t length)
{
    struct ibv_sge sge = span(from, 0, length);
    struct ibv_send_wr wr = request(opcode, wr_id, &sge, 1);

    wr.imm_data = 0x55aa;
    wr.qp_type.xrc.remote_srqn = srq;
    return post(from->qp, &wr);
}

/* ---- What arrives ------------------------------------------------------------------------------------------ */

static void sends(void)
{
    struct ibv_wc wc;
    struct net net;
    int i;

    net_open(&net);
    for (i = 0; i < 20; i++) { /* around the ring */
        bool immediate = i % 2;

        memset(net.from.memory, i + 1, 3000);
        CHECK_EQ(srq_post_room(net.srq, &net.to, 10, 0, 4096), 0);
        CHECK_EQ(send_to(&net.from, net.number, immediate ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, 1, 3000), 0);
        EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
        wc = EXPECT(net.cq, 10, IBV_WC_SUCCESS);
        CHECK_EQ(wc.byte_len, 3000);
        CHECK_EQ(wc.qp_num, net.to.qp->qp_num);
        CHECK_EQ(wc.opcode, IBV_WC_RECV);
        CHECK_EQ(wc.wc_flags, immediate ? IBV_WC_WITH_IMM : 0);
        if (immediate)
            CHECK_EQ(wc.imm_data, 0x55aa);
        CHECK(!memcmp(net.from.memory, net.to.memory, 3000));
    }
    net_close(&net);
}

/* Keys are checked against the shared queue's domain. */
static void one_sided(void)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    struct ibv_mr *mr;
    struct ibv_pd *pd;
    struct net net;

    net_open(&net);
    strcpy((char *)net.from.memory, "write");
    sge = span(&net.from, 0, 6);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &net.to, 0);
    wr.qp_type.xrc.remote_srqn = net.number;
    CHECK_EQ(post(net.from.qp, &wr), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(!strcmp((char *)net.to.memory, "write"));

    CHECK_EQ(srq_post_room(net.srq, &net.to, 10, 100, 8), 0);
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    wr.imm_data = 7;
    CHECK_EQ(post(net.from.qp, &wr), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(EXPECT(net.cq, 10, IBV_WC_SUCCESS).imm_data, 7);

    strcpy((char *)net.to.memory, "read!");
    wr.opcode = IBV_WR_RDMA_READ;
    CHECK_EQ(post(net.from.qp, &wr), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(!strcmp((char *)net.from.memory, "read!"));

    memset(net.to.memory, 0, 8);
    sge = span(&net.from, 0, 8);
    wr = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &sge, 1, &net.to, 0);
    wr.wr.atomic.compare_add = 9;
    wr.qp_type.xrc.remote_srqn = net.number;
    CHECK_EQ(post(net.from.qp, &wr), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(net.to.memory[0], 9);

    pd = soft_verbs.alloc_pd(net.home.context);
    mr = soft_verbs.reg_mr(pd, net.to.memory, 64, ACCESS_ALL);
    REQUIRE(mr != NULL);
    sge = span(&net.from, 0, 8);
    wr = request_to(IBV_WR_RDMA_WRITE, 2, &sge, 1, &net.to, 0);
    wr.wr.rdma.rkey = mr->rkey;
    wr.qp_type.xrc.remote_srqn = net.number;
    CHECK_EQ(post(net.from.qp, &wr), 0);
    EXPECT(net.from.send_cq, 2, IBV_WC_REM_ACCESS_ERR);
    CHECK(wait_state(net.to.qp, IBV_QPS_ERR));
    EXPECT_ASYNC(net.home.context, IBV_EVENT_QP_ACCESS_ERR, net.to.qp);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
    net_close(&net);
}

/* Two connections take from one queue, and completions name the connection of each message. */
static void two_targets(void)
{
    struct end from, to;
    struct ibv_wc wc;
    struct net net;
    int i;

    net_open(&net);
    TYPED_OPEN(&from, &net.home, .type = IBV_QPT_XRC_SEND);
    TYPED_OPEN(&to, &net.home, .type = IBV_QPT_XRC_RECV, .xrcd = net.xrcd);
    connect_ends(&from, &to, &default_link);
    for (i = 0; i < 10; i++) {
        struct end *sender = i % 2 ? &from : &net.from, *target = i % 2 ? &to : &net.to;

        CHECK_EQ(srq_post_room(net.srq, &net.to, (uint64_t)i, 0, 8), 0);
        CHECK_EQ(send_to(sender, net.number, IBV_WR_SEND, 1, 8), 0);
        EXPECT(sender->send_cq, 1, IBV_WC_SUCCESS);
        wc = EXPECT(net.cq, i, IBV_WC_SUCCESS);
        CHECK_EQ(wc.qp_num, target->qp->qp_num);
    }
    end_close(&from);
    end_close(&to);
    net_close(&net);
}

/* An initiator chooses with each request among all queues of the target's domain. */
static void two_queues(void)
{
    struct ibv_srq *second;
    struct net net;

    net_open(&net);
    second = try_xrc_srq(&net.home, net.xrcd, net.cq, 4);
    REQUIRE(second != NULL);
    CHECK_EQ(srq_post_room(net.srq, &net.to, 10, 0, 8), 0);
    CHECK_EQ(srq_post_room(second, &net.to, 20, 0, 8), 0);
    CHECK_EQ(send_to(&net.from, number_of(second), IBV_WR_SEND, 1, 8), 0);
    EXPECT(net.cq, 20, IBV_WC_SUCCESS);
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 2, 8), 0);
    EXPECT(net.cq, 10, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.destroy_srq(second), 0);
    net_close(&net);
}

/* The sender retries while the queue is empty. */
static void not_ready(void)
{
    struct ibv_qp_attr link = default_link;
    struct net net;

    net_open(&net);
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 1, 8), 0);
    EXPECT_NOTHING(net.from.send_cq);
    CHECK_EQ(srq_post_room(net.srq, &net.to, 10, 0, 8), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(net.cq, 10, IBV_WC_SUCCESS);
    net_close(&net);

    link.rnr_retry = 2;
    net_open_with(&net, &link);
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 1, 8), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_RNR_RETRY_EXC_ERR);
    CHECK_EQ(qp_state(net.to.qp), IBV_QPS_RTS); /* it is the sender's error */
    net_close(&net);
}

/* ---- What does not fit ------------------------------------------------------------------------------------- */

enum misfit { NO_SUCH, OTHER_DOMAIN, BASIC, GONE, MISFITS };

static void check_misfit(enum misfit misfit)
{
    struct ibv_xrcd *other;
    struct ibv_srq *srq = NULL;
    struct net net;
    uint32_t number = 0xfffff;

    net_open(&net);
    other = make_xrcd(net.home.context);
    if (misfit == OTHER_DOMAIN || misfit == GONE) {
        srq = try_xrc_srq(&net.home, misfit == GONE ? net.xrcd : other, net.cq, 4);
        REQUIRE(srq != NULL);
        number = number_of(srq);
    }
    if (misfit == BASIC) {
        srq = make_srq(&net.home, 4);
        CHECK_EQ(verbs_get_srq_num(srq, &number), EINVAL);
        number = srq->handle;
    }
    if (misfit == GONE) {
        CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
        srq = NULL;
    }
    if (srq)
        CHECK_EQ(srq_post_room(srq, &net.to, 20, 0, 8), 0);
    CHECK_EQ(send_to(&net.from, number, IBV_WR_SEND, 1, 8), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_REM_INV_REQ_ERR);
    CHECK(wait_state(net.to.qp, IBV_QPS_ERR));
    EXPECT_ASYNC(net.home.context, IBV_EVENT_QP_REQ_ERR, net.to.qp);
    EXPECT_NO_ASYNC(net.home.context);
    EXPECT_EMPTY(net.cq);
    if (srq)
        CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(verbs_close_xrcd(other), 0);
    net_close(&net);
}

static void mismatched_types(void)
{
    int misfit;

    for (misfit = 0; misfit < MISFITS; misfit++)
        check_misfit((enum misfit)misfit);
}

/* Each type has only its own queues. */
static void no_such_queue(void)
{
    struct ibv_recv_wr recv = {.wr_id = 1}, *bad;
    struct net net;

    net_open(&net);
    CHECK_EQ(verbs_post_recv(net.from.qp, &recv, &bad), EINVAL);
    CHECK_EQ(verbs_post_recv(net.to.qp, &recv, &bad), EINVAL);
    CHECK_EQ(send_to(&net.to, net.number, IBV_WR_SEND, 1, 0), EINVAL);
    CHECK(!net.to.qp->pd && !net.to.qp->send_cq && !net.to.qp->recv_cq && !net.from.qp->recv_cq);
    net_close(&net);
}

/* A receive that fails breaks its target, not the shared queue. */
static void receive_error(void)
{
    struct ibv_recv_wr recv = {.wr_id = 10, .num_sge = 1}, *bad;
    struct ibv_sge sge;
    struct net net;

    net_open(&net);
    sge = span(&net.to, 0, 8);
    sge.lkey ^= 1;
    recv.sg_list = &sge;
    CHECK_EQ(verbs_post_srq_recv(net.srq, &recv, &bad), 0);
    CHECK_EQ(srq_post_room(net.srq, &net.to, 11, 0, 4), 0);
    CHECK_EQ(srq_post_room(net.srq, &net.to, 12, 0, 8), 0);
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 1, 8), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_REM_OP_ERR);
    EXPECT(net.cq, 10, IBV_WC_LOC_PROT_ERR);
    EXPECT_NOTHING(net.cq);
    CHECK_EQ(qp_to(net.from.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(qp_to(net.to.qp, IBV_QPS_RESET), 0);
    connect_ends(&net.from, &net.to, &default_link);
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 2, 8), 0);
    EXPECT(net.from.send_cq, 2, IBV_WC_REM_INV_REQ_ERR);
    EXPECT(net.cq, 11, IBV_WC_LOC_LEN_ERR);
    CHECK(wait_state(net.to.qp, IBV_QPS_ERR));
    net_close(&net);
}

/* ---- Events ------------------------------------------------------------------------------------------------ */

/* A target often stays in RTR: its first message raises COMM_EST, once. */
static void established(void)
{
    struct net net;
    uint64_t i;

    net_open(&net);
    CHECK_EQ(qp_to(net.from.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(qp_to(net.to.qp, IBV_QPS_RESET), 0);
    type_connect(net.from.qp, &default_link, net.to.qp->qp_num);
    type_raise(net.to.qp, IBV_QPS_RTR, &default_link, net.from.qp->qp_num);
    EXPECT_NO_ASYNC(net.home.context);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(srq_post_room(net.srq, &net.to, 10, 0, 8), 0);
        CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, i, 8), 0);
        EXPECT(net.from.send_cq, i, IBV_WC_SUCCESS);
        EXPECT(net.cq, 10, IBV_WC_SUCCESS);
        if (i == 0)
            EXPECT_ASYNC(net.home.context, IBV_EVENT_COMM_EST, net.to.qp);
    }
    settle(net.home.context);
    EXPECT_NO_ASYNC(net.home.context);
    net_close(&net);
}

/* Receives taken by messages of all targets count towards the queue's limit. */
static void limit(void)
{
    struct net net;
    uint64_t i;

    net_open(&net);
    for (i = 0; i < 3; i++)
        CHECK_EQ(srq_post_room(net.srq, &net.to, 10 + i, 0, 8), 0);
    CHECK_EQ(srq_arm(net.srq, 2), 0);
    for (i = 0; i < 2; i++) {
        EXPECT_NO_ASYNC(net.home.context);
        CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, i, 8), 0);
        EXPECT(net.cq, 10 + i, IBV_WC_SUCCESS);
        EXPECT(net.from.send_cq, i, IBV_WC_SUCCESS);
    }
    EXPECT_ASYNC(net.home.context, IBV_EVENT_SRQ_LIMIT_REACHED, net.srq);
    CHECK_EQ(srq_resize(net.srq, 64), 0); /* with a receive in it */
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 2, 8), 0);
    EXPECT(net.cq, 12, IBV_WC_SUCCESS);
    EXPECT(net.from.send_cq, 2, IBV_WC_SUCCESS);
    EXPECT_NO_ASYNC(net.home.context);
    net_close(&net);
}

static void drained(void)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
    struct ibv_qp *qps[2];
    struct net net;
    int i;

    net_open(&net);
    qps[0] = net.from.qp;
    qps[1] = net.to.qp; /* it has nothing to drain */
    for (i = 0; i < 2; i++) {
        CHECK_EQ(soft_verbs.modify_qp(qps[i], &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
        EXPECT_ASYNC(net.home.context, IBV_EVENT_SQ_DRAINED, qps[i]);
        CHECK_EQ(qp_to(qps[i], IBV_QPS_RTS), 0);
    }
    net_close(&net);
}

/* If the shared queue's completion queue is full, the target of the message breaks; so does the next one. */
static void no_room(void)
{
    struct end from, to;
    struct net net;
    uint64_t i;

    net_open(&net);
    TYPED_OPEN(&from, &net.home, .type = IBV_QPT_XRC_SEND);
    TYPED_OPEN(&to, &net.home, .type = IBV_QPT_XRC_RECV, .xrcd = net.xrcd);
    connect_ends(&from, &to, &default_link);
    CHECK_EQ(soft_verbs.resize_cq(net.cq, 1), 0);
    for (i = 0; i < 3; i++)
        CHECK_EQ(srq_post_room(net.srq, &net.to, 10 + i, 0, 8), 0);
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 1, 8), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 2, 8), 0);
    EXPECT(net.from.send_cq, 2, IBV_WC_REM_OP_ERR);
    CHECK(wait_state(net.to.qp, IBV_QPS_ERR));
    EXPECT_ASYNC(net.home.context, IBV_EVENT_CQ_ERR, net.cq);
    EXPECT_ASYNC(net.home.context, IBV_EVENT_QP_FATAL, net.to.qp);
    CHECK_EQ(qp_state(to.qp), IBV_QPS_RTS);
    CHECK_EQ(send_to(&from, net.number, IBV_WR_SEND, 3, 8), 0);
    EXPECT(from.send_cq, 3, IBV_WC_REM_OP_ERR);
    CHECK(wait_state(to.qp, IBV_QPS_ERR));
    EXPECT_ASYNC(net.home.context, IBV_EVENT_QP_FATAL, to.qp);
    EXPECT(net.cq, 10, IBV_WC_SUCCESS);
    EXPECT_NO_ASYNC(net.home.context);
    end_close(&from);
    end_close(&to);
    net_close(&net);
}

/* ---- Lives ------------------------------------------------------------------------------------------------- */

static void references_between_objects(void)
{
    struct net net;

    net_open(&net);
    CHECK_EQ(verbs_close_xrcd(net.xrcd), EBUSY);
    CHECK_EQ(soft_verbs.destroy_cq(net.cq), EBUSY);
    CHECK_EQ(soft_verbs.destroy_qp(net.to.qp), 0);
    net.to.qp = NULL;
    CHECK_EQ(verbs_close_xrcd(net.xrcd), EBUSY); /* the shared queue still */
    CHECK_EQ(soft_verbs.destroy_srq(net.srq), 0);
    net.srq = NULL;
    net_close(&net);
}

/* Completions of a shared queue outlive the target, and are removed with the queue. */
static void completions_stay(void)
{
    struct net net;
    int i;

    net_open(&net);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(srq_post_room(net.srq, &net.to, 10 + (uint64_t)i, 0, 8), 0);
        CHECK_EQ(send_to(&net.from, net.number, IBV_WR_SEND, 1, 8), 0);
        EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    }
    CHECK_EQ(soft_verbs.destroy_qp(net.to.qp), 0);
    net.to.qp = NULL;
    EXPECT(net.cq, 10, IBV_WC_SUCCESS);
    EXPECT(net.cq, 11, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.destroy_srq(net.srq), 0);
    net.srq = NULL;
    EXPECT_EMPTY(net.cq);
    net_close(&net);
}

static struct ibv_xrcd *open_by(struct ibv_context *context, int fd)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        .fd = fd,
        .oflags = O_CREAT,
    };
    struct ibv_xrcd *xrcd = verbs_open_xrcd(context, &attr);

    REQUIRE(xrcd != NULL);
    return xrcd;
}

/* One domain, found by its inode: the shared queue in one context, target and initiator in the other. */
static void across_contexts(void)
{
    int fd = memfd_create("domain", MFD_CLOEXEC);
    struct ibv_xrcd *mine, *other;
    struct ibv_srq *srq;
    struct home far;
    struct end room, target;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    struct net net;

    REQUIRE(fd >= 0);
    net_open(&net);
    home_open(&far);
    mine = open_by(net.home.context, fd);
    other = open_by(far.context, fd);
    cq = home_cq(&far, 8, NULL);
    srq = try_xrc_srq(&far, other, cq, 4);
    REQUIRE(srq != NULL);
    TYPED_OPEN(&room, &far, .type = IBV_QPT_RC);
    TYPED_OPEN(&target, &net.home, .type = IBV_QPT_XRC_RECV, .xrcd = mine);
    CHECK_EQ(qp_to(net.from.qp, IBV_QPS_RESET), 0);
    connect_ends(&net.from, &target, &default_link);
    CHECK_EQ(srq_post_room(srq, &room, 10, 0, 8), 0);
    memcpy(net.from.memory, "far away", 8);
    CHECK_EQ(send_to(&net.from, number_of(srq), IBV_WR_SEND, 1, 8), 0);
    EXPECT(net.from.send_cq, 1, IBV_WC_SUCCESS);
    wc = EXPECT(cq, 10, IBV_WC_SUCCESS);
    CHECK_EQ(wc.qp_num, target.qp->qp_num);
    CHECK(!memcmp(room.memory, "far away", 8));
    end_close(&target);
    CHECK_EQ(verbs_close_xrcd(mine), 0);
    CHECK_EQ(verbs_close_xrcd(other), EBUSY);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(verbs_close_xrcd(other), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    end_close(&room);
    home_close(&far);
    net_close(&net);
    close(fd);
}

/* Objects on which such queue pairs cannot be created. */
static void wrong_parts(void)
{
    struct ibv_qp_init_attr_ex attr;
    struct net net, far;

    net_open(&net);
    net_open(&far);
    attr = (struct ibv_qp_init_attr_ex){.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_PD};
    attr.pd = net.home.pd;
    CHECK_REFUSED(verbs_create_qp_ex(net.home.context, &attr), EINVAL);
    attr.comp_mask = IBV_QP_INIT_ATTR_XRCD;
    attr.xrcd = far.xrcd;
    CHECK_REFUSED(verbs_create_qp_ex(net.home.context, &attr), EINVAL);
    attr.xrcd = NULL;
    CHECK_REFUSED(verbs_create_qp_ex(net.home.context, &attr), EINVAL);
    attr.xrcd = net.xrcd;
    attr.srq = net.srq;
    CHECK_REFUSED(verbs_create_qp_ex(net.home.context, &attr), EINVAL);
    attr = (struct ibv_qp_init_attr_ex){.qp_type = IBV_QPT_XRC_SEND, .comp_mask = IBV_QP_INIT_ATTR_PD};
    attr.pd = net.home.pd;
    CHECK_REFUSED(verbs_create_qp_ex(net.home.context, &attr), EINVAL); /* no queue for its completions */
    attr.send_cq = net.cq;
    attr.srq = net.srq;
    CHECK_REFUSED(verbs_create_qp_ex(net.home.context, &attr), EINVAL);
    attr = (struct ibv_qp_init_attr_ex){.qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD};
    attr.pd = net.home.pd;
    attr.send_cq = attr.recv_cq = net.cq;
    attr.srq = net.srq; /* only a basic one */
    CHECK_REFUSED(verbs_create_qp_ex(net.home.context, &attr), EINVAL);
    net_close(&far);
    net_close(&net);
}

CHECK_MAIN(CASE(sends), CASE(one_sided), CASE(two_targets), CASE(two_queues), CASE(not_ready), CASE(mismatched_types),
           CASE(no_such_queue), CASE(receive_error), CASE(established), CASE(limit), CASE(drained), CASE(no_room),
           CASE(references_between_objects), CASE(completions_stay), CASE(across_contexts), CASE(wrong_parts))
