/* Records of allocations by resource type. A piece counts under the type that it was requested with. */
#include "alloc/base.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "abi/libibverbs.h"

struct recording {
    struct alloc_source source;
    struct alloc_source *inner; /* NULL: pieces come from elsewhere, and their allocator records them */
    struct alloc_table table;   /* size: as requested; value: index of the usage */
    struct alloc_usage *usages; /* one for each type */
    size_t types, room;
};

/* Return the usage of a type; NULL without memory. */
static struct alloc_usage *usage_of(struct recording *recording, uint64_t resource_type)
{
    struct alloc_usage *usage;
    size_t i;

    for (i = 0; i < recording->types; i++)
        if (recording->usages[i].resource_type == resource_type)
            return &recording->usages[i];
    if (recording->types == recording->room) {
        size_t room = recording->room ? recording->room * 2 : 8;

        usage = realloc(recording->usages, room * sizeof(*usage));
        if (!usage)
            return NULL;
        recording->usages = usage;
        recording->room = room;
    }
    usage = &recording->usages[recording->types++];
    memset(usage, 0, sizeof(*usage));
    usage->resource_type = resource_type;
    return usage;
}

/* Record a piece, in room that was reserved for it. */
static void note(struct recording *recording, struct alloc_usage *usage, const void *address, size_t size)
{
    alloc_table_insert(&recording->table, address, size, (uint64_t)(usage - recording->usages));
    usage->allocations++;
    usage->pieces++;
    usage->bytes += size;
    if (usage->pieces > usage->peak_pieces)
        usage->peak_pieces = usage->pieces;
    if (usage->bytes > usage->peak_bytes)
        usage->peak_bytes = usage->bytes;
}

static bool forget(struct recording *recording, const void *address)
{
    struct alloc_entry *entry = alloc_table_find(&recording->table, (uintptr_t)address);
    struct alloc_usage *usage;

    if (!entry)
        return false;
    usage = &recording->usages[entry->value];
    usage->pieces--;
    usage->bytes -= entry->size;
    alloc_table_remove(&recording->table, entry);
    return true;
}

static void *recording_allocate(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type,
                                bool *dirty)
{
    struct recording *recording = (struct recording *)source;
    struct alloc_usage *usage = usage_of(recording, resource_type);
    void *address;

    (void)dirty; /* the inner source clears its pieces */
    if (!usage || alloc_table_reserve(&recording->table))
        return alloc_fail(ALLOC_BOOKKEEPING, ENOMEM, size, 0, ALLOC_ANY_NODE);
    address = alloc_piece(recording->inner, size, alignment, resource_type);
    if (!address)
        usage->failures++;
    else if (address == IBV_ALLOCATOR_USE_DEFAULT)
        usage->defaults++;
    else
        note(recording, usage, address, size);
    return address;
}

static int recording_free(struct alloc_source *source, void *address, uint64_t resource_type)
{
    struct recording *recording = (struct recording *)source;

    if (!forget(recording, address))
        return EINVAL;
    return recording->inner ? alloc_return(recording->inner, address, resource_type) : 0;
}

static void recording_count(struct alloc_source *source, struct alloc_counts *counts)
{
    struct recording *recording = (struct recording *)source;

    if (recording->inner)
        alloc_count(recording->inner, counts);
    counts->bookkeeping_bytes += sizeof(*recording) + recording->table.room * sizeof(struct alloc_entry) +
                                 recording->room * sizeof(struct alloc_usage);
}

static void recording_forget(struct alloc_source *source)
{
    struct recording *recording = (struct recording *)source;

    alloc_table_clear(&recording->table);
    free(recording->usages);
    recording->usages = NULL;
    recording->types = recording->room = 0;
}

static void recording_destroy(struct alloc_source *source)
{
    struct recording *recording = (struct recording *)source;

    recording_forget(source);
    if (recording->inner)
        alloc_release(recording->inner);
}

static const struct alloc_ops recording_ops = {recording_allocate, recording_free, recording_count, recording_forget,
                                               recording_destroy};

struct alloc_source *alloc_recording_create(struct alloc_source *inner)
{
    struct recording *recording = alloc_source_create(sizeof(*recording), &recording_ops);

    if (!recording)
        return NULL;
    recording->inner = inner;
    if (inner)
        alloc_source_hold(inner);
    return &recording->source;
}

/* ---- Pieces allocated elsewhere -------------------------------------------------------------------------- */

int alloc_recording_note(struct alloc_source *source, const void *address, size_t size, uint64_t resource_type)
{
    struct recording *recording = (struct recording *)source;
    struct alloc_usage *usage;
    int error = 0;

    alloc_source_lock(source);
    usage = usage_of(recording, resource_type);
    if (!usage || alloc_table_reserve(&recording->table))
        error = ENOMEM;
    else if (alloc_table_find(&recording->table, (uintptr_t)address))
        error = EEXIST;
    if (!error) {
        note(recording, usage, address, size);
        source->pieces++;
    }
    alloc_source_unlock(source);
    return error;
}

void alloc_recording_without(struct alloc_source *source, uint64_t resource_type, bool use_default)
{
    struct alloc_usage *usage;

    alloc_source_lock(source);
    usage = usage_of((struct recording *)source, resource_type);
    if (usage && use_default)
        usage->defaults++;
    else if (usage)
        usage->failures++;
    alloc_source_unlock(source);
}

size_t alloc_recording_usage(struct alloc_source *source, struct alloc_usage *usages, size_t room)
{
    struct recording *recording = (struct recording *)source;
    size_t types;

    alloc_source_lock(source);
    types = recording->types;
    if (types && room)
        memcpy(usages, recording->usages, (types < room ? types : room) * sizeof(*usages));
    alloc_source_unlock(source);
    return types;
}
