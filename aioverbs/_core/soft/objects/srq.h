/* Shared receive queues. */
#ifndef AIOVERBS_SOFT_OBJECTS_SRQ_H
#define AIOVERBS_SOFT_OBJECTS_SRQ_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/epoch.h"
#include "soft/base/util.h"
#include "soft/objects/async_event.h"
#include "soft/objects/limits.h"
#include "soft/objects/pd.h"

struct soft_context;
struct soft_cq;
struct soft_xrcd;

struct soft_srq {
    struct ibv_srq srq;
    struct soft_half half; /* entered by posting threads */
    struct soft_context *context;
    enum ibv_srq_type type;   /* const, like the next five fields */
    struct soft_pd *pd;       /* protection domain of the receives' memory, and of one-sided XRC requests */
    struct soft_xrcd *xrcd;   /* XRC domain, or NULL */
    struct soft_cq *cq;       /* completion queue of an XRC queue, or NULL */
    uint32_t number;          /* number in device->srqs */
    uint32_t max_sge, stride; /* max_sge as granted; stride in bytes of an entry: a struct soft_rwqe and its list */
    struct soft_memory buffer, record;
    _Atomic uint32_t own_record; /* used without an allocator */
    atomic_uint references;      /* number of queue pairs */
    /* Receives that were posted and whose completions were not polled: the depth limits them. Incremented by posting,
     * decremented by polling. */
    atomic_uint outstanding;

    struct soft_lock lock; /* guards the fields below */
    uint8_t *entries;      /* this and the next two fields change under both the lock and the driver half (resizing) */
    uint32_t mask, depth;
    uint32_t consumed, limit; /* consumed: free-running counter; limit: 0 if none is armed */
    _Atomic uint32_t *posted; /* const pointer; doorbell record: written by the driver half, release */
    bool broken;
    struct soft_event_source events;
};

static inline struct soft_srq *to_soft_srq(struct ibv_srq *srq)
{
    return container_of(srq, struct soft_srq, srq);
}

struct ibv_srq *soft_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr);
int soft_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask);
int soft_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr);
int soft_destroy_srq(struct ibv_srq *srq);
int soft_get_srq_num(struct ibv_srq *srq, uint32_t *number);
int soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* Receive work request, of a shared queue or of a queue pair's own; the list is a copy. */
struct soft_receive {
    uint64_t wr_id;
    uint32_t num_sge;
    struct ibv_sge sges[SOFT_MAX_SGE];
};

/* Called from the device half of a queue pair: return whether there is a receive; take the oldest receive, and raise
 * SRQ_LIMIT_REACHED where the limit is reached. False: the queue is empty or broken. */
bool soft_srq_has_receive(struct soft_srq *srq);
bool soft_srq_take(struct soft_srq *srq, struct soft_receive *receive);

/* Return a receive that was taken, and neither completed nor subtracted from `outstanding`, to the front of the queue.
 */
void soft_srq_return(struct soft_srq *srq, const struct soft_receive *receive);

/* Subtract `count` completions that were polled or purged. */
static inline void soft_srq_credit(struct soft_srq *srq, uint32_t count)
{
    atomic_fetch_sub_explicit(&srq->outstanding, count, memory_order_release);
}

/* Break the queue: no receive is taken any more, and SRQ_ERR is raised. */
void soft_srq_break(struct soft_srq *srq);

#endif
