/* Hash table by address: open addressing, linear probing, no tombstones. */
#include "alloc/base.h"

#include <errno.h>
#include <stdlib.h>

#define LEAST_ROOM 16

static size_t address_map_place(const struct alloc_table *table, uintptr_t address)
{
    return (size_t)(((uint64_t)address * 0x9e3779b97f4a7c15u) >> 32) & (table->room - 1);
}

static void address_map_put(struct alloc_table *table, const struct alloc_entry *entry)
{
    size_t place = address_map_place(table, entry->address);

    while (table->entries[place].address)
        place = (place + 1) & (table->room - 1);
    table->entries[place] = *entry;
    table->used++;
}

static int change_room(struct alloc_table *table, size_t room)
{
    struct alloc_table other = {.entries = calloc(room, sizeof(struct alloc_entry)), .room = room};
    size_t i;

    if (!other.entries)
        return ENOMEM;
    for (i = 0; i < table->room; i++)
        if (table->entries[i].address)
            address_map_put(&other, &table->entries[i]);
    free(table->entries);
    *table = other;
    return 0;
}

int alloc_table_reserve(struct alloc_table *table)
{
    if (table->used + 1 <= table->room / 4 * 3)
        return 0;
    return change_room(table, table->room ? table->room * 2 : LEAST_ROOM);
}

void alloc_table_insert(struct alloc_table *table, const void *address, size_t size, uint64_t value)
{
    struct alloc_entry entry = {(uintptr_t)address, size, value};

    address_map_put(table, &entry);
}

struct alloc_entry *alloc_table_find(const struct alloc_table *table, uintptr_t address)
{
    size_t place;

    if (!table->room || !address)
        return NULL;
    for (place = address_map_place(table, address); table->entries[place].address;
         place = (place + 1) & (table->room - 1))
        if (table->entries[place].address == address)
            return &table->entries[place];
    return NULL;
}

/* Remove an entry. Entries that were displaced beyond its place move back, so that a search may stop at the first
 * vacant place. */
void alloc_table_remove(struct alloc_table *table, struct alloc_entry *entry)
{
    size_t mask = table->room - 1, hole = (size_t)(entry - table->entries), place = hole;

    for (;;) {
        place = (place + 1) & mask;
        if (!table->entries[place].address)
            break;
        if (((place - address_map_place(table, table->entries[place].address)) & mask) >= ((place - hole) & mask)) {
            table->entries[hole] = table->entries[place];
            hole = place;
        }
    }
    table->entries[hole] = (struct alloc_entry){0};
    table->used--;
    if (table->room > LEAST_ROOM && table->used < table->room / 8)
        change_room(table, table->room / 2); /* without memory, the table keeps its size */
}

void alloc_table_clear(struct alloc_table *table)
{
    free(table->entries);
    *table = (struct alloc_table){0};
}
