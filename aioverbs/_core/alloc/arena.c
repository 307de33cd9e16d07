/* Arena: small pieces share chunks, large ones have memory of their own.
 *
 * A chunk is split by halves (alloc/buddy.h): a piece takes the next power of two of its size or its alignment, at
 * least a unit. With units of a cache line, two doorbell records, which two processors may write at the same time,
 * never share a line, and 10,000 of them take 625 KiB. A piece of more than half a chunk comes from the source under
 * the arena directly, rounded to pages and no further. One chunk without pieces is kept for the next piece. */
#include "alloc/base.h"

#include "alloc/buddy.h"

#include <errno.h>
#include <stdlib.h>

#include "abi/libibverbs.h"

#define MOST_ORDER 24

struct chunk {
    struct chunk *next, **link; /* links in the bin of its largest free block */
    char *address;
    uint8_t tree[];
};

struct arena {
    struct alloc_source source;
    struct alloc_source *under;
    size_t chunk_bytes, unit_bytes;
    unsigned int order; /* a chunk has 2^order units */
    /* chunks and large pieces; size: of a large piece, 0 for a chunk; value: its struct chunk */
    struct alloc_table table;
    struct chunk *bins[MOST_ORDER + 2]; /* chunks by buddy_largest() */
    size_t chunks;
};

static void unbin(struct chunk *chunk)
{
    *chunk->link = chunk->next;
    if (chunk->next)
        chunk->next->link = chunk->link;
}

static void bin(struct arena *arena, struct chunk *chunk)
{
    struct chunk **head = &arena->bins[buddy_largest(chunk->tree)];

    chunk->next = *head;
    chunk->link = head;
    if (chunk->next)
        chunk->next->link = &chunk->next;
    *head = chunk;
}

/* Return the chunk with the smallest sufficient free block for that order, or a new chunk. */
static struct chunk *chunk_for(struct arena *arena, unsigned int wanted, uint64_t resource_type, void **instead)
{
    struct chunk *chunk = NULL;
    unsigned int largest;

    for (largest = wanted + 1; largest <= arena->order + 1; largest++)
        if (arena->bins[largest])
            return arena->bins[largest];
    if (!alloc_table_reserve(&arena->table))
        chunk = malloc(sizeof(*chunk) + buddy_bytes(arena->order));
    if (!chunk) {
        *instead = alloc_fail(ALLOC_BOOKKEEPING, ENOMEM, arena->chunk_bytes, 0, ALLOC_ANY_NODE);
        return NULL;
    }
    *instead = alloc_piece(arena->under, arena->chunk_bytes, arena->chunk_bytes, resource_type);
    if (!*instead || *instead == IBV_ALLOCATOR_USE_DEFAULT) {
        int error = errno;

        free(chunk);
        errno = error;
        return NULL;
    }
    chunk->address = *instead;
    buddy_init(chunk->tree, arena->order);
    alloc_table_insert(&arena->table, chunk->address, 0, (uintptr_t)chunk);
    bin(arena, chunk);
    arena->chunks++;
    return chunk;
}

static void *allocate_block(struct arena *arena, unsigned int wanted, uint64_t resource_type)
{
    void *instead = NULL;
    struct chunk *chunk = chunk_for(arena, wanted, resource_type, &instead);
    size_t unit;

    if (!chunk)
        return instead;
    unbin(chunk);
    unit = buddy_allocate(chunk->tree, arena->order, wanted);
    bin(arena, chunk);
    return chunk->address + unit * arena->unit_bytes;
}

static void *allocate_large(struct arena *arena, size_t size, size_t alignment, uint64_t resource_type)
{
    void *address;

    if (alloc_table_reserve(&arena->table))
        return alloc_fail(ALLOC_BOOKKEEPING, ENOMEM, size, 0, ALLOC_ANY_NODE);
    address = alloc_piece(arena->under, size, alignment, resource_type);
    if (address && address != IBV_ALLOCATOR_USE_DEFAULT)
        alloc_table_insert(&arena->table, address, size, 0);
    return address;
}

