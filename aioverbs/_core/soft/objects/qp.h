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

/* A receive that was taken. */
struct soft_recv_wqe {
    uint64_t wr_id;
    uint32_t num_sge;
    uint32_t index; /* in the queue pair's own queue */
    const struct ibv_sge *sges;
    struct soft_receive copy; /* of a shared queue's */
};

/* The message that comes in. Each part of it is handled in one go, under rq_lock: between two of them `has_recv_wqe` is true
 * only while the message is under way. */
struct soft_inbound {
    struct soft_message message;
    bool has_recv_wqe;    /* `recv_wqe` is this message's: to be completed, or given back */
    struct soft_srq *srq; /* where it was taken from, or NULL: the queue pair's own queue. It cannot go before */
    struct soft_recv_wqe recv_wqe; /* good while `has_recv_wqe` */
};

struct soft_atomic_replay {
    bool valid;
    uint32_t psn;
    uint64_t value;
};

/* A part whose bytes the peer moves itself, until it says that it did and has left the memory. */
struct soft_direct_part {
    uint32_t psn; /* of its last packet */
    uint32_t serial;
    uint64_t revoked_at; /* when it was not left at once; 0: it was not asked for, or was left */
    uint16_t copy_token;
};
enum { SOFT_DIRECT_PARTS = 16 };

/* The requester's state, under sq_lock. `waiting`: a request was tried and is not over; else nothing is left of `refused`,
 * `rewind`, `deadline` and `pause`. */
struct soft_requester {
    struct soft_window window;       /* which requests are over, which are in flight */
    uint32_t retries_left, rnr_left; /* for the request at window.taken, since the peer made progress last */
    bool begun;                      /* the request at window.taken was tried before */
    bool drain_notify;               /* SQ_DRAINED is to be raised */
    bool waiting;
    bool refused;      /* the peer had no receive, and the request at window.taken was not sent again since */
    bool rewind;       /* all is to be sent again as soon as the peer has left all memory; nothing is sent before */
    uint64_t deadline; /* when the oldest one counts as lost; UINT64_MAX: it is waited for ever */
    uint64_t pause;    /* the peer had no receive: nothing is sent before; 0: it had */

    /* Towards a remote peer. */
    uint32_t token;                      /* of this life of the queue pair: an answer to an earlier one is none */
    uint32_t direct_first, direct_count; /* free-running. None is left when the window goes back */
    struct soft_direct_part direct_parts[SOFT_DIRECT_PARTS];
    struct soft_read_cache_entry pending_entry; /* of a read that is under way; `page` is 0: of none */
    struct soft_read_cache_entry read_cache_entries[SOFT_READ_CACHE_ENTRIES]; /* by key */
};

struct soft_qp {
    struct ibv_qp qp;
    struct soft_half half;
    struct soft_context *context;      /* const, like the next eight */
    struct soft_pd *pd;                /* NULL: XRC_RECV */
    struct soft_cq *send_cq, *recv_cq; /* NULL where the type has no such queue */
    struct soft_srq *srq;              /* or NULL */
    struct soft_xrcd *xrcd;            /* XRC_RECV */
    uint64_t serial;                   /* never given to another queue pair */
    uint32_t max_inline;
    bool sq_sig_all;
    struct soft_memory buffer, record;
    _Alignas(64) _Atomic uint32_t own_record[2]; /* used where the allocator gave none: [0] receive, [1] send */
    struct soft_ring sq, rq;

    /* An `enum ibv_qp_state`. Written under sq_lock (by this side's execution), under rq_lock (by what a peer
	 * does here) or under both (soft_modify_qp); so a change other than to ERR needs both. Sequentially
	 * consistent: who posts and then reads it, or sets ERR and then reads the ring, sees the other. */
    atomic_uint state;
    struct ibv_qp_attr attr; /* written under both locks, read under either */
    bool leads_here;         /* as attr: its path ends at this device */
    struct soft_link *link;  /* as attr: the way to a remote peer; of a datagram's queue, to the last one. Or NULL */
    bool leaving;            /* as attr: it is being destroyed, and stays in RESET */

    struct soft_lock sq_lock;  /* the sending device half */
    struct soft_requester req; /* sq */

    struct soft_lock rq_lock; /* the receiving device half */
    uint32_t expected_psn;    /* rq */
    bool established;         /* rq: COMM_EST was raised */
    bool last_wqe;            /* rq: QP_LAST_WQE_REACHED was raised */
    struct soft_inbound in;   /* rq: the message that comes in */
    struct soft_atomic_replay
        atomic_replays[SOFT_MAX_RD_ATOMIC]; /* rq: what atomics of a remote peer were answered, for repetitions */
    uint32_t atomic_replays_next;           /* rq */

    /* It stands on one of the engine's lists, or is being added. Set by who adds it, cleared under engine.lock when it
     * is taken off, before it is executed: who finds it set has left his work to that execution. */
    atomic_bool queued;
    struct soft_qp *next_queued; /* of who set `queued`, until it is added; from then on under engine.lock */
    struct soft_timer timer;     /* under engine.lock */
    struct soft_event_source events;
    struct soft_waiter waiter;             /* for room on a link to a remote peer */
    struct soft_fault_counts fault_counts; /* under the fault plan's lock */
    struct soft_frame_counts frame_counts; /* under its lock of frames */
};

static inline struct soft_qp *to_soft_qp(struct ibv_qp *qp)
{
    return container_of(qp, struct soft_qp, qp);
}

/* Whether a queue pair waits for answers: the others send and forget. */
static inline bool soft_is_reliable(const struct soft_qp *qp)
{
    return qp->qp.qp_type != IBV_QPT_UC && qp->qp.qp_type != IBV_QPT_UD;
}

#endif
