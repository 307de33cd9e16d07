/* The objects of the software device. Every field that two threads can reach has its rule beside it:
 *
 *   const      set before the object is handed out, never again
 *   driver     the object's driver half: its caller, through soft_half_enter
 *   sq, rq, cq under that lock of the device half
 *   atomic     by itself; the comment says who writes and with which order
 */
#ifndef AIOVERBS_SOFT_H
#define AIOVERBS_SOFT_H

#include "soft_device.h"
#include "soft_sync.h"
#include "soft_table.h"
#include "verbs_abi.h"

#define container_of(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

#define SOFT_MAX_SGE 32u
#define SOFT_MAX_INLINE 1024u
#define SOFT_MAX_QP_WR 32768u
#define SOFT_MAX_CQE (1u << 22)
#define SOFT_MAX_RD_ATOMIC 16u
#define SOFT_MAX_MESSAGE (1u << 30)
#define SOFT_PSN_MASK 0xffffffu
#define SOFT_PAGE 4096u

/* The smallest power of two that is not less; the sizes here are far below 2^31. */
static inline uint32_t soft_power_of_two(uint32_t at_least)
{
    uint32_t size = 1;

    while (size < at_least)
        size *= 2;
    return size;
}

/* ---- Memory of queues, by default or from a parent domain's allocator ------------------------------------ */

/* mlx5's codes, so that an allocator sees here what it will see there: RDMA_DRIVER_MLX5 in the upper half. */
#define SOFT_DRIVER_ID 1ull
#define SOFT_RESOURCE(n) (SOFT_DRIVER_ID << 32 | (n))
enum { SOFT_RES_QP = 1, SOFT_RES_DBR = 3, SOFT_RES_SRQ = 4, SOFT_RES_CQ = 5 };

struct soft_pd;

struct soft_memory {
    void *address;
    size_t size;
    uint64_t resource_type;
    struct soft_pd *owner; /* the parent domain whose allocator gave it, else NULL */
};

int soft_memory_get(struct soft_memory *memory, struct soft_pd *pd, size_t size, size_t alignment, uint32_t kind);
void soft_memory_put(struct soft_memory *memory);

/* ---- Device and context ---------------------------------------------------------------------------------- */

/* One for the process and for all contexts; a child of a fork gets a new one. */
struct soft_device {
    struct ibv_device device;
    struct soft_table qps; /* struct soft_qp by number */
    struct soft_table mrs; /* struct soft_mr by key >> 8 */
};

struct soft_engine {
    pthread_mutex_t lock; /* guards all of this but `context` */
    pthread_cond_t wake;
    pthread_t thread;
    bool started, stop, asleep;
    struct soft_qp *first, *last;               /* queue pairs with something to do, in order of arrival */
    struct soft_qp **timers;                    /* a binary heap of queue pairs by timer_due */
    uint32_t timer_count, timer_room, reserved; /* room for one timer per queue pair of the context */
};

struct soft_context {
    struct soft_device *device;
    uint32_t generation; /* const: soft_generation when it was opened */
    enum soft_mode mode; /* const */
    atomic_ullong delay_ns;
    /* atomic: what is alive, and the next handle to give */
    atomic_uint pds, parent_domains, thread_domains, mrs, channels, cqs, qps, overlaps, next_handle;
    struct soft_engine engine;
    struct verbs_context verbs; /* must be last: libibverbs' layout is counted from its end */
};

static inline struct soft_context *to_soft_context(const struct ibv_context *context)
{
    return container_of(context, struct soft_context, verbs.context);
}

static inline bool soft_stale(const struct soft_context *context)
{
    return context->generation != soft_generation;
}

extern const union ibv_gid soft_gids[];
#define SOFT_GIDS 2u

bool soft_gid_is_local(const union ibv_gid *gid);
void soft_fill_device_attr(struct ibv_device_attr *attr);

/* ---- Domains --------------------------------------------------------------------------------------------- */

struct soft_td {
    struct ibv_td td;
    struct soft_exclusive exclusive;
    atomic_uint references; /* parent domains */
};

struct soft_pd {
    struct ibv_pd pd;
    struct soft_pd *base; /* const: itself, or for a parent domain the domain that it extends */
    struct soft_td *td;   /* const */
    void *(*alloc)(struct ibv_pd *, void *, size_t, size_t, uint64_t); /* const, like the next two */
    void (*free)(struct ibv_pd *, void *, void *, uint64_t);
    void *pd_context;
    atomic_uint references; /* queue pairs, queues, regions, parent domains */
};

static inline struct soft_pd *to_soft_pd(struct ibv_pd *pd)
{
    return container_of(pd, struct soft_pd, pd);
}

