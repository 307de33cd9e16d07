#define _GNU_SOURCE
#include "soft/fabric/read_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
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

enum { WORDS = 251 }; /* prime: numbers that are given out one after the other have words of their own */

struct soft_licence_page {
    uint64_t address;          /* const, like the nonce: where that stands in the owner's memory, too */
    uint8_t nonce[SOFT_NONCE]; /* nobody else's page has it */
    _Atomic uint64_t all, keys[WORDS], qps[WORDS];
};
_Static_assert(sizeof(struct soft_licence_page) <= 4096, "one page");

/* ---- The owner ----------------------------------------------------------------------------------------------- */

static struct soft_licence_page *read_cache_page_map(int fd, int protection)
{
    void *page = mmap(NULL, sizeof(struct soft_licence_page), protection, MAP_SHARED, fd, 0);

    return page == MAP_FAILED ? NULL : page;
}

static bool read_cache_page_fill(struct soft_fabric *fabric, struct soft_licence_page *page)
{
    if (getrandom(fabric->licence_nonce, SOFT_NONCE, 0) != SOFT_NONCE)
        return false;
    memcpy(page->nonce, fabric->licence_nonce, SOFT_NONCE);
    page->address = (uintptr_t)fabric->licence_nonce;
    return true;
}

/* Under progress. */
static bool make_page(struct soft_fabric *fabric)
{
    struct soft_licence_page *page;
    int fd;

    assert_held(&fabric->progress);
    if (fabric->licences_fd >= 0)
        return true;
    fd = soft_sealed_make("aioverbs-licences", sizeof(*page), 0);
    if (fd < 0)
        return false;
    /* Mapped before it is sealed against that: nobody else can map it to be written. */
    page = read_cache_page_map(fd, PROT_READ | PROT_WRITE);
    if (!page || !read_cache_page_fill(fabric, page) || fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)) {
        if (page)
            munmap(page, sizeof(*page));
        soft_descriptor_close(fd);
        return false;
    }
    fabric->licences_fd = fd;
    atomic_store(&fabric->licences, page);
    return true;
}

int soft_licence_offer(struct soft_stream *stream)
{
    struct soft_fabric *fabric = stream->fabric;

    if (!stream->is_unix || !fabric->settings.direct || stream->uid != geteuid() || !make_page(fabric))
        return -1;
    soft_direct_invite();
    stream->licensed = true;
    return fabric->licences_fd;
}

void soft_licence_unmake(struct soft_fabric *fabric)
{
    struct soft_licence_page *page = atomic_exchange(&fabric->licences, NULL);

    soft_descriptor_close(fabric->licences_fd);
    fabric->licences_fd = -1;
    if (page)
        munmap(page, sizeof(*page));
}

bool soft_licence_give(const struct soft_qp *qp, uint32_t key, uint64_t *address, uint64_t *length)
{
    struct soft_device *device = qp->context->device;
    const struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    /* Faults are planned for requests, and frames: where there are none they cannot happen. */
    if (!found || qp->qp.qp_type != IBV_QPT_RC || atomic_load(&qp->context->special) ||
        atomic_load(&device->fabric->disturbed))
        return false;
    if (found->is_window) {
        const struct soft_mw *mw = container_of(found, struct soft_mw, key);

        *address = mw->address;
        *length = mw->length;
    } else {
        const struct soft_mr *mr = container_of(found, struct soft_mr, key);

        *address = (uintptr_t)mr->mr.addr;
        *length = mr->mr.length;
    }
    return true;
}

/* The caller has a context of the device, so the page stays.
 *
 * The fence, and that of soft_licence_read: a reader that copied a byte that its owner stored after the recall is to
 * find the word counted up. The counting alone does not promise that. It is a release for what comes before it, and on
 * ARMv8.0, a loop of exclusive loads and stores, what comes behind may be seen by others before its store is. */
