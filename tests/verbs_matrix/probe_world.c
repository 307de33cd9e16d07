/* Helpers for rows: objects, connected pairs, work, and waiting with a timeout. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "probe.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define STEP_INIT (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT)
#define STEP_RTR (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define STEP_RTS (IBV_QP_STATE | IBV_QP_SQ_PSN)
#define RESPONDER (IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define REQUESTER (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)

enum { PATIENCE_MS = 2000, SETTLE_MS = 10000, QUIET_MS = 60, EVENT_MS = 300, KEPT = 8, TURNS = 4 };

struct end a, b;
struct ibv_srq *pair_srq;
struct ibv_pd *pair_pd_of_b;

struct ibv_qp_attr link_attr = {
    .path_mtu = IBV_MTU_1024,
    .qkey = QKEY,
    .qp_access_flags = ALL_REMOTE,
    .port_num = 1,
    .max_rd_atomic = 4,
    .max_dest_rd_atomic = 4,
    .min_rnr_timer = 1,
    .timeout = 14, /* a virtual machine without acceleration may stall for 50 ms */
    .retry_cnt = 1,
    .rnr_retry = 1,
};

struct ibv_qp_init_attr pair_attr = {
    .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 64},
};

/* ---- Objects ---------------------------------------------------------------------------------------------- */

struct ibv_pd *domain(void)
{
    static struct ibv_pd *pd;

    if (!pd)
        pd = REQUIRE_OBJECT(verbs->alloc_pd(context));
    return pd;
}

uint8_t *pages(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        report("no memory");
        finish();
    }
    return memory;
}

struct ibv_mr *region(int access)
{
    return REQUIRE_OBJECT(verbs->reg_mr(domain(), pages(MEMORY_BYTES), MEMORY_BYTES, access));
}

struct ibv_cq *queue(int cqe)
{
    return REQUIRE_OBJECT(verbs->create_cq(context, cqe, NULL, NULL, 0));
}

struct ibv_srq *shared_queue(uint32_t depth)
{
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = depth, .max_sge = 4}};

    return REQUIRE_OBJECT(verbs->create_srq(domain(), &attr));
}

struct ibv_qp_init_attr qp_attr(enum ibv_qp_type type)
{
    struct ibv_qp_init_attr attr = pair_attr;

    attr.send_cq = queue(64);
    attr.recv_cq = queue(64);
    attr.srq = pair_srq;
    attr.qp_type = type;
    return attr;
}

struct ibv_device_attr device_attr(void)
{
    struct ibv_device_attr attr;

    REQUIRE_INT(verbs->query_device(context, &attr));
    return attr;
}

void make_end(struct end *end, enum ibv_qp_type type)
{
    struct ibv_qp_init_attr attr = qp_attr(type);
    struct ibv_pd *pd = end == &b && pair_pd_of_b ? pair_pd_of_b : domain();

    end->memory = pages(MEMORY_BYTES);
    end->mr = REQUIRE_OBJECT(verbs->reg_mr(pd, end->memory, MEMORY_BYTES, ALL_ACCESS | IBV_ACCESS_MW_BIND));
    end->send_cq = attr.send_cq;
    end->recv_cq = attr.recv_cq;
    end->qp = REQUIRE_OBJECT(verbs->create_qp(pd, &attr));
}

void make_pair(enum ibv_qp_type type)
{
    make_end(&a, type);
    make_end(&b, type);
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    move_to_state(b.qp, IBV_QPS_RTS, a.qp->qp_num);
}

struct ibv_ah_attr path_to_self(void)
{
    struct ibv_ah_attr path = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1, .hop_limit = 64}};

    REQUIRE_INT(verbs->query_gid(context, 1, 1, &path.grh.dgid));
    return path;
}

struct ibv_ah *handle_to_self(void)
{
    struct ibv_ah_attr path = path_to_self();

    return REQUIRE_OBJECT(verbs->create_ah(domain(), &path));
}

/* ---- States ----------------------------------------------------------------------------------------------- */

