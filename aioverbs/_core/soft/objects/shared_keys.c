/* Keys of a protection domain that processes share: publishing regions to other processes, accessing theirs, and
 * waiting for accesses of other processes. */
#define _GNU_SOURCE
#include "soft/objects/shared_keys.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/limits.h"
#include "soft/objects/mr.h"
#include "soft/objects/mw.h"
#include "soft/objects/pd.h"
#include "soft/objects/qp.h"
#include "soft/objects/shared.h"

/* How long a process counts as alive after the kernel was asked: a system call for each access would cost too much. */
#define ALIVE_CACHE_NS 10000000u

/* Time limits, as for copy tokens: processes that are stopped between two instructions are waited for STUCK_NS
 * together. Afterwards each of them gets TIMED_OUT_NS, which is enough for an access in progress. */
#define STUCK_NS 2000000000u
#define TIMED_OUT_NS 1000000u

/* ---- Where a key is ------------------------------------------------------------------------------------------ */

struct place {
    uint32_t slot, key;
};

/* Split a key into slot and index. Return false for a number of the device's own. */
static bool shared_key_place(uint32_t key, struct place *place)
{
    uint32_t number = key >> 8;

    if (number < SOFT_MAX_NUMBER)
        return false;
    place->slot = (number - SOFT_MAX_NUMBER) / SOFT_SHARED_KEYS;
    place->key = (number - SOFT_MAX_NUMBER) % SOFT_SHARED_KEYS;
    return true;
}

/* Return the file of the protection domain's domain, or NULL. The load acquires the file's fields, which are set before
 * the pointer is stored. The pointer is stored once, and stays as long as the domain: keys that were registered or
 * looked up without it precede it. */
static struct soft_shared *pd_file(const struct soft_pd *pd)
{
    return atomic_load_explicit(&pd->domain->file, memory_order_acquire);
}

static struct soft_shared_key *own_entry(struct soft_shared *file, uint32_t place)
{
    return &file->page->keys[file->slot][place];
}

int soft_key_reserve(struct soft_pd *pd, struct soft_key *key, uint8_t *use)
{
    struct soft_shared *file = pd_file(pd);
    uint64_t serial;
    uint32_t place;
    int error;

    if (!file)
        return soft_table_reserve(&to_soft_context(pd->pd.context)->device->keys, &key->number, use);
    error = soft_table_reserve(&file->keys, &place, NULL);
    if (error)
        return error;
    /* Continue the serial number of the slot's former owner, so that none of its keys fits. */
    serial = (atomic_load(&own_entry(file, place)->state) >> 32) + 1;
    *use = (uint8_t)serial;
    atomic_store(&own_entry(file, place)->state, serial << 32 | *use);
    soft_shared_hold(file);
    key->file = file;
    key->number = SOFT_MAX_NUMBER + file->slot * SOFT_SHARED_KEYS + place;
    return 0;
}

static struct soft_table *table_of(struct soft_device *device, const struct soft_key *key)
{
    return key->file ? &key->file->keys : &device->keys;
}

static uint32_t number_of(const struct soft_key *key)
{
    return key->file ? (key->number - SOFT_MAX_NUMBER) % SOFT_SHARED_KEYS : key->number;
}

/* Store the use at once, and not at the release: uses count even if the process dies. */
void soft_key_set_use(struct soft_device *device, const struct soft_key *key, uint8_t use)
{
    struct soft_shared_key *info;
    uint32_t serial;

    if (!key->file) {
        soft_table_set_use(&device->keys, key->number, use);
        return;
    }
    info = own_entry(key->file, number_of(key));
    serial = (uint32_t)(atomic_load(&info->state) >> 32);
    serial += (uint8_t)(use - serial);
    atomic_store(&info->state, (uint64_t)serial << 32 | use); /* a window's entry is never live */
}

void soft_key_publish(struct soft_device *device, struct soft_key *key)
{
    soft_table_publish(table_of(device, key), number_of(key), key);
    if (key->file && !key->is_window)
        soft_shared_publish_key(key->file, number_of(key), container_of(key, struct soft_mr, key));
}

