/* Count the allocations of a process: a library that is preloaded, and replaces malloc and its relatives.
 *
 * With PYTHONMALLOC=malloc, Python allocates its objects here, too. Allocations by the compiled parts of aioverbs are
 * also counted separately. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PARTS = 16 };

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

static struct {
    uintptr_t begin, end;
} parts[PARTS];
static int part_count;
static atomic_uint_fast64_t all, native;

static inline void count(const void *caller)
{
    int at;

    all++;
    for (at = 0; at < part_count; at++)
        if ((uintptr_t)caller >= parts[at].begin && (uintptr_t)caller < parts[at].end) {
            native++;
            return;
        }
}

void *malloc(size_t size)
{
    count(__builtin_return_address(0));
    return __libc_malloc(size);
}

void *calloc(size_t each, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_calloc(each, size);
}

void *realloc(void *old, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    count(__builtin_return_address(0));
    return __libc_memalign(alignment, size);
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
    count(__builtin_return_address(0));
    *out = __libc_memalign(alignment, size);
    return *out ? 0 : ENOMEM;
}

static int add_part(struct dl_phdr_info *info, size_t size, void *data)
{
    int at;

    (void)size, (void)data;
    if (!strstr(info->dlpi_name, "/aioverbs/_core/"))
        return 0;
    for (at = 0; at < info->dlpi_phnum && part_count < PARTS; at++)
        if (info->dlpi_phdr[at].p_type == PT_LOAD && info->dlpi_phdr[at].p_flags & PF_X) {
            parts[part_count].begin = info->dlpi_addr + info->dlpi_phdr[at].p_vaddr;
            parts[part_count].end = parts[part_count].begin + info->dlpi_phdr[at].p_memsz;
            part_count++;
        }
    return 0;
}

/* Find the compiled parts of aioverbs, and return their number. Call once they are loaded. */
int allocations_find_parts(void)
{
    part_count = 0;
    dl_iterate_phdr(add_part, NULL);
    return part_count;
}

/* Return the number of allocations in all threads together: a thread may reuse memory that another one allocated. */
uint64_t allocations_all(void)
{
    return all;
}

uint64_t allocations_native(void)
{
    return native;
}
