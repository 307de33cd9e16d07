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

/* Completion in the queue's memory. `qp` and `srq` are valid as long as the entry is there: destroying either removes
 * its entries first. */
struct soft_cqe {
    uint64_t wr_id;
    struct soft_qp *qp;   /* NULL for completions of an XRC shared receive queue */
    struct soft_srq *srq; /* shared receive queue of the receive, or NULL */
    uint64_t timestamp;   /* CLOCK_MONOTONIC in nanoseconds, if the queue has timestamps */
    uint32_t byte_len, imm_data, qp_num, src_qp;
    /* index of a send, or of a receive of the queue pair's own queue: this entry and all before it are finished */
    uint32_t wqe_index;
    uint32_t vendor_err;
    uint8_t status, opcode, wc_flags;
    bool is_send : 1, solicited : 1;
    uint8_t reserved[4];
};
_Static_assert(sizeof(struct soft_cqe) == 64, "a completion is a cache line");

struct soft_cq {
    struct ibv_cq_ex ex; /* begins with the fields of struct ibv_cq */
    struct soft_half half;
    struct soft_pd *parent_domain; /* const, or NULL */
    struct soft_channel *channel;  /* const, or NULL */
    bool timestamps;               /* const */
    bool has_timer;                /* driver: a timer is reserved for `timer` */
    struct soft_memory buffer, record;
    /* entries [consumer, producer) belong to the driver half, the others to the device half */
    struct soft_cqe *ring;
    /* `ring` and `mask` change under both the driver half and the lock, and are read under either */
    uint32_t mask;
    _Atomic uint32_t *consumer; /* doorbell record; written by the driver half, release */
    struct soft_cqe *current;   /* driver: current entry between start_poll and end_poll */
    uint64_t to_wallclock;      /* driver: difference of CLOCK_REALTIME and CLOCK_MONOTONIC at start_poll */
    atomic_uint references;     /* send and receive sides of queue pairs, XRC shared receive queues */

    struct soft_lock lock;                                             /* the device half */
    _Atomic uint32_t producer;                                         /* written under lock, release */
    enum { SOFT_UNARMED, SOFT_ARMED_SOLICITED, SOFT_ARMED_ANY } armed; /* cq */
    /* written under lock, never reset: a completion found no room, or the fault plan broke the queue */
    atomic_bool overrun;
    uint16_t moderate_count, moderate_period_us; /* cq */
    uint16_t moderated;                          /* cq: completions since the queue was armed that moderation delays */
    uint64_t moderated_since;                    /* cq: time of the first of them, CLOCK_MONOTONIC */
    struct soft_timer timer;                     /* end of the moderation period */

    uint32_t events_pending;    /* under channel->lock: events raised and not delivered */
    uint32_t events_delivered;  /* under channel->lock: events that soft_get_cq_event returned */
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
