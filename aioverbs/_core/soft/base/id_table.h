/* Numbers for objects: queue pair numbers and memory keys.
 *
 * Look-ups take no lock and belong into a grace section. Additions and removals are serialised by a mutex.
 * A number that was given back is given out again only after SOFT_MIN_FREED others were given back, or
 * when no unused one is left, oldest first: a stale number meets nothing rather than a stranger.
 * A key is a number and the low byte of its uses: it comes again after 131,072 others at the earliest, unless a million
 * are in use. In a domain that processes share, in which a slot passes from one to the next, after 256 at the earliest.
 * A window's binding is a use as well: one, by ibv_inc_rkey, else as many as it takes the low byte on. So a window that
 * is bound 256 times has its first key again.
 * Whoever keeps an old key for longer than that may reach what was registered since, of the same protection domain. */
#ifndef AIOVERBS_SOFT_BASE_ID_TABLE_H
#define AIOVERBS_SOFT_BASE_ID_TABLE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "soft/base/lock_order.h"

#define SOFT_CHUNK_BITS 10
#define SOFT_CHUNK_SIZE (1u << SOFT_CHUNK_BITS)
#define SOFT_CHUNKS 1024u /* up to 2^20 numbers */
#define SOFT_MIN_FREED 512u

struct soft_chunk {
    _Atomic(void *) entries[SOFT_CHUNK_SIZE];
    uint8_t uses[SOFT_CHUNK_SIZE]; /* of each number: who has it writes it, and of a free one who holds the lock */
};

struct soft_table {
    _Atomic(struct soft_chunk *) chunks[SOFT_CHUNKS]; /* allocated once, freed with the table */
    struct soft_mutex lock;                           /* guards what follows */
    uint32_t first, fresh, limit;                     /* numbers from `fresh` on were never used */
    uint32_t *freed;                                  /* a ring of free numbers, oldest at `freed_head` */
    uint32_t freed_size, freed_head, freed_count;
    uint32_t live; /* numbers given out */
};

int soft_table_init(struct soft_table *table, uint32_t first, uint32_t limit);
void soft_table_destroy(struct soft_table *table); /* nobody looks into it any more */

/* Reserves a number that finds nothing yet; soft_table_publish makes it find `object`. `uses` (may be NULL) tells
 * one use of the number from the next. 0 or an errno. */
int soft_table_reserve(struct soft_table *table, uint32_t *number, uint8_t *uses);
void soft_table_publish(struct soft_table *table, uint32_t number, void *object);

/* The number's own counts its uses on, to this one: what the next one of the number is told comes behind it. */
void soft_table_set_use(struct soft_table *table, uint32_t number, uint8_t use);

/* The number finds nothing from here on; it is free again when soft_table_release was called. */
void soft_table_withdraw(struct soft_table *table, uint32_t number);
void soft_table_release(struct soft_table *table, uint32_t number);

/* All numbers that were ever given out are less. */
uint32_t soft_table_end(struct soft_table *table);

static inline void *soft_table_find(struct soft_table *table, uint32_t number)
{
    struct soft_chunk *chunk;

    if (number >= SOFT_CHUNKS * SOFT_CHUNK_SIZE)
        return NULL;
    chunk = atomic_load(&table->chunks[number >> SOFT_CHUNK_BITS]);
    return chunk ? atomic_load(&chunk->entries[number & (SOFT_CHUNK_SIZE - 1)]) : NULL;
}

#endif
