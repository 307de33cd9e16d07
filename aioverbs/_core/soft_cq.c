/* Completion queues: a ring in memory of the user's choice, filled by device halves, emptied by one driver half. */
#include "soft.h"

#include <stdlib.h>
#include <string.h>

#define SOFT_WC_FLAGS                                                                                         \
    ((uint64_t)IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP | \
     IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL | IBV_WC_EX_WITH_DLID_PATH_BITS)

/* ---- Creation and destruction ---------------------------------------------------------------------------- */

static int check_cq(struct soft_context *context, uint32_t cqe, struct ibv_comp_channel *channel, uint32_t comp_vector)
{
    if (soft_stale(context))
        return ENODEV;
    if (!cqe || cqe > SOFT_MAX_CQE || comp_vector)
        return EINVAL;
    if (channel && channel->context != &context->verbs.context)
        return EINVAL;
    return 0;
}

static int get_ring(struct soft_cq *cq, uint32_t entries)
{
    size_t size = (size_t)entries * sizeof(struct soft_cqe);
    int error;

    size = (size + SOFT_PAGE - 1) & ~(size_t)(SOFT_PAGE - 1);
    error = soft_memory_get(&cq->buffer, cq->parent_domain, size, SOFT_PAGE, SOFT_RES_CQ);
    if (error)
        return error;
    error = soft_memory_get(&cq->record, cq->parent_domain, 8, 8, SOFT_RES_DBR);
    if (error) {
        soft_memory_put(&cq->buffer);
        return error;
    }
    cq->ring = cq->buffer.address;
    cq->mask = entries - 1;
    cq->consumer = cq->record.address;
    return 0;
}

static int init_cq(struct soft_cq *cq, struct soft_context *context, struct soft_exclusive *exclusive)
{
    struct ibv_cq_ex *ex = &cq->ex;
    int error;

    error = pthread_mutex_init(&ex->mutex, NULL);
    if (error)
        return error;
    error = pthread_cond_init(&ex->cond, NULL);
    if (error)
        goto destroy_mutex;
    ex->context = &context->verbs.context;
    ex->handle = atomic_fetch_add(&context->next_handle, 1);
    error = soft_half_init(&cq->half, context, "completion queue", ex->handle, exclusive);
    if (error)
        goto destroy_cond;
    return 0;

destroy_cond:
    pthread_cond_destroy(&ex->cond);
destroy_mutex:
    pthread_mutex_destroy(&ex->mutex);
    return error;
}

static struct soft_cq *create(struct soft_context *context, const struct ibv_cq_init_attr_ex *attr,
                              struct soft_pd *parent_domain, bool single_threaded)
{
    int error = check_cq(context, attr->cqe, attr->channel, attr->comp_vector);
    struct soft_exclusive *exclusive = NULL;
    struct soft_cq *cq = NULL;

    if (!error && !(cq = calloc(1, sizeof(*cq))))
        error = ENOMEM;
    if (error)
        goto fail;
    cq->parent_domain = parent_domain;
    if (parent_domain && parent_domain->td)
        exclusive = &parent_domain->td->exclusive;
    else if (single_threaded)
        exclusive = &cq->half.own;
    error = init_cq(cq, context, exclusive);
    if (error)
        goto free_cq;
    error = get_ring(cq, soft_power_of_two(attr->cqe));
    if (error)
        goto destroy;
    cq->ex.cq_context = attr->cq_context;
    cq->ex.channel = attr->channel;
    cq->ex.cqe = (int)cq->mask + 1;
    cq->events.element = &cq->ex;
    soft_lock_init(&cq->lock);
    if (attr->channel) {
        cq->channel = container_of(attr->channel, struct soft_channel, channel);
        atomic_fetch_add(&cq->channel->references, 1);
    }
    if (parent_domain)
        atomic_fetch_add(&parent_domain->references, 1);
    atomic_fetch_add(&context->cqs, 1);
    return cq;

destroy:
    soft_half_destroy(&cq->half);
    pthread_cond_destroy(&cq->ex.cond);
    pthread_mutex_destroy(&cq->ex.mutex);
free_cq:
    free(cq);
fail:
    errno = error;
    return NULL;
}

struct ibv_cq *soft_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                              int comp_vector)
{
    struct ibv_cq_init_attr_ex attr = {
        .cqe = cqe < 0 ? 0 : (uint32_t)cqe,
        .cq_context = cq_context,
        .channel = channel,
        .comp_vector = (uint32_t)comp_vector,
    };
    struct soft_cq *cq = create(to_soft_context(context), &attr, NULL, false);

    return cq ? (struct ibv_cq *)&cq->ex : NULL;
}

