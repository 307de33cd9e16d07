/* Memory regions. */
#ifndef AIOVERBS_SOFT_OBJECTS_MR_H
#define AIOVERBS_SOFT_OBJECTS_MR_H

#include <stdatomic.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/util.h"
#include "soft/objects/pd.h"
#include "soft/objects/shared_keys.h"

/* Memory region. All fields but the last two are const while the region can be found. */
struct soft_mr {
    struct soft_key key;
    struct ibv_mr mr;
    struct soft_pd *pd; /* protection domain of the registration; access is checked against its domain */
    int access;
    /* number of windows bound to the region, which cannot be deregistered before they are unbound */
    atomic_uint windows;
    atomic_int file; /* descriptor of the memory file that the region owns, for peers to map it; -1: none */
};

struct soft_segment {
    uint8_t *address;
    uint32_t length;
};

struct ibv_mr *soft_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int soft_dereg_mr(struct ibv_mr *mr);

/* Make a memory file of up to 4 MiB, and register it: peers of this user map it, to read it without a request. A peer
 * that may read a part of it can read and write all of it, at any time until it has unmapped it. The region owns the
 * memory. Return NULL and errno: as soft_reg_mr; EINVAL for another size; EMFILE if more than half of the process's
 * descriptors are in use, so that the other half is left for what needs them. */
struct ibv_mr *soft_make_file_mr(struct ibv_pd *pd, size_t length, int access);

/* Return the address of a range, or NULL if `key` is not the region's current key, `pd` is of another domain, the range
 * exceeds the region, or a bit of `access` was not granted. Call in a grace section; the address stays valid until the
 * section ends. Inline, since every request calls this. */
static inline uint8_t *soft_mr_reach(const struct soft_mr *mr, const struct soft_pd *pd, uint32_t key, uint64_t address,
                                     uint64_t length, int access)
{
    /* wraps to a large number where `address` lies below the region */
    uint64_t offset = address - (uintptr_t)mr->mr.addr;

    if (mr->mr.lkey != key || mr->pd->domain != pd->domain || (mr->access & access) != access)
        return NULL;
    if (offset > mr->mr.length || length > mr->mr.length - offset)
        return NULL;
    return (uint8_t *)(uintptr_t)address;
}

/* Return the address of a range of local memory by the key of a region, as soft_mr_reach does. */
static inline uint8_t *soft_mr_resolve(struct soft_device *device, const struct soft_pd *pd, uint32_t key,
                                       uint64_t address, uint64_t length, int access)
{
    const struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    if (!found)
        return soft_shared_resolve(pd, key, address, length, access);
    if (found->is_window)
        return NULL;
    return soft_mr_reach(container_of(found, struct soft_mr, key), pd, key, address, length, access);
}

#endif
