/* Send window of a queue pair: which of its requests were posted, sent and finished, and which packet sequence numbers
 * (PSNs) the requests in flight have. Pure: no I/O, no locks, no memory but the caller's.
 *
 *      finished           sent              posted      free-running counters: finished <= sent <= posted
 *         |  in flight  |  not sent yet    |
 *         |             | `offset` bytes of the request at `sent` are in flight, too
 *         |
 *       first_psn, and `packets` PSNs from there on, belong to the packets in flight
 *
 * The counters change by these functions alone, so their order holds whatever a peer responds; assertions check the
 * order where they are compiled in. A PSN is looked up only among those in flight (soft_window_locate), which are less
 * than half of all PSNs, so an old PSN is never mistaken for a new one.
 *
 * Part of a queue pair, under its sq_lock. */
#ifndef AIOVERBS_SOFT_OBJECTS_PSN_WINDOW_H
#define AIOVERBS_SOFT_OBJECTS_PSN_WINDOW_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#define SOFT_PSN_MASK 0xffffffu
#define SOFT_WINDOW_PACKETS (SOFT_PSN_MASK / 2) /* limit of packets in flight: less than half of all PSNs */

struct soft_window {
    uint32_t posted;        /* doorbell record when it was last read */
    uint32_t sent;          /* requests before this one were sent completely */
    uint32_t finished;      /* requests before this one are finished: completed, or without a completion */
    uint32_t offset;        /* sent bytes of the request at `sent` */
    uint32_t received;      /* received bytes of the response to the read or atomic at `finished` */
    uint32_t most_received; /* maximum of `received` for the request at `finished`, across all times it was sent */
    uint32_t reads;         /* reads and atomics in flight, including the one at `sent` when a part of it was sent */
    uint32_t first_psn;     /* PSN of the request at `finished` */
    uint32_t packets;       /* packets in flight */
    uint32_t answered;      /* packets from `first_psn` on that responses have covered; <= packets */
    uint32_t ever_sent;     /* packets from `first_psn` on that were ever sent, so the peer may know them; >= packets */
};

/* Check the invariants that every function preserves. */
static inline void soft_window_check(const struct soft_window *window)
{
    uint32_t sent = window->sent - window->finished, posted = window->posted - window->finished;

    (void)sent;
    (void)posted;
    assert(sent <= posted && posted <= UINT32_MAX / 2); /* finished <= sent <= posted, modulo 2^32 */
    assert(!window->offset || sent < posted);
    assert((window->packets == 0) == (!sent && !window->offset));
    assert(window->packets || !window->received);
    assert(window->reads <= sent + !!window->offset);
    assert(window->answered <= window->packets && window->received <= window->most_received);
    assert(window->packets <= window->ever_sent && window->ever_sent <= SOFT_WINDOW_PACKETS);
    assert(window->first_psn <= SOFT_PSN_MASK);
}

/* Record the doorbell. Return whether a request was not completely sent yet. */
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

/* Return whether `packets` further packets may be in flight; otherwise responses have to come first. */
static inline bool soft_window_has_room(const struct soft_window *window, uint32_t packets)
{
    return packets <= SOFT_WINDOW_PACKETS - window->packets;
}

/* Finish the request at `finished` without a response, while nothing is in flight. The request took `packets` PSNs. */
static inline void soft_window_skip(struct soft_window *window, uint32_t packets)
{
    assert(soft_window_is_idle(window) && window->finished != window->posted);
    window->sent = ++window->finished;
    window->most_received = 0;
    window->first_psn = (window->first_psn + packets) & SOFT_PSN_MASK;
    window->ever_sent = window->ever_sent > packets ? window->ever_sent - packets : 0;
    soft_window_check(window);
}

/* Begin with this PSN, while nothing is in flight. */
void soft_window_begin(struct soft_window *window, uint32_t psn);

/* Count a part of the request at `sent` as in flight: the last part, or one of `bytes` bytes. There is room for its
 * packets. */
void soft_window_send(struct soft_window *window, uint32_t bytes, uint32_t packets, bool last, bool is_read);

/* Return the number of packets in flight up to the one with this PSN, inclusive; 0: no packet in flight has it. */
uint32_t soft_window_locate(const struct soft_window *window, uint32_t psn);

/* Record that a response covers `packets` packets in flight. Return whether no response has covered as many since they
 * were sent: a response without news does not extend the timeout. */
bool soft_window_note_answer(struct soft_window *window, uint32_t packets);

/* Count received bytes of the response to the read or atomic at `finished`. Return whether the total exceeds all
 * earlier ones, across all times the request was sent: a peer that sends the beginning repeatedly gets no further
 * retries by that. */
bool soft_window_receive(struct soft_window *window, uint32_t bytes);

/* Finish the request at `finished`, which was sent in `packets` packets and acknowledged. */
void soft_window_acknowledge(struct soft_window *window, uint32_t packets, bool is_read);

/* Finish the request at `finished`, which failed. Nothing is in flight afterwards. */
void soft_window_fail(struct soft_window *window);

/* Rewind all that is in flight, to send it again. The peer may have received the packets. */
void soft_window_rewind(struct soft_window *window);

/* Rewind all that is in flight, to send it again. The peer executed none of the packets. */
void soft_window_undo(struct soft_window *window);

#endif
