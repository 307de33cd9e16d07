/* Protection domains that processes share. The processes of a domain map one file without a name (memfd), which holds
 * the keys of the domain's regions and memory to register, so that the device of one process accesses what another
 * registered.
 *
 * A process owns a slot of the file as long as it holds the lock of the byte with the slot's number: a lock of an open
 * file description, which the kernel releases however the process ends. The owner alone writes the keys of its slot,
 * and owns the chunks of memory that bear the slot's number. So nothing in the file needs a lock that a process could
 * die with; the process that finds the slot of a dead owner unlocked clears it (soft_shared_reap).
 *
 *   process A (slot 0)      process B (slot 1)      process C
 *   locks byte 0            locks byte 1            finds byte 1 unlocked, slot 1 in use:
 *   writes keys of slot 0   dies: byte 1 unlocked   locks byte 1, clears slot 1, unlocks byte 1
 *
 * The other processes belong to the same user, and are trusted no further: sizes come from the file's size, which is
 * sealed; positions are checked before use.
 *
 * Other processes can use only memory that lies in the file. Other memory of a process has keys of its own in the
 * domain, too, which the other processes refuse. */
#ifndef AIOVERBS_SOFT_OBJECTS_SHARED_H
#define AIOVERBS_SOFT_OBJECTS_SHARED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "alloc/area.h"
#include "soft/base/id_table.h"
#include "soft/base/wait_budget.h"

#define SOFT_SHARED_SLOTS 240u
/* keys of a process; all slots together fill the numbers that a device does not assign itself */
#define SOFT_SHARED_KEYS 65536u
#define SOFT_SHARED_CHUNK (1u << 16) /* bytes of a chunk, the unit of allocation */
#define SOFT_SHARED_READERS 64u

/* ---- The file ---------------------------------------------------------------------------------------------- */

/* Region of a process, as the others need it. `state` is written last; a reader that finds the same `state` before and
 * after the other fields has read a consistent entry. */
struct soft_shared_key {
    _Alignas(64) _Atomic uint64_t state; /* low byte of the key, SOFT_SHARED_LIVE, and a serial number from bit 32 on */
    _Atomic uint64_t address, length;    /* as registered, in the process that registered it */
    _Atomic uint64_t offset;             /* offset in the memory; UINT64_MAX: outside of it */
    _Atomic uint32_t access;
};
#define SOFT_SHARED_LIVE 0x100u

/* Number of grace sections of a process that access what others registered; each thread counts in one of several
 * entries: see soft_shared_wait. */
struct soft_shared_reader {
    _Alignas(64) atomic_uint sections;
};

struct soft_shared_slot {
    _Alignas(64) atomic_uint used; /* keys from here on were never written */
    atomic_uint highest;           /* chunks from here on never belonged to the slot */
};

struct soft_shared_head {
    char magic[8];
    uint64_t bytes; /* bytes of the memory */
};

struct soft_shared_page {
    struct soft_shared_head head;   /* const */
    atomic_uint is_closed;          /* the last instance has ended */
    _Atomic uint64_t used_slots[4]; /* a bit for each slot that may have something in the file */
    _Alignas(4096) struct soft_shared_slot slots[SOFT_SHARED_SLOTS];
    _Alignas(4096) struct soft_shared_reader readers[SOFT_SHARED_SLOTS][SOFT_SHARED_READERS];
    _Alignas(4096) struct soft_shared_key keys[SOFT_SHARED_SLOTS][SOFT_SHARED_KEYS];
};
/* After the page: for each chunk the number of its slot plus one, then the memory. */

/* ---- A process's view of the file ---------------------------------------------------------------------------- */

struct soft_device;

struct soft_shared {
    struct soft_shared *next;   /* next of device->shared_files, under device->lock */
    struct soft_device *device; /* const, like all fields up to `keys` */
    uint32_t generation;
    int fd; /* holds the locks; no other process has this open file description */
    dev_t dev;
    ino_t ino;
    uint32_t slot;
    struct soft_shared_page *page;
    size_t size;            /* bytes of the mapping, which begins with the page */
    struct alloc_area area; /* the memory, for allocators */
    struct soft_table keys; /* struct soft_key of this process, by its index in the slot */
    atomic_uint references; /* domains, keys, allocators; the last reference is dropped under device->lock */
    bool member;            /* under device->lock: this process has an instance of the domain */
    struct soft_mutex reaping;
    atomic_bool no_reuse; /* a wait for a process timed out: no chunk is allocated again */
    /* waiting for the slot's process timed out, and it is alive as far as is known */
    atomic_bool timed_out[SOFT_SHARED_SLOTS];
    struct soft_lock wait_lock; /* guards the fields below */
    /* for all other processes together, since one process may own several slots in turn */
    struct soft_wait_budget wait_budget;
    atomic_ullong last_seen[SOFT_SHARED_SLOTS]; /* when its process was last known to be alive */
};

/* Create a file, under device->lock; or map the file that another process created, by a descriptor that remains the
 * caller's. Return NULL and errno on failure: EPROTO (not such a file), EMFILE (no slot is free). */
struct soft_shared *soft_shared_create(struct soft_device *device);
struct soft_shared *soft_shared_import(struct soft_device *device, int fd);

/* Add or drop a reference. */
void soft_shared_hold(struct soft_shared *file);
/* Call without device->lock, when no thread of this process accesses the file. */
void soft_shared_drop(struct soft_shared *file);

/* Return a new descriptor for another process, which the caller closes; -1 and errno on failure. */
int soft_shared_export(const struct soft_shared *file);

/* Record that this process has an instance, or has none any more. Call under device->lock. Return 0, or ENOENT where
 * the last instance has ended. */
int soft_shared_join(struct soft_shared *file, bool first);
void soft_shared_leave(struct soft_shared *file);

/* Return whether a slot's process is alive, by asking the kernel; clear the slots of processes that are not. */
bool soft_shared_is_alive(const struct soft_shared *file, uint32_t slot);
void soft_shared_reap(struct soft_shared *file);

#endif
