#define _GNU_SOURCE
#include "soft/base/memfd.h"

#include <errno.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "soft/base/fork_fds.h"

enum {
    SETTLED = F_SEAL_SHRINK | F_SEAL_GROW,
    SMALL = 4 << 20, /* bytes: two huge pages */
};

/* Return whether this process may make a file of that size: otherwise the kernel sends a signal that ends it. */
static bool is_allowed(off_t bytes)
{
    struct rlimit limit;

    return getrlimit(RLIMIT_FSIZE, &limit) || (rlim_t)bytes <= limit.rlim_cur;
}

int soft_sealed_create(const char *name, off_t bytes, int more)
{
    int fd, error;

    if (!is_allowed(bytes)) {
        errno = EFBIG;
        return -1;
    }
    soft_descriptors_hold();
    fd = soft_descriptor_own(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    error = errno;
    soft_descriptors_release();
    if (fd >= 0 && (ftruncate(fd, bytes) || fcntl(fd, F_ADD_SEALS, SETTLED | more))) {
        error = errno;
        soft_descriptor_close(fd);
        fd = -1;
    }
    errno = error;
    return fd;
}

off_t soft_sealed_bytes(int fd)
{
    struct stat found;
    struct statfs home;
    int seals = fcntl(fd, F_GET_SEALS);

    /* A file of huge pages has a sealed size, but no memory where no huge page is left. */
    if (seals < 0 || (seals & SETTLED) != SETTLED || fstat(fd, &found) || fstatfs(fd, &home) ||
        home.f_type == HUGETLBFS_MAGIC)
        return -1;
    return found.st_size;
}

bool soft_sealed_is_small(int fd)
{
    off_t bytes = soft_sealed_bytes(fd);
    struct stat found;

    /* The file may have pages behind its end, allocated before it was sealed. */
    return bytes >= 0 && bytes <= SMALL && !fstat(fd, &found) && found.st_blocks <= SMALL / 512;
}
