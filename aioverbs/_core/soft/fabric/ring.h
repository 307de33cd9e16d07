/* Rings: the bytes of a stream in memory that two processes share. Pure: no I/O, no memory but the caller's.
 *
 * A stream has a ring for each direction, with one producer and one consumer. Indices count bytes and are never
 * reduced: they wrap with their type, and a byte's place is its index modulo the size, a power of two.
 *
 * The peer may write anything into the shared memory at any time. So each side keeps its own index in memory of its
 * own, and only publishes it; the peer's index is read once, and then checked: it has not gone back, and lies within
 * one size of the own index. Bytes may change while they are read: a reader copies what it checks.
 *
 *   producer                                consumer
 *   1. write bytes                          1. read `tail` (acquire)
 *   2. store `tail` (release)               2. read bytes
 *   3. read `head` (acquire) before the     3. store `head` (release)
 *      place of a byte is used again
 *
 * Sleeping without a lost wake-up: a side that is about to sleep says what would wake it, in `wants`, and looks again;
 * a side that stored an index looks whether the other one wants that. A fence separates the two steps on both sides, so
 * at least one of them sees the other's store. The thread that takes the wish away (soft_ring_answer) has to ring, so
 * many stores ring once. tests/fabric/test_ring_model.py explores all orders of these steps.
 *
 *   this side                               the other side
 *   1. store an index                       1. set `wants`
 *   2. fence                                2. fence
 *   3. read `wants` of the other side;      3. read the index; if it has not changed, sleep
 *      if set, clear it and ring */
#ifndef AIOVERBS_SOFT_FABRIC_RING_H
#define AIOVERBS_SOFT_FABRIC_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Bytes of a ring. The kernel provides pages on first use. A frame of the largest size fits. A multiple of the page
 * size of every kernel. */
#define SOFT_RING_SIZE (1u << 20)

/* Bytes at the begin of a ring that are enough as long as it becomes empty now and then, as rings do without large
 * data: the producer goes back there (soft_ring_rest), so that the others are not touched. After something of
 * SOFT_RING_LARGE bytes or more, it uses more of them before it goes back: two processes that copy at the same time are
 * slower where one of them has just copied. Just after going back, there is no more room than this, until the consumer
 * has seen it. */
#define SOFT_RING_SPAN (SOFT_RING_SIZE / 32)
#define SOFT_RING_LARGE_SPAN (SOFT_RING_SIZE / 4)
#define SOFT_RING_LARGE (SOFT_RING_SPAN / 2)

/* Reasons to wake a side: bits of `wants`. */
enum {
    SOFT_WANTS_BYTES = 1, /* anything to read */
    SOFT_WANTS_ROOM = 2,  /* a ring that was full has SOFT_RING_ROOM bytes of room */
};

/* Room at which a producer goes on that found none: it is not woken for each frame. A consumer reaches it always, since
 * all that it leaves in the ring is the begin of one frame. */
#define SOFT_RING_ROOM (SOFT_RING_SIZE / 4)

/* Shared words of one side; untrusted. Words that are written at different times are on different cache lines, pairs of
 * which some processors fetch together. */
struct soft_ring_side {
    _Alignas(128) _Atomic uint32_t tail;  /* bytes that this side has written to its ring */
    _Alignas(128) _Atomic uint32_t head;  /* bytes that this side has read from the other's ring */
    _Alignas(128) _Atomic uint32_t wants; /* set by this side, cleared by the other */
};

/* One end of a ring. `data` is the ring twice, one copy after the other, so that bytes that wrap lie together. */
struct soft_ring_producer {
    uint8_t *data; /* NULL: there is no ring */
    struct soft_ring_side *own, *peer;
    uint32_t tail;       /* own index */
    uint32_t head;       /* last index that was read of the peer */
    uint32_t looked;     /* own index when soft_ring_rest() last looked at the peer's */
    uint32_t given_back; /* own index when all pages of the ring were last given back */
    bool large;          /* something large was written since the producer last went back to the begin */
    bool invalid;        /* the peer's index was invalid once: what the peer writes later changes nothing */
};

struct soft_ring_consumer {
    const uint8_t *data; /* NULL: there is no ring */
    struct soft_ring_side *own, *peer;
    uint32_t head;     /* own index: bytes up to here are read */
    uint32_t released; /* what the peer knows of it */
    uint32_t tail;     /* last index that was read of the peer */
};

/* ---- The producer -------------------------------------------------------------------------------------------- */

/* Look how much room there is. Return false if the peer's index is invalid, or was. */
bool soft_ring_room(struct soft_ring_producer *ring, uint32_t *room);

/* Write as many bytes of the pieces as there is room for, and publish them. Return their number, or -1 if the peer's
 * index is invalid, or was. */
int32_t soft_ring_write(struct soft_ring_producer *ring, const struct iovec *pieces, unsigned int count);

/* Return how many bytes are left up to the end of the ring if the next `size` bytes need not use them: it is empty, and
 * they would be behind its begin. Return 0 otherwise. Mostly without a look at the peer's index. */
uint32_t soft_ring_rest(struct soft_ring_producer *ring, size_t size);

/* Publish bytes that were not written, for which there is room. The consumer knows that they have any content. */
void soft_ring_pass(struct soft_ring_producer *ring, uint32_t count);

/* ---- The consumer -------------------------------------------------------------------------------------------- */

/* Look how many bytes can be read. Return false if the peer's index is invalid. */
bool soft_ring_available(struct soft_ring_consumer *ring, uint32_t *available);

/* Return whether the peer has written since the last soft_ring_available(). */
static inline bool soft_ring_has_news(const struct soft_ring_consumer *ring)
{
    return atomic_load_explicit(&ring->peer->tail, memory_order_relaxed) != ring->tail;
}

static inline const uint8_t *soft_ring_bytes(const struct soft_ring_consumer *ring)
{
    return ring->data + (ring->head & (SOFT_RING_SIZE - 1));
}

/* Return the room that the producer sees, once soft_ring_release() was called. */
static inline uint32_t soft_ring_free(const struct soft_ring_consumer *ring)
{
    return SOFT_RING_SIZE - (ring->tail - ring->head);
}

/* Let the producer use the places of the bytes that were read. */
void soft_ring_release(struct soft_ring_consumer *ring);

/* ---- Sleeping ------------------------------------------------------------------------------------------------ */

/* Say what wakes this side. The caller looks again after a sequentially consistent fence. */
void soft_ring_want(struct soft_ring_side *own, uint32_t wants);

/* Take wishes back. Return whether they still stood; if not, the peer has rung for one, or is about to. */
bool soft_ring_unwant(struct soft_ring_side *own, uint32_t wants);

/* Return the wishes of the peer, which are taken away, if it wants what this side has just published; 0 otherwise. The
 * caller rings once for all of them. */
uint32_t soft_ring_answer(struct soft_ring_side *peer, uint32_t what);

#endif
