/* The objects of the software device. Every field that two threads can reach has its rule beside it:
 *
 *   const      set before the object is handed out, never again
 *   driver     the object's driver half: its caller, through soft_half_enter
 *   sq, rq, cq under that lock of the device half
 *   atomic     by itself; the comment says who writes and with which order
 */
#ifndef AIOVERBS_SOFT_H
#define AIOVERBS_SOFT_H

#include <unistd.h>

#include "soft/api/device.h"
#include "soft/fabric/fabric.h"
#include "soft/fault/fault.h"
#include "soft/objects/inbound_message.h"
#include "soft/fabric/read_cache.h"
#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/objects/psn_window.h"
#include "abi/libibverbs.h"

#define container_of(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

#define SOFT_MAX_SGE 32u
#define SOFT_MAX_INLINE 1024u
#define SOFT_MAX_QP_WR 32768u
#define SOFT_MAX_SRQ_WR 32768u
#define SOFT_MAX_CQE (1u << 22)
#define SOFT_MAX_RD_ATOMIC 16u
#define SOFT_MAX_MESSAGE (1u << 30)
#define SOFT_MTU 4096u /* of the port */
#define SOFT_GRH 40u   /* bytes before a datagram */

#define SOFT_FIRST_QPN 0x10u /* 0 and 1 are the management queue pairs of the architecture */
#define SOFT_FIRST_MR 1u
#define SOFT_FIRST_SRQ 1u
#define SOFT_MAX_NUMBER (SOFT_CHUNKS * SOFT_CHUNK_SIZE)

/* A page of this kernel: 4 KiB, 16 KiB or 64 KiB. */
static inline size_t soft_page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

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

struct soft_context;

#define SOFT_GIDS 2u

/* The last of a run of acknowledgements to one queue pair, which tells of all of them. */
struct soft_gathered {
    const struct soft_stream *stream; /* that asked, or NULL: nothing is gathered */
    struct soft_frame frame;
};

/* A port for all contexts that were opened by one address, or by none; a child of a fork gets a new one. */
struct soft_device {
    struct ibv_device device;
    struct soft_device *next;      /* const: the one that was made before */
    struct soft_address address;   /* const */
    union ibv_gid gids[SOFT_GIDS]; /* const, and nobody else's */
    int reserved;                  /* const: a socket by whose name others know that the second one is taken, or -1 */
    struct soft_table qps;         /* struct soft_qp by number */
    struct soft_table keys;        /* struct soft_key by key >> 8: memory regions and windows */
    struct soft_table srqs;        /* struct soft_srq by number */
    atomic_bool port_down;         /* written under `lock` */
    atomic_ullong serial;          /* the next queue pair's */
    struct soft_mutex lock;        /* guards the lists */
    struct soft_context *first;    /* all contexts */
    struct soft_domain *shared;    /* protection domains that have a share key */
    struct soft_shared *files;     /* those of them that other processes have, too; under `lock` */
    struct soft_mutex xrcd_lock;   /* other processes may be waited for under it */
    struct soft_xrc_inode *xrcds;  /* XRC domains that have an inode; under xrcd_lock */
    uint32_t next_share;           /* the next identifier of a shared protection domain */
    struct soft_fabric *fabric;    /* const: the way to the devices of others */
    struct soft_gathered gathered; /* under the fabric's progress */
    atomic_uint moving;            /* parts of requests of which a peer moves the bytes itself */
};

/* ---- Asynchronous events --------------------------------------------------------------------------------- */

/* What may raise events: a queue pair, a completion queue, a shared receive queue, and the context itself, for its
 * port and device. An event that waits already is not added a second time but becomes the source's latest. */
enum { SOFT_EVENTS_PER_SOURCE = 8 };

struct soft_event_source {
    struct soft_event_source *next; /* under events.lock, like all of it */
    void *element;                  /* const: the ibv object; NULL for the context */
    uint32_t taken;                 /* handed out by get_async_event */
    uint8_t waiting;                /* how many of `types` */
    uint8_t types[SOFT_EVENTS_PER_SOURCE];
};

struct soft_events {
    struct soft_mutex lock;
    struct soft_event_source *first, *last;
    struct soft_event_source own; /* of the port and the device */
};

