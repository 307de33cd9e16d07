/* Queue pairs. */
#ifndef AIOVERBS_SOFT_OBJECTS_QP_H
#define AIOVERBS_SOFT_OBJECTS_QP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/epoch.h"
#include "soft/base/util.h"
#include "soft/objects/async_event.h"
#include "soft/objects/context.h"
#include "soft/objects/fault_counts.h"
#include "soft/objects/limits.h"
#include "soft/objects/link_waiter.h"
#include "soft/objects/pd.h"
#include "soft/objects/read_cache_entry.h"
#include "soft/objects/srq.h"
#include "soft/objects/work_queue.h"
#include "soft/objects/worker_thread.h"
#include "soft/objects/inbound_message.h"
#include "soft/objects/psn_window.h"

struct soft_cq;
struct soft_link;
struct soft_xrcd;

/* Receive work request that was taken from its queue. */
struct soft_recv_wqe {
    uint64_t wr_id;
    uint32_t num_sge;
    uint32_t index; /* index in the queue pair's own queue */
    const struct ibv_sge *sges;
    struct soft_receive *copy; /* const: copy of a shared queue's entry; NULL if no receive comes from one */
};

/* Message that is being received. Each part is handled under one hold of rq_lock: between two parts `has_recv_wqe` is
 * true only while the message is in flight. */
struct soft_inbound {
    struct soft_message message;
    bool has_recv_wqe; /* `recv_wqe` belongs to this message: it completes, or is returned */
    /* Queue that the receive was taken from; NULL: the queue pair's own queue. It cannot be destroyed before. */
    struct soft_srq *srq;
    struct soft_recv_wqe recv_wqe; /* valid while `has_recv_wqe` */
};

struct soft_atomic_replay {
    bool valid;
    uint32_t psn;
    uint64_t value;
};

/* Part whose bytes the peer copies itself, until the peer reports that it did, and its copy token is revoked. */
struct soft_direct_part {
    uint32_t psn; /* last packet */
    uint32_t serial;
    uint64_t revoked_at; /* when revoking was first tried in vain; 0: not tried */
    uint16_t copy_token;
};
enum { SOFT_DIRECT_PARTS = 16 };

/* State of the requester, under sq_lock. `waiting`: a request was tried and is not finished; otherwise `refused`,
 * `rewind`, `deadline` and `pause` are unset. */
struct soft_requester {
    struct soft_window window;       /* finished requests, and requests in flight */
    uint32_t retries_left, rnr_left; /* for the request at window.finished, since the peer made progress last */
    bool begun;                      /* the request at window.finished was tried before */
    bool drain_notify;               /* SQ_DRAINED is to be raised */
    bool waiting;
    bool refused;      /* the peer had no receive, and the request at window.finished was not sent again since */
    bool rewind;       /* all is sent again as soon as the peer has ended its copies; nothing is sent before */
    uint64_t deadline; /* when the oldest request counts as lost; UINT64_MAX: never */
    uint64_t pause;    /* the peer had no receive: nothing is sent before this time; 0: no pause */

    /* For remote peers. */
    /* Number of this life of the queue pair: responses to earlier ones are ignored. */
    uint32_t token;
    uint32_t direct_first, direct_count; /* free-running counters. No part is left when the window is rewound */
    /* For the read in flight that asked for a grant; `owner_serial` is 0: none. */
    struct soft_read_cache_entry pending_entry;
};

struct soft_qp {
    struct ibv_qp qp;
    struct soft_half half;
    struct soft_context *context;      /* const, like the next eight fields */
    struct soft_pd *pd;                /* NULL with XRC_RECV */
    struct soft_cq *send_cq, *recv_cq; /* NULL where the type has no such queue */
    struct soft_srq *srq;              /* shared receive queue, or NULL */
    struct soft_xrcd *xrcd;            /* XRC domain of XRC_RECV */
    uint64_t serial;                   /* unique among all queue pairs of the device */
    uint32_t max_inline;
    bool sq_sig_all;
    struct soft_memory buffer, record;
    _Alignas(64) _Atomic uint32_t own_record[2]; /* used without an allocator: [0] receive, [1] send */
    struct soft_ring sq, rq;

    /* An `enum ibv_qp_state`. Written under sq_lock (by executing sends), under rq_lock (by a peer's requests) or under
     * both (soft_modify_qp); so a change other than to ERR needs both. Sequentially consistent: of a thread that posts
     * and then reads the state, and one that sets ERR and then reads the ring, at least one sees the other's write. */
    atomic_uint state;
    struct ibv_qp_attr attr; /* written under both locks, read under either */
    bool is_loopback;        /* as attr: the path ends at this device */
    struct soft_link *link;  /* as attr: link to the remote peer; of a datagram queue pair, to the last one; or NULL */
    bool destroying;         /* as attr: the queue pair is being destroyed, and stays in RESET */

    struct soft_lock sq_lock;  /* device half that sends */
    struct soft_requester req; /* sq */
    /* sq: made when they are first needed, as many queue pairs never need them, and kept; NULL before. */
    struct soft_direct_part *direct_parts;            /* SOFT_DIRECT_PARTS of them */
    struct soft_read_cache_entry *read_cache_entries; /* SOFT_READ_CACHE_ENTRIES of them, by key */

    struct soft_lock rq_lock; /* device half that receives */
    uint32_t expected_psn;    /* rq */
    bool established;         /* rq: COMM_EST was raised */
    bool last_wqe;            /* rq: QP_LAST_WQE_REACHED was raised */
    struct soft_inbound in;   /* rq: message that is being received */
    struct soft_atomic_replay
        atomic_replays[SOFT_MAX_RD_ATOMIC]; /* rq: responses to atomics of a remote peer, for repetitions */
    uint32_t atomic_replays_next;           /* rq */

    /* Whether the queue pair is on a list of the worker thread, or is being added. Set by the thread that adds it;
     * cleared under worker.lock when it is removed, before it is executed: a thread that finds the flag set leaves its
     * work to that execution. */
    atomic_bool queued;
    /* written by the thread that set `queued` until the queue pair is added; then under worker.lock */
    struct soft_qp *next_queued;
    struct soft_timer timer; /* under worker.lock */
    struct soft_event_source events;
    struct soft_waiter waiter;             /* waits for room on a link to a remote peer */
    struct soft_fault_counts fault_counts; /* under the fault plan's lock */
    struct soft_frame_counts frame_counts; /* under the plan's lock of frames */
};

static inline struct soft_qp *to_soft_qp(struct ibv_qp *qp)
{
    return container_of(qp, struct soft_qp, qp);
}

/* Return whether a queue pair waits for acknowledgements: UC and UD do not. */
static inline bool soft_is_reliable(const struct soft_qp *qp)
{
    return qp->qp.qp_type != IBV_QPT_UC && qp->qp.qp_type != IBV_QPT_UD;
}

#endif
