/* XRC domains. What all handles of one inode's domain have in common is kept by the device. */
#define _GNU_SOURCE
#include "soft.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

struct soft_xrc_inode {
    dev_t device; /* const, like the next two */
    ino_t inode;
    int fd;                       /* keeps the inode from being another file's; -1: there is none */
    uint32_t handles;             /* under device->lock, like the next two */
    struct soft_xrc_inode **link; /* NULL: not of device->xrcds */
    struct soft_xrc_inode *next;
};

static int check_attr(const struct soft_context *context, const struct ibv_xrcd_init_attr *attr)
{
    const uint32_t needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;

    if (soft_stale(context))
        return ENODEV;
    if (attr->comp_mask & ~needed)
        return EOPNOTSUPP;
    if (attr->comp_mask != needed || (attr->oflags & ~(O_CREAT | O_EXCL)))
        return EINVAL;
    return attr->fd == -1 && !(attr->oflags & O_CREAT) ? EINVAL : 0;
}

/* Another name for the inode behind `fd`. It is no further open file: neither keeps it a pipe or a lock open that the
 * user closes, nor does closing it drop the process's record locks, as it would with a duplicate. -1 and errno. */
static int hold_inode(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    char path[32];

    if (flags < 0)
        return -1;
    if (flags & O_PATH) { /* the kernel takes none for an XRC domain either */
        errno = EBADF;
        return -1;
    }
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return open(path, O_PATH | O_CLOEXEC);
}

static void shared_free(struct soft_xrc_inode *shared)
{
    if (shared && shared->fd >= 0)
        close(shared->fd);
    free(shared);
}

/* What a new domain would be, in no list yet. NULL and errno. */
static struct soft_xrc_inode *shared_new(int fd)
{
    struct soft_xrc_inode *shared = calloc(1, sizeof(*shared));
    struct stat status;
    int error = 0;

    if (!shared) {
        errno = ENOMEM;
        return NULL;
    }
    shared->fd = -1;
    if (fd == -1)
        return shared;
    shared->fd = hold_inode(fd);
    if (shared->fd < 0 || fstat(shared->fd, &status))
        error = errno;
    if (error) {
        shared_free(shared);
        errno = error;
        return NULL;
    }
    shared->device = status.st_dev;
    shared->inode = status.st_ino;
    return shared;
}

/* Under device->lock. */
static struct soft_xrc_inode *find(const struct soft_device *device, const struct soft_xrc_inode *like)
{
    struct soft_xrc_inode *shared = device->xrcds;

    while (shared && (shared->device != like->device || shared->inode != like->inode))
        shared = shared->next;
    return shared;
}

/* Under device->lock. */
static void list(struct soft_device *device, struct soft_xrc_inode *shared)
{
    shared->next = device->xrcds;
    shared->link = &device->xrcds;
    if (shared->next)
        shared->next->link = &shared->next;
    device->xrcds = shared;
}

/* Takes the domain that is there, or `fresh`. The errors are the kernel's. */
static int join(struct soft_device *device, struct soft_xrc_inode *fresh, int oflags, struct soft_xrc_inode **joined)
{
    struct soft_xrc_inode *shared;
    int error = 0;

    pthread_mutex_lock(&device->lock);
    shared = fresh->fd < 0 ? NULL : find(device, fresh);
    if (shared && (oflags & O_EXCL)) {
        error = EINVAL;
    } else if (!shared && !(oflags & O_CREAT)) {
        error = EAGAIN;
    } else {
        if (!shared && fresh->fd >= 0)
            list(device, fresh);
        *joined = shared ? shared : fresh;
        (*joined)->handles++;
    }
    pthread_mutex_unlock(&device->lock);
    return error;
}

struct ibv_xrcd *soft_open_xrcd(struct ibv_context *ibv_context, struct ibv_xrcd_init_attr *attr)
{
    struct soft_context *context = to_soft_context(ibv_context);
    int error = check_attr(context, attr);
    struct soft_xrc_inode *fresh = NULL;
    struct soft_xrcd *xrcd = NULL;

    if (!error && !(xrcd = calloc(1, sizeof(*xrcd))))
        error = ENOMEM;
    if (!error && !(fresh = shared_new(attr->fd)))
        error = errno;
    if (!error)
        error = join(context->device, fresh, attr->oflags, &xrcd->shared);
    if (error || xrcd->shared != fresh)
        shared_free(fresh);
    if (error) {
        free(xrcd);
        errno = error;
        return NULL;
    }
    xrcd->xrcd.context = ibv_context;
    atomic_fetch_add(&context->xrcds, 1);
    return &xrcd->xrcd;
}

int soft_close_xrcd(struct ibv_xrcd *ibv_xrcd)
{
    struct soft_xrcd *xrcd = to_soft_xrcd(ibv_xrcd);
    struct soft_context *context = to_soft_context(ibv_xrcd->context);
    struct soft_xrc_inode *shared = xrcd->shared;
    bool last;

    if (soft_stale(context))
        return ENODEV;
    if (atomic_load(&xrcd->references))
        return EBUSY;
    pthread_mutex_lock(&context->device->lock);
    last = --shared->handles == 0;
    if (last && shared->link) {
        *shared->link = shared->next;
        if (shared->next)
            shared->next->link = shared->link;
    }
    pthread_mutex_unlock(&context->device->lock);
    if (last)
        shared_free(shared);
    atomic_fetch_sub(&context->xrcds, 1);
    free(xrcd);
    return 0;
}