int soft_events_init(struct soft_context *context); /* makes async_fd */
void soft_events_destroy(struct soft_context *context);
void soft_raise(struct soft_context *context, struct soft_event_source *source, enum ibv_event_type type);

/* For a destroy verb: drops what waits, then waits until `*completed` (under `mutex`, signalled by `cond`) says that
 * each event that was taken is acknowledged. Nobody raises events of this source any more. */
void soft_events_finish(struct soft_context *context, struct soft_event_source *source, pthread_mutex_t *mutex,
                        pthread_cond_t *cond, const uint32_t *completed);
int soft_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
void soft_ack_async_event(struct ibv_async_event *event);

/* ---- The engine ------------------------------------------------------------------------------------------ */

/* Embedded in what is to be visited later. Under engine->lock. */
struct soft_timer {
    uint32_t slot; /* its place in the heap + 1, or 0 */
    bool forgotten;
    enum { SOFT_TIMER_QP, SOFT_TIMER_CQ } of; /* const: what it is embedded in */
    uint64_t due;                             /* CLOCK_MONOTONIC */
};

struct soft_engine {
    struct soft_mutex lock; /* guards all of this but the next two */
    /* Queue pairs with something to do, the last one first: anybody adds one, without a lock, and whoever holds the
     * lock takes all at once. So none that was taken can be the head again under who adds. */
    _Atomic(struct soft_qp *) submitted;
    struct soft_sleeper sleeper; /* the thread */
    pthread_t thread;
    bool started, stop;
    struct soft_qp *first, *last;               /* those that were taken, in order of arrival */
    struct soft_timer **timers;                 /* a binary heap by `due` */
    uint32_t timer_count, timer_room, reserved; /* room for each timer that may be set */
};

struct soft_context {
    struct soft_device *device;
    uint32_t generation; /* const: soft_generation when it was opened */
    enum soft_mode mode; /* const */
    atomic_ullong delay_ns;
    /* atomic: what is alive, and the next handle to give */
    atomic_uint pds, parent_domains, thread_domains, xrcds, mrs, mws, ahs, channels, cqs, srqs, qps;
    atomic_uint overlaps, next_handle;
    struct soft_engine engine;
    struct soft_events events;
    struct soft_faults *faults;        /* const */
    atomic_uint special;               /* enum soft_special, any combination; 0 on the usual path */
    struct soft_context *next, **link; /* under device->lock */
    struct verbs_context verbs;        /* must be last: libibverbs' layout is counted from its end */
};

static inline struct soft_context *to_soft_context(const struct ibv_context *context)
{
    return container_of(context, struct soft_context, verbs.context);
}

enum soft_special {
    SOFT_SPECIAL_FAULTS = 1, /* the fault plan has something to say */
    SOFT_SPECIAL_LOST = 2,   /* the device was taken away, for good as far as this context goes */
};

/* The errno with which this call of a verb is to fail before it does anything: the device is lost, or the fault plan
 * has it so. 0 on the usual path. */
static inline int soft_refusal(struct soft_context *context, enum soft_verb verb)
{
    return atomic_load_explicit(&context->special, memory_order_relaxed) ? soft_fault_refusal(context, verb) : 0;
}

/* soft/api/ops.c: the doors by which verbs come in, where refusals are decided. */
void soft_entry_fill(struct verbs_context *verbs);

/* soft/api/unsupported.c: what the device does not have. */
void soft_absent_fill(struct verbs_context *verbs);
struct ibv_context *soft_import_device(int cmd_fd);
struct ibv_pd *soft_import_pd(struct ibv_context *context, uint32_t handle);
void soft_unimport_pd(struct ibv_pd *pd);
int soft_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int soft_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);

static inline bool soft_stale(const struct soft_context *context)
{
    return context->generation != soft_generation;
}

int soft_close_device(struct ibv_context *context);
int soft_query_device(struct ibv_context *context, struct ibv_device_attr *attr);
int soft_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                         struct ibv_device_attr_ex *attr, size_t size);
int soft_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values);
int soft_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out, size_t size);
int soft_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
int soft_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey);

/* soft/objects/gids.c: addresses, and the GIDs and the name made from them. Whether a device can be there; one that has a
 * family. */
bool soft_address_is_usable(const struct soft_address *address);
bool soft_address_is_same(const struct soft_address *one, const struct soft_address *other);
void soft_device_name(const struct soft_address *address, char *name, size_t size);

