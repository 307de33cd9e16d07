/* Shared receive queues. */
#include "probe.h"

static void report_srq(uint32_t max_wr, uint32_t max_sge)
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = max_wr, .max_sge = max_sge}};
    struct ibv_srq *srq = REPORT_OBJECT(verbs->create_srq(domain(), &attr));

    if (srq)
        report("%s", attr.attr.max_wr >= max_wr && attr.attr.max_sge >= max_sge ? "as asked" : "less");
}

ROW(create_srq, "16 receives of 4 entries")
{
    report_srq(16, 4);
}

ROW(create_srq, "no receives")
{
    report_srq(0, 1);
}

ROW(create_srq, "receives of no entries")
{
    report_srq(16, 0);
}

ROW(create_srq, "more receives than max_srq_wr")
{
    report_srq((uint32_t)device_attr().max_srq_wr + 1, 1);
}

ROW(create_srq, "more entries than max_srq_sge")
{
    report_srq(16, (uint32_t)device_attr().max_srq_sge + 1);
}

static int modify(struct ibv_srq *srq, uint32_t max_wr, uint32_t limit, int mask)
{
    struct ibv_srq_attr attr = {.max_wr = max_wr, .srq_limit = limit};

    errno = 0;
    return verbs->modify_srq(srq, &attr, mask);
}

ROW(modify_srq, "to more receives")
{
    struct ibv_srq *srq = shared_queue(4);
    struct ibv_srq_attr attr;

    report_int(modify(srq, 100, 0, IBV_SRQ_MAX_WR));
    REQUIRE_INT(verbs->query_srq(srq, &attr));
    report("%s", attr.max_wr >= 100 ? "as many" : "fewer");
}

ROW(modify_srq, "to fewer receives than are posted")
{
    struct ibv_srq *srq = shared_queue(16);

    for (int i = 0; i < 16; i++)
        REQUIRE_INT(post_shared(srq, 64));
    report_int(modify(srq, 4, 0, IBV_SRQ_MAX_WR));
}

ROW(modify_srq, "to no receives")
{
    report_int(modify(shared_queue(16), 0, 0, IBV_SRQ_MAX_WR));
}

ROW(modify_srq, "to more receives than max_srq_wr")
{
    report_int(modify(shared_queue(16), (uint32_t)device_attr().max_srq_wr + 1, 0, IBV_SRQ_MAX_WR));
}

ROW(modify_srq, "a limit")
{
    struct ibv_srq *srq = shared_queue(16);
    struct ibv_srq_attr attr;

    report_int(modify(srq, 0, 4, IBV_SRQ_LIMIT));
    REQUIRE_INT(verbs->query_srq(srq, &attr));
    report("limit %u", attr.srq_limit);
}

ROW(modify_srq, "a limit above its depth")
{
    report_int(modify(shared_queue(16), 0, 1000, IBV_SRQ_LIMIT));
}

