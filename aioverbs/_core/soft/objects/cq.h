/* Completion queues. */
#ifndef AIOVERBS_SOFT_OBJECTS_CQ_H
#define AIOVERBS_SOFT_OBJECTS_CQ_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/epoch.h"
#include "soft/objects/async_event.h"
#include "soft/objects/pd.h"
#include "soft/objects/worker_thread.h"

struct soft_channel;
struct soft_qp;
struct soft_srq;

/* A completion, in the queue's own memory. `qp` and `srq` are good as long as the entry is there: destroying them
 * removes their entries first. */
struct soft_cqe {
    uint64_t wr_id;
    struct soft_qp *qp;   /* NULL in the completion of an XRC shared receive queue */
    struct soft_srq *srq; /* of a receive that came from one */
    uint64_t timestamp;   /* CLOCK_MONOTONIC, where the queue has timestamps */
    uint32_t byte_len, imm_data, qp_num, src_qp;
    uint32_t wqe_index; /* of a send or of the queue pair's own receive: it and all before it are done */
    uint32_t vendor_err;
    uint8_t status, opcode, wc_flags;
    bool is_send : 1, solicited : 1;
    uint8_t reserved[4];
};
_Static_assert(sizeof(struct soft_cqe) == 64, "a completion is a cache line");

struct soft_cq {
    struct ibv_cq_ex ex; /* its first part is a struct ibv_cq */
    struct soft_half half;
    struct soft_pd *parent_domain; /* const, or NULL */
    struct soft_channel *channel;  /* const, or NULL */
    bool timestamps;               /* const */
    bool has_timer;                /* driver: the worker thread has room for `timer` */
    struct soft_memory buffer, record;
    struct soft_cqe *ring;      /* entries [consumer, producer) are the driver's, the others the device's; */
    uint32_t mask;              /* both are changed by who holds the driver half and the lock, and read under either */
    _Atomic uint32_t *consumer; /* the doorbell record; written by the driver half, release */
    struct soft_cqe *current;   /* driver: between start_poll and end_poll */
    uint64_t to_wallclock;      /* driver: from a timestamp to CLOCK_REALTIME, as it was at start_poll */
    atomic_uint references;     /* queue pairs' ends, XRC shared receive queues */

    struct soft_lock lock;                                             /* the device half */
    _Atomic uint32_t producer;                                         /* written under lock, release */
    enum { SOFT_UNARMED, SOFT_ARMED_SOLICITED, SOFT_ARMED_ANY } armed; /* cq */
    atomic_bool overrun; /* written under lock, for good: a completion found no room, or the fault plan had it so */
    uint16_t moderate_count, moderate_period_us; /* cq */
    uint16_t moderated;                          /* cq: completions since it was armed that would have notified */
    uint64_t moderated_since;                    /* cq: when the first of them came, CLOCK_MONOTONIC */
    struct soft_timer timer;                     /* until the period is over */

    uint32_t events_pending;    /* under channel->lock: raised, not taken */
    uint32_t events_delivered;  /* under channel->lock: handed out by soft_get_cq_event */
    struct soft_cq *next_event; /* under channel->lock */
    struct soft_event_source events;
};

static inline struct soft_cq *to_soft_cq(struct ibv_cq *cq)
{
    return (struct soft_cq *)(void *)cq;
}

struct ibv_cq *soft_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                              int comp_vector);
struct ibv_cq_ex *soft_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
int soft_destroy_cq(struct ibv_cq *cq);

int soft_resize_cq(struct ibv_cq *cq, int cqe);

#endif
