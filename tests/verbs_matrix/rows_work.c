/* Work requests of connected queue pairs: states in which they may be posted, results, and failures. */
#include "probe.h"

#include <unistd.h>

/* ---- By state --------------------------------------------------------------------------------------------- */

static void report_post_in(enum ibv_qp_state state)
{
    make_end(&a, IBV_QPT_RC);
    make_end(&b, IBV_QPT_RC);
    if (state != IBV_QPS_RESET)
        move_to_state(a.qp, state, b.qp->qp_num);
    report_int(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
}

static void report_receive_in(enum ibv_qp_state state)
{
    make_end(&a, IBV_QPT_RC);
    if (state != IBV_QPS_RESET)
        move_to_state(a.qp, state, a.qp->qp_num);
    if (state == IBV_QPS_ERR)
        sleep(1); /* soft-RoCE flushes in a kernel thread: requests posted meanwhile may be flushed, too */
    report_int(post_receive(&a, 64));
    report_no_completion(a.recv_cq);
}

#define POST_ROWS(name, state)                                  \
    ROW(post_send, "in " name)                                  \
    {                                                           \
        report_post_in(state);                                  \
        report_no_completion(a.send_cq);                        \
    }                                                           \
    ROW_AS(post_recv, "in " name, ROW_JOIN(receive_, __LINE__)) \
    {                                                           \
        report_receive_in(state);                               \
    }

POST_ROWS("RESET", IBV_QPS_RESET)
POST_ROWS("INIT", IBV_QPS_INIT)
POST_ROWS("RTR", IBV_QPS_RTR)
POST_ROWS("ERR", IBV_QPS_ERR)

ROW(post_recv, "in RTS")
{
    report_receive_in(IBV_QPS_RTS);
}

ROW(post_send, "in SQD: it waits until RTS")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(step(a.qp, IBV_QPS_SQD, 0));
    report_int(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_no_completion(a.send_cq);
    REQUIRE_INT(step_as(a.qp, IBV_QPS_RTS, 0, link_attr, IBV_QP_STATE));
    report_statuses(a.send_cq, 1);
}

/* ---- By opcode -------------------------------------------------------------------------------------------- */

static void report_work(enum ibv_qp_type type, enum ibv_wr_opcode opcode, uint32_t length)
{
    make_pair(type);
    REQUIRE_INT(post_receive(&b, 64));
    if (report_int(post(&a, request(opcode, &a, &b, length))))
        return;
    report_completions(a.send_cq, 1);
    if (opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        report_completions(b.recv_cq, 1);
}

#define WORK_ROW(asked, type, opcode, length) \
    ROW(post_send, asked)                     \
    {                                         \
        report_work(type, opcode, length);    \
    }

WORK_ROW("RC: SEND", IBV_QPT_RC, IBV_WR_SEND, 8)
WORK_ROW("RC: SEND of no bytes", IBV_QPT_RC, IBV_WR_SEND, 0)
WORK_ROW("RC: SEND_WITH_IMM", IBV_QPT_RC, IBV_WR_SEND_WITH_IMM, 8)
WORK_ROW("RC: RDMA_WRITE", IBV_QPT_RC, IBV_WR_RDMA_WRITE, 8)
WORK_ROW("RC: RDMA_WRITE of many packets", IBV_QPT_RC, IBV_WR_RDMA_WRITE, 20000)
WORK_ROW("RC: RDMA_WRITE_WITH_IMM", IBV_QPT_RC, IBV_WR_RDMA_WRITE_WITH_IMM, 8)
WORK_ROW("RC: RDMA_READ", IBV_QPT_RC, IBV_WR_RDMA_READ, 8)
WORK_ROW("RC: ATOMIC_CMP_AND_SWP", IBV_QPT_RC, IBV_WR_ATOMIC_CMP_AND_SWP, 8)
WORK_ROW("RC: ATOMIC_FETCH_AND_ADD", IBV_QPT_RC, IBV_WR_ATOMIC_FETCH_AND_ADD, 8)
WORK_ROW("RC: an invalid opcode", IBV_QPT_RC, (enum ibv_wr_opcode)99, 8)
WORK_ROW("RC: TSO", IBV_QPT_RC, IBV_WR_TSO, 8)
WORK_ROW("UC: SEND", IBV_QPT_UC, IBV_WR_SEND, 8)
WORK_ROW("UC: RDMA_WRITE", IBV_QPT_UC, IBV_WR_RDMA_WRITE, 8)
WORK_ROW("UC: RDMA_WRITE_WITH_IMM", IBV_QPT_UC, IBV_WR_RDMA_WRITE_WITH_IMM, 8)
WORK_ROW("UC: RDMA_READ", IBV_QPT_UC, IBV_WR_RDMA_READ, 8)
WORK_ROW("UC: ATOMIC_FETCH_AND_ADD", IBV_QPT_UC, IBV_WR_ATOMIC_FETCH_AND_ADD, 8)

ROW(post_send, "an atomic of 4 bytes")
{
    make_pair(IBV_QPT_RC);
    if (!report_int(post(&a, request(IBV_WR_ATOMIC_FETCH_AND_ADD, &a, &b, 4))))
        report_statuses(a.send_cq, 1);
}

ROW(post_send, "an atomic at an odd address")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_ATOMIC_FETCH_AND_ADD, &a, &b, 8);
    wr->wr.atomic.remote_addr += 4;
    if (!report_int(post(&a, wr)))
        report_statuses(a.send_cq, 1);
}

