/* File of a protection domain that processes share: creating and joining it, the locks of its slots, and clearing what
 * dead processes left. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/memfd.h"
#include "soft/objects/device.h"
#include "soft/objects/limits.h"
#include "soft/objects/shared.h"
#include "soft/objects/shared_keys.h"

#define MAGIC "aioshpd1"
#define MEMBERS_BYTE 4096 /* byte that all processes with an instance lock together (F_RDLCK) */
#define HUGE_PAGE ((size_t)2 << 20)
#define MAX_BYTES ((uint64_t)1 << 44)

_Static_assert(SOFT_SHARED_SLOTS <= 256 && SOFT_SHARED_SLOTS < MEMBERS_BYTE, "a bit and a byte for each slot");
_Static_assert((uint64_t)SOFT_SHARED_SLOTS *SOFT_SHARED_KEYS == (1u << 24) - SOFT_MAX_NUMBER, "all numbers are used");

/* ---- Locks --------------------------------------------------------------------------------------------------- */

static int shared_file_lock(const struct soft_shared *file, short type, off_t byte)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};

    return fcntl(file->fd, F_OFD_SETLK, &lock) ? errno : 0;
}

static bool is_locked_by_others(const struct soft_shared *file, off_t byte)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};

    return fcntl(file->fd, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

bool soft_shared_is_alive(const struct soft_shared *file, uint32_t slot)
{
    return slot == file->slot || is_locked_by_others(file, slot);
}

/* ---- Slots --------------------------------------------------------------------------------------------------- */

static bool is_used(const struct soft_shared *file, uint32_t slot)
{
    return atomic_load(&file->page->used_slots[slot / 64]) >> slot % 64 & 1;
}

static void set_used(struct soft_shared *file, uint32_t slot, bool used)
{
    uint64_t bit = 1ull << slot % 64;

    if (used)
        atomic_fetch_or(&file->page->used_slots[slot / 64], bit);
    else
        atomic_fetch_and(&file->page->used_slots[slot / 64], ~bit);
}

static bool is_owned_by_ended(const struct alloc_area *area, size_t chunk, const bool ended[SOFT_SHARED_SLOTS])
{
    uint16_t owner = atomic_load(&area->owners[chunk]);

    return owner && owner <= SOFT_SHARED_SLOTS && ended[owner - 1];
}

/* Free the chunks of slots whose processes have ended, in one pass for all of them, since each slot's `highest` may be
 * at the end of the memory. */
static void free_chunks(struct soft_shared *file, const bool ended[SOFT_SHARED_SLOTS])
{
    const struct alloc_area *area = &file->area;
    size_t shared_file_free = 0, count = area->bytes / area->chunk_bytes, i, run;
    uint32_t slot;

    for (slot = 0; slot < SOFT_SHARED_SLOTS; slot++) {
        unsigned int highest = ended[slot] ? atomic_load(&file->page->slots[slot].highest) : 0;

        shared_file_free = highest > shared_file_free ? highest : shared_file_free;
    }
    if (shared_file_free > count)
        shared_file_free = count;
    for (i = 0; i < shared_file_free; i += run + 1) {
        for (run = 0; i + run < shared_file_free && is_owned_by_ended(area, i + run, ended); run++)
            ;
        if (run)
            alloc_area_put(area, i, run);
    }
    for (slot = 0; slot < SOFT_SHARED_SLOTS; slot++)
        if (ended[slot])
            atomic_store(&file->page->slots[slot].highest, 0);
}

/* Clear a slot whose lock this process holds, and in which this process has nothing, like the next function. Afterwards
 * no process waits for the slot or finds a key in it. */
static void shared_slot_clear(struct soft_shared *file, uint32_t slot)
{
    unsigned int i;

    for (i = 0; i < SOFT_SHARED_READERS; i++)
        atomic_store(&file->page->readers[slot][i].sections, 0);
    soft_shared_clear_keys(file, slot);
}

static void shared_slots_clear(struct soft_shared *file, const bool ended[SOFT_SHARED_SLOTS])
{
    uint32_t slot;

    for (slot = 0; slot < SOFT_SHARED_SLOTS; slot++)
        if (ended[slot])
            shared_slot_clear(file, slot);
    grace_wait();
    soft_shared_wait(file);
    free_chunks(file, ended);
}

void soft_shared_reap(struct soft_shared *file)
{
    bool ended[SOFT_SHARED_SLOTS], any_ended = false;
    uint32_t slot;

    soft_mutex_take(&file->reaping);
    for (slot = 0; slot < SOFT_SHARED_SLOTS; slot++) {
        ended[slot] = slot != file->slot && is_used(file, slot) && !shared_file_lock(file, F_WRLCK, slot);
        any_ended = any_ended || ended[slot];
    }
    if (any_ended)
        shared_slots_clear(file, ended);
    for (slot = 0; slot < SOFT_SHARED_SLOTS; slot++) {
        if (!ended[slot])
            continue;
        set_used(file, slot, false);
        atomic_store(&file->timed_out[slot], false);
        shared_file_lock(file, F_UNLCK, slot);
    }
    soft_mutex_give(&file->reaping);
}

/* Lock a free slot: without `any`, one that was left clean, which needs no waiting; with `any`, also one that a dead
 * process left. */
static int acquire_slot(struct soft_shared *file, bool any)
{
    bool ended[SOFT_SHARED_SLOTS] = {false};
    uint32_t slot;
    int error = EAGAIN;

    for (slot = 0; slot < SOFT_SHARED_SLOTS && error; slot++) {
        if (!any && is_used(file, slot))
            continue;
        error = shared_file_lock(file, F_WRLCK, slot);
        if (error && error != EAGAIN && error != EACCES)
            return error;
        if (!error && !any && is_used(file, slot)) { /* its process has died just now */
            shared_file_lock(file, F_UNLCK, slot);
            error = EAGAIN;
        }
        if (!error)
            file->slot = slot;
    }
    if (error)
        return EMFILE;
    ended[file->slot] = true;
    if (is_used(file, file->slot))
        shared_slots_clear(file, ended);
    else
        shared_slot_clear(file, file->slot);
    set_used(file, file->slot, true);
    file->area.owner = (uint16_t)(file->slot + 1);
    file->area.highest = &file->page->slots[file->slot].highest;
    return 0;
}

/* ---- Instances ------------------------------------------------------------------------------------------------- */

int soft_shared_join(struct soft_shared *file, bool first)
{
    int error = file->member ? 0 : shared_file_lock(file, F_RDLCK, MEMBERS_BYTE);

    if (error) /* the last instance is being ended */
        return error == EAGAIN || error == EACCES ? ENOENT : error;
    if (!file->member && !first && (atomic_load(&file->page->is_closed) || !is_locked_by_others(file, MEMBERS_BYTE))) {
        shared_file_lock(file, F_UNLCK, MEMBERS_BYTE);
        return ENOENT;
    }
    file->member = true;
    return 0;
}

void soft_shared_leave(struct soft_shared *file)
{
    /* Of two processes that leave at the same time neither may count as the last, but a process that joins later finds
     * no member. */
    if (!shared_file_lock(file, F_WRLCK, MEMBERS_BYTE))
        atomic_store(&file->page->is_closed, 1);
    shared_file_lock(file, F_UNLCK, MEMBERS_BYTE);
    file->member = false;
}

/* ---- Mapping --------------------------------------------------------------------------------------------------- */

static size_t align_up(size_t size, size_t to)
{
    return (size + to - 1) & ~(to - 1);
}

/* Return the offset of the memory in a file with `bytes` bytes of memory. The memory ends the file. */
static size_t memory_offset(uint64_t bytes)
{
    return align_up(sizeof(struct soft_shared_page) + bytes / SOFT_SHARED_CHUNK * sizeof(uint16_t), HUGE_PAGE);
}

/* Return the size of the memory: as much as the machine has, so that the file is never the limit. The kernel allocates
 * pages on first access. */
static uint64_t memory_bytes(void)
{
    uint64_t bytes = align_up((size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE), HUGE_PAGE);

    return bytes < MAX_BYTES ? bytes : MAX_BYTES;
}

/* Check a size that another process wrote. The machine may have had more memory when the file was created; with far
 * more than that, the creator of the file could make clearing dead slots arbitrarily slow. */
static bool is_plausible_size(uint64_t bytes)
{
    return bytes && bytes <= MAX_BYTES && bytes / 4 <= memory_bytes() && bytes % HUGE_PAGE == 0;
}

static void shared_area_hold(void *file)
{
    soft_shared_hold(file);
}

static void shared_area_drop(void *file)
{
    soft_shared_drop(file);
}

static void reap(void *file)
{
    soft_shared_reap(file);
}

/* Map the file at a multiple of a huge page, so that the memory is aligned to one. Children of forks do not get the
 * mapping, and core files do not contain it: the kernel would allocate the pages that were never accessed. */
static int shared_file_map(struct soft_shared *file, uint64_t bytes)
{
    size_t size = file->size = memory_offset(bytes) + bytes, head;
    char *room = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *at;

    if (room == MAP_FAILED)
        return errno;
    head = -(uintptr_t)room & (HUGE_PAGE - 1);
    at = mmap(room + head, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file->fd, 0);
    if (at == MAP_FAILED || madvise(at, size, MADV_DONTFORK)) {
        int error = errno;

        munmap(room, size + HUGE_PAGE);
        return error;
    }
    if (head)
        munmap(room, head);
    munmap(at + size, HUGE_PAGE - head);
    madvise(at, size, MADV_DONTDUMP);
    file->page = (void *)at;
    file->area = (struct alloc_area){
        .memory = at + memory_offset(bytes),
        .bytes = bytes,
        .chunk_bytes = SOFT_SHARED_CHUNK,
        .owners = (void *)(at + sizeof(struct soft_shared_page)),
        .no_reuse = &file->no_reuse,
        .handle = file,
        .hold = shared_area_hold,
        .drop = shared_area_drop,
        .reap = reap,
    };
    return 0;
}

/* ---- Creation and destruction ------------------------------------------------------------------------------------ */

static void shared_file_free(struct soft_shared *file)
{
    if (file->slot < SOFT_SHARED_SLOTS)
        set_used(file, file->slot, false); /* nothing of this process is left in the slot */
    /* first: the last close frees all of the memory, and the caller of this function holds a lock */
    soft_descriptor_close(file->fd);
    if (file->page)
        munmap(file->page, file->size);
    soft_table_destroy(&file->keys);
    soft_mutex_destroy(&file->reaping);
    free(file);
}

static struct soft_shared *shared_file_new(struct soft_device *device)
{
    struct soft_shared *file = calloc(1, sizeof(*file));

    if (!file || soft_table_init(&file->keys, 0, SOFT_SHARED_KEYS)) {
        free(file);
        errno = ENOMEM;
        return NULL;
    }
    soft_mutex_init(&file->reaping, SOFT_RANK_REAPING);
    file->device = device;
    file->generation = soft_generation;
    file->fd = -1;
    file->slot = SOFT_SHARED_SLOTS; /* no slot */
    soft_lock_init(&file->wait_lock, SOFT_RANK_WAITED);
    atomic_init(&file->references, 1);
    return file;
}

/* Record the file's identity, by which it is found again. */
static int shared_file_identify(struct soft_shared *file)
{
    struct stat found;

    if (fstat(file->fd, &found))
        return errno;
    file->dev = found.st_dev;
    file->ino = found.st_ino;
    return 0;
}

/* Publish a file that has a slot, or free it on an error. */
static struct soft_shared *shared_file_finish(struct soft_shared *file, int error)
{
    assert_held(&file->device->lock);
    if (error) {
        shared_file_free(file);
        errno = error;
        return NULL;
    }
    file->next = file->device->shared_files;
    file->device->shared_files = file;
    return file;
}

struct soft_shared *soft_shared_create(struct soft_device *device)
{
    struct soft_shared *file = shared_file_new(device);
    uint64_t bytes = memory_bytes();
    int error;

    if (!file)
        return NULL;
    file->fd = soft_sealed_create("aioverbs-domain", (off_t)(memory_offset(bytes) + bytes), F_SEAL_SEAL);
    error = file->fd < 0 ? errno : shared_file_map(file, bytes);
    if (!error) {
        memcpy(file->page->head.magic, MAGIC, sizeof(file->page->head.magic));
        file->page->head.bytes = bytes;
        error = shared_file_identify(file);
    }
    if (!error)
        error = acquire_slot(file, false);
    return shared_file_finish(file, error);
}

/* Check a file of another process, as far as possible. Two properties matter: the file never shrinks, and it gets no
 * further seals, since with F_SEAL_FUTURE_WRITE its pages could not be freed, and would be zeroed by writing instead.
 */
static int shared_file_check(const struct soft_shared *file, uint64_t *bytes)
{
    struct soft_shared_head head;
    off_t size = soft_sealed_bytes(file->fd);

    if (size < 0 || !(fcntl(file->fd, F_GET_SEALS) & F_SEAL_SEAL) ||
        pread(file->fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) ||
        memcmp(head.magic, MAGIC, sizeof(head.magic)) || !is_plausible_size(head.bytes) ||
        (uint64_t)size != memory_offset(head.bytes) + head.bytes)
        return EPROTO;
    *bytes = head.bytes;
    return 0;
}

/* Return the device's file behind a descriptor, with a reference that the caller drops; or NULL. */
static struct soft_shared *shared_file_find(struct soft_device *device, int fd)
{
    struct soft_shared *file;
    struct stat found;

    assert_held(&device->lock);
    if (fstat(fd, &found))
        return NULL;
    for (file = device->shared_files; file; file = file->next)
        if (file->dev == found.st_dev && file->ino == found.st_ino)
            break;
    if (file)
        soft_shared_hold(file);
    return file;
}

/* Open the file anew. Locks belong to an open file description, and the sender of the descriptor shares the other one.
 * EWOULDBLOCK: the sender holds a lease on the file (F_SETLEASE), and opening would wait for it. */
static int reopen(int fd)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
}