struct ibv_cq_ex *soft_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    const uint32_t known_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    bool single_threaded = false;
    struct soft_pd *parent_domain = NULL;
    struct soft_cq *cq;

    if ((attr->comp_mask & ~known_mask) || (attr->wc_flags & ~SOFT_WC_FLAGS)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) {
        if (attr->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED) {
            errno = EOPNOTSUPP;
            return NULL;
        }
        single_threaded = attr->flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    }
    if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) {
        /* Like mlx5: the field is for parent domains, a plain one is a mistake. */
        if (!attr->parent_domain || attr->parent_domain->context != context ||
            to_soft_pd(attr->parent_domain)->base == to_soft_pd(attr->parent_domain)) {
            errno = EINVAL;
            return NULL;
        }
        parent_domain = to_soft_pd(attr->parent_domain);
    }
    cq = create(to_soft_context(context), attr, parent_domain, single_threaded);
    if (!cq)
        return NULL;
    soft_cq_ex_methods(&cq->ex, attr->wc_flags);
    return &cq->ex;
}

int soft_destroy_cq(struct ibv_cq *ibv_cq)
{
    struct soft_cq *cq = to_soft_cq(ibv_cq);
    struct soft_context *context = to_soft_context(ibv_cq->context);
    int error;

    if (soft_stale(context))
        return ENODEV;
    error = soft_half_enter(&cq->half, "destroy_cq");
    if (error)
        return error;
    if (atomic_load(&cq->references)) {
        soft_half_leave(&cq->half);
        return EBUSY;
    }
    /* No queue pair refers to it; an execution that still pushed into it is waited for. */
    grace_wait();
    soft_half_leave(&cq->half); /* who took an event may poll before he acknowledges it */
    if (cq->channel) {
        uint32_t taken = soft_channel_forget(cq->channel, cq);

        pthread_mutex_lock(&cq->ex.mutex);
        while (cq->ex.comp_events_completed != taken)
            pthread_cond_wait(&cq->ex.cond, &cq->ex.mutex);
        pthread_mutex_unlock(&cq->ex.mutex);
        atomic_fetch_sub(&cq->channel->references, 1);
    }
    soft_events_finish(context, &cq->events, &cq->ex.mutex, &cq->ex.cond, &cq->ex.async_events_completed);
    soft_memory_put(&cq->record);
    soft_memory_put(&cq->buffer);
    if (cq->parent_domain)
        atomic_fetch_sub(&cq->parent_domain->references, 1);
    soft_half_destroy(&cq->half);
    pthread_cond_destroy(&cq->ex.cond);
    pthread_mutex_destroy(&cq->ex.mutex);
    atomic_fetch_sub(&context->cqs, 1);
    free(cq);
    return 0;
}

/* ---- The device half ------------------------------------------------------------------------------------- */

bool soft_cq_push(struct soft_cq *cq, const struct soft_cqe *cqe)
{
    bool notify = false;
    uint32_t producer;

    soft_lock_take(&cq->lock);
    producer = atomic_load_explicit(&cq->producer, memory_order_relaxed);
    if (producer - atomic_load_explicit(cq->consumer, memory_order_acquire) > cq->mask)
        atomic_store_explicit(&cq->overrun, true, memory_order_relaxed);
    if (atomic_load_explicit(&cq->overrun, memory_order_relaxed)) {
        /* Who sleeps must hear of it: poll_cq tells. */
        notify = cq->armed != SOFT_UNARMED && cq->channel;
        cq->armed = SOFT_UNARMED;
        soft_lock_give(&cq->lock);
        if (notify)
            soft_channel_notify(cq->channel, cq);
        return false;
    }
    cq->ring[producer & cq->mask] = *cqe;
    atomic_store_explicit(&cq->producer, producer + 1, memory_order_release);
    if (cq->armed == SOFT_ARMED_ANY ||
        (cq->armed == SOFT_ARMED_SOLICITED && (cqe->solicited || cqe->status != IBV_WC_SUCCESS))) {
        cq->armed = SOFT_UNARMED;
        notify = cq->channel != NULL;
    }
    soft_lock_give(&cq->lock);
    /* Outside of the queue's lock, which others may want meanwhile: it may be a system call, if not one that waits.
	 * The grace section keeps the queue. */
    if (notify)
        soft_channel_notify(cq->channel, cq);
    return true;
}

int soft_req_notify_cq(struct ibv_cq *ibv_cq, int solicited_only)
{
    struct soft_cq *cq = to_soft_cq(ibv_cq);

    if (soft_stale(to_soft_context(ibv_cq->context)))
        return ENODEV;
    if (!cq->channel)
        return EINVAL;
    /* As the architecture has it: the next completion that is added raises the event, not one that waits
	 * already. A request for any completion outdoes one for solicited ones. */
    soft_lock_take(&cq->lock);
    if (cq->armed != SOFT_ARMED_ANY)
        cq->armed = solicited_only ? SOFT_ARMED_SOLICITED : SOFT_ARMED_ANY;
    soft_lock_give(&cq->lock);
    return 0;
}

/* ---- The driver half ------------------------------------------------------------------------------------- */

static struct soft_cqe *peek(struct soft_cq *cq, uint32_t *consumer)
{
    *consumer = atomic_load_explicit(cq->consumer, memory_order_relaxed);
    if (*consumer == atomic_load_explicit(&cq->producer, memory_order_acquire))
        return NULL;
    return &cq->ring[*consumer & cq->mask];
}

