#include "support.h"
#include "support_alloc.h"

#include "alloc/base.h"

#include <sys/mman.h>
#include <unistd.h>

struct alloc_source *base_pages(void)
{
    struct alloc_source *source = alloc_pages_create(ALLOC_BASE_PAGES, ALLOC_ANY_NODE, true);

    REQUIRE(source != NULL);
    return source;
}

struct alloc_counts counts_of(struct alloc_source *source)
{
    struct alloc_counts counts;

    alloc_count(source, &counts);
    return counts;
}

bool is_zero(const void *memory, size_t size)
{
    const char *bytes = memory;

    return !size || (bytes[0] == 0 && !memcmp(bytes, bytes + 1, size - 1));
}

bool is_mapped(const void *memory)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char there;

    return mincore((void *)((uintptr_t)memory & ~(page - 1)), page, &there) == 0;
}

bool is_aligned(const void *memory, size_t alignment)
{
    return (uintptr_t)memory % alignment == 0;
}

void *sound_piece(struct alloc_source *source, size_t size, size_t alignment)
{
    void *piece = alloc_piece(source, size, alignment, TYPE_QP);

    if (!CHECK(piece && piece != IBV_ALLOCATOR_USE_DEFAULT) || !CHECK(is_aligned(piece, alignment)) ||
        !CHECK(is_zero(piece, size)))
        return NULL;
    memset(piece, 0xa5, size);
    return piece;
}

/* ---- Pages that run out ---------------------------------------------------------------------------------- */

struct limited {
    struct alloc_source source;
    struct alloc_source *pages;
    size_t *left;
};

static void *limited_take(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type,
                          bool *dirty)
{
    struct limited *limited = (struct limited *)source;

    (void)dirty;
    if (!*limited->left)
        return alloc_fail(ALLOC_MAP, ENOSPC, size, 0, ALLOC_ANY_NODE);
    --*limited->left;
    return alloc_piece(limited->pages, size, alignment, resource_type);
}

static int limited_give(struct alloc_source *source, void *address, uint64_t resource_type)
{
    struct limited *limited = (struct limited *)source;
    int error = alloc_return(limited->pages, address, resource_type);

    *limited->left += !error;
    return error;
}

static void limited_count(struct alloc_source *source, struct alloc_counts *counts)
{
    alloc_count(((struct limited *)source)->pages, counts);
}

static void limited_forget(struct alloc_source *source)
{
    (void)source;
}

static void limited_destroy(struct alloc_source *source)
{
    alloc_release(((struct limited *)source)->pages);
}

static const struct alloc_ops limited_ops = {limited_take, limited_give, limited_count, limited_forget,
                                             limited_destroy};

struct alloc_source *limited_pages(size_t *left)
{
    struct alloc_source *pages = base_pages();
    struct limited *limited = alloc_source_create(sizeof(*limited), &limited_ops);

    REQUIRE(limited != NULL);
    limited->pages = pages;
    limited->left = left;
    return &limited->source;
}