int mask_to(enum ibv_qp_type type, enum ibv_qp_state state)
{
    bool datagram = type == IBV_QPT_UD, one_way = type == IBV_QPT_UC;

    switch (state) {
    case IBV_QPS_INIT:
        return STEP_INIT | (datagram ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
    case IBV_QPS_RTR:
        return datagram ? IBV_QP_STATE : STEP_RTR | (one_way || type == IBV_QPT_XRC_SEND ? 0 : RESPONDER);
    case IBV_QPS_RTS:
        if (type == IBV_QPT_XRC_RECV)
            return STEP_RTS | IBV_QP_TIMEOUT;
        return STEP_RTS | (datagram || one_way ? 0 : REQUESTER);
    default:
        return IBV_QP_STATE;
    }
}

int step_as(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t dest_qp_num, struct ibv_qp_attr attr, int mask)
{
    attr.qp_state = state;
    attr.dest_qp_num = dest_qp_num;
    attr.ah_attr = path_to_self();
    errno = 0;
    return verbs->modify_qp(qp, &attr, mask);
}

int step(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t dest_qp_num)
{
    return step_as(qp, state, dest_qp_num, link_attr, mask_to(qp->qp_type, state));
}

void move_to_state(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t dest_qp_num)
{
    for (enum ibv_qp_state next = IBV_QPS_INIT; next <= state && next <= IBV_QPS_RTS; next++)
        REQUIRE_INT(step(qp, next, dest_qp_num));
    if (state > IBV_QPS_RTS)
        REQUIRE_INT(step(qp, state, dest_qp_num));
}

enum ibv_qp_state state_of(struct ibv_qp *qp)
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr = {0};

    REQUIRE_INT(verbs->query_qp(qp, &attr, IBV_QP_STATE, &init));
    return attr.qp_state;
}

/* ---- Work ------------------------------------------------------------------------------------------------- */

struct ibv_send_wr *request(enum ibv_wr_opcode opcode, struct end *from, struct end *to, uint32_t length)
{
    static struct ibv_send_wr wrs[KEPT];
    static struct ibv_sge sges[KEPT];
    static unsigned int count;
    struct ibv_send_wr *wr = &wrs[count % KEPT];
    struct ibv_sge *sge = &sges[count % KEPT];

