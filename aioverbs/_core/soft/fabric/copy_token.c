/* Leases. A word of the shared page is FREE, OPEN or BUSY, with the serial number of its request. The requester opens
 * it; the peer makes it BUSY around each system call that moves bytes; the requester frees it, when it is not BUSY. So
 * no byte is moved for a request that is over, whatever became of the connection.
 *
 * Nobody waits in here. A lease that is BUSY stays the queue pair's, which asks for it again: from its timer, while it
 * sends nothing (soft/transport/requester.c), or from the verb that wants its memory back, with no lock of a device half held, outside
 * of grace sections. Destroying or resetting a queue pair does so inside of its driver half and those of its completion
 * queues. So a peer that keeps a word BUSY holds up that queue pair, that verb and who polls these queues, nobody else.
 *
 * And not for ever. The word is the peer's to write, so it may stay BUSY, or become BUSY again: a peer that has kept
 * others waiting for SOFT_LEASE_NS, in one wait or in all (soft/base/wait_budget.h), is overdue. Then its gate is shut,
 * so that no system call that it begins from then on moves anything, though it may have been stopped right before that;
 * the link is torn, so that no answer to what was asked on it is ever heard; all leases of it count as taken back, which
 * the caller rests on; and no lease is opened on it again, so data goes over the stream. What is left is a system call
 * that has gone through the gate: one that moves SOFT_DIRECT_FRAGMENT bytes is over long before SOFT_LEASE_NS are,
 * where all pages are there. Pages that the kernel has to wait for longer than that, in the middle of the system call,
 * are not covered: nobody can call it off, and to look for them before each one costs too much.
 *
 * That holds for an honest peer. One that is not honest needs neither lease nor gate to write to this process's memory:
 * it is of this user, or it would have none, and the kernel lets it. */
#define _GNU_SOURCE
#include "soft/fabric/copy_token.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/memfd.h"
#include "soft/fabric/direct_copy.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/stream.h"

enum { FREE, OPEN, BUSY };
_Static_assert(sizeof(struct soft_lease_page) == 4096, "one page");

static uint64_t word(unsigned int state, uint32_t serial)
{
    return (uint64_t)state << 32 | serial;
}

/* ---- The page ---------------------------------------------------------------------------------------------- */

