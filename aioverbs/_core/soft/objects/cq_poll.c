/* The driver half of completion queues: one thread at a time polls completions, by ibv_poll_cq or by ibv_start_poll and
 * ibv_next_poll. */
#include "soft/objects/cq_poll.h"

#include <time.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/hooks.h"
#include "soft/objects/qp.h"
#include "soft/objects/srq.h"
#include "soft/objects/verbs.h"
#include "soft/objects/work_queue.h"

/* ---- The driver half ------------------------------------------------------------------------------------- */

static bool is_empty(const struct soft_cq *cq)
{
    return atomic_load_explicit(cq->consumer, memory_order_relaxed) ==
           atomic_load_explicit(&cq->producer, memory_order_acquire);
}

static struct soft_cqe *peek(struct soft_cq *cq, uint32_t *consumer)
{
    *consumer = atomic_load_explicit(cq->consumer, memory_order_relaxed);
    if (is_empty(cq))
        return NULL;
    return &cq->ring[*consumer & cq->mask];
}

/* Free an entry that was copied or is no longer needed, and the slots of the work requests that it completes. */
static void consume(struct soft_cq *cq, const struct soft_cqe *cqe, uint32_t consumer)
{
    if (cqe->srq) {
        soft_srq_credit(cqe->srq, 1);
    } else {
        struct soft_ring *ring = cqe->is_send ? &cqe->qp->sq : &cqe->qp->rq;

        atomic_store_explicit(&ring->reaped, cqe->wqe_index + 1, memory_order_release);
    }
    atomic_store_explicit(cq->consumer, consumer + 1, memory_order_release);
}

/* Read what remote peers sent, since the queue is empty: a response may complete a request. */
static void poll_peers(const struct soft_cq *cq)
{
    struct soft_device *device = to_soft_context(cq->ex.context)->device;

    device->hooks->poll_peers(device, false);
}

int soft_poll_cq(struct ibv_cq *ibv_cq, int count, struct ibv_wc *wc)
{
    struct soft_cq *cq = to_soft_cq(ibv_cq);
    const struct soft_cqe *cqe;
    uint32_t consumer;
    int error, n;

    if (soft_stale(to_soft_context(ibv_cq->context)))
        return -ENODEV;
    error = soft_half_enter(&cq->half, "poll_cq");
    if (error)
        return -error;
    if (is_empty(cq))
        poll_peers(cq);
    for (n = 0; n < count && (cqe = peek(cq, &consumer)); n++) {
        wc[n] = (struct ibv_wc){
            .wr_id = cqe->wr_id,
            .status = cqe->status,
            .opcode = cqe->opcode,
            .vendor_err = cqe->vendor_err,
            .byte_len = cqe->byte_len,
            .imm_data = cqe->imm_data,
            .qp_num = cqe->qp_num,
            .src_qp = cqe->src_qp,
            .wc_flags = cqe->wc_flags,
        };
        consume(cq, cqe, consumer);
    }
    /* An overrun queue lost completions for good: report this once the remaining completions are polled. */
    if (!n && count > 0 && atomic_load_explicit(&cq->overrun, memory_order_relaxed))
        n = -EIO;
    soft_half_leave(&cq->half);
    return n;
}

void soft_cq_purge(struct soft_cq *cq, const struct soft_qp *qp, const struct soft_srq *srq)
{
    struct soft_context *context = to_soft_context(cq->ex.context);
    uint32_t consumer, producer, from, to;

    /* First the held completions: a release, in any thread, would move them to the ring. */
    context->device->hooks->purge_held(context, cq, qp, srq);
    soft_lock_take(&cq->lock); /* no entry is added meanwhile; the caller keeps pollers out */
    consumer = atomic_load_explicit(cq->consumer, memory_order_relaxed);
    producer = atomic_load_explicit(&cq->producer, memory_order_relaxed);
    /* Entries that stay move up against the producer, so that only the consumer's counter changes. */
    for (from = to = producer; from != consumer; from--) {
        const struct soft_cqe *cqe = &cq->ring[(from - 1) & cq->mask];

        if ((!qp || cqe->qp != qp) && (!srq || cqe->srq != srq))
            cq->ring[--to & cq->mask] = *cqe;
        else if (cqe->srq)
            soft_srq_credit(cqe->srq, 1);
    }
    atomic_store_explicit(cq->consumer, to, memory_order_release);
    soft_lock_give(&cq->lock);
}

/* ---- Extended polling ------------------------------------------------------------------------------------ */

static struct soft_cq *from_ex(struct ibv_cq_ex *ex)
{
    return container_of(ex, struct soft_cq, ex);
}

static int show_current(struct soft_cq *cq)
{
    uint32_t consumer;

    cq->current = peek(cq, &consumer);
    if (!cq->current)
        return atomic_load_explicit(&cq->overrun, memory_order_relaxed) ? EIO : ENOENT;
    cq->ex.wr_id = cq->current->wr_id;
    cq->ex.status = cq->current->status;
    return 0;
}

/* Free the current entry. An entry stays in the ring, where its fields are read, until the next one is requested. */
static void consume_current(struct soft_cq *cq)
{
    if (cq->current)
        consume(cq, cq->current, atomic_load_explicit(cq->consumer, memory_order_relaxed));
    cq->current = NULL;
}

