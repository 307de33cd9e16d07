/* Memory regions: keys, access rights and bounds. */
#define _GNU_SOURCE
#include "soft/objects/mr.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/memfd.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/hooks.h"
#include "soft/objects/pd.h"
#include "soft/objects/shared.h"
#include "soft/objects/shared_keys.h"

#define SOFT_ACCESS_KNOWN                                                                                   \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | \
     IBV_ACCESS_MW_BIND | IBV_ACCESS_OPTIONAL_RANGE)

/* since Linux 5.14; headers may be older */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

static uintptr_t page_of(const void *address)
{
    return (uintptr_t)address & ~(uintptr_t)(soft_page() - 1);
}

/* Check that the pages exist and allow the requested access, as a NIC's driver does by pinning them: a later access
 * must not end the process. Where the kernel cannot populate pages, only the mappings are checked (MS_ASYNC starts no
 * I/O). A caller that unmaps registered memory is not protected. */
static int populate(const void *address, size_t length, bool writable)
{
    static char probe;
    uintptr_t first = page_of(address);
    size_t size = (uintptr_t)address + length - first;

    if (!madvise((void *)first, size, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ))
        return 0;
    /* this kernel lacks the advice, whatever the mapping */
    if (errno == EINVAL && madvise((void *)page_of(&probe), 1, MADV_POPULATE_READ))
        return msync((void *)first, size, MS_ASYNC) ? EFAULT : 0;
    return errno == EAGAIN ? EAGAIN : EFAULT;
}

static int check_registration(struct soft_context *context, const void *address, size_t length, int access)
{
    if (soft_stale(context))
        return ENODEV;
    if ((access & IBV_ACCESS_ON_DEMAND) || (access & IBV_ACCESS_ZERO_BASED))
        return EOPNOTSUPP;
    if (access & ~SOFT_ACCESS_KNOWN)
        return EINVAL;
    /* InfiniBand architecture: remote write and remote atomic access require local write access */
    if ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    if (!length || (uintptr_t)address + length < (uintptr_t)address)
        return EINVAL;
    return populate(address, length,
                    access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC));
}

struct ibv_mr *soft_reg_mr(struct ibv_pd *ibv_pd, void *address, size_t length, int access)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    struct soft_pd *pd = to_soft_pd(ibv_pd);
    struct soft_mr *mr = NULL;
    uint8_t use;
    int error = check_registration(context, address, length, access);

    if (!error && !(mr = calloc(1, sizeof(*mr))))
        error = ENOMEM;
    if (!error)
        error = soft_key_reserve(pd, &mr->key, &use);
    if (error) {
        free(mr);
        errno = error;
        return NULL;
    }
    mr->pd = pd;
    mr->access = access;
    atomic_init(&mr->file, -1);
    mr->mr.context = ibv_pd->context;
    mr->mr.pd = ibv_pd;
    mr->mr.addr = address;
    mr->mr.length = length;
    mr->mr.handle = mr->key.number;
    /* The low byte differs between uses of a number. soft/base/id_table.h says for how long an old key fits no new
     * region; where an old key does fit, the domain, rights and bounds of the new region apply. */
    mr->mr.lkey = mr->mr.rkey = mr->key.number << 8 | use;
    soft_pd_add_key(pd, &mr->key);
    atomic_fetch_add(&context->mrs, 1);
    soft_key_publish(context->device, &mr->key);
    return &mr->mr;
}

/* Return whether a new descriptor is beyond half of those that the process may have: numbers are given from the lowest
 * on. */
static bool is_scarce(int fd)
{
    struct rlimit limit;

    return !getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur != RLIM_INFINITY && (rlim_t)fd > limit.rlim_cur / 2;
}

struct ibv_mr *soft_make_file_mr(struct ibv_pd *pd, size_t length, int access)
{
    int error = soft_verb_error(to_soft_context(pd->context), SOFT_VERB_reg_mr), fd;
    void *memory = MAP_FAILED;
    struct ibv_mr *mr = NULL;

    if (error) {
        errno = error;
        return NULL;
    }
    fd = soft_sealed_create("aioverbs-messages", (off_t)length, F_SEAL_SEAL);
    if (fd < 0)
        return NULL;
    if (is_scarce(fd))
        errno = EMFILE;
    else if (!length || !soft_sealed_is_small(fd))
        errno = EINVAL;
    else
        memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED && !madvise(memory, length, MADV_DONTFORK))
        mr = soft_reg_mr(pd, memory, length, access);
    if (mr) {
        atomic_store(&container_of(mr, struct soft_mr, mr)->file, fd);
        return mr;
    }
    error = errno;
    if (memory != MAP_FAILED)
        munmap(memory, length);
    soft_descriptor_close(fd);
    errno = error;
    return NULL;
}

int soft_dereg_mr(struct ibv_mr *ibv_mr)
{
    struct soft_mr *mr = container_of(ibv_mr, struct soft_mr, mr);
    struct soft_context *context = to_soft_context(ibv_mr->context);
    struct soft_device *device = context->device;

    if (soft_stale(context))
        return ENODEV;
    if (atomic_load(&mr->windows)) /* concurrent uses of the region must not notice this call */
        return EBUSY;
    if (!grace_ready())
        return ENOMEM;
    soft_key_withdraw(context->device, &mr->key);
    grace_wait(); /* from here on no thread accesses memory through this region, or binds a window to it */
    if (mr->key.file)
        soft_shared_wait(mr->key.file); /* nor does another process */
    if (atomic_load(&mr->windows)) {
        soft_pd_restore_key(mr->pd, &mr->key);
        return EBUSY;
    }
    device->hooks->invalidate_key(device, mr->key.number);
    device->hooks->release_mr(device, mr);
    if (atomic_load(&mr->file) >= 0) { /* no grant that was given with it is valid any more */
        munmap(mr->mr.addr, mr->mr.length);
        soft_descriptor_close(atomic_load(&mr->file));
    }
    soft_pd_remove_key(mr->pd, &mr->key);
    soft_key_release(context->device, &mr->key);
    atomic_fetch_sub(&context->mrs, 1);
    free(mr);
    return 0;
}