void soft_key_withdraw(struct soft_device *device, struct soft_key *key)
{
    soft_table_withdraw(table_of(device, key), number_of(key));
    if (key->file)
        soft_shared_withdraw_key(key->file, number_of(key));
}

void soft_key_release(struct soft_device *device, struct soft_key *key)
{
    soft_table_release(table_of(device, key), number_of(key));
    if (key->file)
        soft_shared_drop(key->file);
}

struct soft_key *soft_shared_find(const struct soft_pd *pd, uint32_t key)
{
    struct soft_shared *file = pd_file(pd);
    struct place place;

    if (!file || !shared_key_place(key, &place) || place.slot != file->slot)
        return NULL;
    return soft_table_find(&file->keys, place.key);
}

bool soft_shared_find_foreign(const struct soft_pd *pd, uint32_t key)
{
    struct soft_shared *file = pd_file(pd);
    struct place place;

    return file && shared_key_place(key, &place) && place.slot != file->slot;
}

/* ---- Publishing ---------------------------------------------------------------------------------------------- */

void soft_shared_publish_key(struct soft_shared *file, uint32_t place, const struct soft_mr *mr)
{
    struct soft_shared_key *key = own_entry(file, place);
    const struct alloc_area *area = &file->area;
    uint64_t offset = (uintptr_t)mr->mr.addr - (uintptr_t)area->memory;
    atomic_uint *at = &file->page->slots[file->slot].used;
    unsigned int used = atomic_load(at);

    if (offset >= area->bytes || mr->mr.length > area->bytes - offset)
        offset = UINT64_MAX;
    atomic_store(&key->address, (uintptr_t)mr->mr.addr);
    atomic_store(&key->length, mr->mr.length);
    atomic_store(&key->offset, offset);
    atomic_store(&key->access, (uint32_t)mr->access);
    while (used <= place && !atomic_compare_exchange_weak(at, &used, place + 1))
        ;
    atomic_fetch_or(&key->state, SOFT_SHARED_LIVE);
}

void soft_shared_withdraw_key(struct soft_shared *file, uint32_t place)
{
    atomic_fetch_and(&own_entry(file, place)->state, ~(uint64_t)SOFT_SHARED_LIVE);
}

void soft_shared_clear_keys(struct soft_shared *file, uint32_t slot)
{
    uint32_t used = atomic_load(&file->page->slots[slot].used), i;

    for (i = 0; i < used && i < SOFT_SHARED_KEYS; i++)
        atomic_fetch_and(&file->page->keys[slot][i].state, ~(uint64_t)SOFT_SHARED_LIVE);
    atomic_store(&file->page->slots[slot].used, 0);
}

/* ---- Regions of other processes ------------------------------------------------------------------------------ */

static bool is_slot_alive(struct soft_shared *file, uint32_t slot)
{
    uint64_t now = soft_now_ns();

    if (now - atomic_load_explicit(&file->last_seen[slot], memory_order_relaxed) < ALIVE_CACHE_NS)
        return true;
    if (!soft_shared_is_alive(file, slot))
        return false;
    atomic_store_explicit(&file->last_seen[slot], now, memory_order_relaxed);
    return true;
}

static atomic_uint *own_reader(struct soft_shared *file)
{
    return &file->page->readers[file->slot][soft_thread_id() % SOFT_SHARED_READERS].sections;
}

/* End the accesses to the files of a grace section, at its end. */
static void leave_files(struct grace_reader *self)
{
    unsigned int i;

    for (i = 0; i < SOFT_SECTION_FILES && self->shared_files[i]; i++) {
        atomic_fetch_sub(own_reader(self->shared_files[i]), 1);
        self->shared_files[i] = NULL;
    }
}

/* Count the thread's grace section, until its end, as one that accesses what others registered in the file. A request
 * concerns at most three domains; if the section has used more files, the least recently used one is left. */
static void enter_file(struct soft_shared *file)
{
    struct grace_reader *self = grace_self;
    struct soft_shared *before = file, *at;
    unsigned int i;

    self->files_leave = leave_files;
    for (i = 0; i < SOFT_SECTION_FILES; i++) {
        at = self->shared_files[i];
        self->shared_files[i] = before;
        if (at == file)
            return;
        before = at;
        if (!at)
            break;
    }
    if (i == SOFT_SECTION_FILES)
        atomic_fetch_sub(own_reader(before), 1);
    atomic_fetch_add(own_reader(file), 1);
}

