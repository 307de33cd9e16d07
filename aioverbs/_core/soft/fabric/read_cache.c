#define _GNU_SOURCE
#include "soft/fabric/read_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/memfd.h"
#include "soft/base/util.h"
#include "soft/fabric/direct_copy.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/fabric/stream.h"
#include "soft/objects/device.h"
#include "soft/objects/mr.h"
#include "soft/objects/mw.h"
#include "soft/objects/qp.h"
#include "soft/objects/read_cache_entry.h"
#include "soft/objects/shared_keys.h"

/* since Linux 5.3 and 5.6; headers may be older */
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

enum { WORDS = 251 }; /* prime, so that consecutive numbers have different versions */

struct soft_read_cache_page {
    uint64_t address;          /* const, like the nonce: address of the nonce in the owner's memory */
    uint8_t nonce[SOFT_NONCE]; /* unique to this page */
    _Atomic uint64_t all, keys[WORDS], qps[WORDS];
};
_Static_assert(sizeof(struct soft_read_cache_page) <= 4096, "one page");

/* ---- The owner ----------------------------------------------------------------------------------------------- */

static struct soft_read_cache_page *read_cache_page_map(int fd, int protection)
{
    void *page = mmap(NULL, sizeof(struct soft_read_cache_page), protection, MAP_SHARED, fd, 0);

    return page == MAP_FAILED ? NULL : page;
}

static bool read_cache_page_fill(struct soft_fabric *fabric, struct soft_read_cache_page *page)
{
    if (getentropy(fabric->read_cache_nonce, SOFT_NONCE))
        return false;
    memcpy(page->nonce, fabric->read_cache_nonce, SOFT_NONCE);
    page->address = (uintptr_t)fabric->read_cache_nonce;
    return true;
}

/* Create the page. Under progress. */
static bool make_page(struct soft_fabric *fabric)
{
    struct soft_read_cache_page *page;
    int fd;

    assert_held(&fabric->progress);
    if (fabric->read_cache_fd >= 0)
        return true;
    fd = soft_sealed_create("aioverbs-read-cache", sizeof(*page), 0);
    if (fd < 0)
        return false;
    /* Mapped before the seal: no other process can map it for writing. */
    page = read_cache_page_map(fd, PROT_READ | PROT_WRITE);
    if (!page || !read_cache_page_fill(fabric, page) || fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)) {
        if (page)
            munmap(page, sizeof(*page));
        soft_descriptor_close(fd);
        return false;
    }
    fabric->read_cache_fd = fd;
    atomic_store(&fabric->read_cache_page, page);
    return true;
}

int soft_read_cache_offer(struct soft_stream *stream)
{
    struct soft_fabric *fabric = stream->fabric;

    if (!stream->is_unix || !fabric->settings.direct || stream->uid != geteuid() || !make_page(fabric))
        return -1;
    soft_direct_allow_ptrace();
    stream->has_read_cache = true;
    return fabric->read_cache_fd;
}

void soft_read_cache_destroy(struct soft_fabric *fabric)
{
    struct soft_read_cache_page *page = atomic_exchange(&fabric->read_cache_page, NULL);

    soft_descriptor_close(fabric->read_cache_fd);
    fabric->read_cache_fd = -1;
    if (page)
        munmap(page, sizeof(*page));
}

bool soft_read_cache_grant(const struct soft_qp *qp, uint32_t key, struct soft_read_cache_grant *grant)
{
    struct soft_device *device = qp->context->device;
    const struct soft_key *found = soft_table_find(&device->keys, key >> 8);
    const struct soft_mr *mr;

    /* Fault plans apply to requests and frames: a read without either would escape them. */
    if (!found || qp->qp.qp_type != IBV_QPT_RC || atomic_load(&qp->context->special) ||
        atomic_load(&device->fabric->frame_fault_plans))
        return false;
    if (found->is_window) {
        const struct soft_mw *mw = container_of(found, struct soft_mw, key);

        mr = mw->mr;
        grant->address = mw->address;
        grant->length = mw->length;
    } else {
        mr = container_of(found, struct soft_mr, key);
        grant->address = (uintptr_t)mr->mr.addr;
        grant->length = mr->mr.length;
    }
    grant->file = grant->address == (uintptr_t)mr->mr.addr ? atomic_load(&mr->file) : -1;
    return true;
}

