/* Memory regions. */
#ifndef AIOVERBS_SOFT_OBJECTS_MR_H
#define AIOVERBS_SOFT_OBJECTS_MR_H

#include <stdatomic.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/util.h"
#include "soft/objects/pd.h"
#include "soft/objects/shared_keys.h"

/* All const while it can be found, but for `windows`. */
struct soft_mr {
    struct soft_key key;
    struct ibv_mr mr;
    struct soft_pd *pd; /* as given at registration; its domain is what access is checked against */
    int access;
    atomic_uint windows; /* bound to it: with any, it cannot be deregistered */
};

struct soft_segment {
    uint8_t *address;
    uint32_t length;
};

struct ibv_mr *soft_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int soft_dereg_mr(struct ibv_mr *mr);

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

/* Local memory: the same by a key, which must be a region's. */
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
