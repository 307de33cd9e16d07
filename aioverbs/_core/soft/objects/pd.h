/* Protection, thread and parent domains; memory of queues, by default or from a parent domain's allocator. */
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

/* mlx5's resource types, so that an allocator sees the same codes as on such a NIC: RDMA_DRIVER_MLX5 in the upper half.
 */
#define SOFT_DRIVER_ID 1ull
#define SOFT_RESOURCE(n) (SOFT_DRIVER_ID << 32 | (n))
enum { SOFT_RES_QP = 1, SOFT_RES_DBR = 3, SOFT_RES_SRQ = 4, SOFT_RES_CQ = 5 };

struct soft_memory {
    void *address;
    size_t size;
    uint64_t resource_type;
    struct soft_pd *owner; /* parent domain whose allocator provided the memory, or NULL */
    bool is_mapped;        /* valid without an owner: the memory was mapped, not allocated */
};

/* Allocate zeroed memory for a queue by the parent domain's allocator, or by default, and free it. Return 0 or an
 * errno. Call with no lock held. */
int soft_memory_get(struct soft_memory *memory, struct soft_pd *pd, size_t size, size_t alignment, uint32_t kind);
void soft_memory_put(struct soft_memory *memory);

/* ---- Domains --------------------------------------------------------------------------------------------- */

struct soft_td {
    struct ibv_td td;
    struct soft_exclusive exclusive;
    atomic_uint references; /* number of parent domains with this thread domain */
};

/* Domain in which keys are valid. Each protection domain has one; all instances of a shared protection domain have one
 * together. */
struct soft_domain {
    atomic_uint instances;
    uint64_t share_key;       /* under device->lock, like the next two */
    uint32_t share_id;        /* identifier for ibv_share_pd; 0: not shared */
    struct soft_domain *next; /* next of device->shared_domains */
    /* File of a domain that other processes may share; set once, under device->lock. Objects that are created on the
     * domain from then on have numbers that no other process of the domain assigns. */
    _Atomic(struct soft_shared *) file;
};

struct soft_pd {
    struct ibv_pd pd;
    struct soft_pd *base;       /* const: the domain that a parent domain extends, or this domain itself */
    struct soft_domain *domain; /* const: domain of `base` */
    struct soft_td *td;         /* const */
    void *(*alloc)(struct ibv_pd *, void *, size_t, size_t, uint64_t); /* const, like the next two */
    void (*free)(struct ibv_pd *, void *, void *, uint64_t);
    void *pd_context;
    atomic_uint references; /* queue pairs, queues, regions, windows, address handles, parent domains */
    struct soft_mutex lock; /* guards the fields below */
    struct soft_key *keys;  /* regions and windows created on this protection domain */
    uint32_t key_count;     /* number of `keys`; counted in `references` */
    bool deallocated;       /* deallocated while some of its dead keys remain: releasing the last key frees it */
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

/* Create a protection domain: with a domain of its own, or a further instance of a shared domain (under device->lock).
 * Return NULL and errno on failure. */
struct soft_pd *soft_pd_new(struct soft_context *context, struct soft_domain *shared);

/* Add a region or window that is being created, before any key finds it; remove one that is being destroyed, when no
 * key finds it any more and before its number is free. In between the domain counts it as a reference. */
void soft_pd_add_key(struct soft_pd *pd, struct soft_key *key);
void soft_pd_remove_key(struct soft_pd *pd, struct soft_key *key);
void soft_pd_restore_key(struct soft_pd *pd, struct soft_key *key); /* publish the key again, unless it is dead */

#endif