struct info {
    uint64_t address, length, offset;
    uint32_t access;
};

/* Read another process's entry. Return false where the entry does not have that key. */
static bool read_key(struct soft_shared *file, const struct place *at, uint32_t key, struct info *info)
{
    struct soft_shared_key *entry = &file->page->keys[at->slot][at->key];
    uint64_t state = atomic_load(&entry->state);

    if (!(state & SOFT_SHARED_LIVE) || (state & 0xff) != (key & 0xff) || !is_slot_alive(file, at->slot))
        return false;
    info->address = atomic_load(&entry->address);
    info->length = atomic_load(&entry->length);
    info->offset = atomic_load(&entry->offset);
    info->access = atomic_load(&entry->access);
    return atomic_load(&entry->state) == state;
}

/* Return the address of a range in this process's mapping, checking what the other process wrote: NULL where the range
 * is not in the memory. */
static uint8_t *map_offset(const struct soft_shared *file, uint64_t offset, uint64_t length)
{
    if (offset > file->area.bytes || length > file->area.bytes - offset)
        return NULL;
    return (uint8_t *)file->area.memory + offset;
}

/* Return the address of a range of another process's region. Either this function finds the key withdrawn, or the
 * process that withdraws it finds this thread's section counted. */
static uint8_t *shared_reach(struct soft_shared *file, const struct place *at, uint32_t key, uint64_t address,
                             uint64_t length, int access)
{
    struct info info;
    uint64_t within;

    enter_file(file);
    if (!read_key(file, at, key, &info) || (info.access & (uint32_t)access) != (uint32_t)access)
        return NULL;
    within = address - info.address;
    if (within > info.length || length > info.length - within || !map_offset(file, info.offset, info.length))
        return NULL;
    return map_offset(file, info.offset + within, length);
}

uint8_t *soft_shared_resolve(const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access)
{
    struct soft_shared *file = pd_file(pd);
    const struct soft_key *found;
    struct place place;

    if (!file || !shared_key_place(key, &place))
        return NULL;
    if (place.slot != file->slot)
        return shared_reach(file, &place, key, address, length, access);
    found = soft_table_find(&file->keys, place.key);
    if (!found || found->is_window)
        return NULL;
    return soft_mr_reach(container_of(found, struct soft_mr, key), pd, key, address, length, access);
}

uint8_t *soft_shared_open(struct soft_remote *remote, const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key,
                          uint64_t address, uint64_t length, int access)
{
    struct soft_key *found = soft_shared_find(pd, key);

    if (found && found->is_window)
        return soft_mw_open(container_of(found, struct soft_mw, key), remote, qp, pd, key, address, length, access);
    return soft_shared_resolve(pd, key, address, length, access);
}

/* ---- Imported regions ------------------------------------------------------------------------------------------- */

struct imported_mr {
    struct ibv_mr mr; /* with the address in the process that registered the region */
    struct soft_pd *pd;
};

/* Look up a region by key: of this process, at the address where it was registered; of another, at the address where
 * the file is mapped. */
static int shared_key_look_up(const struct soft_pd *pd, uint32_t key, struct info *info, void **here)
{
    struct soft_key *found = soft_shared_find(pd, key);
    struct soft_shared *file = pd_file(pd);
    struct place place;

    if (found && !found->is_window) {
        const struct soft_mr *mr = container_of(found, struct soft_mr, key);

        *info = (struct info){(uintptr_t)mr->mr.addr, mr->mr.length, 0, (uint32_t)mr->access};
        *here = mr->mr.addr;
        return mr->mr.lkey == key ? 0 : ENOENT;
    }
    if (!file || found || !shared_key_place(key, &place) || place.slot == file->slot ||
        !read_key(file, &place, key, info))
        return ENOENT;
    *here = map_offset(file, info->offset, info->length);
    return *here ? 0 : EFAULT;
}