/* Fills the GIDs of a device that has its address. 0 or an errno. */
int soft_gids_init(struct soft_device *device);

/* A socket, which is owned: as long as it is open others are told EADDRINUSE. -1 and errno. */
int soft_gid_reserve(const union ibv_gid *gid);
bool soft_gid_is_local(const struct soft_device *device, const union ibv_gid *gid);

/* Whether it is made of an IPv4 address, which its last four bytes are; bytes 8 and 9 may be a port. */
bool soft_gid_is_ipv4(const union ibv_gid *gid);

/* ---- Domains --------------------------------------------------------------------------------------------- */

struct soft_td {
    struct ibv_td td;
    struct soft_exclusive exclusive;
    atomic_uint references; /* parent domains */
};

/* What isolation is about. One per protection domain, unless it is shared: then one for all its instances. */
struct soft_domain {
    atomic_uint instances;
    uint64_t share_key;       /* under device->lock, like the next two */
    uint32_t share;           /* its identifier; 0: not shared */
    struct soft_domain *next; /* of device->shared */
    /* Where other processes may have it, too; set once, under device->lock. What is made on it from then on has a number
     * that no other of its processes gives. */
    _Atomic(struct soft_shared *) file;
};

struct soft_pd {
    struct ibv_pd pd;
    struct soft_pd *base;       /* const: itself, or for a parent domain the domain that it extends */
    struct soft_domain *domain; /* const: the base's */
    struct soft_td *td;         /* const */
    void *(*alloc)(struct ibv_pd *, void *, size_t, size_t, uint64_t); /* const, like the next two */
    void (*free)(struct ibv_pd *, void *, void *, uint64_t);
    void *pd_context;
    atomic_uint references; /* queue pairs, queues, regions, windows, address handles, parent domains */
    struct soft_mutex lock; /* guards what follows */
    struct soft_key *keys;  /* the regions and windows made on it */
    uint32_t key_count;     /* how many, of `references` */
    bool gone;              /* it was given back, some of its dead keys were not: the last of them frees it */
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

/* A protection domain: of its own, or a further instance of a shared one (under device->lock). NULL and errno. */
struct soft_pd *soft_pd_new(struct soft_context *context, struct soft_domain *shared);

/* Its last instance goes: nobody finds it any more, under device->lock; and then nobody uses it. */
void soft_domain_unlink(struct soft_device *device, struct soft_domain *domain);
void soft_domain_free(struct soft_domain *domain);

/* For who makes a region or window and before it can be found; and for who gives it back, when nobody finds it any
 * more and before its number is free again. The domain counts it as a reference meanwhile. */
void soft_pd_adopt(struct soft_pd *pd, struct soft_key *key);
void soft_pd_release(struct soft_pd *pd, struct soft_key *key);
void soft_pd_restore(struct soft_pd *pd, struct soft_key *key); /* it is found again, unless it is dead */

struct soft_xrcd {
    struct ibv_xrcd xrcd;
    struct soft_xrc_inode *shared; /* const: what all handles of one inode's domain have in common */
    atomic_uint references;        /* queue pairs and shared receive queues made with this handle */
};

static inline struct soft_xrcd *to_soft_xrcd(struct ibv_xrcd *xrcd)
{
    return container_of(xrcd, struct soft_xrcd, xrcd);
}

struct ibv_xrcd *soft_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int soft_close_xrcd(struct ibv_xrcd *xrcd);

/* ---- Memory regions and windows --------------------------------------------------------------------------- */

/* What a key finds. */
struct soft_key {
    bool is_window;           /* const */
    uint32_t number;          /* const: in device->keys, or in the domain's */
    struct soft_shared *file; /* const: of a domain that other processes have, or NULL */
    /* Set once, when the instance of a shared protection domain that it was made on is given back. Its key finds
     * nothing any more, and it waits to be given back itself. A window that is bound to a dead region leads nowhere. */
    atomic_bool dead;
    struct soft_key *next, **link; /* of pd->keys, under pd->lock */
};

/* A number for a region or window of a protection domain, with what tells one use of it from the next: 0 or an errno.
 * Then it finds the key, or nothing; and then it is free. Meanwhile a window may count its uses on, to this one. */
int soft_key_reserve(struct soft_pd *pd, struct soft_key *key, uint8_t *use);
void soft_key_use(struct soft_device *device, const struct soft_key *key, uint8_t use);
void soft_key_publish(struct soft_device *device, struct soft_key *key);
void soft_key_withdraw(struct soft_device *device, struct soft_key *key);
void soft_key_release(struct soft_device *device, struct soft_key *key);

/* All const while it can be found, but for `windows`. */
struct soft_mr {
    struct soft_key key;
    struct ibv_mr mr;
    struct soft_pd *pd; /* as given at registration; its domain is what access is checked against */
    int access;
    atomic_uint windows; /* bound to it: with any, it cannot be deregistered */
};

/* A window's key as a number stays; its low byte, and whether it leads anywhere, change with each binding. */
struct soft_mw {
    struct soft_key key;
    struct ibv_mw mw;
    struct soft_pd *pd;    /* const */
    struct soft_lock lock; /* guards what follows; held while bytes move through the window */
    bool bound;
    uint32_t rkey;
    uint64_t qp_serial; /* type 2: the queue pair that it was bound on, and that alone may be used */
    struct soft_mr *mr;
    uint64_t address, length;
    int access;
};

struct soft_segment {
    uint8_t *address;
    uint32_t length;
};

struct ibv_mr *soft_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int soft_dereg_mr(struct ibv_mr *mr);
struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
int soft_dealloc_mw(struct ibv_mw *mw);
void soft_mw_die(struct soft_mw *mw); /* nobody finds it any more: it gives the region free that it is bound to */

/* What follows is asked for every request, and so is inline up to where a window is in it.
 *
 * The address, or NULL where the key is not this region's as it is now, `pd` is not of its domain, the range leaves
 * it, or a bit of `access` was not granted. In a grace section; the address stays good until the section ends. */
static inline uint8_t *soft_mr_reach(const struct soft_mr *mr, const struct soft_pd *pd, uint32_t key, uint64_t address,
                                     uint64_t length, int access)
{
    uint64_t offset = address - (uintptr_t)mr->mr.addr; /* wraps to something large where the address is below */

    if (mr->mr.lkey != key || mr->pd->domain != pd->domain || (mr->access & access) != access)
        return NULL;
    if (offset > mr->mr.length || length > mr->mr.length - offset)
        return NULL;
    return (uint8_t *)(uintptr_t)address;
}

struct soft_remote;

/* What soft_mr_resolve, soft_remote_open and soft_key_find do with numbers that are not the device's own: those of
 * domains that processes share. What another process registered is reached by soft_far_resolve alone, where this
 * process has it; and stays good until the section ends, too. */
uint8_t *soft_far_resolve(const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access);
uint8_t *soft_far_open(struct soft_remote *remote, const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key,
                       uint64_t address, uint64_t length, int access);
struct soft_key *soft_far_find(const struct soft_pd *pd, uint32_t key);
bool soft_far_find_others(const struct soft_pd *pd, uint32_t key);

/* Whether it is the number of a region of another process, as far as it is one. */
static inline bool soft_far_is_others(const struct soft_pd *pd, uint32_t key)
{
    return key >> 8 >= SOFT_MAX_NUMBER && soft_far_find_others(pd, key);
}

static inline struct soft_key *soft_key_find(struct soft_device *device, const struct soft_pd *pd, uint32_t key)
{
    struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    return found ? found : soft_far_find(pd, key);
}

/* Local memory: the same by a key, which must be a region's. */
static inline uint8_t *soft_mr_resolve(struct soft_device *device, const struct soft_pd *pd, uint32_t key,
                                       uint64_t address, uint64_t length, int access)
{
    const struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    if (!found)
        return soft_far_resolve(pd, key, address, length, access);
    if (found->is_window)
        return NULL;
    return soft_mr_reach(container_of(found, struct soft_mr, key), pd, key, address, length, access);
}

/* Memory that a peer of `qp` names by a region's or a window's key. In a grace section, under rq_lock. NULL as above;
 * else the address stays good, and a window bound, until soft_remote_close. */
struct soft_remote {
    struct soft_mw *window; /* locked, or NULL */
};

uint8_t *soft_mw_open(struct soft_mw *mw, struct soft_remote *remote, const struct soft_qp *qp,
                      const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access);

static inline uint8_t *soft_remote_open(struct soft_remote *remote, struct soft_device *device,
                                        const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key,
                                        uint64_t address, uint64_t length, int access)
{
    struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    remote->window = NULL;
    if (!found)
        return soft_far_open(remote, qp, pd, key, address, length, access);
    if (found->is_window)
        return soft_mw_open(container_of(found, struct soft_mw, key), remote, qp, pd, key, address, length, access);
    return soft_mr_reach(container_of(found, struct soft_mr, key), pd, key, address, length, access);
}

static inline void soft_remote_close(struct soft_remote *remote)
{
    if (remote->window)
        soft_lock_give(&remote->window->lock);
}

struct soft_wqe;

/* A binding's work request, posted; a window of type 1 comes by no other way. */
int soft_post_window(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);

/* What a queue pair does with a window when it executes: in a grace section, under sq_lock or rq_lock. False: it is
 * not to be. After an unbinding nobody is in the window any more. */
bool soft_mw_bind(const struct soft_qp *qp, const struct soft_wqe *wqe);
bool soft_mw_invalidate(const struct soft_qp *qp, const struct soft_pd *pd, uint32_t rkey);

/* ---- Completion channels and queues ---------------------------------------------------------------------- */

struct soft_cq;

struct soft_channel {
    struct ibv_comp_channel channel; /* its fd is of an epoll, with event_fd in it, and the fabric's where it leads */
    int event_fd;                    /* an eventfd, readable while the list is not empty */
    struct soft_mutex lock;          /* guards the list */
    struct soft_cq *first, *last;    /* queues with events that nobody took yet */
    atomic_uint references;
};

struct ibv_comp_channel *soft_create_comp_channel(struct ibv_context *context);
int soft_destroy_comp_channel(struct ibv_comp_channel *channel);
int soft_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void soft_ack_cq_events(struct ibv_cq *cq, unsigned int count);
void soft_channel_notify(struct soft_channel *channel, struct soft_cq *cq);
uint32_t soft_channel_forget(struct soft_channel *channel, struct soft_cq *cq);

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
    bool timed;                    /* driver: the engine has room for `timer` */
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