/* The entry was copied or is done with: its place, and the work requests' slots that it tells of, are free. */
static void consume(struct soft_cq *cq, const struct soft_cqe *cqe, uint32_t consumer)
{
    struct soft_ring *ring = cqe->is_send ? &cqe->qp->sq : &cqe->qp->rq;

    atomic_store_explicit(&ring->reaped, cqe->wqe_index + 1, memory_order_release);
    atomic_store_explicit(cq->consumer, consumer + 1, memory_order_release);
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
    /* An overrun queue lost completions for good: say so once what it still has was handed out. */
    if (!n && count > 0 && atomic_load_explicit(&cq->overrun, memory_order_relaxed))
        n = -EIO;
    soft_half_leave(&cq->half);
    return n;
}

void soft_cq_purge(struct soft_cq *cq, const struct soft_qp *qp, const struct soft_srq *srq)
{
    uint32_t consumer, producer, from, to;

    soft_lock_take(&cq->lock); /* no entry comes meanwhile; the caller keeps pollers out */
    consumer = atomic_load_explicit(cq->consumer, memory_order_relaxed);
    producer = atomic_load_explicit(&cq->producer, memory_order_relaxed);
    /* What stays moves up against the producer, so that only the consumer's counter changes. */
    for (from = to = producer; from != consumer; from--)
        if ((!qp || cq->ring[(from - 1) & cq->mask].qp != qp) && (!srq || cq->ring[(from - 1) & cq->mask].srq != srq))
            cq->ring[--to & cq->mask] = cq->ring[(from - 1) & cq->mask];
    atomic_store_explicit(cq->consumer, to, memory_order_release);
    soft_lock_give(&cq->lock);
}

/* ---- Extended polling ------------------------------------------------------------------------------------ */

static struct soft_cq *from_ex(struct ibv_cq_ex *ex)
{
    return container_of(ex, struct soft_cq, ex);
}

static int show(struct soft_cq *cq)
{
    uint32_t consumer;

    cq->current = peek(cq, &consumer);
    if (!cq->current)
        return atomic_load_explicit(&cq->overrun, memory_order_relaxed) ? EIO : ENOENT;
    cq->ex.wr_id = cq->current->wr_id;
    cq->ex.status = cq->current->status;
    return 0;
}

/* The current entry stays in the ring, where its fields are read, until the next one is asked for. */
static void step(struct soft_cq *cq)
{
    if (cq->current)
        consume(cq, cq->current, atomic_load_explicit(cq->consumer, memory_order_relaxed));
    cq->current = NULL;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
    struct soft_cq *cq = from_ex(ex);
    int error;

    if (soft_stale(to_soft_context(ex->context)))
        return ENODEV;
    if (attr && attr->comp_mask)
        return EINVAL;
    error = soft_half_enter(&cq->half, "start_poll");
    if (error)
        return error;
    error = show(cq);
    if (error)
        soft_half_leave(&cq->half);
    return error;
}

/* 0 where the calling thread is in the session that start_poll opened. Only an unlocked queue can tell; on a locked
 * one the session is its mutex. */
static int in_session(struct soft_cq *cq, const char *verb)
{
    struct soft_exclusive *exclusive = cq->half.exclusive;
    uint32_t owner;

    if (!exclusive)
        return 0;
    owner = atomic_load_explicit(&exclusive->owner, memory_order_relaxed);
    if (owner == soft_thread() && cq->half.inside)
        return 0;
    return soft_half_refuse(&cq->half, verb, owner);
}

/* A child of a fork must not consume what may be shared memory with its parent. */
static int next_poll(struct ibv_cq_ex *ex)
{
    struct soft_cq *cq = from_ex(ex);
    int error;

    if (soft_stale(to_soft_context(ex->context)))
        return ENODEV;
    error = in_session(cq, "next_poll");
    if (error)
        return error;
    step(cq);
    return show(cq);
}

static void end_poll(struct ibv_cq_ex *ex)
{
    struct soft_cq *cq = from_ex(ex);

    if (soft_stale(to_soft_context(ex->context)) || in_session(cq, "end_poll"))
        return;
    step(cq);
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

void soft_cq_ex_methods(struct ibv_cq_ex *ex, uint64_t wc_flags)
{
    ex->start_poll = start_poll;
    ex->next_poll = next_poll;
    ex->end_poll = end_poll;
    ex->read_opcode = read_opcode;
    ex->read_vendor_err = read_vendor_err;
    ex->read_wc_flags = read_wc_flags;
    /* The others are there for those who asked at creation, as the verb has it. */
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
}

/* ---- To come ---- */

int soft_resize_cq(struct ibv_cq *cq, int cqe)
{
    (void)cq, (void)cqe;
    return EOPNOTSUPP;
}

int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
    (void)cq, (void)attr;
    return EOPNOTSUPP;
}

void soft_cq_expired(struct soft_cq *cq)
{
    (void)cq;
}

void soft_cq_break(struct soft_cq *cq)
{
    atomic_store(&cq->overrun, true);
    soft_raise(to_soft_context(cq->ex.context), &cq->events, IBV_EVENT_CQ_ERR);
}