struct ibv_pd *soft_alloc_pd(struct ibv_context *context);
int soft_dealloc_pd(struct ibv_pd *pd);
struct ibv_td *soft_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int soft_dealloc_td(struct ibv_td *td);
struct ibv_pd *soft_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);

/* ---- Memory regions -------------------------------------------------------------------------------------- */

/* All const while it can be found. */
struct soft_mr {
    struct ibv_mr mr;
    struct soft_pd *pd; /* as given at registration; `pd->base` is what access is checked against */
    int access;
};

struct soft_segment {
    uint8_t *address;
    uint32_t length;
};

struct ibv_mr *soft_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int soft_dereg_mr(struct ibv_mr *mr);

/* In a grace section. NULL where the key is not one of `pd`'s, the range leaves the region, or a bit of `access`
 * was not granted. The address stays good until the section ends. */
uint8_t *soft_mr_resolve(struct soft_device *device, const struct soft_pd *pd, uint32_t key, uint64_t address,
                         uint64_t length, int access);

/* ---- Completion channels and queues ---------------------------------------------------------------------- */

struct soft_cq;

struct soft_channel {
    struct ibv_comp_channel channel;
    pthread_mutex_t lock;         /* guards the list; channel.fd is readable while it is not empty */
    struct soft_cq *first, *last; /* queues with events that nobody took yet */
    atomic_uint references;
};

struct ibv_comp_channel *soft_create_comp_channel(struct ibv_context *context);
int soft_destroy_comp_channel(struct ibv_comp_channel *channel);
int soft_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void soft_ack_cq_events(struct ibv_cq *cq, unsigned int count);
void soft_channel_notify(struct soft_channel *channel, struct soft_cq *cq);
uint32_t soft_channel_forget(struct soft_channel *channel, struct soft_cq *cq);

/* A completion, in the queue's own memory. `qp` is good as long as the entry is there: destroying a queue pair
 * removes its entries first. */
struct soft_cqe {
    uint64_t wr_id;
    struct soft_qp *qp;
    uint32_t byte_len, imm_data, qp_num, src_qp;
    uint32_t wqe_index; /* of a send: the work request and all before it are done */
    uint16_t status, opcode;
    uint16_t wc_flags;
    uint8_t is_send, solicited;
    uint32_t vendor_err;
    uint8_t reserved[12];
};
_Static_assert(sizeof(struct soft_cqe) == 64, "a completion is a cache line");

struct soft_cq {
    struct ibv_cq_ex ex; /* its first part is a struct ibv_cq */
    struct soft_half half;
    struct soft_pd *parent_domain; /* const, or NULL */
    struct soft_channel *channel;  /* const, or NULL */
    struct soft_memory buffer, record;
    struct soft_cqe *ring;      /* const; entries [consumer, producer) are the driver's, the others the device's */
    uint32_t mask;              /* const */
    _Atomic uint32_t *consumer; /* the doorbell record; written by the driver half, release */
    struct soft_cqe *current;   /* driver: between start_poll and end_poll */
    atomic_uint references;     /* queue pairs' ends */

    struct soft_lock lock;                                             /* the device half */
    _Atomic uint32_t producer;                                         /* written under lock, release */
    enum { SOFT_UNARMED, SOFT_ARMED_SOLICITED, SOFT_ARMED_ANY } armed; /* cq */
    atomic_bool overrun; /* written under lock, for good: a completion found no room */

    uint32_t events_waiting;    /* under channel->lock: raised, not taken */
    uint32_t events_taken;      /* under channel->lock: handed out by soft_get_cq_event */
    struct soft_cq *next_event; /* under channel->lock */
};

static inline struct soft_cq *to_soft_cq(struct ibv_cq *cq)
{
    return (struct soft_cq *)(void *)cq;
}

struct ibv_cq *soft_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                              int comp_vector);
struct ibv_cq_ex *soft_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
int soft_destroy_cq(struct ibv_cq *cq);
int soft_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);
void soft_cq_ex_methods(struct ibv_cq_ex *ex, uint64_t wc_flags);

/* From the device half of any queue pair. False: the queue overran, the completion is lost. */
bool soft_cq_push(struct soft_cq *cq, const struct soft_cqe *cqe);

/* Removes what `qp` completed and nobody polled. The caller is inside of the queue's driver half. */
void soft_cq_purge(struct soft_cq *cq, const struct soft_qp *qp);

/* ---- Queue pairs ----------------------------------------------------------------------------------------- */

/* A send work request in the queue's memory; scatter/gather entries or inline bytes follow it. */
struct soft_wqe {
    uint64_t wr_id;
    uint8_t opcode, flags, num_sge, reserved;
    uint32_t imm_data;
    uint64_t remote_addr;
    uint32_t rkey;
    uint32_t inline_length;
    uint64_t compare_add, swap;
    uint64_t due_ns; /* engine mode: not to be executed before */
    uint64_t padding;
};
_Static_assert(sizeof(struct soft_wqe) == 64, "a work request's head is a cache line");
_Static_assert(SOFT_MAX_SGE < 256, "num_sge is one byte");

