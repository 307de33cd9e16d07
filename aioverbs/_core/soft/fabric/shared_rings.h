/* Streams whose bytes go through rings in shared memory (soft/fabric/ring.h): between processes of one user and host.
 *
 * The connecting side makes a sealed memory file with both rings, and sends it with HELLO. Once the handshake is over,
 * frames go through the rings only. The socket stays: its end tells that the peer is gone, and its bytes are doorbells.
 * A doorbell is one byte of any value. It is sent to a peer that wants to be woken (soft_ring_answer), so a peer that
 * is awake costs no system call. A socket that takes no more bytes has enough of them to wake its reader.
 *
 * A stream that is `armed` has its peer ring for what it waits for: for bytes, or, if it handles none now, for room at
 * most. This holds whenever no thread will look at the rings by itself:
 *
 * - the fabric thread arms all streams before it sleeps in epoll_wait;
 * - a thread that polls leaves streams unarmed only while the fabric thread yields to it. That thread checks every
 *   YIELD_MS whether it still polls, and arms all streams if not;
 * - a thread that stops polling, to sleep on the wakeup channel, arms all streams. Its last poll, which it makes before
 *   it sleeps, may find frames of a peer that has not looked at `wants` yet, and leave that stream unarmed: then the
 *   fabric thread arms it, after 2 × YIELD_MS at most.
 *
 * A poll looks at the rings of all streams if there are few, since that is cheaper than the calls by which it would
 * hear of a doorbell. If there are many, it looks at those of streams that are not armed, and arms the ones that are
 * idle: it hears of them when it looks at the sockets, as of streams that have no rings.
 *
 * A thread that arms a stream looks at its ring once more. All under progress, unless noted otherwise.
 *
 * One doorbell for an answer and a message. A thread that reads a message of a peer that sleeps answers it, and mostly
 * has a message sent to the same peer soon after. The answer goes through the ring of the served stream, the message
 * through that of a link; each has `wants` and a socket of its own. To wake the peer once, the thread that reads writes
 * the answer without a doorbell, which is owed, and the next doorbell of the link pays for it:
 *
 *   this side                                        the peer
 *   1. write the answer, store `tail` (served)       1. read a doorbell of the stream that it serves
 *   2. fence                                         2. look at the rings of its links to this side: disarm those
 *   3. owe: note the link's count of doorbells          that have news
 *   4. pay: if the count is the same, look at        3. handle what is there, or arm again and sleep
 *      `wants` (served) as ever, and ring
 *   any thread that writes to the link:
 *   a. look at `wants` (link); if it is set, clear
 *      it, count a doorbell, and ring
 *
 * If the count in step 4 is another one than in step 3, the doorbell of step a was counted, and so sent, behind the
 * fence of step 2: the peer, which reads it after that, sees the answer in its step 2, whichever of its threads reads,
 * and although the stream of the answer stays armed. If the count is the same, step 4 is the one that follows any store
 * of an index, only later. So the peer hears of the answer, and no later than step 4:
 *
 * - only a thread that reads owes, under progress, while the fabric thread yields (soft_stream_send_deferred). Under
 *   progress, too, it pays before it sleeps, as an event loop does behind the tasks that it has woken, or after some
 *   more polls. If it does neither, the fabric thread pays when it stops yielding, YIELD_MS after it began at most;
 * - a stream that is closed, for whatever reason, pays what is owed by all of them before: links that pay are open;
 * - if this process dies, the peer handles what is in the ring when the socket ends.
 *
 * Both sides find the stream in the other direction by the GIDs that all streams between two devices have in common.
 * tests/fabric/test_ring_model.py explores all orders of these steps. */
#ifndef AIOVERBS_SOFT_FABRIC_SHARED_RINGS_H
#define AIOVERBS_SOFT_FABRIC_SHARED_RINGS_H

#include <stdbool.h>
#include <stdint.h>

#define SOFT_RINGS_FILE (2112u << 10) /* bytes of the memory file of a stream */

struct soft_fabric;
struct soft_hello;
struct soft_link;
struct soft_stream;

/* ---- The handshake ------------------------------------------------------------------------------------------- */

/* Link: make rings, and offer them in HELLO. Return the descriptor to send, which the caller closes, or -1. */
int soft_rings_offer(struct soft_stream *stream, struct soft_hello *hello);

/* Served: map the rings that came with HELLO. Return whether there are any; if not, the reason is recorded. */
bool soft_rings_accept(struct soft_stream *stream, const struct soft_hello *hello);

/* Link: the peer does not use the rings. */
void soft_rings_decline(struct soft_stream *stream, const char *why);

/* The stream opens: frames go through its rings from here on, if it has any. */
void soft_rings_open(struct soft_stream *stream);

/* Unmap the rings. Under tx, too, if the stream may be used by senders. */
void soft_rings_unmap(struct soft_stream *stream);

/* Give the pages of rings that this side writes back to the kernel, which provides new ones when they are used again:
 * those of a link, and of the streams that this side serves to the same process. Rings that are not empty keep them. */
void soft_rings_give_back(struct soft_link *link);

/* ---- Waking the peer ----------------------------------------------------------------------------------------- */

/* Have the peer woken if it wants `what`, which was just published. Under progress or tx. If the doorbell cannot be
 * sent, for want of memory or by a filter of system calls, the wish stands again, and the next call rings; or the peer
 * looks by itself, with its next sweep. */
void soft_rings_notify(struct soft_stream *stream, uint32_t what);

/* Return the link whose next doorbell pays for an answer to the peer of a served stream; NULL if there is none, or the
 * peer does not sleep. */
struct soft_stream *soft_rings_find_payer(const struct soft_stream *served);

/* Owe the doorbell for answers that were just published. */
void soft_rings_owe(struct soft_stream *served, struct soft_stream *payer);

/* Have the peer woken if a doorbell is owed that was not paid for. */
void soft_rings_pay(struct soft_stream *served);

/* Have this side woken when there is room in the ring, which is `starved` until the caller has sent what is queued.
 * Under tx. Return whether there is room already. */
bool soft_rings_want_room(struct soft_stream *stream);

/* ---- Being woken --------------------------------------------------------------------------------------------- */

/* The peer need not ring for bytes: this thread looks at the ring by itself. */
void soft_rings_disarm(struct soft_stream *stream);

/* A doorbell came on this stream, and stands for answers in the rings of links to the same peer, too: look at these. */
void soft_rings_look_aside(struct soft_stream *served);

/* Arm all streams. Return whether one of them has something to handle: it is not armed then. */
bool soft_rings_arm(struct soft_fabric *fabric);

/* Return the next stream that is not armed, one after the other and again from the first; NULL if there is none. */
struct soft_stream *soft_rings_next(struct soft_fabric *fabric);

/* A turn of a stream that is not armed has found nothing: arm it if there are many others. */
void soft_rings_found_nothing(struct soft_stream *stream);

/* Disarm armed streams that have something to handle, if there are few streams. */
void soft_rings_look(struct soft_fabric *fabric);

/* The same for any number of streams: their peers should have rung. */
void soft_rings_sweep(struct soft_fabric *fabric);

#endif