ROW(modify_srq, "depth and limit at once")
{
    report_int(modify(shared_queue(16), 32, 4, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
}

ROW(modify_srq, "an unknown bit in the mask")
{
    report_int(modify(shared_queue(16), 0, 0, 1 << 15));
}

ROW(modify_srq, "an empty mask")
{
    report_int(modify(shared_queue(16), 0, 0, 0));
}

ROW(query_srq, "as created")
{
    struct ibv_srq_attr attr = {0};

    REPORT_INT(verbs->query_srq(shared_queue(16), &attr));
    report("%s", attr.max_wr >= 16 && attr.max_sge >= 4 ? "as asked" : "less");
    report("limit %u", attr.srq_limit);
}

ROW(destroy_srq, "without users")
{
    REPORT_INT(verbs->destroy_srq(shared_queue(16)));
}

ROW(destroy_srq, "with a queue pair")
{
    pair_srq = shared_queue(16);
    make_end(&a, IBV_QPT_RC);
    REPORT_INT(verbs->destroy_srq(pair_srq));
}

ROW(destroy_srq, "with posted receives")
{
    struct ibv_srq *srq = shared_queue(16);

    REQUIRE_INT(post_shared(srq, 64));
    REPORT_INT(verbs->destroy_srq(srq));
}

ROW(get_srq_num, "of a basic queue")
{
    uint32_t number;

    REPORT_INT(verbs_get_srq_num(shared_queue(16), &number));
}

ROW(create_srq_ex, "a basic queue")
{
    struct ibv_srq_init_attr_ex attr = {
        .attr = {.max_wr = 4, .max_sge = 1},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
        .srq_type = IBV_SRQT_BASIC,
        .pd = domain(),
    };

    REPORT_OBJECT(verbs_create_srq_ex(context, &attr));
}

ROW(create_srq_ex, "tag matching")
{
    struct ibv_srq_init_attr_ex attr = {
        .attr = {.max_wr = 4, .max_sge = 1},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
        .srq_type = IBV_SRQT_TM,
        .pd = domain(),
        .cq = queue(16),
        .tm_cap = {.max_num_tags = 4, .max_ops = 4},
    };

    REPORT_OBJECT(verbs_create_srq_ex(context, &attr));
}

ROW(create_srq_ex, "an XRC queue without an XRC domain")
{
    struct ibv_srq_init_attr_ex attr = {
        .attr = {.max_wr = 4, .max_sge = 1},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = domain(),
        .cq = queue(16),
    };

    REPORT_OBJECT(verbs_create_srq_ex(context, &attr));
}

/* ---- Receives --------------------------------------------------------------------------------------------- */

ROW(post_srq_recv, "one")
{
    REPORT_INT(post_shared(shared_queue(16), 64));
}

ROW(post_srq_recv, "more than its depth")
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq = REQUIRE_OBJECT(verbs->create_srq(domain(), &attr));

    for (uint32_t i = 0; i < attr.attr.max_wr; i++)
        REQUIRE_INT(post_shared(srq, 64));
    report_int(post_shared(srq, 64));
}

ROW(post_srq_recv, "more entries than it takes")
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq = REQUIRE_OBJECT(verbs->create_srq(domain(), &attr));
    struct ibv_sge sges[64] = {{0}};
    struct ibv_recv_wr wr = {.sg_list = sges, .num_sge = (int)attr.attr.max_sge + 1}, *bad;

    REPORT_INT(verbs_post_srq_recv(srq, &wr, &bad));
}

ROW(post_srq_recv, "and a message for a queue pair")
{
    pair_srq = shared_queue(16);
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post_shared(pair_srq, 64));
    REPORT_INT(post(&a, request(IBV_WR_SEND_WITH_IMM, &a, &b, 8)));
    report_completions(a.send_cq, 1);
    report_completions(b.recv_cq, 1);
}

ROW(post_srq_recv, "too short for the message")
{
    pair_srq = shared_queue(16);
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post_shared(pair_srq, 4));
    REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
    report_statuses(b.recv_cq, 1);
}

ROW(post_srq_recv, "by an invalid key")
{
    pair_srq = shared_queue(16);
    make_pair(IBV_QPT_RC);
    struct ibv_sge sge = {.addr = (uintptr_t)b.memory, .length = 64, .lkey = b.mr->lkey + 0x500000};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    REPORT_INT(verbs_post_srq_recv(pair_srq, &wr, &bad));
    REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
    report_statuses(b.recv_cq, 1);
}

ROW(post_srq_recv, "none, and a message for a queue pair")
{
    pair_srq = shared_queue(16);
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
}

ROW(post_recv, "on a queue pair with a shared receive queue")
{
    pair_srq = shared_queue(16);
    make_pair(IBV_QPT_RC);
    report_int(post_receive(&b, 64));
}

ROW(get_async_event, "the limit of a shared receive queue is reached")
{
    struct ibv_srq_attr attr = {.srq_limit = 2};

    pair_srq = shared_queue(16);
    make_pair(IBV_QPT_RC);
    for (int i = 0; i < 3; i++)
        REQUIRE_INT(post_shared(pair_srq, 64));
    REQUIRE_INT(verbs->modify_srq(pair_srq, &attr, IBV_SRQ_LIMIT));
    for (int i = 0; i < 2; i++) {
        REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
        require_success(a.send_cq, 1);
    }
    report_event();
    REQUIRE_INT(verbs->query_srq(pair_srq, &attr));
    report("limit %u", attr.srq_limit);
}

ROW(get_async_event, "setting a limit above the number of posted receives")
{
    struct ibv_srq_attr attr = {.srq_limit = 8};
    struct ibv_srq *srq = shared_queue(16);

    REQUIRE_INT(post_shared(srq, 64));
    REPORT_INT(verbs->modify_srq(srq, &attr, IBV_SRQ_LIMIT));
    report_event();
}

ROW(get_async_event, "a queue pair with a shared receive queue goes to ERR")
{
    pair_srq = shared_queue(16);
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(step(b.qp, IBV_QPS_ERR, 0));
    report_event();
}
