/* A context on another context's descriptor: opened as usual, then its commands are redirected to that descriptor.
 *
 * The kernel identifies a context by its open file, so for the kernel both processes are the same user of the
 * device, as with a provider that has the verb. */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static _Atomic uint32_t devices, pds, unimported;

static struct {
    struct ibv_device **(*get_device_list)(int *count);
    void (*free_device_list)(struct ibv_device **list);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *context);
} verbs;

static bool load_verbs(void)
{
    void *handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!handle)
        return false;
    *(void **)&verbs.get_device_list = dlsym(handle, "ibv_get_device_list");
    *(void **)&verbs.free_device_list = dlsym(handle, "ibv_free_device_list");
    *(void **)&verbs.open_device = dlsym(handle, "ibv_open_device");
    *(void **)&verbs.close_device = dlsym(handle, "ibv_close_device");
    return verbs.get_device_list && verbs.free_device_list && verbs.open_device && verbs.close_device;
}

static bool is_of(const struct ibv_device *device, dev_t wanted)
{
    char path[IBV_SYSFS_PATH_MAX + 8];
    unsigned int major_number = 0, minor_number = 0;
    FILE *file;

    snprintf(path, sizeof(path), "%s/dev", device->dev_path);
    file = fopen(path, "r");
    if (!file)
        return false;
    if (fscanf(file, "%u:%u", &major_number, &minor_number) != 2)
        major_number = 0;
    fclose(file);
    return major_number && makedev(major_number, minor_number) == wanted;
}

/* A descriptor for asynchronous events of the file that commands go to; -1 and errno on failure. */
static int alloc_async_fd(int cmd_fd)
{
    struct {
        struct ib_uverbs_ioctl_hdr hdr;
        struct ib_uverbs_attr attr;
    } command;

    memset(&command, 0, sizeof(command));
    command.hdr.length = sizeof(command);
    command.hdr.object_id = UVERBS_OBJECT_ASYNC_EVENT;
    command.hdr.method_id = UVERBS_METHOD_ASYNC_EVENT_ALLOC;
    command.hdr.num_attrs = 1;
    command.hdr.driver_id = RDMA_DRIVER_RXE;
    command.attr.attr_id = UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE;
    command.attr.flags = UVERBS_ATTR_F_MANDATORY;
    if (ioctl(cmd_fd, RDMA_VERBS_IOCTL, &command))
        return -1;
    return (int)command.attr.data_s64;
}

/* As in libibverbs, creating a context takes over the descriptor, even if that fails. */
static struct ibv_context *turn(struct ibv_context *context, int cmd_fd)
{
    int error;

    if (dup3(cmd_fd, context->cmd_fd, O_CLOEXEC) >= 0) {
        close(cmd_fd);
        close(context->async_fd);
        context->async_fd = alloc_async_fd(context->cmd_fd);
        if (context->async_fd >= 0)
            return context;
    }
    error = errno;
    verbs.close_device(context);
    errno = error;
    return NULL;
}

struct ibv_context *shim_import_device(int cmd_fd)
{
    struct ibv_context *context = NULL;
    struct ibv_device **list;
    struct stat status;
    int i;

    if (fstat(cmd_fd, &status) || !S_ISCHR(status.st_mode))
        return shim_refused(EINVAL);
    if (!load_verbs() || !(list = verbs.get_device_list(NULL)))
        return shim_refused(ENODEV);
    for (i = 0; list[i] && !is_of(list[i], status.st_rdev); i++)
        continue;
    errno = ENODEV;
    if (list[i] && (context = verbs.open_device(list[i])))
        context = turn(context, cmd_fd);
    devices += context != NULL;
    verbs.free_device_list(list);
    return context;
}

/* Like in providers, there is nothing behind the public part. */
struct ibv_pd *shim_import_pd(struct ibv_context *context, uint32_t handle)
{
    struct ibv_pd *pd = calloc(1, sizeof(*pd));

    if (!pd)
        return shim_refused(ENOMEM);
    pd->context = context;
    pd->handle = handle;
    pds++;
    return pd;
}

void shim_unimport_pd(struct ibv_pd *pd)
{
    free(pd);
    unimported++;
}

void shim_count_imports(struct shim_imports *imports)
{
    imports->devices = devices;
    imports->pds = pds;
    imports->unimported = unimported;
}
