/* Tables of numbered objects: queue pair numbers and memory keys.
 *
 * Look-ups take no lock, and need a grace section. A mutex serialises additions and removals. A freed number is reused
 * only after SOFT_MIN_FREED others were freed, or when no unused number is left, oldest first, so that a stale number
 * finds nothing rather than another object.
 *
 * A key is a number and the low byte of the count of its uses: a key repeats after 131,072 others at the earliest,
 * unless a million numbers are in use. In a domain that processes share, where a slot passes from one process to the
 * next, a key repeats after 256 others at the earliest. Binding a window is a use as well: one, with ibv_inc_rkey, else
 * as many as the low byte advances by. So a window that is bound 256 times has its first key again.
 *
 * A stale key that is kept for longer than that may access a region of the same protection domain that was registered
 * since. */
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
    /* uses of each number: written by the owner of the number, and under the lock while the number is free */
    uint8_t uses[SOFT_CHUNK_SIZE];
};

struct soft_table {
    _Atomic(struct soft_chunk *) chunks[SOFT_CHUNKS]; /* allocated once, freed with the table */
    struct soft_mutex lock;                           /* guards the fields below */
    uint32_t first, fresh, limit;                     /* numbers from `fresh` on were never used */
    uint32_t *freed;                                  /* ring of free numbers, oldest at `freed_head` */
    uint32_t freed_size, freed_head, freed_count;
    uint32_t live; /* numbers in use */
};

/* Initialise a table of the numbers `first` to `limit` - 1: return 0 or an errno. */
int soft_table_init(struct soft_table *table, uint32_t first, uint32_t limit);
void soft_table_destroy(struct soft_table *table); /* Call when no thread looks anything up any more. */

/* Reserve a number that finds nothing yet; soft_table_publish makes it find `object`. `uses` (may be NULL) tells uses
 * of the number apart. Return 0 or an errno. */
int soft_table_reserve(struct soft_table *table, uint32_t *number, uint8_t *uses);
void soft_table_publish(struct soft_table *table, uint32_t number, void *object);

/* Advance the uses of a number that the caller has: the next owner's use follows this one. */
void soft_table_set_use(struct soft_table *table, uint32_t number, uint8_t use);

/* Withdraw: the number finds nothing from here on. Release: the number is free again. */
void soft_table_withdraw(struct soft_table *table, uint32_t number);
void soft_table_release(struct soft_table *table, uint32_t number);

/* Return a bound: all numbers that were ever reserved are less. */
uint32_t soft_table_end(struct soft_table *table);

/* Return the object of a number, or NULL. Call in a grace section. */
static inline void *soft_table_find(struct soft_table *table, uint32_t number)
{
    struct soft_chunk *chunk;

    if (number >= SOFT_CHUNKS * SOFT_CHUNK_SIZE)
        return NULL;
    chunk = atomic_load(&table->chunks[number >> SOFT_CHUNK_BITS]);
    return chunk ? atomic_load(&chunk->entries[number & (SOFT_CHUNK_SIZE - 1)]) : NULL;
}

#endif
