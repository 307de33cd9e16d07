/* Protection, thread and parent domains, and the memory of queues: by default or from a parent domain's allocator. */
#ifndef AIOVERBS_SOFT_OBJECTS_PD_H
#define AIOVERBS_SOFT_OBJECTS_PD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"

struct soft_context;
struct soft_key;
struct soft_pd;
struct soft_shared;

/* mlx5's codes, so that an allocator sees here what it will see there: RDMA_DRIVER_MLX5 in the upper half. */
#define SOFT_DRIVER_ID 1ull
#define SOFT_RESOURCE(n) (SOFT_DRIVER_ID << 32 | (n))
enum { SOFT_RES_QP = 1, SOFT_RES_DBR = 3, SOFT_RES_SRQ = 4, SOFT_RES_CQ = 5 };

struct soft_memory {
    void *address;
    size_t size;
    uint64_t resource_type;
    struct soft_pd *owner; /* the parent domain whose allocator gave it, else NULL */
};

int soft_memory_get(struct soft_memory *memory, struct soft_pd *pd, size_t size, size_t alignment, uint32_t kind);
void soft_memory_put(struct soft_memory *memory);

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
    uint32_t share_id;        /* its identifier; 0: not shared */
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
    bool deallocated;       /* it was given back, some of its dead keys were not: the last of them frees it */
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

/* For who makes a region or window and before it can be found; and for who gives it back, when nobody finds it any
 * more and before its number is free again. The domain counts it as a reference meanwhile. */
void soft_pd_add_key(struct soft_pd *pd, struct soft_key *key);
void soft_pd_remove_key(struct soft_pd *pd, struct soft_key *key);
void soft_pd_restore_key(struct soft_pd *pd, struct soft_key *key); /* it is found again, unless it is dead */

#endif
