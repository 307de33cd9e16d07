#include "soft/base/id_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "soft/base/lock_order.h"

int soft_table_init(struct soft_table *table, uint32_t first, uint32_t limit)
{
    memset(table, 0, sizeof(*table));
    table->first = table->fresh = first;
    table->limit = limit;
    return soft_mutex_init(&table->lock, SOFT_RANK_TABLE);
}

void soft_table_destroy(struct soft_table *table)
{
    uint32_t i;

    for (i = 0; i < SOFT_CHUNKS; i++)
        free(atomic_load(&table->chunks[i]));
    free(table->freed);
    soft_mutex_destroy(&table->lock);
}

/* Make room in the ring for every number in use when it is reserved, so that freeing cannot fail. */
static int id_table_make_room(struct soft_table *table)
{
    uint32_t wanted = table->live + table->freed_count + 1;
    uint32_t size = table->freed_size ? table->freed_size : 1024;
    uint32_t *ring, i;

    assert_held(&table->lock);
    if (wanted <= table->freed_size)
        return 0;
    while (size < wanted)
        size *= 2;
    ring = malloc(size * sizeof(*ring));
    if (!ring)
        return ENOMEM;
    for (i = 0; i < table->freed_count; i++)
        ring[i] = table->freed[(table->freed_head + i) & (table->freed_size - 1)];
    free(table->freed);
    table->freed = ring;
    table->freed_size = size;
    table->freed_head = 0;
    return 0;
}

static uint32_t take_freed(struct soft_table *table)
{
    uint32_t number = table->freed[table->freed_head];

    assert_held(&table->lock);
    table->freed_head = (table->freed_head + 1) & (table->freed_size - 1);
    table->freed_count--;
    return number;
}

static int take_fresh(struct soft_table *table, uint32_t *number)
{
    uint32_t index = table->fresh >> SOFT_CHUNK_BITS;

    assert_held(&table->lock);
    if (!atomic_load(&table->chunks[index])) {
        struct soft_chunk *chunk = calloc(1, sizeof(*chunk));

        if (!chunk)
            return ENOMEM;
        atomic_store(&table->chunks[index], chunk);
    }
    *number = table->fresh++;
    return 0;
}

int soft_table_reserve(struct soft_table *table, uint32_t *number, uint8_t *uses)
{
    int error;

    soft_mutex_take(&table->lock);
    error = id_table_make_room(table);
    if (error) {
        /* no number was taken */
    } else if (table->freed_count >= SOFT_MIN_FREED || (table->fresh >= table->limit && table->freed_count)) {
        *number = take_freed(table);
    } else if (table->fresh < table->limit) {
        error = take_fresh(table, number);
    } else {
        error = ENOMEM;
    }
    if (!error) {
        struct soft_chunk *chunk = atomic_load(&table->chunks[*number >> SOFT_CHUNK_BITS]);
        uint8_t count = ++chunk->uses[*number & (SOFT_CHUNK_SIZE - 1)];

        if (uses)
            *uses = count;
        table->live++;
    }
    soft_mutex_give(&table->lock);
    return error;
}

void soft_table_publish(struct soft_table *table, uint32_t number, void *object)
{
    struct soft_chunk *chunk = atomic_load(&table->chunks[number >> SOFT_CHUNK_BITS]);

    atomic_store(&chunk->entries[number & (SOFT_CHUNK_SIZE - 1)], object);
}

void soft_table_set_use(struct soft_table *table, uint32_t number, uint8_t use)
{
    struct soft_chunk *chunk = atomic_load(&table->chunks[number >> SOFT_CHUNK_BITS]);

    chunk->uses[number & (SOFT_CHUNK_SIZE - 1)] = use;
}

void soft_table_withdraw(struct soft_table *table, uint32_t number)
{
    soft_table_publish(table, number, NULL);
}

void soft_table_release(struct soft_table *table, uint32_t number)
{
    soft_mutex_take(&table->lock);
    table->freed[(table->freed_head + table->freed_count) & (table->freed_size - 1)] = number;
    table->freed_count++;
    table->live--;
    soft_mutex_give(&table->lock);
}

uint32_t soft_table_end(struct soft_table *table)
{
    uint32_t end;

    soft_mutex_take(&table->lock);
    end = table->fresh;
    soft_mutex_give(&table->lock);
    return end;
}