struct soft_rwqe {
    uint64_t wr_id;
    uint64_t num_sge;
};

/* Counters of a ring run freely; an index is a counter masked. */
struct soft_ring {
    uint8_t *entries;         /* const */
    uint32_t stride, mask;    /* const */
    uint32_t depth, max_sge;  /* const; 0 where the ring was not asked for */
    _Atomic uint32_t *posted; /* doorbell record: written by the driver half with release, read by the device half */
    uint32_t taken;           /* sq or rq lock: how far the device half is */
    _Atomic uint32_t reaped;  /* written by whoever polls (the CQ's driver half), release: slots free again */
};

static inline void *soft_ring_entry(const struct soft_ring *ring, uint32_t counter)
{
    return ring->entries + (size_t)(counter & ring->mask) * ring->stride;
}

struct soft_qp {
    struct ibv_qp qp;
    struct soft_half half;
    struct soft_context *context; /* const, like the next five */
    struct soft_pd *pd;
    struct soft_cq *send_cq, *recv_cq;
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

    struct soft_lock sq_lock;        /* the sending device half */
    uint32_t next_psn;               /* sq */
    uint32_t retries_left, rnr_left; /* sq */
    bool waiting;                    /* sq: a request is to be tried again, or never (timeout 0) */
    bool unanswered;                 /* sq: ... since nobody answered */
    uint64_t retry_ns;               /* sq: when; UINT64_MAX: never */

    struct soft_lock rq_lock; /* the receiving device half */
    uint32_t expected_psn;    /* rq */

    bool queued;    /* under engine.lock, like the next four */
    bool forgotten; /* it is being destroyed */
    struct soft_qp *next_queued;
    uint32_t timer_slot; /* its place in the heap + 1, or 0 */
    uint64_t timer_due;
};

static inline struct soft_qp *to_soft_qp(struct ibv_qp *qp)
{
    return container_of(qp, struct soft_qp, qp);
}

struct ibv_qp *soft_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
int soft_destroy_qp(struct ibv_qp *qp);
int soft_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init_attr);
int soft_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* soft_state.c, pure: 0 where `mask` may take a queue pair of this type from one state to the other, else EINVAL. */
int soft_state_check(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask);

/* ---- Execution ------------------------------------------------------------------------------------------- */

/* Does what there is to do for a queue pair now: executes, retries or flushes. In a grace section, no device
 * lock held. Returns when to come again (CLOCK_MONOTONIC), or UINT64_MAX. */
uint64_t soft_execute(struct soft_qp *qp);

/* Has soft_execute called: at once in inline mode, else by the engine. In a grace section, no device lock held. */
void soft_kick(struct soft_qp *qp);

/* The same from a driver half, outside of any section; grace_ready() was true. */
void soft_kick_from_driver(struct soft_qp *qp);

/* Under rq_lock: completes every posted receive as flushed. */
void soft_flush_receives(struct soft_qp *qp);

int soft_engine_init(struct soft_context *context);
void soft_engine_destroy(struct soft_context *context);
int soft_engine_reserve(struct soft_context *context); /* room for one more queue pair; may start the thread */
void soft_engine_unreserve(struct soft_context *context);
void soft_engine_ring(struct soft_qp *qp);                /* the engine executes it soon */
void soft_engine_timer(struct soft_qp *qp, uint64_t due); /* ... or then; the earliest of several counts */
int soft_engine_start(struct soft_context *context);      /* makes sure that the thread runs: 0 or an errno */
void soft_engine_forget(struct soft_qp *qp);

/* ---- Delivery to a peer ---------------------------------------------------------------------------------- */

struct soft_request {
    const struct soft_qp *from; /* its sq_lock is held */
    enum ibv_wr_opcode opcode;
    bool solicited;
    uint32_t imm_data, rkey, length, psn, packets;
    uint64_t remote_addr, compare_add, swap;
    const struct soft_segment *local; /* what is sent, or where the answer goes; checked */
    uint32_t local_count;
};

struct soft_reply {
    enum {
        SOFT_ACK,
        SOFT_NAK,    /* for good, with `status` */
        SOFT_RNR,    /* no receive was posted: again after `rnr_ns` */
        SOFT_SILENT, /* nobody answers */
    } kind;
    enum ibv_wc_status status;
    uint64_t rnr_ns;
    struct soft_qp *broken; /* a peer of this process that went to ERR and is to be kicked, else NULL */
};

/* In a grace section. Finds the peer of `request->from` and executes the request there. */
void soft_link_deliver(const struct soft_request *request, struct soft_reply *reply);

void soft_sync_after_fork(void);

#endif