    uint32_t events_waiting;    /* under channel->lock: raised, not taken */
    uint32_t events_taken;      /* under channel->lock: handed out by soft_get_cq_event */
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
int soft_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int soft_resize_cq(struct ibv_cq *cq, int cqe);
int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
void soft_cq_ex_methods(struct ibv_cq_ex *ex, uint64_t wc_flags);

/* From the device half of any queue pair. False: the queue overran, the completion is lost. */
bool soft_cq_push(struct soft_cq *cq, const struct soft_cqe *cqe);

/* The same by way of the fault plan, which may hold completions. Device halves call this one. */
static inline bool soft_complete(struct soft_context *context, struct soft_cq *cq, const struct soft_cqe *cqe)
{
    if (atomic_load_explicit(&context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS)
        return soft_fault_complete(context, cq, cqe);
    return soft_cq_push(cq, cqe);
}

/* Removes what `qp` or `srq` completed and nobody polled; either may be NULL. The caller is inside of the queue's
 * driver half. Credits of shared receive queues are given back. */
void soft_cq_purge(struct soft_cq *cq, const struct soft_qp *qp, const struct soft_srq *srq);

/* In a grace section: the moderation period is over. */
void soft_cq_expired(struct soft_cq *cq);

/* The queue breaks, as by an overrun. In a grace section, no lock held that comes after cq->lock. */
void soft_cq_break(struct soft_cq *cq);

/* ---- Shared receive queues ------------------------------------------------------------------------------- */

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
    uint32_t taken, limit;    /* free-running; 0: no limit is armed */
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
bool soft_srq_has(struct soft_srq *srq);
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

/* ---- Queue pairs ----------------------------------------------------------------------------------------- */

/* A send work request in the queue's memory; scatter/gather entries or inline bytes follow it. */
struct soft_wqe {
    uint64_t wr_id;
    uint8_t opcode, flags, num_sge;
    bool ah_refused;      /* a datagram: its address handle is of another protection domain */
    uint32_t imm_data;    /* or the key to invalidate; of a bind: the lkey of the region */
    uint64_t remote_addr; /* of a datagram: the peer's number; of a bind: where the window begins */
    uint32_t rkey;        /* of a datagram: the Q_Key; of a bind: the window's new key */
    uint32_t inline_length;
    union {
        struct {
            uint64_t compare_add, swap;
        };
        struct {
            uint64_t length, access;
        } bind;
        union ibv_gid dgid; /* of a datagram */
    };
    uint64_t due_ns; /* engine mode: not to be executed before */
    union {
        uint32_t remote_srqn;
        struct {
            uint32_t flow_label;
            uint8_t sgid_index, hop_limit, traffic_class;
        } path; /* of a datagram */
    };
};
_Static_assert(sizeof(struct soft_wqe) == 64, "a work request's head is a cache line");
_Static_assert(SOFT_MAX_SGE < 256, "num_sge is one byte");

/* One at a time: compilers make of a memcpy with a known limit a string instruction, which costs as much as all the
 * rest of posting, and nearly all lists have one element. */
static inline void soft_copy_sges(struct ibv_sge *to, const struct ibv_sge *from, unsigned int count)
{
    while (count--)
        *to++ = *from++;
}

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
    uint32_t taken;           /* rq lock: how far the device half is; of a send queue its window says so */
    _Atomic uint32_t reaped;  /* written by whoever polls (the CQ's driver half), release: slots free again */
};

static inline void *soft_ring_entry(const struct soft_ring *ring, uint32_t counter)
{
    return ring->entries + (size_t)(counter & ring->mask) * ring->stride;
}

/* A receive that was taken. */
struct soft_taken {
    uint64_t wr_id;
    uint32_t num_sge;
    uint32_t index; /* in the queue pair's own queue */
    const struct ibv_sge *sges;
    struct soft_receive copy; /* of a shared queue's */
};

/* The message that comes in. Each part of it is handled in one go, under rq_lock: between two of them `holds` is true
 * only while the message is under way. */
struct soft_inbound {
    struct soft_message message;
    bool holds;              /* `taken` is this message's: to be completed, or given back */
    struct soft_srq *srq;    /* where it was taken from, or NULL: the queue pair's own queue. It cannot go before */
    struct soft_taken taken; /* good while `holds` */
};

struct soft_kept {
    bool valid;
    uint32_t psn;
    uint64_t value;
};

/* A part whose bytes the peer moves itself, until it says that it did and has left the memory. */
struct soft_moving {
    uint32_t psn; /* of its last packet */
    uint32_t serial;
    uint64_t asked_back; /* when it was not left at once; 0: it was not asked for, or was left */
    uint16_t lease;
};
enum { SOFT_MOVING = 16 };

/* What a queue pair with a remote peer has beside its window, which says what is in flight. */
struct soft_outbound {
    uint32_t token; /* of this life of the queue pair: an answer to an earlier one is none */
    uint64_t
        deadline;   /* when the oldest one counts as lost; UINT64_MAX: nothing is under way, or it is waited for ever */
    uint64_t pause; /* the peer had no receive: nothing is sent before; 0: it had */
    uint64_t give_up; /* of a datagram: when it is dropped at last; 0: it does not wait */
    bool rewind;      /* all is to be sent again as soon as the peer has left all memory; nothing is sent before */
    uint32_t moving_first, moving_count; /* free-running. None is left when the window goes back */
    struct soft_moving moving[SOFT_MOVING];
    struct soft_licence asked;                   /* of a read that is under way; `page` is 0: of none */
    struct soft_licence licences[SOFT_LICENCES]; /* by key */
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

