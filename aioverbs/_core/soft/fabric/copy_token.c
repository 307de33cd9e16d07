/* Copy tokens. A word of the shared page has a state, FREE, OPEN or BUSY, and the serial number of its request.
 *
 *             requester opens               peer begins a system call
 *      FREE ------------------------> OPEN ------------------------> BUSY
 *           <------------------------      <------------------------
 *             requester closes              peer ends the system call
 *
 * The requester opens the token of a direct request. The peer makes it BUSY around each system call that copies bytes.
 * The requester closes it, when it is not BUSY. So no byte is copied for a request that is over, whatever became of the
 * connection.
 *
 * No function in this file waits. A token that is BUSY remains in use by its queue pair, which tries to close it again:
 * from its timer, while it sends nothing (soft/transport/requester.c), or from the verb that takes its memory back,
 * with no device half's lock held and outside of grace sections. Destroying or resetting a queue pair does so inside of
 * its driver half and those of its completion queues. So a peer that keeps a word BUSY delays that queue pair, that
 * verb and threads that poll these completion queues, and nothing else.
 *
 * The delay is bounded. The peer can write to the word, so it may stay BUSY, or become BUSY again. A peer that was
 * waited for for SOFT_COPY_TIMEOUT_NS, in one wait or in all (soft/base/wait_budget.h), is overdue. Then:
 *
 * - the gate is closed: no system call that the peer begins from then on copies anything, even if the peer was stopped
 *   right before it;
 * - the stream is broken: no answer to a request that was sent on it is handled any more;
 * - all tokens of the link count as closed, which callers rely on;
 * - no token is opened on the link again: data goes over the stream.
 *
 * What remains is a system call that has passed the gate. One that copies SOFT_DIRECT_FRAGMENT bytes is over long
 * before SOFT_COPY_TIMEOUT_NS, if all pages are present. Pages that the kernel has to wait for longer than that, in the
 * middle of the system call, are not covered: the system call cannot be cancelled, and checking for such pages before
 * each call costs too much.
 *
 * All this holds for an honest peer. A dishonest one needs neither token nor gate to write to this process's memory: it
 * runs as this user, or direct copies would not be offered, and the kernel lets it. */
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
_Static_assert(sizeof(struct soft_copy_token_page) == 4096, "one page");

static uint64_t word(unsigned int state, uint32_t serial)
{
    return (uint64_t)state << 32 | serial;
}

/* ---- The page ---------------------------------------------------------------------------------------------- */