    *sge = (struct ibv_sge){.addr = (uintptr_t)from->memory, .length = length, .lkey = from->mr->lkey};
    *wr = (struct ibv_send_wr){
        .wr_id = ++count, .sg_list = sge, .num_sge = length ? 1 : 0, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr->wr.atomic.remote_addr = (uintptr_t)to->memory;
        wr->wr.atomic.rkey = to->mr->rkey;
        wr->wr.atomic.compare_add = 0;
        wr->wr.atomic.swap = 1;
    } else if (to) {
        wr->wr.rdma.remote_addr = (uintptr_t)to->memory;
        wr->wr.rdma.rkey = to->mr->rkey;
    }
    if (opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        memcpy(&wr->imm_data, "imm!", 4);
    return wr;
}

int post(struct end *end, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad = NULL;

    errno = 0;
    return verbs_post_send(end->qp, wr, &bad);
}

int post_receive_list(struct end *end, struct ibv_sge *list, int count)
{
    struct ibv_recv_wr wr = {.wr_id = 100, .sg_list = list, .num_sge = count}, *bad = NULL;

    errno = 0;
    return verbs_post_recv(end->qp, &wr, &bad);
}

int post_receive(struct end *end, uint32_t length)
{
    struct ibv_sge sge = {.addr = (uintptr_t)end->memory, .length = length, .lkey = end->mr->lkey};

    return post_receive_list(end, &sge, 1);
}

int post_shared(struct ibv_srq *srq, uint32_t length)
{
    static struct ibv_mr *mr;
    struct ibv_sge sge = {.length = length};
    struct ibv_recv_wr wr = {.wr_id = 200, .sg_list = &sge, .num_sge = 1}, *bad = NULL;

    if (!mr)
        mr = region(ALL_ACCESS);
    sge.addr = (uintptr_t)mr->addr;
    sge.lkey = mr->lkey;
    errno = 0;
    return verbs_post_srq_recv(srq, &wr, &bad);
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void pause_ms(unsigned int milliseconds)
{
    usleep(milliseconds * 1000);
}

static bool wait_up_to(struct ibv_cq *cq, struct ibv_wc *wc, unsigned int milliseconds)
{
    uint64_t end = now_ms() + milliseconds;
    bool over = false;
    int found;

    while (!(found = verbs_poll_cq(cq, 1, wc))) {
        if (over)
            return false;
        usleep(100);
        over = now_ms() > end; /* check once more: this thread may not have run since then */
    }
    if (found < 0) {
        report("poll fails");
        finish();
    }
    return true;
}

/* On the software device: its thread serves queue pairs in turn, so it has served those with pending work before it
 * flushes a request that is posted now. That work may have created work for other queue pairs, and so on. */
static bool is_idle(void)
{
    static struct end flushing;
    struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_wc wc;

    if (!on_soft_device())
        return false;
    if (!flushing.qp) {
        struct ibv_qp_init_attr attr = {.cap = {.max_send_wr = 1}, .qp_type = IBV_QPT_RC};
        attr.send_cq = attr.recv_cq = flushing.send_cq = queue(1);
        flushing.qp = REQUIRE_OBJECT(verbs->create_qp(domain(), &attr));
        REQUIRE_INT(step(flushing.qp, IBV_QPS_INIT, 0));
        REQUIRE_INT(step(flushing.qp, IBV_QPS_ERR, 0));
    }
    for (int i = 0; i < TURNS; i++) {
        REQUIRE_INT(post(&flushing, &wr));
        if (!wait_up_to(flushing.send_cq, &wc, SETTLE_MS) || wc.status != IBV_WC_WR_FLUSH_ERR) {
            report("does not settle");
            finish();
        }
    }
    return true;
}

bool wait_wc(struct ibv_cq *cq, struct ibv_wc *wc)
{
    if (wait_up_to(cq, wc, PATIENCE_MS))
        return true;
    return is_idle() && wait_up_to(cq, wc, QUIET_MS); /* the whole process may not have run for that time */
}

void wait_until_idle(unsigned int milliseconds)
{
    if (!is_idle())
        pause_ms(milliseconds);
}

void require_success(struct ibv_cq *cq, unsigned int count)
{
    struct ibv_wc wc;

    while (count--) {
        if (!wait_wc(cq, &wc) || wc.status) {
            report("not delivered");
            finish();
        }
    }
}

/* ---- Answers ---------------------------------------------------------------------------------------------- */

static const char *error_name(int error)
{
    static const struct {
        int error;
        const char *name;
    } names[] = {
        {EPERM, "EPERM"},           {ENOENT, "ENOENT"},       {EIO, "EIO"},
        {EBADF, "EBADF"},           {EAGAIN, "EAGAIN"},       {ENOMEM, "ENOMEM"},
        {EACCES, "EACCES"},         {EFAULT, "EFAULT"},       {EBUSY, "EBUSY"},
        {EEXIST, "EEXIST"},         {ENODEV, "ENODEV"},       {EINVAL, "EINVAL"},
        {EMFILE, "EMFILE"},         {ENOSPC, "ENOSPC"},       {ERANGE, "ERANGE"},
        {ENOSYS, "ENOSYS"},         {EOVERFLOW, "EOVERFLOW"}, {EPROTONOSUPPORT, "EPROTONOSUPPORT"},
        {EOPNOTSUPP, "EOPNOTSUPP"}, {E2BIG, "E2BIG"},
    };
    static char number[32];

    for (size_t i = 0; i < ROWS_OF(names); i++) {
        if (names[i].error == error)
            return names[i].name;
    }
    snprintf(number, sizeof(number), "errno %d", error);
    return number;
}

static int error_of(int answered)
{
    if (answered == -1)
        return errno;
    return answered < 0 ? -answered : answered;
}

int report_int(int answered)
{
    int error = error_of(answered);

    report("%s", error ? error_name(error) : answered ? "-1 without errno" : "0");
    return error;
}

void *report_object(const void *object)
{
    report("%s", object ? "ok" : errno ? error_name(errno) : "NULL without errno");
    return (void *)(uintptr_t)object;
}

void *require_object(const void *object)
{
    if (!object) {
        report("%s", error_name(errno));
        finish();
    }
    return (void *)(uintptr_t)object;
}

void require_int(int answered)
{
    if (answered) {
        report("%s", error_name(error_of(answered)));
        finish();
    }
}

const char *status_name(enum ibv_wc_status status)
{
    static const char *const names[] = {
        "SUCCESS",          "LOC_LEN_ERR",       "LOC_QP_OP_ERR",     "LOC_EEC_OP_ERR",
        "LOC_PROT_ERR",     "WR_FLUSH_ERR",      "MW_BIND_ERR",       "BAD_RESP_ERR",
        "LOC_ACCESS_ERR",   "REM_INV_REQ_ERR",   "REM_ACCESS_ERR",    "REM_OP_ERR",
        "RETRY_EXC_ERR",    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR",  "REM_INV_RD_REQ_ERR",
        "REM_ABORT_ERR",    "INV_EECN_ERR",      "INV_EEC_STATE_ERR", "FATAL_ERR",
        "RESP_TIMEOUT_ERR", "GENERAL_ERR",
    };

    return (size_t)status < ROWS_OF(names) ? names[status] : "an unknown status";
}

const char *state_name(enum ibv_qp_state state)
{
    static const char *const names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};

    return (size_t)state < ROWS_OF(names) ? names[state] : "an unknown state";
}

static const char *opcode_name(enum ibv_wc_opcode opcode)
{
    static const char *const sends[] = {"SEND",      "RDMA_WRITE", "RDMA_READ", "COMP_SWAP",
                                        "FETCH_ADD", "BIND_MW",    "LOCAL_INV"};

    if ((size_t)opcode < ROWS_OF(sends))
        return sends[opcode];
    if (opcode == IBV_WC_RECV)
        return "RECV";
    return opcode == IBV_WC_RECV_RDMA_WITH_IMM ? "RECV_RDMA_WITH_IMM" : "an unknown opcode";
}

void report_statuses(struct ibv_cq *cq, unsigned int count)
{
    struct ibv_wc wc;

    for (; count; count--) {
        if (!wait_wc(cq, &wc)) {
            report("none");
            return;
        }
        report("%s", status_name(wc.status));
    }
}

void report_completions(struct ibv_cq *cq, unsigned int count)
{
    struct ibv_wc wc;

    for (; count; count--) {
        if (!wait_wc(cq, &wc)) {
            report("none");
            return;
        }
        if (wc.status) {
            report("%s", status_name(wc.status));
            continue;
        }
        report("%s", opcode_name(wc.opcode));
        if (wc.opcode & IBV_WC_RECV)
            report("%u bytes%s%s%s", wc.byte_len, wc.wc_flags & IBV_WC_GRH ? " GRH" : "",
                   wc.wc_flags & IBV_WC_WITH_IMM && !memcmp(&wc.imm_data, "imm!", 4) ? " imm" : "",
                   wc.wc_flags & IBV_WC_WITH_INV ? " inv" : "");
    }
}

void report_no_completion(struct ibv_cq *cq)
{
    struct ibv_wc wc;

    report("%s", wait_up_to(cq, &wc, is_idle() ? 0 : QUIET_MS) ? status_name(wc.status) : "none");
}

static bool readable(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};

