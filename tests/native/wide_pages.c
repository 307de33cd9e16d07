/* To be preloaded: a program finds a kernel with pages of 64 KiB, and is aborted where that kernel refuses a call.
 *
 * What the C library and the dynamic linker map for themselves does not come by here, and has this machine's pages. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>

#define REAL(name) real_##name
#define WIDE(name) name
#define REFUSED() abort()
#include "wide_pages.h"

long real_sysconf(int name)
{
    static _Atomic(long (*)(int)) next;

    if (!next)
        next = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return next(name);
}

int getpagesize(void)
{
    return PAGE;
}

void *real_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

/* The name that mmap has for programs that ask for offsets of 64 bits. */
void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    return mmap(address, size, protection, flags, fd, offset);
}

int real_munmap(void *address, size_t size)
{
    return (int)syscall(SYS_munmap, address, size);
}

int real_madvise(void *address, size_t size, int advice)
{
    return (int)syscall(SYS_madvise, address, size, advice);
}

int real_msync(void *address, size_t size, int flags)
{
    return (int)syscall(SYS_msync, address, size, flags);
}
