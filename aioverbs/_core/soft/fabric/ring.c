/* Rings in memory that two processes share. */
#include "soft/fabric/ring.h"

#include <string.h>

_Static_assert(!(SOFT_RING_SIZE & (SOFT_RING_SIZE - 1)), "a power of two");

#define LOOK_BYTES 1024u /* written bytes after which soft_ring_rest() looks again */

/* ---- The producer -------------------------------------------------------------------------------------------- */

bool soft_ring_room(struct soft_ring_producer *ring, uint32_t *room)
{
    uint32_t head = atomic_load_explicit(&ring->peer->head, memory_order_acquire);

    /* Between the last index and the own one: it has neither gone back nor passed what was written. */
    ring->invalid |= head - ring->head > ring->tail - ring->head;
    if (ring->invalid)
        return false;
    ring->head = head;
    *room = SOFT_RING_SIZE - (ring->tail - head);
    return true;
}

/* Copy up to `room` bytes of the pieces; return their number. */
static uint32_t ring_copy(struct soft_ring_producer *ring, const struct iovec *pieces, unsigned int count,
                          uint32_t room)
{
    uint8_t *to = ring->data + (ring->tail & (SOFT_RING_SIZE - 1));
    uint32_t left = room;

    for (; count-- && left; pieces++) {
        uint32_t part = pieces->iov_len < left ? (uint32_t)pieces->iov_len : left;

        if (part)
            memcpy(to, pieces->iov_base, part);
        to += part;
        left -= part;
    }
    return room - left;
}

int32_t soft_ring_write(struct soft_ring_producer *ring, const struct iovec *pieces, unsigned int count)
{
    uint32_t room = SOFT_RING_SIZE - (ring->tail - ring->head), written;
    size_t size = 0;
    unsigned int i;

    for (i = 0; i < count; i++)
        size += pieces[i].iov_len;
    if (ring->invalid || (size > room && !soft_ring_room(ring, &room)))
        return -1;
    written = ring_copy(ring, pieces, count, room);
    ring->tail += written;
    if (written)
        atomic_store_explicit(&ring->own->tail, ring->tail, memory_order_release);
    return (int32_t)written;
}

uint32_t soft_ring_rest(struct soft_ring_producer *ring, size_t size)
{
    uint32_t place = ring->tail & (SOFT_RING_SIZE - 1), room;

    ring->large |= size >= SOFT_RING_LARGE;
    if (place < (ring->large ? SOFT_RING_LARGE_SPAN : SOFT_RING_SPAN) || ring->tail - ring->looked < LOOK_BYTES)
        return 0;
    ring->looked = ring->tail;
    if (!soft_ring_room(ring, &room) || room != SOFT_RING_SIZE)
        return 0;
    ring->large = size >= SOFT_RING_LARGE;
    return SOFT_RING_SIZE - place;
}

void soft_ring_pass(struct soft_ring_producer *ring, uint32_t count)
{
    ring->tail += count;
    atomic_store_explicit(&ring->own->tail, ring->tail, memory_order_release);
}

/* ---- The consumer -------------------------------------------------------------------------------------------- */

bool soft_ring_available(struct soft_ring_consumer *ring, uint32_t *available)
{
    uint32_t tail = atomic_load_explicit(&ring->peer->tail, memory_order_acquire);

    /* Not before the last index, and no more than one size ahead of what the producer knows to be read. */
    if (tail - ring->tail > SOFT_RING_SIZE - (ring->tail - ring->released))
        return false;
    ring->tail = tail;
    *available = tail - ring->head;
    return true;
}

void soft_ring_release(struct soft_ring_consumer *ring)
{
    if (ring->released == ring->head)
        return;
    ring->released = ring->head;
    atomic_store_explicit(&ring->own->head, ring->head, memory_order_release);
}

/* ---- Sleeping ------------------------------------------------------------------------------------------------ */

void soft_ring_want(struct soft_ring_side *own, uint32_t wants)
{
    atomic_fetch_or_explicit(&own->wants, wants, memory_order_relaxed);
}

bool soft_ring_unwant(struct soft_ring_side *own, uint32_t wants)
{
    return wants & atomic_fetch_and_explicit(&own->wants, ~wants, memory_order_relaxed);
}

/* The peer may change its wishes between the two accesses, and two threads of this side may come here at a time: the
 * one that takes the wishes away rings, whatever they are. */
uint32_t soft_ring_answer(struct soft_ring_side *peer, uint32_t what)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (!(atomic_load_explicit(&peer->wants, memory_order_relaxed) & what))
        return 0;
    return atomic_exchange_explicit(&peer->wants, 0, memory_order_relaxed);
}
