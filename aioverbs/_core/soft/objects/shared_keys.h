/* Keys of memory regions and windows, and what they find: also in domains that processes share. */
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
void soft_key_set_use(struct soft_device *device, const struct soft_key *key, uint8_t use);
void soft_key_publish(struct soft_device *device, struct soft_key *key);
void soft_key_withdraw(struct soft_device *device, struct soft_key *key);
void soft_key_release(struct soft_device *device, struct soft_key *key);

/* What soft_mr_resolve, soft_remote_open and soft_key_find do with numbers that are not the device's own: those of
 * domains that processes share. What another process registered is reached by soft_shared_resolve alone, where this
 * process has it; and stays good until the section ends, too. */
uint8_t *soft_shared_resolve(const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access);
uint8_t *soft_shared_open(struct soft_remote *remote, const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key,
                          uint64_t address, uint64_t length, int access);
struct soft_key *soft_shared_find(const struct soft_pd *pd, uint32_t key);
bool soft_shared_find_foreign(const struct soft_pd *pd, uint32_t key);

/* Whether it is the number of a region of another process, as far as it is one. */
static inline bool soft_shared_is_foreign(const struct soft_pd *pd, uint32_t key)
{
    return key >> 8 >= SOFT_MAX_NUMBER && soft_shared_find_foreign(pd, key);
}

static inline struct soft_key *soft_key_find(struct soft_device *device, const struct soft_pd *pd, uint32_t key)
{
    struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    return found ? found : soft_shared_find(pd, key);
}

/* A region of the domain by its key, which another process registered: for scatter/gather entries, its address is what
 * that process knows it by, and `*here` where it is in this one. It can be used until that process gives it back; it is
 * given back itself by soft_unimport_mr, before the domain. NULL and errno: ENOENT (no region has this key), EFAULT
 * (its memory is that process' alone), ENOMEM. */
struct ibv_mr *soft_import_mr(struct ibv_pd *pd, uint32_t key, void **here, int *access);
int soft_unimport_mr(struct ibv_mr *mr);

/* ---- Domains that processes share ------------------------------------------------------------------------ */

/* A region's place in the slot leads other processes there; it does not any more; what a process that died left. */
void soft_shared_publish_key(struct soft_shared *file, uint32_t place, const struct soft_mr *mr);
void soft_shared_withdraw_key(struct soft_shared *file, uint32_t place);
void soft_shared_clear_keys(struct soft_shared *file, uint32_t slot);

/* No other process is at memory by a key that was recalled before, as grace_wait for the threads of this one. A process
 * that was stopped in the middle, or says so, is waited for two seconds, once, and all of them together no longer: what
 * was waited in one call counts in the next (soft/base/wait_budget.h). From then on it has a millisecond, for as long
 * as it has the slot. What it has then still to do it does to memory that no allocator gives out again. More is not
 * promised: each process of the domain can write to all of its memory whenever it likes. Not under device->lock, like
 * soft_shared_reap and soft_shared_import. */
void soft_shared_wait(struct soft_shared *file);

#endif