static struct soft_copy_token_page *copy_token_page_map(int fd)
{
    void *page = mmap(NULL, sizeof(struct soft_copy_token_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    return page == MAP_FAILED ? NULL : page;
}

int soft_copy_tokens_create(struct soft_link *link)
{
    struct soft_copy_token_page *page;
    int fd;

    if (link->stream.copy_tokens)
        return 0;
    fd = soft_sealed_create("aioverbs-copy-tokens", sizeof(*page), F_SEAL_SEAL);
    page = fd < 0 ? NULL : copy_token_page_map(fd);
    if (!page) {
        int error = errno;

        soft_descriptor_close(fd);
        return error;
    }
    link->tokens_fd = fd;
    soft_mutex_take(&link->stream.tx);
    link->stream.copy_tokens = page;
    soft_mutex_give(&link->stream.tx);
    return 0;
}

void soft_copy_tokens_destroy(struct soft_link *link)
{
    if (link->stream.copy_tokens)
        munmap(link->stream.copy_tokens, sizeof(*link->stream.copy_tokens));
    link->stream.copy_tokens = NULL;
    soft_descriptor_close(link->tokens_fd);
    link->tokens_fd = -1;
}

const char *soft_copy_tokens_map(struct soft_stream *stream)
{
    if (stream->received_fds[0] < 0)
        return "no copy tokens came with the offer of direct copies";
    if (soft_sealed_bytes(stream->received_fds[0]) != (off_t)sizeof(*stream->copy_tokens))
        /* A file that can shrink would make accesses fail. */
        return "the file of copy tokens is not sealed or has another size";
    stream->copy_tokens = copy_token_page_map(stream->received_fds[0]);
    return stream->copy_tokens ? NULL : "the file of copy tokens cannot be mapped";
}

void soft_copy_tokens_unmap(struct soft_stream *stream)
{
    if (stream->copy_tokens)
        munmap(stream->copy_tokens, sizeof(*stream->copy_tokens));
    stream->copy_tokens = NULL;
}

/* ---- The requester ------------------------------------------------------------------------------------------- */

int soft_copy_token_open(struct soft_link *link, uint16_t *copy_token, uint32_t *serial)
{
    int error = EAGAIN;
    unsigned int i;

    soft_mutex_take(&link->stream.tx);
    for (i = 0; link->stream.copy_tokens && !link->overdue && i < SOFT_COPY_TOKENS / 64 && error; i++) {
        uint64_t unused = ~link->tokens_in_use[i];
        unsigned int bit = unused ? (unsigned int)__builtin_ctzll(unused) : 64;

        if (bit == 64)
            continue;
        link->tokens_in_use[i] |= 1ull << bit;
        *copy_token = (uint16_t)(i * 64 + bit);
        *serial = ++link->serials[*copy_token];
        atomic_store(&link->stream.copy_tokens->words[*copy_token], word(OPEN, *serial));
        error = 0;
    }
    soft_mutex_give(&link->stream.tx);
    return error;
}

/* Make the token available again. Under tx. */
static void copy_token_put_back(struct soft_link *link, uint16_t copy_token)
{
    link->tokens_in_use[copy_token / 64] &= ~(1ull << copy_token % 64);
}

bool soft_copy_token_close(struct soft_link *link, uint16_t copy_token, uint32_t serial)
{
    _Atomic uint64_t *at = &link->stream.copy_tokens->words[copy_token];
    uint64_t found = word(OPEN, serial);
    bool busy = !atomic_compare_exchange_strong(at, &found, word(FREE, serial)) && found == word(BUSY, serial);

    soft_mutex_take(&link->stream.tx);
    if (busy && (link->overdue || soft_process_has_exited(link->stream.pidfd)))
        busy = false;
    if (!busy)
        copy_token_put_back(link, copy_token);
    soft_mutex_give(&link->stream.tx);
    return !busy;
}

void soft_copy_token_cancel(struct soft_link *link, uint16_t copy_token, uint32_t serial)
{
    atomic_store(&link->stream.copy_tokens->words[copy_token], word(FREE, serial));
    soft_mutex_take(&link->stream.tx);
    copy_token_put_back(link, copy_token);
    soft_mutex_give(&link->stream.tx);
}

bool soft_copy_token_may_wait(struct soft_link *link, uint64_t begin)
{
    bool may_stay;

    soft_mutex_take(&link->stream.tx);
    may_stay = soft_wait_budget_spend(&link->waited, begin, soft_now_ns(), SOFT_COPY_TIMEOUT_NS);
    soft_mutex_give(&link->stream.tx);
    return may_stay;
}

void soft_copy_tokens_give_up(struct soft_link *link)
{
    soft_mutex_take(&link->stream.tx);
    link->overdue = true;
    soft_direct_close_gate(link);
    if (link->stream.stage != SOFT_CLOSED && !link->stream.broken)
        soft_stream_break(&link->stream);
    soft_mutex_give(&link->stream.tx);
}

bool soft_copy_tokens_are_overdue(struct soft_link *link)
{
    bool overdue;

    soft_mutex_take(&link->stream.tx);
    overdue = link->overdue;
    soft_mutex_give(&link->stream.tx);
    return overdue;
}

void soft_copy_tokens_free_busy(struct soft_link *link)
{
    unsigned int i;

    for (i = 0; link->stream.copy_tokens && i < SOFT_COPY_TOKENS; i++) {
        uint64_t found = atomic_load(&link->stream.copy_tokens->words[i]);

        if (found >> 32 == BUSY)
            atomic_compare_exchange_strong(&link->stream.copy_tokens->words[i], &found, word(FREE, (uint32_t)found));
    }
}

/* No token that is opened from here on leads to a request: the stream was closed before. The gate is closed at the
 * first call: a copy that had passed it is over by the last call, and a peer that was stopped before it copies
 * nothing. */
bool soft_copy_tokens_revoke_all(struct soft_link *link)
{
    struct soft_copy_token_page *page;
    bool left = true;
    unsigned int i;

    soft_mutex_take(&link->stream.tx);
    page = link->stream.copy_tokens;
    soft_direct_close_gate(link);
    for (i = 0; page && i < SOFT_COPY_TOKENS; i++) {
        uint64_t found = atomic_load(&page->words[i]);

        if (found >> 32 == OPEN)
            atomic_compare_exchange_strong(&page->words[i], &found, word(FREE, (uint32_t)found));
        left = left && found >> 32 != BUSY;
    }
    left = left || link->overdue || soft_process_has_exited(link->stream.pidfd);
    soft_mutex_give(&link->stream.tx);
    return left;
}

/* ---- The peer ------------------------------------------------------------------------------------------------ */

bool soft_copy_token_enter(struct soft_copy_token_page *page, uint16_t copy_token, uint32_t serial)
{
    uint64_t expected = word(OPEN, serial);

    return atomic_compare_exchange_strong(&page->words[copy_token], &expected, word(BUSY, serial));
}

void soft_copy_token_leave(struct soft_copy_token_page *page, uint16_t copy_token, uint32_t serial)
{
    uint64_t expected = word(BUSY, serial);

    (void)atomic_compare_exchange_strong(&page->words[copy_token], &expected, word(OPEN, serial));
}
