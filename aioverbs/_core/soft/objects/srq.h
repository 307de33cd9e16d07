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
    struct soft_half half; /* who posts */
    struct soft_context *context;
    enum ibv_srq_type type;   /* const, like the next five */
    struct soft_pd *pd;       /* receives go to its memory; one-sided XRC requests, too */
    struct soft_xrcd *xrcd;   /* XRC */
    struct soft_cq *cq;       /* XRC: where its receives complete */
    uint32_t number;          /* in device->srqs */
    uint32_t max_sge, stride; /* granted; bytes of an entry, a struct soft_rwqe and its list */
    struct soft_memory buffer, record;
    _Atomic uint32_t own_record; /* used where the allocator gave none */
    atomic_uint references;      /* queue pairs */
    /* Posted and not polled: what the depth limits. Raised by who posts, lowered by who polls. */
    atomic_uint outstanding;

    struct soft_lock lock; /* guards what follows */
    uint8_t *entries;      /* this and the next two: changed under the lock by who holds the driver half (resize) */
    uint32_t mask, depth;
    uint32_t consumed, limit; /* free-running; 0: no limit is armed */
    _Atomic uint32_t *posted; /* const; the doorbell record: written by the driver half, release */
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

/* A receive, wherever it was posted; the list is a copy. */
struct soft_receive {
    uint64_t wr_id;
    uint32_t num_sge;
    struct ibv_sge sges[SOFT_MAX_SGE];
};

/* From the device half of a queue pair. Whether there is a receive; takes the oldest, raises SRQ_LIMIT_REACHED where
 * that is due. False: there is none, or the queue is broken. */
bool soft_srq_has_receive(struct soft_srq *srq);
bool soft_srq_take(struct soft_srq *srq, struct soft_receive *receive);

/* A receive that was taken, and neither completed nor was counted down from `outstanding`, is the oldest again. */
void soft_srq_give_back(struct soft_srq *srq, const struct soft_receive *receive);

/* `count` of its completions were polled or purged. */
static inline void soft_srq_credit(struct soft_srq *srq, uint32_t count)
{
    atomic_fetch_sub_explicit(&srq->outstanding, count, memory_order_release);
}

/* Nothing is taken from it any more. SRQ_ERR is raised. */
void soft_srq_break(struct soft_srq *srq);

#endif
