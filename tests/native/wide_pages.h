/* A kernel with pages of 64 KiB, as some have on arm64 and POWER: it is spoken to of whole pages only.
 *
 * WIDE(mmap) stands in front of REAL(mmap), and so on; a call that such a kernel refuses also calls REFUSED. The file
 * that includes this defines these macros. */
#ifndef AIOVERBS_TESTS_WIDE_PAGES_H
#define AIOVERBS_TESTS_WIDE_PAGES_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)64 << 10)

/* Since Linux 5.14; headers may be older. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

long REAL(sysconf)(int name);
long WIDE(sysconf)(int name);
void *REAL(mmap)(void *address, size_t size, int protection, int flags, int fd, off_t offset);
void *WIDE(mmap)(void *address, size_t size, int protection, int flags, int fd, off_t offset);
int REAL(munmap)(void *address, size_t size);
int WIDE(munmap)(void *address, size_t size);
int REAL(madvise)(void *address, size_t size, int advice);
int WIDE(madvise)(void *address, size_t size, int advice);
int REAL(msync)(void *address, size_t size, int flags);
int WIDE(msync)(void *address, size_t size, int flags);

static bool knows_populate = true;
static atomic_uint populated, looked_at;

static size_t to_pages(size_t size)
{
    return (size + PAGE - 1) & ~(PAGE - 1);
}

static bool is_refused(const void *address, off_t offset)
{
    bool is = (uintptr_t)address % PAGE || (size_t)offset % PAGE;

    if (is) {
        REFUSED();
        errno = EINVAL;
    }
    return is;
}

long WIDE(sysconf)(int name)
{
    long real = REAL(sysconf)(name);

    if (name == _SC_PAGESIZE)
        return PAGE;
    return name == _SC_PHYS_PAGES ? real / (long)(PAGE / (size_t)REAL(sysconf)(_SC_PAGESIZE)) : real;
}

void *WIDE(mmap)(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    size_t length = to_pages(size), head;
    char *room;
    void *mapped;

    if (is_refused(flags & MAP_FIXED ? address : NULL, offset))
        return MAP_FAILED;
    if (flags & (MAP_FIXED | MAP_HUGETLB))
        return REAL(mmap)(address, length, protection, flags, fd, offset);
    room = REAL(mmap)(NULL, length + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return room;
    head = -(uintptr_t)room & (PAGE - 1);
    mapped = REAL(mmap)(room + head, length, protection, flags | MAP_FIXED, fd, offset);
    if (mapped == MAP_FAILED) {
        int error = errno;

        REAL(munmap)(room, length + PAGE);
        errno = error;
        return mapped;
    }
    if (head)
        REAL(munmap)(room, head);
    REAL(munmap)(room + head + length, PAGE - head);
    return mapped;
}

int WIDE(munmap)(void *address, size_t size)
{
    return is_refused(address, 0) ? -1 : REAL(munmap)(address, to_pages(size));
}

/* Leave out the pages of this machine that are missing at the beginning of a wide page. Memory that the C library maps
 * has this machine's pages, so it may begin and end anywhere in a wide one. */
static void leave_out_missing(void **address, size_t *size)
{
    size_t page = (size_t)REAL(sysconf)(_SC_PAGESIZE);
    char *last = (char *)*address + PAGE - page;

    while ((char *)*address < last && *size > page && REAL(msync)(*address, page, MS_ASYNC) && errno == ENOMEM) {
        *address = (char *)*address + page;
        *size -= page;
    }
}

int WIDE(madvise)(void *address, size_t size, int advice)
{
    bool populates = advice == MADV_POPULATE_READ || advice == MADV_POPULATE_WRITE;

    if (is_refused(address, 0))
        return -1;
    if (populates && !knows_populate) {
        errno = EINVAL;
        return -1;
    }
    if (!populates)
        return REAL(madvise)(address, to_pages(size), advice);
    atomic_fetch_add(&populated, 1);
    leave_out_missing(&address, &size);
    return REAL(madvise)(address, size, advice);
}

int WIDE(msync)(void *address, size_t size, int flags)
{
    if (is_refused(address, 0))
        return -1;
    atomic_fetch_add(&looked_at, 1);
    leave_out_missing(&address, &size);
    return REAL(msync)(address, size, flags);
}

#endif