static void *arena_allocate(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type,
                            bool *dirty)
{
    struct arena *arena = (struct arena *)source;
    size_t least = size > alignment ? size : alignment;
    unsigned int wanted = 0;
    void *address;

    if (least > arena->chunk_bytes / 2)
        return allocate_large(arena, size, alignment, resource_type);
    while (arena->unit_bytes << wanted < least)
        wanted++;
    address = allocate_block(arena, wanted, resource_type);
    *dirty = address && address != IBV_ALLOCATOR_USE_DEFAULT;
    return address;
}

static void drop_chunk(struct arena *arena, struct chunk *chunk)
{
    unbin(chunk);
    alloc_table_remove(&arena->table, alloc_table_find(&arena->table, (uintptr_t)chunk->address));
    alloc_free(arena->under, chunk->address, 0);
    free(chunk);
    arena->chunks--;
}

static int free_block(struct arena *arena, struct chunk *chunk, size_t offset)
{
    struct chunk *spare = arena->bins[arena->order + 1];

    if (offset % arena->unit_bytes || !buddy_free(chunk->tree, arena->order, offset / arena->unit_bytes))
        return EINVAL;
    unbin(chunk);
    bin(arena, chunk);
    if (buddy_largest(chunk->tree) == arena->order + 1 && spare)
        drop_chunk(arena, chunk);
    return 0;
}

static int arena_free(struct alloc_source *source, void *address, uint64_t resource_type)
{
    struct arena *arena = (struct arena *)source;
    uintptr_t offset = (uintptr_t)address & (arena->chunk_bytes - 1);
    struct alloc_entry *entry = alloc_table_find(&arena->table, (uintptr_t)address);

    if (entry && entry->size) {
        alloc_table_remove(&arena->table, entry);
        return alloc_return(arena->under, address, resource_type);
    }
    entry = alloc_table_find(&arena->table, (uintptr_t)address - offset);
    if (!entry || entry->size)
        return EINVAL;
    return free_block(arena, (struct chunk *)(uintptr_t)entry->value, offset);
}

static void arena_count(struct alloc_source *source, struct alloc_counts *counts)
{
    struct arena *arena = (struct arena *)source;
    size_t trees = arena->chunks * (sizeof(struct chunk) + buddy_bytes(arena->order));

    alloc_count(arena->under, counts);
    counts->bookkeeping_bytes += sizeof(*arena) + trees + arena->table.room * sizeof(struct alloc_entry);
}

static void arena_forget(struct alloc_source *source)
{
    struct arena *arena = (struct arena *)source;
    unsigned int largest;

    for (largest = 0; largest <= arena->order + 1; largest++) {
        while (arena->bins[largest]) {
            struct chunk *chunk = arena->bins[largest];

            unbin(chunk);
            free(chunk);
        }
    }
    arena->chunks = 0;
    alloc_table_clear(&arena->table);
}

static void arena_destroy(struct alloc_source *source)
{
    struct arena *arena = (struct arena *)source;

    while (arena->bins[arena->order + 1])
        drop_chunk(arena, arena->bins[arena->order + 1]);
    alloc_table_clear(&arena->table);
    alloc_release(arena->under);
}

static const struct alloc_ops arena_ops = {arena_allocate, arena_free, arena_count, arena_forget, arena_destroy};

static bool power_of_two(size_t number)
{
    return number && !(number & (number - 1));
}

struct alloc_source *alloc_arena_create(struct alloc_source *under, size_t chunk_bytes, size_t unit_bytes)
{
    struct arena *arena;

    if (!power_of_two(chunk_bytes) || !power_of_two(unit_bytes) || chunk_bytes < 2 * unit_bytes ||
        chunk_bytes / unit_bytes > (size_t)1 << MOST_ORDER)
        return alloc_fail(ALLOC_ARGUMENTS, EINVAL, chunk_bytes, 0, ALLOC_ANY_NODE);
    arena = alloc_source_create(sizeof(*arena), &arena_ops);
    if (!arena)
        return NULL;
    alloc_source_hold(under);
    arena->under = under;
    arena->chunk_bytes = chunk_bytes;
    arena->unit_bytes = unit_bytes;
    arena->order = (unsigned int)__builtin_ctzl(chunk_bytes / unit_bytes);
    return &arena->source;
}