/* Increment a version. The caller has a context of the device, so the page stays.
 *
 * The fence pairs with the one in soft_read_cache_copy(): a reader that copied a byte which the owner stored after this
 * call must find the version incremented. The increment alone does not guarantee that. It is a release for stores
 * before it; on ARMv8.0, where it is a loop of exclusive loads and stores, later stores may become visible before its
 * own. */
static void read_cache_invalidate(struct soft_device *device, size_t offset)
{
    struct soft_read_cache_page *page = atomic_load(&device->fabric->read_cache_page);

    if (!page)
        return;
    atomic_fetch_add((_Atomic uint64_t *)(void *)((char *)page + offset), 1);
    atomic_thread_fence(memory_order_seq_cst);
}

void soft_read_cache_invalidate_key(struct soft_device *device, uint32_t number)
{
    read_cache_invalidate(device, offsetof(struct soft_read_cache_page, keys) + number % WORDS * sizeof(uint64_t));
}

void soft_read_cache_invalidate_qp(const struct soft_qp *qp)
{
    read_cache_invalidate(qp->context->device,
                          offsetof(struct soft_read_cache_page, qps) + qp->qp.qp_num % WORDS * sizeof(uint64_t));
}

void soft_read_cache_invalidate_all(struct soft_device *device)
{
    read_cache_invalidate(device, offsetof(struct soft_read_cache_page, all));
}

/* ---- The requester: what a link has -------------------------------------------------------------------------- */

struct soft_read_cache_owner {
    struct soft_read_cache_owner *next; /* of link->read_cache_owners */
    const struct soft_read_cache_page *page;
    int memory;  /* /proc/PID/mem of the process that sent the page */
    int process; /* the same process, for its descriptors; -1: not available */
    uint32_t pid;
    uint64_t serial;
};

static void free_owner(struct soft_read_cache_owner *owner)
{
    if (owner->page)
        munmap((void *)(uintptr_t)owner->page, sizeof(*owner->page));
    soft_descriptor_close(owner->memory);
    soft_descriptor_close(owner->process);
    free(owner);
}

static int open_memory(uint32_t pid)
{
    char path[32];
    int fd;

    snprintf(path, sizeof(path), "/proc/%u/mem", pid);
    soft_descriptors_hold();
    fd = soft_descriptor_own(open(path, O_RDONLY | O_CLOEXEC));
    soft_descriptors_release();
    return fd;
}

static int open_process(uint32_t pid)
{
    int fd;

    soft_descriptors_hold();
    fd = soft_descriptor_own((int)syscall(SYS_pidfd_open, pid, 0));
    soft_descriptors_release();
    return fd;
}

/* Return whether `memory` is that of the process that owns the page. */
static bool is_memory_of_owner(const struct soft_read_cache_owner *owner)
{
    uint8_t found[SOFT_NONCE];

    return owner->page && owner->memory >= 0 &&
           pread(owner->memory, found, sizeof(found), (off_t)owner->page->address) == (ssize_t)sizeof(found) &&
           !memcmp(found, owner->page->nonce, sizeof(found));
}

static struct soft_read_cache_owner *make_owner(const struct soft_stream *stream, int fd)
{
    static atomic_ullong serials = 1;
    struct soft_read_cache_owner *owner;

    if (!stream->pid || soft_sealed_bytes(fd) < (off_t)sizeof(struct soft_read_cache_page))
        return NULL;
    owner = calloc(1, sizeof(*owner));
    if (!owner)
        return NULL;
    owner->page = read_cache_page_map(fd, PROT_READ);
    /* In this order: if another process had the number already, the memory would be its, too, without the nonce. */
    owner->process = open_process(stream->pid);
    owner->memory = open_memory(stream->pid);
    owner->pid = stream->pid;
    owner->serial = atomic_fetch_add(&serials, 1);
    if (is_memory_of_owner(owner))
        return owner;
    free_owner(owner);
    return NULL;
}