static struct soft_lease_page *copy_token_page_map(int fd)
{
    void *page = mmap(NULL, sizeof(struct soft_lease_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    return page == MAP_FAILED ? NULL : page;
}

int soft_lease_make(struct soft_link *link)
{
    struct soft_lease_page *page;
    int fd;

    if (link->stream.leases)
        return 0;
    fd = soft_sealed_make("aioverbs-leases", sizeof(*page), F_SEAL_SEAL);
    page = fd < 0 ? NULL : copy_token_page_map(fd);
    if (!page) {
        int error = errno;

        soft_descriptor_close(fd);
        return error;
    }
    link->leases_fd = fd;
    soft_mutex_take(&link->stream.tx);
    link->stream.leases = page;
    soft_mutex_give(&link->stream.tx);
    return 0;
}

void soft_lease_unmake(struct soft_link *link)
{
    if (link->stream.leases)
        munmap(link->stream.leases, sizeof(*link->stream.leases));
    link->stream.leases = NULL;
    soft_descriptor_close(link->leases_fd);
    link->leases_fd = -1;
}

const char *soft_lease_take(struct soft_stream *stream)
{
    if (stream->came_fd < 0)
        return "no leases came with the offer";
    if (soft_sealed_bytes(stream->came_fd) != (off_t)sizeof(*stream->leases))
        return "the leases that came are not what they should be"; /* it could be cut short under our hands */
    stream->leases = copy_token_page_map(stream->came_fd);
    soft_descriptor_close(stream->came_fd);
    stream->came_fd = -1;
    return stream->leases ? NULL : "the leases that came cannot be mapped";
}

void soft_lease_drop(struct soft_stream *stream)
{
    if (stream->leases)
        munmap(stream->leases, sizeof(*stream->leases));
    stream->leases = NULL;
    soft_descriptor_close(stream->came_fd);
    stream->came_fd = -1;
}

/* ---- The requester ------------------------------------------------------------------------------------------- */

int soft_lease_open(struct soft_link *link, uint16_t *lease, uint32_t *serial)
{
    int error = EAGAIN;
    unsigned int i;

    soft_mutex_take(&link->stream.tx);
    for (i = 0; link->stream.leases && !link->overdue && i < SOFT_LEASES / 64 && error; i++) {
        uint64_t unused = ~link->leased[i];
        unsigned int bit = unused ? (unsigned int)__builtin_ctzll(unused) : 64;

        if (bit == 64)
            continue;
        link->leased[i] |= 1ull << bit;
        *lease = (uint16_t)(i * 64 + bit);
        *serial = ++link->serials[*lease];
        atomic_store(&link->stream.leases->words[*lease], word(OPEN, *serial));
        error = 0;
    }
    soft_mutex_give(&link->stream.tx);
    return error;
}

/* Under tx: it may be opened again. */
static void copy_token_put(struct soft_link *link, uint16_t lease)
{
    link->leased[lease / 64] &= ~(1ull << lease % 64);
}

bool soft_lease_close(struct soft_link *link, uint16_t lease, uint32_t serial)
{
    _Atomic uint64_t *at = &link->stream.leases->words[lease];
    uint64_t found = word(OPEN, serial);
    bool busy = !atomic_compare_exchange_strong(at, &found, word(FREE, serial)) && found == word(BUSY, serial);

    soft_mutex_take(&link->stream.tx);
    if (busy && (link->overdue || soft_process_gone(link->stream.pidfd)))
        busy = false;
    if (!busy)
        copy_token_put(link, lease);
    soft_mutex_give(&link->stream.tx);
    return !busy;
}

void soft_lease_cancel(struct soft_link *link, uint16_t lease, uint32_t serial)
{
    atomic_store(&link->stream.leases->words[lease], word(FREE, serial));
    soft_mutex_take(&link->stream.tx);
    copy_token_put(link, lease);
    soft_mutex_give(&link->stream.tx);
}

bool soft_lease_may_stay(struct soft_link *link, uint64_t begin)
{
    bool may_stay;

    soft_mutex_take(&link->stream.tx);
    may_stay = soft_waited_more(&link->waited, begin, soft_now_ns(), SOFT_LEASE_NS);
    soft_mutex_give(&link->stream.tx);
    return may_stay;
}

void soft_lease_give_up(struct soft_link *link)
{
    soft_mutex_take(&link->stream.tx);
    link->overdue = true;
    soft_direct_shut(link);
    if (link->stream.stage != SOFT_CLOSED && !link->stream.broken)
        soft_stream_break(&link->stream);
    soft_mutex_give(&link->stream.tx);
}

bool soft_lease_is_overdue(struct soft_link *link)
{
    bool overdue;

    soft_mutex_take(&link->stream.tx);
    overdue = link->overdue;
    soft_mutex_give(&link->stream.tx);
    return overdue;
}

void soft_lease_forget(struct soft_link *link)
{
    unsigned int i;

    for (i = 0; link->stream.leases && i < SOFT_LEASES; i++) {
        uint64_t found = atomic_load(&link->stream.leases->words[i]);

        if (found >> 32 == BUSY)
            atomic_compare_exchange_strong(&link->stream.leases->words[i], &found, word(FREE, (uint32_t)found));
    }
}

/* No lease is opened any more whose request leaves: the stream was closed before. The gate is shut at the first look:
 * what has gone through it is over by the last one, and a peer that was stopped before it moves nothing. */
bool soft_lease_recall(struct soft_link *link)
{
    struct soft_lease_page *page;
    bool left = true;
    unsigned int i;

    soft_mutex_take(&link->stream.tx);
    page = link->stream.leases;
    soft_direct_shut(link);
    for (i = 0; page && i < SOFT_LEASES; i++) {
        uint64_t found = atomic_load(&page->words[i]);

        if (found >> 32 == OPEN)
            atomic_compare_exchange_strong(&page->words[i], &found, word(FREE, (uint32_t)found));
        left = left && found >> 32 != BUSY;
    }
    left = left || link->overdue || soft_process_gone(link->stream.pidfd);
    soft_mutex_give(&link->stream.tx);
    return left;
}

/* ---- The peer ------------------------------------------------------------------------------------------------ */

bool soft_lease_enter(struct soft_lease_page *page, uint16_t lease, uint32_t serial)
{
    uint64_t expected = word(OPEN, serial);

    return atomic_compare_exchange_strong(&page->words[lease], &expected, word(BUSY, serial));
}

void soft_lease_leave(struct soft_lease_page *page, uint16_t lease, uint32_t serial)
{
    uint64_t expected = word(BUSY, serial);

    (void)atomic_compare_exchange_strong(&page->words[lease], &expected, word(OPEN, serial));
}