    return poll(&ready, 1, is_idle() ? 0 : EVENT_MS) > 0;
}

void report_event(void)
{
    static const char *const names[] = {
        "CQ_ERR",
        "QP_FATAL",
        "QP_REQ_ERR",
        "QP_ACCESS_ERR",
        "COMM_EST",
        "SQ_DRAINED",
        "PATH_MIG",
        "PATH_MIG_ERR",
        "DEVICE_FATAL",
        "PORT_ACTIVE",
        "PORT_ERR",
        "LID_CHANGE",
        "PKEY_CHANGE",
        "SM_CHANGE",
        "SRQ_ERR",
        "SRQ_LIMIT_REACHED",
        "QP_LAST_WQE_REACHED",
    };
    struct ibv_async_event event;

    if (!readable(context->async_fd)) {
        report("no event");
        return;
    }
    REQUIRE_INT(verbs->get_async_event(context, &event));
    report("%s", (size_t)event.event_type < ROWS_OF(names) ? names[event.event_type] : "an unknown event");
    verbs->ack_async_event(&event);
}

bool report_cq_event(struct ibv_comp_channel *channel)
{
    struct ibv_cq *cq;
    void *cq_context;

    if (!readable(channel->fd)) {
        report("no event");
        return false;
    }
    REQUIRE_INT(verbs->get_cq_event(channel, &cq, &cq_context));
    report("event");
    verbs->ack_cq_events(cq, 1);
    return true;
}
