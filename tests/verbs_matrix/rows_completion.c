/* Completion channels and queues. */
#include "probe.h"

#include <fcntl.h>
#include <limits.h>

static struct ibv_comp_channel *channel(void)
{
    static struct ibv_comp_channel *made;

    if (!made)
        made = REQUIRE_OBJECT(verbs->create_comp_channel(context));
    return made;
}

/* A pair whose first end completes its sends in a queue with a channel. */
static void make_watched_pair(void)
{
    make_pair(IBV_QPT_RC);
    struct ibv_qp_init_attr attr = qp_attr(IBV_QPT_RC);
    REQUIRE_INT(verbs->destroy_qp(a.qp));
    REQUIRE_INT(verbs->destroy_qp(b.qp));
    attr.recv_cq = attr.send_cq = a.send_cq = a.recv_cq =
        REQUIRE_OBJECT(verbs->create_cq(context, 16, NULL, channel(), 0));
    a.qp = REQUIRE_OBJECT(verbs->create_qp(domain(), &attr));
    attr.recv_cq = b.recv_cq;
    attr.send_cq = b.send_cq;
    b.qp = REQUIRE_OBJECT(verbs->create_qp(domain(), &attr));
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    move_to_state(b.qp, IBV_QPS_RTS, a.qp->qp_num);
}

ROW(create_comp_channel, "one")
{
    REPORT_OBJECT(verbs->create_comp_channel(context));
}

ROW(destroy_comp_channel, "without users")
{
    REPORT_INT(verbs->destroy_comp_channel(channel()));
}

ROW(destroy_comp_channel, "with a completion queue")
{
    REQUIRE_OBJECT(verbs->create_cq(context, 16, NULL, channel(), 0));
    REPORT_INT(verbs->destroy_comp_channel(channel()));
}

ROW(get_cq_event, "when there is none, without blocking")
{
    struct ibv_cq *cq;
    void *cq_context;

    fcntl(channel()->fd, F_SETFL, O_NONBLOCK);
    REPORT_INT(verbs->get_cq_event(channel(), &cq, &cq_context));
}

ROW(get_cq_event, "of a queue armed before its completion")
{
    make_watched_pair();
    REQUIRE_INT(verbs_req_notify_cq(a.send_cq, 0));
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_cq_event(channel());
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_cq_event(channel());
}

ROW(ack_cq_events, "then the queue is destroyed")
{
    make_watched_pair();
    REQUIRE_INT(verbs_req_notify_cq(a.send_cq, 0));
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_cq_event(channel());
    REPORT_INT(verbs->destroy_qp(a.qp));
    REPORT_INT(verbs->destroy_cq(a.send_cq));
}

#define CREATE_ROW(asked, entries, vector)                                          \
    ROW(create_cq, asked)                                                           \
    {                                                                               \
        int max = device_attr().max_cqe;                                            \
        struct ibv_cq *cq;                                                          \
                                                                                    \
        (void)max;                                                                  \
        cq = REPORT_OBJECT(verbs->create_cq(context, entries, NULL, NULL, vector)); \
        if (cq && cq->cqe < (entries))                                              \
            report("fewer entries");                                                \
    }

CREATE_ROW("one entry", 1, 0)
CREATE_ROW("no entries", 0, 0)
CREATE_ROW("a negative number of entries", -1, 0)
CREATE_ROW("more entries than max_cqe", max + 1, 0)
CREATE_ROW("a negative completion vector", 16, -1)
CREATE_ROW("a completion vector beyond the last", 16, context->num_comp_vectors)

static struct ibv_cq_init_attr_ex attr_ex(uint64_t wc_flags)
{
    return (struct ibv_cq_init_attr_ex){.cqe = 16, .wc_flags = wc_flags};
}

ROW(create_cq_ex, "the standard fields")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_STANDARD_FLAGS);

    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "timestamps")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);

    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "timestamps of the wall clock")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);

    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "tag matching")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_EX_WITH_TM_INFO);

    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "an unknown field")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(1ull << 40);

    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "SINGLE_THREADED")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_STANDARD_FLAGS);

    attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "IGNORE_OVERRUN")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_STANDARD_FLAGS);

    attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attr.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "an unknown bit in comp_mask")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_STANDARD_FLAGS);

    attr.comp_mask = 1u << 31;
    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