void soft_read_cache_accept(struct soft_link *link)
{
    struct soft_stream *stream = &link->stream;
    struct soft_read_cache_owner *owner = NULL, *before = link->read_cache_owners;

    if (stream->received_fds[0] >= 0 && stream->fabric->settings.direct && stream->uid == geteuid())
        owner = make_owner(stream, stream->received_fds[0]);
    if (!owner)
        return;
    if (before && !memcmp(before->page->nonce, owner->page->nonce, SOFT_NONCE)) {
        free_owner(owner); /* a new connection to the same process: its grants remain valid */
        owner = before;
    } else {
        owner->next = before;
        link->read_cache_owners = owner;
    }
    stream->has_read_cache = true;
    atomic_store(&link->read_cache_owner, owner);
}

void soft_read_cache_suspend(struct soft_link *link, bool suspend)
{
    atomic_store(&link->read_cache_owner, suspend || !link->stream.has_read_cache ? NULL : link->read_cache_owners);
}

bool soft_read_cache_is_outdated(const struct soft_link *link)
{
    return link->read_cache_owners && link->read_cache_owners->next;
}

void soft_read_cache_drop(struct soft_link *link, bool all)
{
    struct soft_read_cache_owner *owner, **place = all                       ? &link->read_cache_owners
                                                   : link->read_cache_owners ? &link->read_cache_owners->next
                                                                             : NULL;

    if (all)
        atomic_store(&link->read_cache_owner, NULL);
    if (!place || !*place)
        return;
    owner = *place;
    *place = NULL;
    grace_wait(); /* readers that used them have finished */
    while (owner) {
        struct soft_read_cache_owner *next = owner->next;

        free_owner(owner);
        owner = next;
    }
}

/* ---- The requester: reading ---------------------------------------------------------------------------------- */

static struct soft_read_cache_versions versions_of(const struct soft_read_cache_page *page, uint32_t key,
                                                   uint32_t qp_num)
{
    return (struct soft_read_cache_versions){
        atomic_load(&page->all),
        atomic_load(&page->keys[(key >> 8) % WORDS]),
        atomic_load(&page->qps[qp_num % WORDS]),
    };
}

static bool are_equal(const struct soft_read_cache_versions *one, const struct soft_read_cache_versions *other)
{
    return one->all == other->all && one->key == other->key && one->qp == other->qp;
}

bool soft_read_cache_note(const struct soft_link *link, uint32_t key, uint32_t qp_num,
                          struct soft_read_cache_entry *entry)
{
    const struct soft_read_cache_owner *owner = atomic_load(&link->read_cache_owner);

    if (!owner)
        return false;
    *entry = (struct soft_read_cache_entry){
        .key = key, .owner_serial = owner->serial, .versions = versions_of(owner->page, key, qp_num)};
    return true;
}

static bool is_valid(const struct soft_read_cache_owner *owner, const struct soft_read_cache_entry *entry,
                     uint32_t qp_num)
{
    struct soft_read_cache_versions versions = versions_of(owner->page, entry->key, qp_num);

    return entry->owner_serial == owner->serial && are_equal(&versions, &entry->versions);
}

static bool read_cache_holds(const struct soft_read_cache_owner *owner, uint32_t qp_num,
                             const struct soft_read_cache_read *reads, unsigned int count)
{
    unsigned int i;

    for (i = 0; i < count; i++)
        if ((!i || reads[i].entry != reads[i - 1].entry) && !is_valid(owner, reads[i].entry, qp_num))
            return false;
    return true;
}

/* Copy one read through the file, which is tied to the owner's memory: it does not lead to a process that reuses the
 * number, or to a program that the owner executes; reads from the file fail then. */
static bool copy_one(const struct soft_read_cache_owner *owner, const struct soft_read_cache_read *read,
                     const struct iovec *pieces, unsigned int piece_count)
{
    return read->address <= INT64_MAX &&
           preadv(owner->memory, pieces, (int)piece_count, (off_t)read->address) == (ssize_t)read->length;
}

/* Copy several reads by one system call. That names the owner by its process number, so it also reads the nonce, out of
 * the same memory. */