/* ---- Flags and limits -------------------------------------------------------------------------------------- */

ROW(post_send, "not signalled")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->send_flags = 0;
    report_int(post(&a, wr));
    report_no_completion(a.send_cq);
}

ROW(post_send, "not signalled, where all signal")
{
    pair_attr.sq_sig_all = 1;
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->send_flags = 0;
    report_int(post(&a, wr));
    report_statuses(a.send_cq, 1);
}

ROW(post_send, "inline, without a key")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->send_flags |= IBV_SEND_INLINE;
    wr->sg_list->lkey = 0;
    report_int(post(&a, wr));
    report_statuses(a.send_cq, 1);
}

ROW(post_send, "inline, more than max_inline_data")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 4096);
    wr->send_flags |= IBV_SEND_INLINE;
    report_int(post(&a, wr));
}

ROW(post_send, "a read inline")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_READ, &a, &b, 8);
    wr->send_flags |= IBV_SEND_INLINE;
    if (!report_int(post(&a, wr)))
        report_statuses(a.send_cq, 1);
}

ROW(post_send, "more entries than max_send_sge")
{
    struct ibv_sge sges[64] = {{0}};
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    make_pair(IBV_QPT_RC);
    REQUIRE_INT(verbs->query_qp(a.qp, &attr, IBV_QP_CAP, &init));
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->sg_list = sges;
    wr->num_sge = (int)attr.cap.max_send_sge + 1;
    report_int(post(&a, wr));
}

ROW(post_send, "more than the queue holds")
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    int error = 0;

    make_pair(IBV_QPT_RC);
    REQUIRE_INT(verbs->query_qp(a.qp, &attr, IBV_QP_CAP, &init));
    for (uint32_t i = 0; i <= attr.cap.max_send_wr && !error; i++) {
        struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);

        wr->send_flags = 0; /* its slot is not free before a signalled request is polled */
        error = post(&a, wr);
    }
    report_int(error);
}

ROW(post_send, "a chain whose second request is bad")
{
    struct ibv_sge sges[64] = {{0}};
    struct ibv_send_wr *bad = NULL;

    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *good = request(IBV_WR_RDMA_WRITE, &a, &b, 8), *second = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    second->sg_list = sges;
    second->num_sge = ROWS_OF(sges);
    good->next = second;
    errno = 0;
    report_int(verbs_post_send(a.qp, good, &bad));
    report("%s", bad == second ? "the second one" : "another one");
    report_statuses(a.send_cq, 1);
}

ROW(post_recv, "more entries than max_recv_sge")
{
    struct ibv_sge sges[64] = {{0}};
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    make_pair(IBV_QPT_RC);
    REQUIRE_INT(verbs->query_qp(a.qp, &attr, IBV_QP_CAP, &init));
    report_int(post_receive_list(&a, sges, (int)attr.cap.max_recv_sge + 1));
}