ROW(create_cq_ex, "no entries")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_STANDARD_FLAGS);

    attr.cqe = 0;
    REPORT_OBJECT(verbs_create_cq_ex(context, &attr));
}

/* ---- Polling ---------------------------------------------------------------------------------------------- */

ROW(poll_cq, "an empty queue")
{
    struct ibv_wc wc;

    report("%d", verbs_poll_cq(queue(16), 1, &wc));
}

ROW(poll_cq, "zero of the available completions")
{
    struct ibv_wc wc;

    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(100);
    report("%d", verbs_poll_cq(a.send_cq, 0, &wc));
    report_statuses(a.send_cq, 1);
}

ROW(poll_cq, "more completions than available")
{
    struct ibv_wc wcs[8];

    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(100);
    report("%d", verbs_poll_cq(a.send_cq, 8, wcs));
}

static struct ibv_cq_ex *make_extended_pair(void)
{
    struct ibv_cq_init_attr_ex wanted = attr_ex(IBV_WC_STANDARD_FLAGS);
    struct ibv_cq_ex *cq = REQUIRE_OBJECT(verbs_create_cq_ex(context, &wanted));

    make_pair(IBV_QPT_RC);
    struct ibv_qp_init_attr attr = qp_attr(IBV_QPT_RC);
    attr.send_cq = a.send_cq = (struct ibv_cq *)(void *)cq;
    REQUIRE_INT(verbs->destroy_qp(a.qp));
    a.qp = REQUIRE_OBJECT(verbs->create_qp(domain(), &attr));
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    REQUIRE_INT(step(b.qp, IBV_QPS_RESET, 0));
    move_to_state(b.qp, IBV_QPS_RTS, a.qp->qp_num);
    return cq;
}

ROW(start_poll, "an empty queue")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_STANDARD_FLAGS);
    struct ibv_cq_ex *cq = REQUIRE_OBJECT(verbs_create_cq_ex(context, &attr));
    struct ibv_poll_cq_attr poll = {0};

    REPORT_INT(cq->start_poll(cq, &poll));
}

ROW(start_poll, "an unknown bit in comp_mask")
{
    struct ibv_cq_init_attr_ex attr = attr_ex(IBV_WC_STANDARD_FLAGS);
    struct ibv_cq_ex *cq = REQUIRE_OBJECT(verbs_create_cq_ex(context, &attr));
    struct ibv_poll_cq_attr poll = {.comp_mask = 1u << 31};

    REPORT_INT(cq->start_poll(cq, &poll));
}

ROW(start_poll, "two completions, and the end of them")
{
    struct ibv_cq_ex *cq = make_extended_pair();
    struct ibv_poll_cq_attr poll = {0};

    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_READ, &a, &b, 8)));
    wait_until_idle(100);
    REPORT_INT(cq->start_poll(cq, &poll));
    report("%s wr_id %d opcode %d", status_name(cq->status), (int)cq->wr_id, (int)cq->read_opcode(cq));
    REPORT_INT(cq->next_poll(cq));
    report("%s wr_id %d opcode %d", status_name(cq->status), (int)cq->wr_id, (int)cq->read_opcode(cq));
    REPORT_INT(cq->next_poll(cq));
    cq->end_poll(cq);
}

ROW(start_poll, "again after a session")
{
    struct ibv_cq_ex *cq = make_extended_pair();
    struct ibv_poll_cq_attr poll = {0};

    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(100);
    REPORT_INT(cq->start_poll(cq, &poll));
    cq->end_poll(cq);
    REPORT_INT(cq->start_poll(cq, &poll));
}

/* ---- Resizing, moderation, notification ------------------------------------------------------------------- */

ROW(resize_cq, "to more entries")
{
    struct ibv_cq *cq = queue(16);

    REPORT_INT(verbs->resize_cq(cq, 100));
    report("%s", cq->cqe >= 100 ? "as many" : "fewer");
}

ROW(resize_cq, "to fewer entries")
{
    struct ibv_cq *cq = queue(100);

    REPORT_INT(verbs->resize_cq(cq, 10));
    report("%s", cq->cqe >= 10 && cq->cqe < 100 ? "fewer than before" : "as many as before");
}