static void read_cache_invalidate(struct soft_device *device, size_t offset)
{
    struct soft_licence_page *page = atomic_load(&device->fabric->licences);

    if (!page)
        return;
    atomic_fetch_add((_Atomic uint64_t *)(void *)((char *)page + offset), 1);
    atomic_thread_fence(memory_order_seq_cst);
}

void soft_licence_recall_key(struct soft_device *device, uint32_t number)
{
    read_cache_invalidate(device, offsetof(struct soft_licence_page, keys) + number % WORDS * sizeof(uint64_t));
}

void soft_licence_recall_qp(const struct soft_qp *qp)
{
    read_cache_invalidate(qp->context->device,
                          offsetof(struct soft_licence_page, qps) + qp->qp.qp_num % WORDS * sizeof(uint64_t));
}

void soft_licence_recall_all(struct soft_device *device)
{
    read_cache_invalidate(device, offsetof(struct soft_licence_page, all));
}

/* ---- The requester: what a link has -------------------------------------------------------------------------- */

struct soft_licensor {
    struct soft_licensor *next; /* of link->licensors */
    const struct soft_licence_page *page;
    int memory; /* of the process that the page came from */
    uint32_t pid;
    uint64_t serial;
};

static void free_licensor(struct soft_licensor *licensor)
{
    if (licensor->page)
        munmap((void *)(uintptr_t)licensor->page, sizeof(*licensor->page));
    soft_descriptor_close(licensor->memory);
    free(licensor);
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

/* Whether that is the memory of the page's owner. */
static bool fits(const struct soft_licensor *licensor)
{
    uint8_t found[SOFT_NONCE];

    return licensor->page && licensor->memory >= 0 &&
           pread(licensor->memory, found, sizeof(found), (off_t)licensor->page->address) == (ssize_t)sizeof(found) &&
           !memcmp(found, licensor->page->nonce, sizeof(found));
}

static struct soft_licensor *make_licensor(const struct soft_stream *stream, int fd)
{
    static atomic_ullong serials = 1;
    struct soft_licensor *licensor;

    if (!stream->pid || soft_sealed_bytes(fd) < (off_t)sizeof(struct soft_licence_page))
        return NULL;
    licensor = calloc(1, sizeof(*licensor));
    if (!licensor)
        return NULL;
    licensor->page = read_cache_page_map(fd, PROT_READ);
    licensor->memory = open_memory(stream->pid);
    licensor->pid = stream->pid;
    licensor->serial = atomic_fetch_add(&serials, 1);
    if (fits(licensor))
        return licensor;
    free_licensor(licensor);
    return NULL;
}

void soft_licence_take(struct soft_link *link)
{
    struct soft_stream *stream = &link->stream;
    struct soft_licensor *licensor = NULL, *before = link->licensors;

    if (stream->came_fd >= 0 && stream->fabric->settings.direct && stream->uid == geteuid())
        licensor = make_licensor(stream, stream->came_fd);
    soft_descriptor_close(stream->came_fd);
    stream->came_fd = -1;
    if (!licensor)
        return;
    if (before && !memcmp(before->page->nonce, licensor->page->nonce, SOFT_NONCE)) {
        free_licensor(licensor); /* a new connection to the same process: what it allowed holds */
        licensor = before;
    } else {
        licensor->next = before;
        link->licensors = licensor;
    }
    stream->licensed = true;
    atomic_store(&link->licensor, licensor);
}

void soft_licence_suspend(struct soft_link *link, bool suspend)
{
    atomic_store(&link->licensor, suspend || !link->stream.licensed ? NULL : link->licensors);
}

bool soft_licence_is_outdated(const struct soft_link *link)
{
    return link->licensors && link->licensors->next;
}

void soft_licence_drop(struct soft_link *link, bool all)
{
    struct soft_licensor *licensor, **place = all ? &link->licensors : link->licensors ? &link->licensors->next : NULL;

    if (all)
        atomic_store(&link->licensor, NULL);
    if (!place || !*place)
        return;
    licensor = *place;
    *place = NULL;
    grace_wait(); /* who read by them has done so */
    while (licensor) {
        struct soft_licensor *next = licensor->next;

        free_licensor(licensor);
        licensor = next;
    }
}

/* ---- The requester: reading ---------------------------------------------------------------------------------- */

static struct soft_licence_words words_of(const struct soft_licence_page *page, uint32_t key, uint32_t qp_num)
{
    return (struct soft_licence_words){
        atomic_load(&page->all),
        atomic_load(&page->keys[(key >> 8) % WORDS]),
        atomic_load(&page->qps[qp_num % WORDS]),
    };
}

static bool are_the_same(const struct soft_licence_words *one, const struct soft_licence_words *other)
{
    return one->all == other->all && one->key == other->key && one->qp == other->qp;
}

bool soft_licence_note(const struct soft_link *link, uint32_t key, uint32_t qp_num, struct soft_licence *licence)
{
    const struct soft_licensor *licensor = atomic_load(&link->licensor);

    if (!licensor)
        return false;
    *licence =
        (struct soft_licence){.key = key, .page = licensor->serial, .words = words_of(licensor->page, key, qp_num)};
    return true;
}

static bool read_cache_holds(const struct soft_licensor *licensor, uint32_t qp_num,
                             const struct soft_licensed_read *reads, unsigned int count)
{
    unsigned int i;

    for (i = 0; i < count; i++) {
        const struct soft_licence *licence = reads[i].licence;
        struct soft_licence_words words;

        if (i && licence == reads[i - 1].licence)
            continue;
        words = words_of(licensor->page, licence->key, qp_num);
        if (licence->page != licensor->serial || !are_the_same(&words, &licence->words))
            return false;
    }
    return true;
}

/* One by the file, which is the owner's memory and that of nobody who gets its number, or of a program that it became:
 * nothing is there then. */
static bool copy_one(const struct soft_licensor *licensor, const struct soft_licensed_read *read,
                     const struct iovec *pieces, unsigned int piece_count)
{
    return read->address <= INT64_MAX &&
           preadv(licensor->memory, pieces, (int)piece_count, (off_t)read->address) == (ssize_t)read->length;
}

/* Several by one system call, which knows the owner by its number: so it brings the nonce as well, out of the same
 * memory. */
static bool copy_all(const struct soft_licensor *licensor, const struct soft_licensed_read *reads, unsigned int count,
                     const struct iovec *pieces, unsigned int piece_count)
{
    struct iovec here[SOFT_LICENSED_PIECES + 1], there[SOFT_LICENSED_READS + 1];
    uint8_t nonce[SOFT_NONCE];
    ssize_t size = sizeof(nonce);
    unsigned int i;

    for (i = 0; i < count; i++) {
        there[i] = (struct iovec){(void *)(uintptr_t)reads[i].address, reads[i].length};
        size += reads[i].length;
    }
    memcpy(here, pieces, piece_count * sizeof(*pieces));
    there[count] = (struct iovec){(void *)(uintptr_t)licensor->page->address, sizeof(nonce)};
    here[piece_count] = (struct iovec){nonce, sizeof(nonce)};
    return process_vm_readv((pid_t)licensor->pid, here, piece_count + 1, there, count + 1, 0) == size &&
           !memcmp(nonce, licensor->page->nonce, sizeof(nonce));
}

bool soft_licence_read(const struct soft_link *link, uint32_t qp_num, const struct soft_licensed_read *reads,
                       unsigned int count, const struct iovec *pieces, unsigned int piece_count)
{
    const struct soft_licensor *licensor = atomic_load(&link->licensor);

    if (!licensor || !read_cache_holds(licensor, qp_num, reads, count)) /* what was copied would be worth nothing */
        return false;
    if (!(count == 1 ? copy_one(licensor, reads, pieces, piece_count)
                     : copy_all(licensor, reads, count, pieces, piece_count)))
        return false;
    atomic_thread_fence(memory_order_seq_cst); /* the words are looked at after the last byte */
    return read_cache_holds(licensor, qp_num, reads, count);
}