ROW(post_recv, "more than the queue holds")
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    int error = 0;

    make_pair(IBV_QPT_RC);
    REQUIRE_INT(verbs->query_qp(a.qp, &attr, IBV_QP_CAP, &init));
    for (uint32_t i = 0; i <= attr.cap.max_recv_wr && !error; i++)
        error = post_receive(&a, 8);
    report_int(error);
}

/* ---- How requests fail ------------------------------------------------------------------------------------- */

/* A request and another one behind it: completions of both ends, and states. */
static void report_failure(struct ibv_send_wr *wr, bool received)
{
    if (report_int(post(&a, wr)))
        return;
    report_statuses(a.send_cq, 1);
    if (received)
        report_statuses(b.recv_cq, 1);
    report("%s %s", state_name(state_of(a.qp)), state_name(state_of(b.qp)));
}

ROW(post_send, "a bad lkey")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->sg_list->lkey += 0x500000;
    report_failure(wr, false);
}

ROW(post_send, "local memory beyond its region")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->sg_list->addr += MEMORY_BYTES - 4;
    report_failure(wr, false);
}

ROW(post_send, "a local key of another protection domain")
{
    make_pair(IBV_QPT_RC);
    struct ibv_pd *other = REQUIRE_OBJECT(verbs->alloc_pd(context));
    a.mr = REQUIRE_OBJECT(verbs->reg_mr(other, a.memory, MEMORY_BYTES, ALL_ACCESS));
    report_failure(request(IBV_WR_RDMA_WRITE, &a, &b, 8), false);
}

ROW(post_send, "a read into memory without LOCAL_WRITE")
{
    make_pair(IBV_QPT_RC);
    a.mr = REQUIRE_OBJECT(verbs->reg_mr(domain(), a.memory, MEMORY_BYTES, IBV_ACCESS_REMOTE_READ));
    report_failure(request(IBV_WR_RDMA_READ, &a, &b, 8), false);
}

ROW(post_send, "a bad rkey")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->wr.rdma.rkey += 0x500000;
    report_failure(wr, false);
}

ROW(post_send, "remote memory beyond its region")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->wr.rdma.remote_addr += MEMORY_BYTES - 4;
    report_failure(wr, false);
}

ROW(post_send, "a remote key of another protection domain")
{
    make_pair(IBV_QPT_RC);
    struct ibv_pd *other = REQUIRE_OBJECT(verbs->alloc_pd(context));
    b.mr = REQUIRE_OBJECT(verbs->reg_mr(other, b.memory, MEMORY_BYTES, ALL_ACCESS));
    report_failure(request(IBV_WR_RDMA_WRITE, &a, &b, 8), false);
}

#define REMOTE_ROW(asked, opcode, access)                                               \
    ROW(post_send, asked)                                                               \
    {                                                                                   \
        make_pair(IBV_QPT_RC);                                                          \
        b.mr = REQUIRE_OBJECT(verbs->reg_mr(domain(), b.memory, MEMORY_BYTES, access)); \
        report_failure(request(opcode, &a, &b, 8), false);                              \
    }

REMOTE_ROW("a write where only reads are allowed", IBV_WR_RDMA_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)
REMOTE_ROW("a read where only writes are allowed", IBV_WR_RDMA_READ, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
REMOTE_ROW("an atomic where only writes are allowed", IBV_WR_ATOMIC_FETCH_AND_ADD,
           IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)

#define QP_ACCESS_ROW(asked, opcode, access)               \
    ROW(post_send, asked)                                  \
    {                                                      \
        link_attr.qp_access_flags = access;                \
        make_pair(IBV_QPT_RC);                             \
        report_failure(request(opcode, &a, &b, 8), false); \
    }

QP_ACCESS_ROW("a write that the queue pair does not allow", IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_READ)
QP_ACCESS_ROW("a read that the queue pair does not allow", IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_WRITE)
QP_ACCESS_ROW("an atomic that the queue pair does not allow", IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_WRITE)

ROW(post_send, "no bytes to a bad rkey")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 0);
    wr->wr.rdma.rkey += 0x500000;
    report_failure(wr, false);
}

ROW(post_send, "a message longer than the receive")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post_receive(&b, 4));
    report_failure(request(IBV_WR_SEND, &a, &b, 8), true);
}

ROW(post_send, "a message for a receive with a bad key")
{
    make_pair(IBV_QPT_RC);
    b.mr->lkey += 0x500000;
    REQUIRE_INT(post_receive(&b, 64));
    b.mr->lkey -= 0x500000;
    report_failure(request(IBV_WR_SEND, &a, &b, 8), true);
}

