/* XRC domains. All handles of one inode's domain share a struct soft_xrc_inode of the device.
 *
 * Locks on a file of the fabric's directory tell processes which inodes have a domain. Each device with the domain
 * holds a read lock on the byte that stands for the inode, through an open file description of its own; a device
 * without the domain looks for such a lock, and takes one. The kernel releases the locks of a process however it ends.
 * The bytes need not exist, and nothing is ever written.
 *
 *   device that opens              device that closes
 *   flock(LOCK_EX)
 *   look for a lock on the byte    release its lock on the byte
 *   take a lock on the byte
 *   flock(LOCK_UN)
 *
 * Looking and taking is one step, since only the holder of the flock() does it. Closing needs no flock: an opening
 * device either sees the lock, in which case the domain existed and is joined, or does not see it.
 *
 * In the child of a fork the descriptor is closed at once, and the lock stays with the parent. A child on its way to
 * exec() shares the description for a moment, so locks are released explicitly and not left to close(). */
#define _GNU_SOURCE
#include "soft/objects/xrcd.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/hmac.h"
#include "soft/base/lock_order.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/hooks.h"

/* Time limit for the flock. Each holder needs only a few system calls, but may be stopped among them. */
#define LOCK_TIMEOUT_NS 10000000000ull

struct soft_xrc_inode {
    dev_t device; /* const, like the next three fields */
    ino_t inode;
    int fd;     /* keeps the inode from being reused by another file; -1: no inode */
    off_t byte; /* byte that stands for the inode */
    /* const once listed: description that holds the lock; -1: no directory, or no inode */
    int locks;
    uint32_t handles;             /* under device->xrcd_lock, like the next two fields */
    struct soft_xrc_inode **link; /* NULL: not in device->xrcds */
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

/* Open the inode behind `fd` by O_PATH. The result is no further open file: it keeps no pipe or lock open that the user
 * closes, nor does closing it drop the process's record locks, as closing a duplicate would. Return -1 and errno on
 * failure. */
static int reopen_inode(int fd)
{
    int flags = fcntl(fd, F_GETFL), held, error;
    char path[32];

    if (flags < 0)
        return -1;
    if (flags & O_PATH) { /* the kernel accepts none for an XRC domain either */
        errno = EBADF;
        return -1;
    }
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    soft_descriptors_hold();
    held = soft_descriptor_own(open(path, O_PATH | O_CLOEXEC));
    error = errno;
    soft_descriptors_release();
    errno = error;
    return held;
}

static void shared_free(struct soft_xrc_inode *shared)
{
    if (!shared)
        return;
    soft_descriptor_close(shared->locks);
    soft_descriptor_close(shared->fd);
    free(shared);
}

/* Return the byte that stands for an inode: two inodes have the same one with a probability of 2^-63. */
static off_t lock_byte(dev_t device, ino_t inode)
{
    const uint64_t numbers[2] = {device, inode};
    uint8_t digest[SOFT_DIGEST];
    struct soft_sha256 sha;
    uint64_t byte;

    soft_sha256_begin(&sha);
    soft_sha256_add(&sha, numbers, sizeof(numbers));
    soft_sha256_end(&sha, digest);
    memcpy(&byte, digest, sizeof(byte));
    return (off_t)(byte >> 1);
}

/* Return the state of a new domain, in no list yet; NULL and errno on failure. */
static struct soft_xrc_inode *shared_new(int fd)
{
    struct soft_xrc_inode *shared = calloc(1, sizeof(*shared));
    struct stat status;
    int error = 0;

    if (!shared) {
        errno = ENOMEM;
        return NULL;
    }
    shared->fd = shared->locks = -1;
    if (fd == -1)
        return shared;
    shared->fd = reopen_inode(fd);
    if (shared->fd < 0 || fstat(shared->fd, &status))
        error = errno;
    if (error) {
        shared_free(shared);
        errno = error;
        return NULL;
    }
    shared->device = status.st_dev;
    shared->inode = status.st_ino;
    shared->byte = lock_byte(shared->device, shared->inode);
    return shared;
}

/* ---- Between processes --------------------------------------------------------------------------------------- */

static int xrc_inode_lock(const struct soft_xrc_inode *shared, int command, short type, short *found)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = shared->byte, .l_len = 1};
    int error = fcntl(shared->locks, command, &lock) ? errno : 0;

    *found = lock.l_type;
    return error;
}

