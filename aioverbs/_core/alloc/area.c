/* Pieces of memory that processes share: whole chunks, for which no process waits for another. */
#define _GNU_SOURCE
#include "alloc/area.h"

#include "alloc/base.h"

#include <errno.h>

struct area {
    struct alloc_source source;
    struct alloc_area at;
    struct alloc_table table; /* size: chunks of the piece */
    size_t next;              /* where the next search begins */
    size_t chunks;            /* chunks in all pieces */
    int closed;               /* 0, or why nothing is allocated any more: ENXIO, or in the child of a fork ENODEV */
    bool held;                /* whether this source holds the area */
};

static size_t total(const struct area *area)
{
    return area->at.bytes / area->at.chunk_bytes;
}

/* Raise the bound up to which another process searches for chunks of this one, should this one die. */
static void area_raise_highest(atomic_uint *highest, size_t to)
{
    unsigned int found = atomic_load(highest);

    while (found < to && !atomic_compare_exchange_weak(highest, &found, (unsigned int)to))
        ;
}

/* Claim chunks from `first` on; return how many, less than `count` where the next one has an owner. */
static size_t claim(struct area *area, size_t first, size_t count)
{
    size_t claimed;

    area_raise_highest(area->at.highest, first + count);
    for (claimed = 0; claimed < count; claimed++) {
        uint16_t owner = 0;

        if (!atomic_compare_exchange_strong(&area->at.owners[first + claimed], &owner, area->at.owner))
            break;
    }
    if (claimed < count) {
        size_t i;

        for (i = 0; i < claimed; i++)
            atomic_store(&area->at.owners[first + i], 0);
    }
    return claimed;
}

/* Claim `count` chunks between `begin` and `end`, the first at a multiple of `step`; return the first, or `end` where
 * there are none. */
static size_t area_find(struct area *area, size_t begin, size_t end, size_t count, size_t step)
{
    size_t first = begin;

    for (;;) {
        size_t past = ((uintptr_t)area->at.memory / area->at.chunk_bytes + first) & (step - 1), claimed;

        if (past)
            first += step - past;
        if (first >= end || count > end - first)
            return end;
        claimed = claim(area, first, count);
        if (claimed == count)
            return first;
        first += claimed + 1;
    }
}

static size_t find_anywhere(struct area *area, size_t count, size_t step)
{
    size_t end = total(area), first = area_find(area, area->next, end, count, step);

    return first == end && area->next ? area_find(area, 0, end, count, step) : first;
}

static void *area_allocate(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type,
                           bool *dirty)
{
    struct area *area = (struct area *)source;
    size_t chunk = area->at.chunk_bytes, count = (size + chunk - 1) / chunk;
    size_t step = alignment > chunk ? alignment / chunk : 1, first;
    void *address;

    (void)resource_type;
    (void)dirty; /* freed memory is zero */
    if (area->closed)
        return alloc_fail(ALLOC_AREA, area->closed, size, 0, ALLOC_ANY_NODE);
    if (alloc_table_reserve(&area->table))
        return alloc_fail(ALLOC_BOOKKEEPING, ENOMEM, size, 0, ALLOC_ANY_NODE);
    first = find_anywhere(area, count, step);
    if (first == total(area)) {
        area->at.reap(area->at.handle);
        first = find_anywhere(area, count, step);
    }
    if (first == total(area))
        return alloc_fail(ALLOC_AREA, ENOMEM, size, 0, ALLOC_ANY_NODE);
    address = area->at.memory + first * chunk;
    alloc_table_insert(&area->table, address, count, 0);
    area->next = first + count;
    area->chunks += count;
    return address;
}

/* Drop the area, when nothing in it is needed any more. */
static void release_area(struct area *area)
{
    if (area->held)
        area->at.drop(area->at.handle);
    area->held = false;
}

static int area_free(struct alloc_source *source, void *address, uint64_t resource_type)
{
    struct area *area = (struct area *)source;
    struct alloc_entry *entry = alloc_table_find(&area->table, (uintptr_t)address);
    size_t first = (size_t)((char *)address - area->at.memory) / area->at.chunk_bytes;

    (void)resource_type;
    if (!entry)
        return EINVAL;
    alloc_area_put(&area->at, first, entry->size);
    if (first < area->next)
        area->next = first;
    area->chunks -= entry->size;
    alloc_table_remove(&area->table, entry);
    if (area->closed && !area->table.used)
        release_area(area);
    return 0;
}

static void area_count(struct alloc_source *source, struct alloc_counts *counts)
{
    struct area *area = (struct area *)source;

    counts->mappings += area->held;
    counts->mapped_bytes += area->chunks * area->at.chunk_bytes;
    counts->bookkeeping_bytes += sizeof(*area) + area->table.room * sizeof(struct alloc_entry);
}

static void area_forget(struct alloc_source *source)
{
    struct area *area = (struct area *)source;

    alloc_table_clear(&area->table);
    area->chunks = 0;
    area->closed = ENODEV;
    area->held = false; /* the child does not hold the area either */
}

static void area_destroy(struct alloc_source *source)
{
    struct area *area = (struct area *)source;

    alloc_table_clear(&area->table);
    release_area(area);
}

static const struct alloc_ops area_ops = {area_allocate, area_free, area_count, area_forget, area_destroy};

struct alloc_source *alloc_area_create(const struct alloc_area *at)
{
    struct area *area = alloc_source_create(sizeof(*area), &area_ops);

    if (!area)
        return NULL;
    area->at = *at;
    at->hold(at->handle);
    area->held = true;
    return &area->source;
}

void alloc_area_close(struct alloc_source *source)
{
    struct area *area = (struct area *)source;

    alloc_source_lock(source);
    if (!area->closed)
        area->closed = ENXIO;
    if (!area->table.used)
        release_area(area);
    alloc_source_unlock(source);
}