static bool copy_all(const struct soft_read_cache_owner *owner, const struct soft_read_cache_read *reads,
                     unsigned int count, const struct iovec *pieces, unsigned int piece_count)
{
    struct iovec here[SOFT_CACHED_RUN_PIECES + 1], there[SOFT_CACHED_RUN_READS + 1];
    uint8_t nonce[SOFT_NONCE];
    ssize_t size = sizeof(nonce);
    unsigned int i;

    for (i = 0; i < count; i++) {
        there[i] = (struct iovec){(void *)(uintptr_t)reads[i].address, reads[i].length};
        size += reads[i].length;
    }
    memcpy(here, pieces, piece_count * sizeof(*pieces));
    there[count] = (struct iovec){(void *)(uintptr_t)owner->page->address, sizeof(nonce)};
    here[piece_count] = (struct iovec){nonce, sizeof(nonce)};
    return process_vm_readv((pid_t)owner->pid, here, piece_count + 1, there, count + 1, 0) == size &&
           !memcmp(nonce, owner->page->nonce, sizeof(nonce));
}

/* Copy one read from the mapping. */
static bool copy_mapped(const struct soft_read_cache_read *read, const struct iovec *pieces, unsigned int piece_count)
{
    const uint8_t *from = read->entry->memory + (read->address - read->entry->address);

    for (; piece_count--; from += pieces++->iov_len)
        memcpy(pieces->iov_base, from, pieces->iov_len);
    return true;
}

bool soft_read_cache_copy(const struct soft_link *link, uint32_t qp_num, const struct soft_read_cache_read *reads,
                          unsigned int count, const struct iovec *pieces, unsigned int piece_count)
{
    const struct soft_read_cache_owner *owner = atomic_load(&link->read_cache_owner);

    if (!owner || !read_cache_holds(owner, qp_num, reads, count)) /* the copy would be discarded anyway */
        return false;
    if (!(count > 1              ? copy_all(owner, reads, count, pieces, piece_count)
          : reads->entry->memory ? copy_mapped(reads, pieces, piece_count)
                                 : copy_one(owner, reads, pieces, piece_count)))
        return false;
    atomic_thread_fence(memory_order_seq_cst); /* compare the versions after the last byte was copied */
    return read_cache_holds(owner, qp_num, reads, count);
}

/* ---- The requester: mapping ---------------------------------------------------------------------------------- */

/* Return a descriptor of the owner's file, which the caller closes, or -1. */
static int get_file(const struct soft_read_cache_owner *owner, uint32_t number)
{
    int fd;

    if (owner->process < 0 || soft_descriptors_are_stuck())
        return -1;
    /* This may wait for the owner's execve(), so forks are not held off: a child may keep the descriptor. */
    fd = (int)syscall(SYS_pidfd_getfd, owner->process, number, 0);
    if (fd < 0)
        return -1;
    /* The owner may have deregistered the region, or execute another program, whose descriptor it is now. */
    if (soft_sealed_is_small(fd) && is_memory_of_owner(owner))
        return fd;
    soft_descriptor_return(fd);
    return -1;
}

void soft_read_cache_map(const struct soft_link *link, struct soft_read_cache_entry *entry, uint32_t number)
{
    const struct soft_read_cache_owner *owner = atomic_load(&link->read_cache_owner);
    void *memory;
    int fd;

    if (!owner || owner->serial != entry->owner_serial || (fd = get_file(owner, number)) < 0)
        return;
    if (entry->length <= (uint64_t)soft_sealed_bytes(fd)) {
        memory = mmap(NULL, entry->length, PROT_READ, MAP_SHARED, fd, 0);
        if (memory != MAP_FAILED && !madvise(memory, entry->length, MADV_DONTFORK))
            entry->memory = memory;
        else if (memory != MAP_FAILED)
            munmap(memory, entry->length);
    }
    close(fd);
}

void soft_read_cache_clear_invalid(const struct soft_link *link, uint32_t qp_num, struct soft_read_cache_entry *entries)
{
    const struct soft_read_cache_owner *owner = atomic_load(&link->read_cache_owner);
    unsigned int i;

    for (i = 0; i < SOFT_READ_CACHE_ENTRIES; i++)
        if (entries[i].memory && (!owner || !is_valid(owner, &entries[i], qp_num)))
            soft_read_cache_clear(&entries[i], 1);
}

void soft_read_cache_clear(struct soft_read_cache_entry *entries, unsigned int count)
{
    for (; count--; entries++) {
        if (entries->memory)
            munmap(entries->memory, entries->length);
        *entries = (struct soft_read_cache_entry){0};
    }
}