    struct soft_lock sq_lock;        /* the sending device half */
    struct soft_window window;       /* sq: which requests are over, which are in flight */
    uint32_t retries_left, rnr_left; /* sq */
    bool begun;                      /* sq: the request at window.taken was tried before */
    bool waiting;                    /* sq: a request is to be tried again, or never (timeout 0) */
    bool unanswered;                 /* sq: ... since nobody answered */
    uint64_t retry_ns;               /* sq: when; UINT64_MAX: never */
    bool drain_notify;               /* sq: SQ_DRAINED is to be raised */
    struct soft_outbound out;        /* sq: towards a remote peer */

    struct soft_lock rq_lock;                  /* the receiving device half */
    uint32_t expected_psn;                     /* rq */
    bool established;                          /* rq: COMM_EST was raised */
    bool last_wqe;                             /* rq: QP_LAST_WQE_REACHED was raised */
    struct soft_inbound in;                    /* rq: the message that comes in */
    struct soft_kept kept[SOFT_MAX_RD_ATOMIC]; /* rq: what atomics of a remote peer were answered, for repetitions */
    uint32_t kept_next;                        /* rq */

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

struct ibv_qp *soft_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
int soft_destroy_qp(struct ibv_qp *qp);
int soft_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init_attr);
int soft_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);

