/* Pages from the kernel, a mapping for each piece: shared, so that no write copies them, and not inherited by children
 * of forks. Shared alone is not enough, since a child could write there; MADV_DONTFORK alone is not, since
 * deregistering the memory with fork support (ibv_fork_init) undoes it. */
#define _GNU_SOURCE
#include "alloc/base.h"

#include <errno.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif

/* From <linux/mempolicy.h>, which some systems with a compiler lack. */
#define POLICY_PREFERRED 1
#define POLICY_BIND 2

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

struct pages {
    struct alloc_source source;
    struct alloc_table table; /* size: of the mapping; value: whether it is bound to the node */
    size_t page_bytes;
    int huge_flags, node; /* huge_flags: 0 with base pages */
    bool strict;
    size_t mapped_bytes, bound_bytes;
};

static void *map_at(const struct pages *pages, void *address, size_t length)
{
    int flags = MAP_SHARED | MAP_ANONYMOUS | pages->huge_flags | (address ? MAP_FIXED : 0);
    void *mapped = mmap(address, length, PROT_READ | PROT_WRITE, flags, -1, 0);

    return mapped == MAP_FAILED ? NULL : mapped;
}

/* Map pages at a multiple of `alignment`. Address space is reserved first, without memory: a larger mapping of huge
 * pages, cut to fit, might exceed their number. */
static void *map_aligned(const struct pages *pages, size_t length, size_t alignment)
{
    size_t room = length + alignment, head;
    char *start, *mapped;
    int error;

    start = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    head = -(uintptr_t)start & (alignment - 1);
    mapped = map_at(pages, start + head, length);
    error = errno;
    if (!mapped) {
        munmap(start, room);
        errno = error;
        return NULL;
    }
    if (head)
        munmap(start, head);
    if (room - head > length)
        munmap(start + head + length, room - head - length);
    return mapped;
}

static int bind_to_node(void *address, size_t length, int node, int policy)
{
    unsigned long mask[ALLOC_MAX_NODES / (sizeof(unsigned long) * CHAR_BIT)] = {0};
    const size_t bits = sizeof(mask[0]) * CHAR_BIT;

    mask[(size_t)node / bits] = 1ul << ((size_t)node % bits);
    return syscall(SYS_mbind, address, length, policy, mask, (unsigned long)ALLOC_MAX_NODES + 1, 0u) ? errno : 0;
}

/* Prepare new pages; return ALLOC_NOTHING or the step that failed. `*bound`: whether the pages come from the node. */
static enum alloc_step prepare(const struct pages *pages, void *address, size_t length, bool *bound)
{
    *bound = false;
    if (madvise(address, length, MADV_DONTFORK))
        return ALLOC_DONT_FORK;
    /* A control group's limit on huge pages may apply only at the first access, which then ends the process: access
     * them here, where the failure can be reported. EINVAL: a kernel before 5.14, which cannot. */
    if (pages->huge_flags && madvise(address, length, MADV_POPULATE_WRITE) && errno != EINVAL) {
        errno = ENOMEM;
        return ALLOC_MAP_HUGE;
    }
    if (pages->node == ALLOC_ANY_NODE)
        return ALLOC_NOTHING;
    errno = bind_to_node(address, length, pages->node, pages->strict ? POLICY_BIND : POLICY_PREFERRED);
    *bound = !errno;
    return errno && pages->strict ? ALLOC_BIND : ALLOC_NOTHING;
}

static void *pages_allocate(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type,
                            bool *dirty)
{
    struct pages *pages = (struct pages *)source;
    size_t length = (size + pages->page_bytes - 1) & ~(pages->page_bytes - 1);
    enum alloc_step step;
    void *address;
    bool bound;

    (void)resource_type;
    (void)dirty; /* the kernel's pages are zero */
    if (alloc_table_reserve(&pages->table))
        return alloc_fail(ALLOC_BOOKKEEPING, ENOMEM, size, 0, pages->node);
    if (alignment > pages->page_bytes)
        address = map_aligned(pages, length, alignment);
    else
        address = map_at(pages, NULL, length);
    if (!address)
        return alloc_fail(pages->huge_flags ? ALLOC_MAP_HUGE : ALLOC_MAP, errno, length, pages->page_bytes,
                          pages->node);
    step = prepare(pages, address, length, &bound);
    if (step != ALLOC_NOTHING) {
        int error = errno;

        munmap(address, length);
        return alloc_fail(step, error, length, pages->page_bytes, pages->node);
    }
    alloc_table_insert(&pages->table, address, length, bound);
    pages->mapped_bytes += length;
    pages->bound_bytes += bound ? length : 0;
    return address;
}

static int pages_free(struct alloc_source *source, void *address, uint64_t resource_type)
{
    struct pages *pages = (struct pages *)source;
    struct alloc_entry *entry = alloc_table_find(&pages->table, (uintptr_t)address);

    (void)resource_type;
    if (!entry)
        return EINVAL;
    munmap(address, entry->size);
    pages->mapped_bytes -= entry->size;
    pages->bound_bytes -= entry->value ? entry->size : 0;
    alloc_table_remove(&pages->table, entry);
    return 0;
}

static void pages_count(struct alloc_source *source, struct alloc_counts *counts)
{
    struct pages *pages = (struct pages *)source;

    counts->mappings += pages->table.used;
    counts->mapped_bytes += pages->mapped_bytes;
    counts->huge_bytes += pages->huge_flags ? pages->mapped_bytes : 0;
    counts->bound_bytes += pages->bound_bytes;
    counts->bookkeeping_bytes += sizeof(*pages) + pages->table.room * sizeof(struct alloc_entry);
}

static void pages_forget(struct alloc_source *source)
{
    struct pages *pages = (struct pages *)source;

    alloc_table_clear(&pages->table);
    pages->mapped_bytes = 0;
    pages->bound_bytes = 0;
}

static void pages_destroy(struct alloc_source *source)
{
    alloc_table_clear(&((struct pages *)source)->table);
}

static const struct alloc_ops pages_ops = {pages_allocate, pages_free, pages_count, pages_forget, pages_destroy};

struct alloc_source *alloc_pages_create(size_t page_bytes, int node, bool strict)
{
    struct pages *pages;

    if ((page_bytes & (page_bytes - 1)) || node < ALLOC_ANY_NODE || node >= ALLOC_MAX_NODES)
        return alloc_fail(ALLOC_ARGUMENTS, EINVAL, page_bytes, page_bytes, node);
    pages = alloc_source_create(sizeof(*pages), &pages_ops);
    if (!pages)
        return NULL;
    pages->page_bytes = page_bytes ? page_bytes : (size_t)sysconf(_SC_PAGESIZE);
    if (page_bytes)
        pages->huge_flags = MAP_HUGETLB | __builtin_ctzl(page_bytes) << MAP_HUGE_SHIFT;
    pages->node = node;
    pages->strict = strict;
    return &pages->source;
}
