/* Leases. A word of the shared page is FREE, OPEN or BUSY, with the serial number of its request. The requester opens
 * it; the peer makes it BUSY around each system call that moves bytes; the requester frees it, when it is not BUSY. So
 * no byte is moved for a request that is over, whatever became of the connection. */
#define _GNU_SOURCE
#include "soft_stream.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "soft_descriptors.h"
#include "soft_sealed.h"
#include "soft_sync.h"

enum { FREE, OPEN, BUSY };
_Static_assert(sizeof(struct soft_lease_page) == 4096, "one page");

/* One that neither ends nor moves on, as when it was stopped between two instructions: after this time the system
 * call that it was in is over. */
#define STUCK_NS 2000000000u

static uint64_t word(unsigned int state, uint32_t serial)
{
    return (uint64_t)state << 32 | serial;
}

/* ---- The page ---------------------------------------------------------------------------------------------- */

static struct soft_lease_page *map(int fd)
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
    page = fd < 0 ? NULL : map(fd);
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
    stream->leases = map(stream->came_fd);
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
    for (i = 0; link->stream.leases && i < SOFT_LEASES / 64 && error; i++) {
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

/* Whether nothing is moved any more. The word is the peer's to write as well: whatever it says, this ends. */
static bool withdraw(struct soft_link *link, _Atomic uint64_t *at, uint32_t serial)
{
    uint64_t patient = soft_now_ns() + SOFT_YIELD_NS, end = patient + STUCK_NS;
    bool gone;

    for (;;) {
        uint64_t found = word(OPEN, serial);

        if (atomic_compare_exchange_strong(at, &found, word(FREE, serial)) || found != word(BUSY, serial))
            return true;
        if (soft_now_ns() < patient) {
            sched_yield();
            continue;
        }
        soft_mutex_take(&link->stream.tx);
        gone = soft_process_gone(link->stream.pidfd);
        soft_mutex_give(&link->stream.tx);
        if (gone)
            return true;
        if (soft_now_ns() > end)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

void soft_lease_close(struct soft_link *link, uint16_t lease, uint32_t serial)
{
    if (!withdraw(link, &link->stream.leases->words[lease], serial))
        return; /* that word is never used again */
    soft_mutex_take(&link->stream.tx);
    link->leased[lease / 64] &= ~(1ull << lease % 64);
    soft_mutex_give(&link->stream.tx);
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