/* QP_FATAL: the queue pair breaks by itself. In a grace section, no device lock held. */
void soft_qp_break(struct soft_qp *qp);

/* ---- Address handles ------------------------------------------------------------------------------------- */

struct soft_ah {
    struct ibv_ah ah;
    struct soft_pd *pd;
    struct ibv_ah_attr attr;
};

int soft_check_path(const struct ibv_ah_attr *attr); /* 0 or EINVAL: whether it leads anywhere from this device */
struct ibv_ah *soft_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int soft_destroy_ah(struct ibv_ah *ah);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* soft/objects/qp_state.c, pure: 0 where `mask` may take a queue pair of this type from one state to the other, else EINVAL. */
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
int soft_engine_reserve(struct soft_context *context); /* room for one more timer; may start the thread */
void soft_engine_unreserve(struct soft_context *context);
void soft_engine_ring(struct soft_qp *qp); /* the engine executes it soon. In a grace section; takes no lock */
int soft_engine_start(struct soft_context *context); /* makes sure that the thread runs: 0 or an errno */
void soft_engine_forget(struct soft_qp *qp);         /* neither executed nor timed from here on */

/* The engine comes back then: to execute a queue pair, or for soft_cq_expired. The earliest of several counts. */
void soft_engine_timer(struct soft_context *context, struct soft_timer *timer, uint64_t due);
void soft_engine_cancel(struct soft_context *context, struct soft_timer *timer, bool for_good);

