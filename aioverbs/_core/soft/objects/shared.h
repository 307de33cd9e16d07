/* Protection domains that processes share: a file without a name (memfd), which all of them have mapped. In it are the
 * keys of the domain's regions and memory to register, so that the device of one process reaches what another one
 * registered.
 *
 * A process has a slot in it, for as long as it holds the lock of the byte with the slot's number (an open file
 * description's lock, which the kernel takes away when the process dies, however it dies). It alone writes the keys of
 * its slot, and has the chunks of memory that bear the slot's number. So nothing in the file needs a lock that a
 * process could die with: what a dead one left is cleared by who finds the slot free (soft_shared_reap).
 *
 * The others are processes of the same user, and are not trusted further than that: sizes come from the file's own,
 * which is sealed; places are checked before they are used.
 *
 * Only what lies in the file's memory serves other processes. What else is registered has a number of its own in the
 * domain, too, and they refuse it. */
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
#define SOFT_SHARED_KEYS 65536u /* of a process; with the slots this fills the numbers that a device's own leave free */
#define SOFT_SHARED_CHUNK (1u << 16) /* memory is given out by so many bytes */
#define SOFT_SHARED_READERS 64u

/* ---- The file ---------------------------------------------------------------------------------------------- */

/* What other processes need of a region. `state` is written last; who finds it the same after reading the others has
 * read what belongs together. */
struct soft_shared_key {
    _Alignas(64) _Atomic uint64_t state; /* the key's low byte, SOFT_SHARED_LIVE, and a serial number from bit 32 on */
    _Atomic uint64_t address, length;    /* as registered, where it was registered */
    _Atomic uint64_t offset;             /* in the memory; UINT64_MAX: not in there */
    _Atomic uint32_t access;
};
#define SOFT_SHARED_LIVE 0x100u

/* How many sections of a process reach what others registered, by threads: see soft_shared_wait. */
struct soft_shared_reader {
    _Alignas(64) atomic_uint sections;
};

struct soft_shared_slot {
    _Alignas(64) atomic_uint used; /* keys beyond were never written */
    atomic_uint highest;           /* chunks beyond were never its own */
};

struct soft_shared_head {
    char magic[8];
    uint64_t bytes; /* of the memory */
};

struct soft_shared_page {
    struct soft_shared_head head;   /* const */
    atomic_uint is_closed;          /* the last instance went */
    _Atomic uint64_t used_slots[4]; /* a bit for each slot: something of it may be here */
    _Alignas(4096) struct soft_shared_slot slots[SOFT_SHARED_SLOTS];
    _Alignas(4096) struct soft_shared_reader readers[SOFT_SHARED_SLOTS][SOFT_SHARED_READERS];
    _Alignas(4096) struct soft_shared_key keys[SOFT_SHARED_SLOTS][SOFT_SHARED_KEYS];
};
/* Behind it: for each chunk the number of the slot that has it plus one, then the memory. */

/* ---- What a process has of it -------------------------------------------------------------------------------- */

struct soft_device;

struct soft_shared {
    struct soft_shared *next;   /* of device->files, under device->lock */
    struct soft_device *device; /* const, like all up to `keys` */
    uint32_t generation;
    int fd; /* what holds the locks; no other process has this description */
    dev_t dev;
    ino_t ino;
    uint32_t slot;
    struct soft_shared_page *page;
    size_t size;            /* of the mapping, which begins with the page */
    struct alloc_area area; /* the memory, as allocators use it */
    struct soft_table keys; /* this process's struct soft_key, by the key's place in the slot */
    atomic_uint references; /* domains, keys, allocators; the last one goes under device->lock */
    bool member;            /* under device->lock: an instance of the domain is in this process */
    struct soft_mutex reaping;
    atomic_bool no_reuse;                     /* somebody was not waited for to the end: no chunk is given out again */
    atomic_bool timed_out[SOFT_SHARED_SLOTS]; /* that was its process, which is still there as far as is known */
    struct soft_lock wait_lock;               /* guards what follows */
    struct soft_wait_budget wait_budget; /* for all others: one process may have several slots, or another one soon */
    atomic_ullong last_seen[SOFT_SHARED_SLOTS]; /* when its process was there */
};

/* NULL and errno. The one makes a file, under device->lock; the other takes what another process made, by a descriptor
 * that stays the caller's: EPROTO where it is none, EMFILE where there are as many processes as there can be. */
struct soft_shared *soft_shared_create(struct soft_device *device);
struct soft_shared *soft_shared_import(struct soft_device *device, int fd);

void soft_shared_hold(struct soft_shared *file);
void soft_shared_drop(struct soft_shared *file); /* not under device->lock; nobody of this process is in there */

/* A further descriptor for another process, the caller's to close; -1 and errno. */
int soft_shared_export(const struct soft_shared *file);

/* Under device->lock: this process has an instance, or has none any more. 0, or ENOENT: the last one went. */
int soft_shared_join(struct soft_shared *file, bool first);
void soft_shared_leave(struct soft_shared *file);

/* Whether a slot's process is there, by the kernel's word; what a process left that is not is cleared. */
bool soft_shared_is_alive(const struct soft_shared *file, uint32_t slot);
void soft_shared_reap(struct soft_shared *file);

#endif
