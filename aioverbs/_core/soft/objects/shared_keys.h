/* Keys of memory regions and windows, and the look-up by key, including domains that processes share. */
#ifndef AIOVERBS_SOFT_OBJECTS_SHARED_KEYS_H
#define AIOVERBS_SOFT_OBJECTS_SHARED_KEYS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/id_table.h"
#include "soft/objects/device.h"
#include "soft/objects/limits.h"

struct soft_mr;
struct soft_pd;
struct soft_qp;
struct soft_remote;
struct soft_shared;

/* Object that a key finds: the base of a region or window. */
struct soft_key {
    bool is_window;           /* const */
    uint32_t number;          /* const: number in device->keys, or in the domain */
    struct soft_shared *file; /* const: file of a domain that processes share, or NULL */
    /* Set once, when the instance of a shared protection domain that the object was created on is deallocated. Its key
     * finds nothing any more, but the object is still to be destroyed. A window that is bound to a dead region allows
     * no access. */
    atomic_bool dead;
    struct soft_key *next, **link; /* links of pd->keys, under pd->lock */
};

/* Life of a key: reserve a number for a region or window of a protection domain, and `use`, the low byte that tells
 * uses of the number apart (return 0 or an errno); publish: the number finds the object; withdraw: the number finds
 * nothing; release: the number is free. While a window is published, it may advance its use by soft_key_set_use. */
int soft_key_reserve(struct soft_pd *pd, struct soft_key *key, uint8_t *use);
void soft_key_set_use(struct soft_device *device, const struct soft_key *key, uint8_t use);
void soft_key_publish(struct soft_device *device, struct soft_key *key);
void soft_key_withdraw(struct soft_device *device, struct soft_key *key);
void soft_key_release(struct soft_device *device, struct soft_key *key);

/* Look-ups of soft_mr_resolve, soft_remote_open and soft_key_find for numbers that are not the device's own: those of
 * domains that processes share. Only soft_shared_resolve accesses regions of other processes, where this process maps
 * their memory; the address stays valid until the section ends, too. */
uint8_t *soft_shared_resolve(const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access);
uint8_t *soft_shared_open(struct soft_remote *remote, const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key,
                          uint64_t address, uint64_t length, int access);
struct soft_key *soft_shared_find(const struct soft_pd *pd, uint32_t key);
bool soft_shared_find_foreign(const struct soft_pd *pd, uint32_t key);

/* Return whether a key has a number of another process. The key may find nothing. */
static inline bool soft_shared_is_foreign(const struct soft_pd *pd, uint32_t key)
{
    return key >> 8 >= SOFT_MAX_NUMBER && soft_shared_find_foreign(pd, key);
}

/* Return the region or window of this process with a key, or NULL. Call in a grace section. */
static inline struct soft_key *soft_key_find(struct soft_device *device, const struct soft_pd *pd, uint32_t key)
{
    struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    return found ? found : soft_shared_find(pd, key);
}

/* Import a region that another process registered, by its key. The region's address, for scatter/gather entries, is the
 * one in that process; `*here` is the address in this process. The region is usable until the other process deregisters
 * it, and is released by soft_unimport_mr before the domain. Return NULL and errno on failure: ENOENT (no region has
 * the key), EFAULT (its memory lies outside of the shared memory), ENOMEM. */
struct ibv_mr *soft_import_mr(struct ibv_pd *pd, uint32_t key, void **here, int *access);
int soft_unimport_mr(struct ibv_mr *mr);

/* ---- Domains that processes share ------------------------------------------------------------------------ */

/* Publish a region to other processes at an index of this process's slot; withdraw it; clear all keys that a dead
 * process left in a slot. */
void soft_shared_publish_key(struct soft_shared *file, uint32_t place, const struct soft_mr *mr);
void soft_shared_withdraw_key(struct soft_shared *file, uint32_t place);
void soft_shared_clear_keys(struct soft_shared *file, uint32_t slot);

/* Wait until no other process accesses memory by a key that was withdrawn before, as grace_wait does for the threads of
 * this process.
 *
 * A process that is stopped during an access, or pretends to be, is waited for at most two seconds, once, and all
 * processes together no longer: time waited in one call counts in the next (soft/base/wait_budget.h). After its timeout
 * a process gets a millisecond for each wait, as long as it owns the slot. Its late accesses hit memory that no
 * allocator hands out again. No more is guaranteed: each process of the domain can write to all of its memory at any
 * time.
 *
 * Call without device->lock, like soft_shared_reap and soft_shared_import. */
void soft_shared_wait(struct soft_shared *file);

#endif