static uint64_t wallclock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Return the difference of CLOCK_REALTIME and CLOCK_MONOTONIC in nanoseconds, modulo 2^64. The thread may lose its
 * processor between reading the clocks: of a few attempts the one with the shortest interval counts. */
static uint64_t wallclock_offset(void)
{
    uint64_t apart = 0, closest = UINT64_MAX;
    int attempts;

    for (attempts = 0; attempts < 4 && closest > 1000; attempts++) {
        uint64_t before = soft_now_ns(), wallclock = wallclock_ns(), took = soft_now_ns() - before;

        if (took < closest) {
            closest = took;
            apart = wallclock - (before + took / 2);
        }
    }
    return apart;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
    struct soft_cq *cq = from_ex(ex);
    int error;

    if (soft_stale(to_soft_context(ex->context)))
        return ENODEV;
    if (attr && attr->comp_mask)
        return EINVAL;
    error = soft_verb_error(to_soft_context(ex->context), SOFT_VERB_start_poll);
    if (error)
        return error;
    error = soft_half_enter(&cq->half, "start_poll");
    if (error)
        return error;
    if (is_empty(cq))
        poll_peers(cq);
    error = show_current(cq);
    if (error)
        soft_half_leave(&cq->half);
    else if (ex->read_completion_wallclock_ns)
        cq->to_wallclock = wallclock_offset();
    return error;
}

/* Return 0 if the calling thread is in the session that start_poll opened. Only an unlocked queue can check this; on a
 * locked one the session is its mutex. */
static int in_session(struct soft_cq *cq, const char *verb)
{
    struct soft_exclusive *exclusive = cq->half.exclusive;
    uint32_t owner;

    if (!exclusive)
        return 0;
    owner = atomic_load_explicit(&exclusive->owner, memory_order_relaxed);
    if (owner == soft_thread_id() && cq->half.inside)
        return 0;
    return soft_half_refuse(&cq->half, verb, owner);
}

/* The child of a fork must not consume entries of memory that it may share with its parent. */
static int next_poll(struct ibv_cq_ex *ex)
{
    struct soft_cq *cq = from_ex(ex);
    int error;

    if (soft_stale(to_soft_context(ex->context)))
        return ENODEV;
    error = in_session(cq, "next_poll");
    if (error)
        return error;
    consume_current(cq);
    return show_current(cq);
}

static void end_poll(struct ibv_cq_ex *ex)
{
    struct soft_cq *cq = from_ex(ex);

    if (soft_stale(to_soft_context(ex->context)) || in_session(cq, "end_poll"))
        return;
    consume_current(cq);
    soft_half_leave(&cq->half);
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->opcode;
}

static uint32_t read_vendor_err(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->vendor_err;
}

static uint32_t read_byte_len(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->byte_len;
}

static __be32 read_imm_data(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->imm_data;
}

static uint32_t read_qp_num(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->qp_num;
}

static uint32_t read_src_qp(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->src_qp;
}

static unsigned int read_wc_flags(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->wc_flags;
}

static uint32_t read_slid(struct ibv_cq_ex *ex)
{
    (void)ex;
    return 0; /* Ethernet has no LIDs */
}

static uint8_t read_sl(struct ibv_cq_ex *ex)
{
    (void)ex;
    return 0;
}

static uint8_t read_dlid_path_bits(struct ibv_cq_ex *ex)
{
    (void)ex;
    return 0;
}

static uint64_t read_completion_ts(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->timestamp;
}

/* One difference of the clocks serves the whole session, so that timestamps keep the order of the completions. */
static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *ex)
{
    return from_ex(ex)->current->timestamp + from_ex(ex)->to_wallclock;
}

void soft_cq_ex_methods(struct ibv_cq_ex *ex, uint64_t wc_flags)
{
    ex->start_poll = start_poll;
    ex->next_poll = next_poll;
    ex->end_poll = end_poll;
    ex->read_opcode = read_opcode;
    ex->read_vendor_err = read_vendor_err;
    ex->read_wc_flags = read_wc_flags;
    /* Further readers exist if they were requested at creation: ibv_create_cq_ex. */
    if (wc_flags & IBV_WC_EX_WITH_BYTE_LEN)
        ex->read_byte_len = read_byte_len;
    if (wc_flags & IBV_WC_EX_WITH_IMM)
        ex->read_imm_data = read_imm_data;
    if (wc_flags & IBV_WC_EX_WITH_QP_NUM)
        ex->read_qp_num = read_qp_num;
    if (wc_flags & IBV_WC_EX_WITH_SRC_QP)
        ex->read_src_qp = read_src_qp;
    if (wc_flags & IBV_WC_EX_WITH_SLID)
        ex->read_slid = read_slid;
    if (wc_flags & IBV_WC_EX_WITH_SL)
        ex->read_sl = read_sl;
    if (wc_flags & IBV_WC_EX_WITH_DLID_PATH_BITS)
        ex->read_dlid_path_bits = read_dlid_path_bits;
    if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
        ex->read_completion_ts = read_completion_ts;
    if (wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
        ex->read_completion_wallclock_ns = read_completion_wallclock_ns;
}