static int shared_file_join(struct soft_shared *file, int fd)
{
    uint64_t bytes = 0;
    int error = 0;

    soft_descriptors_hold();
    file->fd = soft_descriptor_own(reopen(fd));
    if (file->fd < 0)
        error = errno == EWOULDBLOCK ? EPROTO : errno;
    soft_descriptors_release();
    if (!error)
        error = shared_file_check(file, &bytes);
    if (!error)
        error = shared_file_identify(file);
    if (!error)
        error = shared_file_map(file, bytes);
    if (error)
        return error;
    error = acquire_slot(file, false);
    return error == EMFILE ? acquire_slot(file, true) : error;
}

/* Import a file. Joining may have to wait for other processes and for what they left, so the file is prepared before
 * device->lock is used. Any call on a file other than a memory file may block for as long as its owner likes, so the
 * type is checked first. */
struct soft_shared *soft_shared_import(struct soft_device *device, int fd)
{
    struct soft_shared *file, *found;
    int error;

    if (soft_sealed_bytes(fd) < 0) {
        errno = EPROTO;
        return NULL;
    }
    soft_mutex_take(&device->lock);
    found = shared_file_find(device, fd);
    soft_mutex_give(&device->lock);
    if (found)
        return found;
    file = shared_file_new(device);
    if (!file)
        return NULL;
    error = shared_file_join(file, fd);
    soft_mutex_take(&device->lock);
    /* another thread may have imported the file meanwhile, and may have used the last slot */
    found = shared_file_find(device, fd);
    if (found)
        shared_file_free(file);
    else
        file = shared_file_finish(file, error);
    soft_mutex_give(&device->lock);
    if (found)
        return found;
    if (file)
        soft_shared_reap(file);
    return file;
}

int soft_shared_export(const struct soft_shared *file)
{
    return reopen(file->fd);
}

void soft_shared_hold(struct soft_shared *file)
{
    atomic_fetch_add(&file->references, 1);
}

void soft_shared_drop(struct soft_shared *file)
{
    struct soft_shared **link;
    bool last;

    if (file->generation != soft_generation) /* the child of a fork inherits nothing of the file but this structure */
        return;
    soft_mutex_take(&file->device->lock);
    last = atomic_fetch_sub(&file->references, 1) == 1;
    if (last) {
        for (link = &file->device->shared_files; *link != file; link = &(*link)->next)
            ;
        *link = file->next;
    }
    soft_mutex_give(&file->device->lock);
    if (last)
        shared_file_free(file);
}