ROW(post_send, "a message for a receive without LOCAL_WRITE")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mr *mr = REQUIRE_OBJECT(verbs->reg_mr(domain(), b.memory, 4096, IBV_ACCESS_REMOTE_READ));
    struct ibv_sge sge = {.addr = (uintptr_t)b.memory, .length = 64, .lkey = mr->lkey};
    REQUIRE_INT(post_receive_list(&b, &sge, 1));
    report_failure(request(IBV_WR_SEND, &a, &b, 8), true);
}

ROW(post_send, "a message without a receive, one RNR retry")
{
    make_pair(IBV_QPT_RC);
    report_failure(request(IBV_WR_SEND, &a, &b, 8), false);
}

ROW(post_send, "a message without a receive, posted before the retries end")
{
    link_attr.rnr_retry = 7;
    link_attr.min_rnr_timer = 14;
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
    pause_ms(50);
    REQUIRE_INT(post_receive(&b, 64));
    report_statuses(a.send_cq, 1);
    report_statuses(b.recv_cq, 1);
}

ROW(post_send, "UC: a message without a receive")
{
    make_pair(IBV_QPT_UC);
    report_failure(request(IBV_WR_SEND, &a, &b, 8), false);
}

ROW(post_send, "UC: a bad rkey")
{
    make_pair(IBV_QPT_UC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->wr.rdma.rkey += 0x500000;
    report_failure(wr, false);
}

ROW(post_send, "UC: a message longer than the receive")
{
    make_pair(IBV_QPT_UC);
    REQUIRE_INT(post_receive(&b, 4));
    report_failure(request(IBV_WR_SEND, &a, &b, 8), true);
}

ROW(post_send, "UC: a bad lkey")
{
    make_pair(IBV_QPT_UC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->sg_list->lkey += 0x500000;
    report_failure(wr, false);
}

ROW(post_send, "requests behind a failure are flushed")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *bad = request(IBV_WR_RDMA_WRITE, &a, &b, 8), *behind = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    bad->wr.rdma.rkey += 0x500000;
    bad->next = behind;
    behind->send_flags = 0;
    REPORT_INT(post(&a, bad));
    report_statuses(a.send_cq, 2);
}

ROW(post_send, "more reads at once than max_rd_atomic: they wait")
{
    link_attr.max_rd_atomic = 1;
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *one = request(IBV_WR_RDMA_READ, &a, &b, 8), *two = request(IBV_WR_RDMA_READ, &a, &b, 8);
    one->next = two;
    REPORT_INT(post(&a, one));
    report_statuses(a.send_cq, 2);
}

ROW(post_send, "reads with max_rd_atomic 0")
{
    link_attr.max_rd_atomic = 0;
    make_pair(IBV_QPT_RC);
    if (!report_int(post(&a, request(IBV_WR_RDMA_READ, &a, &b, 8))))
        report_no_completion(a.send_cq);
}

ROW(post_send, "reads of a peer with max_dest_rd_atomic 0")
{
    link_attr.max_dest_rd_atomic = 0;
    make_pair(IBV_QPT_RC);
    report_failure(request(IBV_WR_RDMA_READ, &a, &b, 8), false);
}

/* ---- Events of the responder -------------------------------------------------------------------------------- */

ROW(get_async_event, "the responder refuses an access")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->wr.rdma.rkey += 0x500000;
    REQUIRE_INT(post(&a, wr));
    report_statuses(a.send_cq, 1);
    report_event();
}

ROW(get_async_event, "a message is longer than the receive")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post_receive(&b, 4));
    REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
    report_event();
}

ROW(get_async_event, "a write is refused by the queue pair's access flags")
{
    link_attr.qp_access_flags = 0;
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
    report_event();
}

ROW(ack_async_event, "then the queue pair is destroyed")
{
    struct ibv_qp_attr attr = link_attr;

    make_pair(IBV_QPT_RC);
    attr.en_sqd_async_notify = 1;
    REQUIRE_INT(step_as(a.qp, IBV_QPS_SQD, 0, attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
    report_event();
    REPORT_INT(verbs->destroy_qp(a.qp));
}
