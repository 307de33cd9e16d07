/* The send window of a queue pair: which of its requests were posted, sent and finished, and which packet sequence
 * numbers (PSNs) those in flight have. Pure: no I/O, no locks, no memory but the caller's.
 *
 *      taken          sent              posted      free-running counters of requests: taken <= sent <= posted
 *        |  in flight  |  to be sent      |
 *        |             | `offset` bytes of the request at `sent` are in flight, too
 *        |
 *      first_psn, and `packets` PSNs from there on, belong to what is in flight
 *
 * Whatever a peer answers, the counters move by these functions alone, so their order holds; assertions check it where
 * they are compiled in. A PSN is only ever looked up among those in flight (soft_window_locate), which are less than
 * half of all, so that an old one is never taken for a new one.
 *
 * Part of a queue pair, under its sq_lock. */
#ifndef AIOVERBS_SOFT_OBJECTS_PSN_WINDOW_H
#define AIOVERBS_SOFT_OBJECTS_PSN_WINDOW_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#define SOFT_PSN_MASK 0xffffffu
#define SOFT_WINDOW_PACKETS (SOFT_PSN_MASK / 2) /* in flight at most: less than half of all sequence numbers */

struct soft_window {
    uint32_t posted;        /* as the doorbell was seen last */
    uint32_t sent;          /* requests before it left whole */
    uint32_t finished;      /* requests before it are finished: completed, or not to be told of */
    uint32_t offset;        /* bytes of the request at `sent` that left */
    uint32_t received;      /* bytes of the answer to the read or atomic at `finished` that came */
    uint32_t most_received; /* the most that `received` was for the request at `finished`, however often it was sent */
    uint32_t reads;         /* reads and atomics in flight, that at `sent` included when a part of it left */
    uint32_t first_psn;     /* of the request at `finished` */
    uint32_t packets;       /* in flight */
    uint32_t answered;      /* packets from `first_psn` on up to the last one that an answer told of; <= packets */
    uint32_t ever_sent; /* packets from `first_psn` on that left at some time, so the peer may know them; >= packets */
};

/* Check what every function leaves behind. */
static inline void soft_window_check(const struct soft_window *window)
{
    uint32_t sent = window->sent - window->finished, posted = window->posted - window->finished;

    (void)sent;
    (void)posted;
    assert(sent <= posted && posted <= UINT32_MAX / 2); /* taken <= sent <= posted, however far they ran */
    assert(!window->offset || sent < posted);
    assert((window->packets == 0) == (!sent && !window->offset));
    assert(window->packets || !window->received);
    assert(window->reads <= sent + !!window->offset);
    assert(window->answered <= window->packets && window->received <= window->most_received);
    assert(window->packets <= window->ever_sent && window->ever_sent <= SOFT_WINDOW_PACKETS);
    assert(window->first_psn <= SOFT_PSN_MASK);
}

/* Note how far the doorbell is. Return whether some request did not leave whole yet. */
static inline bool soft_window_post(struct soft_window *window, uint32_t posted)
{
    window->posted = posted;
    soft_window_check(window);
    return window->sent != posted;
}

/* Return whether nothing is in flight. */
static inline bool soft_window_is_idle(const struct soft_window *window)
{
    return window->sent == window->finished && !window->offset;
}

/* Return the PSN of the packet that is sent next. */
static inline uint32_t soft_window_psn(const struct soft_window *window)
{
    return (window->first_psn + window->packets) & SOFT_PSN_MASK;
}

/* Return whether the packet that is sent next was sent before. */
static inline bool soft_window_repeats(const struct soft_window *window)
{
    return window->packets < window->ever_sent;
}

/* Return whether so many further packets may be in flight; else answers have to come first. */
static inline bool soft_window_has_room(const struct soft_window *window, uint32_t packets)
{
    return packets <= SOFT_WINDOW_PACKETS - window->packets;
}

/* Finish the request at `finished` without an answer, where nothing is in flight. It took so many PSNs. */
static inline void soft_window_skip(struct soft_window *window, uint32_t packets)
{
    assert(soft_window_is_idle(window) && window->finished != window->posted);
    window->sent = ++window->finished;
    window->most_received = 0;
    window->first_psn = (window->first_psn + packets) & SOFT_PSN_MASK;
    window->ever_sent = window->ever_sent > packets ? window->ever_sent - packets : 0;
    soft_window_check(window);
}

/* Begin with this PSN, where nothing is in flight. */
void soft_window_begin(struct soft_window *window, uint32_t psn);

/* Count a part of the request at `sent` as in flight: the last part, or one of so many bytes. There is room for its
 * packets. */
void soft_window_send(struct soft_window *window, uint32_t bytes, uint32_t packets, bool last, bool is_read);

/* Return how many packets are in flight up to the one with this PSN, including it; 0: none in flight has it. */
uint32_t soft_window_locate(const struct soft_window *window, uint32_t psn);

/* Note that an answer told of so many packets in flight. Return whether none told of as many since they left: one that
 * tells nothing new gives no more time. */
bool soft_window_note_answer(struct soft_window *window, uint32_t packets);

/* Count bytes of the answer to the read or atomic at `finished`. Return whether more than ever came, however often it was
 * sent: who sends the beginning again and again gets no further repetitions by that. */
bool soft_window_receive(struct soft_window *window, uint32_t bytes);

/* Finish the request at `finished`, which left whole in so many packets, and was answered. */
void soft_window_acknowledge(struct soft_window *window, uint32_t packets, bool is_read);

/* Finish the request at `finished`, which failed. Nothing is in flight any more. */
void soft_window_fail(struct soft_window *window);

/* Take back all that is in flight, to be sent again. The peer may know of it. */
void soft_window_rewind(struct soft_window *window);

/* Take back all that is in flight, to be sent again. The peer did nothing of it. */
void soft_window_undo(struct soft_window *window);

#endif