static int lock_decision(const struct soft_xrc_inode *shared)
{
    uint64_t end = soft_now_ns() + LOCK_TIMEOUT_NS;

    while (flock(shared->locks, LOCK_EX | LOCK_NB)) {
        if (errno != EWOULDBLOCK)
            return errno;
        if (soft_now_ns() > end)
            return ETIMEDOUT;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return 0;
}

/* Check `oflags` against whether the domain exists, with the errors of the kernel: see ibv_open_xrcd(3). */
static int check_oflags(bool exists, int oflags)
{
    if (exists)
        return oflags & O_EXCL ? EINVAL : 0;
    return oflags & O_CREAT ? 0 : EAGAIN;
}

/* Find out whether other devices have the inode's domain, and take its lock for this device if `oflags` allow it.
 * Without a usable directory there are no other devices for this one, as peers cannot find it either. */
static int associate(const struct soft_device *device, struct soft_xrc_inode *shared, int oflags)
{
    short found = F_UNLCK;
    int error;

    shared->locks = device->hooks->open_directory_locks(device);
    if (shared->locks < 0)
        return errno == EMFILE || errno == ENFILE || errno == ENOMEM ? errno : check_oflags(false, oflags);
    error = lock_decision(shared);
    if (error)
        return error;
    error = xrc_inode_lock(shared, F_OFD_GETLK, F_WRLCK, &found);
    if (!error)
        error = check_oflags(found != F_UNLCK, oflags);
    if (!error)
        error = xrc_inode_lock(shared, F_OFD_SETLK, F_RDLCK, &found);
    flock(shared->locks, LOCK_UN);
    return error;
}

static void dissociate(const struct soft_xrc_inode *shared)
{
    short found;

    if (shared->locks >= 0)
        xrc_inode_lock(shared, F_OFD_SETLK, F_UNLCK, &found);
}

/* ---- Within the process -------------------------------------------------------------------------------------- */

static struct soft_xrc_inode *xrc_inode_find(const struct soft_device *device, const struct soft_xrc_inode *like)
{
    struct soft_xrc_inode *shared = device->xrcds;

    assert_held(&device->xrcd_lock);
    while (shared && (shared->device != like->device || shared->inode != like->inode))
        shared = shared->next;
    return shared;
}

static void add_to_list(struct soft_device *device, struct soft_xrc_inode *shared)
{
    assert_held(&device->xrcd_lock);
    shared->next = device->xrcds;
    shared->link = &device->xrcds;
    if (shared->next)
        shared->next->link = &shared->next;
    device->xrcds = shared;
}

/* Join the device's domain of the inode, or add `fresh`. */
static int join(struct soft_device *device, struct soft_xrc_inode *fresh, int oflags, struct soft_xrc_inode **joined)
{
    struct soft_xrc_inode *shared;
    int error = 0;

    soft_mutex_take(&device->xrcd_lock);
    shared = fresh->fd < 0 ? NULL : xrc_inode_find(device, fresh);
    if (shared)
        error = check_oflags(true, oflags);
    else if (fresh->fd >= 0)
        error = associate(device, fresh, oflags);
    if (!error && !shared && fresh->fd >= 0)
        add_to_list(device, fresh);
    if (!error) {
        *joined = shared ? shared : fresh;
        (*joined)->handles++;
    }
    soft_mutex_give(&device->xrcd_lock);
    return error;
}

/* Leave a domain. Return whether that was the domain's last handle: then the device does not have it any more. */
static bool xrc_inode_leave(struct soft_device *device, struct soft_xrc_inode *shared)
{
    bool last;

    soft_mutex_take(&device->xrcd_lock);
    last = --shared->handles == 0;
    if (last && shared->link) {
        dissociate(shared);
        *shared->link = shared->next;
        if (shared->next)
            shared->next->link = shared->link;
    }
    soft_mutex_give(&device->xrcd_lock);
    return last;
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

    if (soft_stale(context))
        return ENODEV;
    if (atomic_load(&xrcd->references))
        return EBUSY;
    if (xrc_inode_leave(context->device, xrcd->shared))
        shared_free(xrcd->shared);
    atomic_fetch_sub(&context->xrcds, 1);
    free(xrcd);
    return 0;
}
