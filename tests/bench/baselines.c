/* Baselines in C for the benchmarks: domains, queues and requests of their own, through the verbs of the context
 * that aioverbs has open, and over the memory that aioverbs registered. Results are nanoseconds for all operations;
 * a negative result means that a verb or a request failed, and that the figures are invalid. */
#include "baselines.h"

#include <stdlib.h>
#include <time.h>

#include "abi/verbs_ops.h"

#define BATCH 16 /* completions polled at once */
#define GID_INDEX 1
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

struct baseline {
    struct ibv_context *context;
    const struct verbs_table *table;
    uint8_t *local, *remote; /* `length` bytes each */
    uint64_t length;
    uint64_t idle; /* polls that found nothing: none if requests execute in the posting call */
    struct ibv_pd *base, *pd;
    struct ibv_td *td;
    struct ibv_mr *from, *to;
    struct ibv_cq_ex *cq;
    uint32_t count;
    struct ibv_qp *qps[];
};

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* ---- Objects ------------------------------------------------------------------------------------------------ */

static int connect_to_itself(const struct baseline *baseline, struct ibv_qp *qp)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS};
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_4096,
        .dest_qp_num = qp->qp_num,
        .max_dest_rd_atomic = 16,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = GID_INDEX}},
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6, .max_rd_atomic = 16};
    int error = baseline->table->query_gid(baseline->context, 1, GID_INDEX, &rtr.ah_attr.grh.dgid);

    if (!error)
        error =
            baseline->table->modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (!error)
        error = baseline->table->modify_qp(qp, &rtr,
                                           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                               IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (!error)
        error = baseline->table->modify_qp(qp, &rts,
                                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                               IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    return error;
}

static bool make(struct baseline *baseline, uint32_t count, uint32_t depth)
{
    struct ibv_td_init_attr td_attr = {0};
    struct ibv_parent_domain_init_attr parent = {0};
    struct ibv_cq_init_attr_ex cq_attr = {
        .cqe = count * depth,
        .wc_flags = IBV_WC_STANDARD_FLAGS,
        .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD | IBV_CQ_INIT_ATTR_MASK_FLAGS,
        .flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
    };
    struct ibv_qp_init_attr qp_attr = {
        .cap = {.max_send_wr = depth, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };

    if (!(baseline->base = parent.pd = baseline->table->alloc_pd(baseline->context)))
        return false;
    if (!(baseline->td = parent.td = verbs_alloc_td(baseline->context, &td_attr)))
        return false;
    if (!(baseline->pd = cq_attr.parent_domain = verbs_alloc_parent_domain(baseline->context, &parent)))
        return false;
    if (!(baseline->from = baseline->table->reg_mr(baseline->base, baseline->local, baseline->length, ACCESS)) ||
        !(baseline->to = baseline->table->reg_mr(baseline->base, baseline->remote, baseline->length, ACCESS)))
        return false;
    if (!(baseline->cq = verbs_create_cq_ex(baseline->context, &cq_attr)))
        return false;
    qp_attr.send_cq = qp_attr.recv_cq = (struct ibv_cq *)(void *)baseline->cq;
    while (baseline->count < count) {
        if (!(baseline->qps[baseline->count] = baseline->table->create_qp(baseline->pd, &qp_attr)))
            return false;
        if ((errno = connect_to_itself(baseline, baseline->qps[baseline->count++])))
            return false;
    }
    return true;
}

struct baseline *baseline_open(struct ibv_context *context, const struct verbs_table *table, void *local, void *remote,
                               uint64_t length, uint32_t count, uint32_t depth)
{
    struct baseline *baseline = calloc(1, sizeof(*baseline) + count * sizeof(struct ibv_qp *));
    int error;

    if (!baseline)
        return NULL;
    baseline->context = context;
    baseline->table = table;
    baseline->local = local;
    baseline->remote = remote;
    baseline->length = length;
    if (make(baseline, count, depth))
        return baseline;
    error = errno;
    baseline_close(baseline);
    errno = error;
    return NULL;
}

int baseline_close(struct baseline *baseline)
{
    int error = 0;

    while (!error && baseline->count)
        error = baseline->table->destroy_qp(baseline->qps[--baseline->count]);
    if (!error && baseline->cq)
        error = baseline->table->destroy_cq((struct ibv_cq *)(void *)baseline->cq);
    if (!error && baseline->to)
        error = baseline->table->dereg_mr(baseline->to);
    if (!error && baseline->from)
        error = baseline->table->dereg_mr(baseline->from);
    if (!error && baseline->pd)
        error = baseline->table->dealloc_pd(baseline->pd);
    if (!error && baseline->td)
        error = verbs_dealloc_td(baseline->td);
    if (!error && baseline->base)
        error = baseline->table->dealloc_pd(baseline->base);
    free(baseline);
    return error;
}

uint64_t baseline_idle_polls(const struct baseline *baseline)
{
    return baseline->idle;
}

/* ---- Requests and completions ----------------------------------------------------------------------------------- */

struct request {
    struct ibv_sge sge;
    struct ibv_send_wr wr;
};

/* One at the beginning of both regions; moved from slot to slot instead of being built again. */
static void build(const struct baseline *baseline, struct request *request, enum ibv_wr_opcode opcode, uint32_t length)
{
    *request = (struct request){
        .sge = {.addr = (uintptr_t)baseline->local, .length = length, .lkey = baseline->from->lkey},
        .wr = {.opcode = opcode, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED},
    };
    request->wr.sg_list = &request->sge;
    request->wr.wr.rdma.remote_addr = (uintptr_t)baseline->remote;
    request->wr.wr.rdma.rkey = baseline->to->rkey;
}

static void move(const struct baseline *baseline, struct request *request, uint64_t offset)
{
    request->sge.addr = (uintptr_t)baseline->local + offset;
    request->wr.wr.rdma.remote_addr = (uintptr_t)baseline->remote + offset;
}

static uint64_t after(const struct baseline *baseline, uint64_t offset, uint64_t stride, uint32_t length)
{
    offset += stride;
    return offset + length <= baseline->length ? offset : 0;
}

/* Number of completions polled, up to BATCH and `wanted`; negative if one failed, or polling did. */
static int take_basic(struct baseline *baseline, int wanted)
{
    struct ibv_wc wcs[BATCH];
    int found = verbs_poll_cq((struct ibv_cq *)(void *)baseline->cq, wanted < BATCH ? wanted : BATCH, wcs), i;

    for (i = 0; i < found; i++)
        if (wcs[i].status != IBV_WC_SUCCESS)
            return -1;
    return found;
}

static int take_extended(struct baseline *baseline, int wanted)
{
    struct ibv_poll_cq_attr attr = {0};
    struct ibv_cq_ex *cq = baseline->cq;
    int error = cq->start_poll(cq, &attr), found = 0;
    bool good = true;

    if (error)
        return error == ENOENT ? 0 : -1;
    do {
        good = good && cq->status == IBV_WC_SUCCESS;
        found++;
    } while (found < wanted && !(error = cq->next_poll(cq)));
    cq->end_poll(cq);
    return good && (!error || error == ENOENT) ? found : -1;
}

/* Polls until there are some completions. */
static inline int take(struct baseline *baseline, int wanted, bool extended)
{
    int found;

    while (!(found = extended ? take_extended(baseline, wanted) : take_basic(baseline, wanted)))
        baseline->idle++;
    return found;
}

/* ---- What is measured ------------------------------------------------------------------------------------------- */

int64_t baseline_writes(struct baseline *baseline, uint32_t length, uint64_t offset, uint64_t stride,
                        uint64_t operations, int extended)
{
    uint64_t i;
    struct request request;
    struct ibv_send_wr *bad;
    int64_t begin = now_ns();

    build(baseline, &request, IBV_WR_RDMA_WRITE, length);
    for (i = 0; i < operations; i++) {
        move(baseline, &request, offset);
        if (verbs_post_send(baseline->qps[0], &request.wr, &bad) || take(baseline, 1, extended) != 1)
            return -1;
        offset = after(baseline, offset, stride, length);
    }
    return now_ns() - begin;
}

int64_t baseline_window(struct baseline *baseline, uint32_t length, uint32_t window, uint64_t operations, int extended)
{
    uint64_t offset = 0, posted = 0, done = 0;
    struct request request;
    struct ibv_send_wr *bad;
    int64_t begin = now_ns();
    int found;

    build(baseline, &request, IBV_WR_RDMA_READ, length);
    while (done < operations) {
        while (posted < operations && posted - done < window) {
            move(baseline, &request, offset);
            if (verbs_post_send(baseline->qps[0], &request.wr, &bad))
                return -1;
            posted++;
            offset = after(baseline, offset, length, length);
        }
        if ((found = take(baseline, BATCH, extended)) < 0)
            return -1;
        done += (uint64_t)found;
    }
    return now_ns() - begin;
}

int64_t baseline_batches(struct baseline *baseline, uint32_t length, uint32_t size, uint64_t batches, int extended)
{
    struct request requests[BASELINE_MAX_BATCH];
    struct ibv_send_wr *bad;
    int64_t begin = now_ns();
    uint64_t i;
    uint32_t k;

    if (!size || size > BASELINE_MAX_BATCH || (uint64_t)size * length > baseline->length)
        return -1;
    for (i = 0; i < batches; i++) {
        for (k = 0; k < size; k++) { /* built every time, as programs with varying requests must */
            build(baseline, &requests[k], IBV_WR_RDMA_WRITE, length);
            move(baseline, &requests[k], (uint64_t)k * length);
            requests[k].wr.send_flags = k + 1 < size ? 0 : IBV_SEND_SIGNALED;
            requests[k].wr.next = k + 1 < size ? &requests[k + 1].wr : NULL;
        }
        if (verbs_post_send(baseline->qps[0], &requests[0].wr, &bad) || take(baseline, 1, extended) != 1)
            return -1;
    }
    return now_ns() - begin;
}

int64_t baseline_round_robin(struct baseline *baseline, uint32_t length, uint64_t operations, int extended)
{
    struct request request;
    struct ibv_send_wr *bad;
    int64_t begin = now_ns();
    uint64_t i;

    build(baseline, &request, IBV_WR_RDMA_WRITE, length);
    for (i = 0; i < operations; i++) {
        move(baseline, &request, i % baseline->count * length);
        if (verbs_post_send(baseline->qps[i % baseline->count], &request.wr, &bad) || take(baseline, 1, extended) != 1)
            return -1;
    }
    return now_ns() - begin;
}

int64_t baseline_copies(struct baseline *baseline, uint32_t length, uint64_t offset, uint64_t stride,
                        uint64_t operations)
{
    int64_t begin = now_ns();
    uint64_t i;

    for (i = 0; i < operations; i++) {
        memcpy(baseline->remote + offset, baseline->local + offset, length);
        __asm__ volatile("" : : "r"(baseline->remote) : "memory"); /* keeps the compiler from dropping the copy */
        offset = after(baseline, offset, stride, length);
    }
    return now_ns() - begin;
}