struct ibv_mr *soft_import_mr(struct ibv_pd *ibv_pd, uint32_t key, void **here, int *access)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    struct soft_pd *pd = to_soft_pd(ibv_pd);
    struct imported_mr *imported_mr = NULL;
    struct grace_reader *grace;
    struct info info;
    int error = soft_stale(context) ? ENODEV : grace_ready() ? 0 : ENOMEM;

    if (!error) {
        grace = grace_enter();
        error = shared_key_look_up(pd, key, &info, here);
        grace_leave(grace);
    }
    if (!error && !(imported_mr = calloc(1, sizeof(*imported_mr))))
        error = ENOMEM;
    if (error) {
        errno = error;
        return NULL;
    }
    *access = (int)info.access;
    imported_mr->mr = (struct ibv_mr){
        .context = ibv_pd->context,
        .pd = ibv_pd,
        .addr = (void *)(uintptr_t)info.address,
        .length = info.length,
        .lkey = key,
        .rkey = key,
    };
    imported_mr->pd = pd;
    atomic_fetch_add(&pd->references, 1);
    atomic_fetch_add(&context->mrs, 1);
    return &imported_mr->mr;
}

int soft_unimport_mr(struct ibv_mr *mr)
{
    struct imported_mr *imported_mr = container_of(mr, struct imported_mr, mr);
    struct soft_context *context = to_soft_context(mr->context);

    if (soft_stale(context))
        return ENODEV;
    atomic_fetch_sub(&imported_mr->pd->references, 1);
    atomic_fetch_sub(&context->mrs, 1);
    free(imported_mr);
    return 0;
}

/* ---- Waiting for other processes ------------------------------------------------------------------------------ */

/* Charge a wait since `begin` that is not over to the budget of all other processes. Return false where the budget is
 * used up. */
static bool has_time_left(struct soft_shared *file, uint64_t begin, uint64_t now)
{
    bool have;

    soft_lock_take(&file->wait_lock);
    have = soft_wait_budget_spend(&file->wait_budget, begin, now, STUCK_NS);
    soft_lock_give(&file->wait_lock);
    return have;
}

/* Wait until one count of the slot's sections is zero, or its process has died. Return false on a timeout: at
 * `deadline`, if the slot has timed out before; otherwise not before the budget of all processes is used up. The other
 * process writes the count. */
static bool wait_for_reader(struct soft_shared *file, uint32_t slot, const atomic_uint *sections, uint64_t begin,
                            uint64_t deadline)
{
    uint64_t now = soft_now_ns(), yield_until = now + SOFT_YIELD_NS;

    for (; atomic_load(sections); now = soft_now_ns()) {
        if (now < yield_until && now < deadline) {
            sched_yield();
            continue;
        }
        if (!soft_shared_is_alive(file, slot)) {
            atomic_store(&file->timed_out[slot], false); /* the next owner of the slot is another process */
            return true;
        }
        if (now >= deadline && (atomic_load(&file->timed_out[slot]) || !has_time_left(file, begin, now)))
            return false;
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    return true;
}

/* Wait for all counts of a slot. A slot that has not timed out gets TIMED_OUT_NS of its own, however long the others
 * took. */
static void wait_for_slot(struct soft_shared *file, uint32_t slot, uint64_t begin)
{
    uint64_t deadline = (atomic_load(&file->timed_out[slot]) ? begin : soft_now_ns()) + TIMED_OUT_NS;
    uint32_t reader = 0;

    while (reader < SOFT_SHARED_READERS &&
           wait_for_reader(file, slot, &file->page->readers[slot][reader].sections, begin, deadline))
        reader++;
    if (reader == SOFT_SHARED_READERS)
        return;
    atomic_store(&file->no_reuse, true);
    atomic_store(&file->timed_out[slot], true);
}

void soft_shared_wait(struct soft_shared *file)
{
    uint64_t begin = soft_now_ns();
    uint32_t slot;

    for (slot = 0; slot < SOFT_SHARED_SLOTS; slot++)
        if (slot != file->slot && atomic_load(&file->page->used_slots[slot / 64]) >> slot % 64 & 1)
            wait_for_slot(file, slot, begin);
}