ROW(resize_cq, "to none")
{
    REPORT_INT(verbs->resize_cq(queue(16), 0));
}

ROW(resize_cq, "to more than max_cqe")
{
    int max = device_attr().max_cqe;

    REPORT_INT(verbs->resize_cq(queue(16), max + 1));
}

ROW(resize_cq, "to fewer entries than it holds; they survive")
{
    make_pair(IBV_QPT_RC);
    for (int i = 0; i < 8; i++)
        REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(200);
    REPORT_INT(verbs->resize_cq(a.send_cq, 1));
    struct ibv_wc wcs[16];
    report("%d", verbs_poll_cq(a.send_cq, 16, wcs));
}

ROW(modify_cq, "moderation")
{
    struct ibv_modify_cq_attr attr = {.attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = {.cq_count = 4, .cq_period = 100}};

    REPORT_INT(verbs_modify_cq(queue(16), &attr));
}

ROW(modify_cq, "an unknown attribute")
{
    struct ibv_modify_cq_attr attr = {.attr_mask = 1u << 31};

    REPORT_INT(verbs_modify_cq(queue(16), &attr));
}

ROW(req_notify_cq, "of a queue without a channel")
{
    REPORT_INT(verbs_req_notify_cq(queue(16), 0));
}

ROW(req_notify_cq, "with a completion there already")
{
    make_watched_pair();
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(100);
    REPORT_INT(verbs_req_notify_cq(a.send_cq, 0));
    report_cq_event(channel());
}

ROW(req_notify_cq, "solicited only: a plain receive, a solicited one")
{
    make_watched_pair();
    struct ibv_send_wr *wr;
    REPORT_INT(verbs_req_notify_cq(a.recv_cq, 1));
    for (int i = 0; i < 2; i++) {
        REQUIRE_INT(post_receive(&a, 64));
        wr = request(IBV_WR_SEND, &b, &a, 8);
        wr->send_flags |= i ? IBV_SEND_SOLICITED : 0;
        REQUIRE_INT(post(&b, wr));
        report_cq_event(channel());
    }
}

ROW(req_notify_cq, "solicited only: a completion with an error")
{
    make_watched_pair();
    REPORT_INT(verbs_req_notify_cq(a.send_cq, 1));
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->wr.rdma.rkey += 0x500000;
    REQUIRE_INT(post(&a, wr));
    report_cq_event(channel());
}

ROW(destroy_cq, "without users")
{
    REPORT_INT(verbs->destroy_cq(queue(16)));
}

ROW(destroy_cq, "with a queue pair")
{
    make_end(&a, IBV_QPT_RC);
    REPORT_INT(verbs->destroy_cq(a.send_cq));
}

ROW(destroy_cq, "with completions in it")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(100);
    REQUIRE_INT(verbs->destroy_qp(a.qp));
    REPORT_INT(verbs->destroy_cq(a.send_cq));
}

ROW(poll_cq, "completions of a destroyed queue pair")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(100);
    REQUIRE_INT(verbs->destroy_qp(a.qp));
    report_no_completion(a.send_cq);
}

ROW(poll_cq, "after more completions than the queue holds")
{
    struct ibv_wc wcs[64];
    int found, total = 0;

    pair_attr.cap.max_send_wr = 256;
    make_end(&a, IBV_QPT_RC);
    make_end(&b, IBV_QPT_RC);
    struct ibv_qp_init_attr attr = qp_attr(IBV_QPT_RC);
    REQUIRE_INT(verbs->destroy_qp(a.qp));
    attr.send_cq = a.send_cq = queue(4);
    a.qp = REQUIRE_OBJECT(verbs->create_qp(domain(), &attr));
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    move_to_state(b.qp, IBV_QPS_RTS, a.qp->qp_num);
    for (int i = 0; i < 64; i++)
        post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8));
    report_event();
    wait_until_idle(200);
    while ((found = verbs_poll_cq(a.send_cq, 64, wcs)) > 0 && total < 1000)
        total += found;
    report("%s", found < 0 ? "polling fails" : "polling goes on");
    report("%s", state_name(state_of(a.qp)));
}