/* ---- Delivery to a peer ---------------------------------------------------------------------------------- */

struct soft_request {
    struct soft_qp *from; /* its sq_lock is held; NULL: it came from a remote one */
    const struct soft_wqe *wqe;
    uint32_t src_qp;              /* its number */
    const union ibv_gid *sgid;    /* and where it is; of a datagram */
    struct soft_carrier *carrier; /* of a remote one's: moves the bytes; NULL: `local` is in this process */
    uint32_t total, offset;       /* bytes: of the message, and where this part of it begins */
    uint32_t psn, packets;
    uint32_t reads; /* of a read or atomic: how many the requester would have in flight, with this one */
    bool again;     /* it was done before, in its order: a remote peer's read, whose answer was lost */
    uint32_t length;
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

/* What moves the bytes of a remote peer's request that are not here already. */
struct soft_carrier {
    /* `length` bytes to or from memory here that was checked: 0, or ESTALE: the peer gave the request up; or another
     * errno: it cannot be done. */
    int (*bring)(struct soft_carrier *carrier, const struct soft_segment *to, uint32_t length);
    int (*give)(struct soft_carrier *carrier, const struct soft_segment *from, uint32_t length);
};

/* In a grace section. Finds the peer of `request->from` and executes the request there. */
void soft_link_deliver(const struct soft_request *request, struct soft_reply *reply);

/* soft/transport/responder.c: what a peer does with a request that reached it. In a grace section, under the peer's rq_lock. */
void soft_respond(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply);

/* Whether the queue pair's device and its port work; and whether it receives at all. */
bool soft_is_up(const struct soft_qp *qp);
bool soft_listens(const struct soft_qp *peer);

/* Under rq_lock: the message under way, if there is one, ends before all of it came. Flushed, its receive completes;
 * else that is the oldest one of its queue again. */
void soft_inbound_end(struct soft_qp *qp, bool flushed);

/* A shared receive queue goes, and cannot be found any more: what messages under way took from it goes with it.
 * grace_ready() was true. */
void soft_inbound_without(struct soft_device *device, const struct soft_srq *srq);

/* Whether a queue pair waits for answers: the others send and forget. */
static inline bool soft_is_reliable(const struct soft_qp *qp)
{
    return qp->qp.qp_type != IBV_QPT_UC && qp->qp.qp_type != IBV_QPT_UD;
}

void soft_sync_after_fork(void);

#endif
