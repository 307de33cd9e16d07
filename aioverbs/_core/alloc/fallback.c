/* Sources without memory of their own: tiers, which try several sources in turn, and the caller's own memory. */
#include "alloc/base.h"

#include <errno.h>

#include "abi/libibverbs.h"

/* ---- Tiers ----------------------------------------------------------------------------------------------- */

struct tiers {
    struct alloc_source source;
    struct alloc_source *tier[ALLOC_MAX_TIERS];
    size_t count;
};

static void *tiers_allocate(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type,
                            bool *dirty)
{
    struct tiers *tiers = (struct tiers *)source;
    void *address = NULL;
    size_t i;

    (void)dirty; /* each tier clears its pieces */
    for (i = 0; i < tiers->count && !address; i++)
        address = alloc_piece(tiers->tier[i], size, alignment, resource_type);
    return address;
}

static int tiers_free(struct alloc_source *source, void *address, uint64_t resource_type)
{
    struct tiers *tiers = (struct tiers *)source;
    size_t i;

    for (i = 0; i < tiers->count; i++)
        if (!alloc_return(tiers->tier[i], address, resource_type))
            return 0;
    return EINVAL;
}

static void tiers_count(struct alloc_source *source, struct alloc_counts *counts)
{
    struct tiers *tiers = (struct tiers *)source;
    size_t i;

    for (i = 0; i < tiers->count; i++) {
        struct alloc_counts one;

        alloc_count(tiers->tier[i], &one);
        counts->mappings += one.mappings;
        counts->mapped_bytes += one.mapped_bytes;
        counts->huge_bytes += one.huge_bytes;
        counts->bound_bytes += one.bound_bytes;
        counts->bookkeeping_bytes += one.bookkeeping_bytes;
    }
    counts->bookkeeping_bytes += sizeof(*tiers);
}

static void no_op(struct alloc_source *source)
{
    (void)source;
}

static void tiers_destroy(struct alloc_source *source)
{
    struct tiers *tiers = (struct tiers *)source;

    while (tiers->count)
        alloc_release(tiers->tier[--tiers->count]);
}

static const struct alloc_ops tiers_ops = {tiers_allocate, tiers_free, tiers_count, no_op, tiers_destroy};

struct alloc_source *alloc_tiers_create(struct alloc_source *const *tier, size_t count)
{
    struct tiers *tiers;

    if (!count || count > ALLOC_MAX_TIERS)
        return alloc_fail(ALLOC_ARGUMENTS, EINVAL, count, 0, ALLOC_ANY_NODE);
    tiers = alloc_source_create(sizeof(*tiers), &tiers_ops);
    if (!tiers)
        return NULL;
    for (; tiers->count < count; tiers->count++) {
        tiers->tier[tiers->count] = tier[tiers->count];
        alloc_source_hold(tier[tiers->count]);
    }
    return &tiers->source;
}

/* ---- The caller's own memory ----------------------------------------------------------------------------- */

static void *default_allocate(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type,
                              bool *dirty)
{
    (void)source, (void)size, (void)alignment, (void)resource_type, (void)dirty;
    return IBV_ALLOCATOR_USE_DEFAULT;
}

static int default_free(struct alloc_source *source, void *address, uint64_t resource_type)
{
    (void)source, (void)address, (void)resource_type;
    return EINVAL;
}

static void default_count(struct alloc_source *source, struct alloc_counts *counts)
{
    counts->bookkeeping_bytes += sizeof(*source);
}

static const struct alloc_ops default_ops = {default_allocate, default_free, default_count, no_op, no_op};

struct alloc_source *alloc_default_create(void)
{
    return alloc_source_create(sizeof(struct alloc_source), &default_ops);
}
