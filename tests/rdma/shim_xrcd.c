/* XRC domains, identified by the inode that they were opened with. */
#define _GNU_SOURCE
#include "shim.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

struct xrc_domain {
    int file; /* a duplicate: the inode cannot be reused while the file is open; -1: no inode */
    dev_t device;
    ino_t inode;
    unsigned int opened;
};

/* The open domain of an inode. Called with `shim_lock` held. */
static struct xrc_domain *find_domain(const struct stat *status)
{
    for (struct object *object = shim_objects; object; object = object->next) {
        struct xrc_domain *domain = object->kind == XRCD ? object->domain : NULL;

        if (domain && domain->file >= 0 && domain->device == status->st_dev && domain->inode == status->st_ino)
            return domain;
    }
    return NULL;
}

static struct xrc_domain *make_domain(int fd, const struct stat *status)
{
    struct xrc_domain *domain = calloc(1, sizeof(*domain));

    if (!domain)
        return NULL;
    domain->file = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && domain->file < 0) {
        free(domain);
        return NULL;
    }
    domain->device = status->st_dev;
    domain->inode = status->st_ino;
    return domain;
}

/* The domain that the attributes ask for; NULL with errno set on failure. Called with `shim_lock` held. If the
 * document names no errno, it is the kernel's. */
static struct xrc_domain *choose_domain(const struct ibv_xrcd_init_attr *attr)
{
    struct stat status = {0};
    struct xrc_domain *domain = NULL;

    if (attr->comp_mask != (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS) || (attr->oflags & ~(O_CREAT | O_EXCL)))
        return shim_refused(EINVAL);
    if (attr->fd == -1) {
        if (!(attr->oflags & O_CREAT))
            return shim_refused(EINVAL);
    } else {
        if (fstat(attr->fd, &status))
            return NULL;
        domain = find_domain(&status);
        if (domain && (attr->oflags & O_CREAT) && (attr->oflags & O_EXCL))
            return shim_refused(EINVAL);
        if (!domain && !(attr->oflags & O_CREAT))
            return shim_refused(EAGAIN);
    }
    return domain ? domain : make_domain(attr->fd, &status);
}

static void release_domain(struct xrc_domain *domain)
{
    if (domain->opened)
        return;
    if (domain->file >= 0)
        close(domain->file);
    free(domain);
}

struct ibv_xrcd *shim_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
    struct xrc_domain *domain;
    struct object *xrcd = NULL;

    pthread_mutex_lock(&shim_lock);
    domain = choose_domain(attr);
    if (domain) {
        xrcd = shim_add(XRCD);
        if (xrcd) {
            xrcd->xrcd.context = context;
            xrcd->handle = UINT32_MAX;
            xrcd->domain = domain;
            domain->opened++;
        } else {
            release_domain(domain);
            errno = ENOMEM;
        }
    }
    pthread_mutex_unlock(&shim_lock);
    return xrcd ? &xrcd->xrcd : NULL;
}

int shim_close_xrcd(struct ibv_xrcd *address)
{
    struct object *xrcd;
    int error = 0;

    pthread_mutex_lock(&shim_lock);
    xrcd = shim_find(XRCD, address);
    if (!xrcd) {
        error = EINVAL;
    } else if (xrcd->associated) {
        error = EBUSY;
    } else {
        shim_drop(xrcd);
        xrcd->domain->opened--;
        release_domain(xrcd->domain);
    }
    pthread_mutex_unlock(&shim_lock);
    if (!error)
        free(xrcd);
    return error;
}

int shim_associate(struct ibv_xrcd *address, int difference)
{
    struct object *xrcd;
    int error = EINVAL;

    pthread_mutex_lock(&shim_lock);
    xrcd = shim_find(XRCD, address);
    if (xrcd && (long)xrcd->associated + difference >= 0) {
        xrcd->associated += (unsigned int)difference;
        error = 0;
    }
    pthread_mutex_unlock(&shim_lock);
    return error;
}
