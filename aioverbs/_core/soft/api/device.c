/* Devices of this process: opening and closing contexts, and faults of devices. */
#define _GNU_SOURCE
#include "soft/api/device.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "soft/api/ops.h"
#include "soft/api/qp.h"
#include "soft/base/address.h"
#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/fabric/directory.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/read_cache.h"
#include "soft/fault/injection.h"
#include "soft/objects/async_event.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/cq_push.h"
#include "soft/objects/device.h"
#include "soft/objects/gids.h"
#include "soft/objects/hooks.h"
#include "soft/objects/limits.h"
#include "soft/objects/qp.h"
#include "soft/objects/srq.h"
#include "soft/objects/worker_thread.h"
#include "soft/transport/inbound.h"
#include "soft/transport/direct_requests.h"
#include "soft/transport/requester.h"
#include "soft/transport/responder.h"

/* ---- Devices --------------------------------------------------------------------------------------------- */

static struct soft_device *devices; /* under device_lock; never freed, since contexts and tables refer to them */
static struct soft_mutex device_lock = SOFT_MUTEX_INITIALIZER(SOFT_RANK_DEVICES);
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;

static void child_after_fork(void)
{
    /* Another thread may have held the lock at the fork, so initialise it anew. */
    soft_mutex_init(&device_lock, SOFT_RANK_DEVICES);
    devices = NULL;
    soft_sync_after_fork();
}

static void device_watch_forks(void)
{
    fork_error = pthread_atfork(NULL, NULL, child_after_fork);
}

int soft_watch_forks(void)
{
    pthread_once(&fork_once, device_watch_forks);
    return fork_error ? fork_error : soft_descriptors_watch_forks();
}

static int open_directory_locks(const struct soft_device *device)
{
    return soft_directory_locks(soft_fabric_settings(device));
}

static const struct soft_hooks device_hooks = {
    .poll_peers = soft_fabric_poll,
    .stop_polling = soft_fabric_stop_polling,
    .is_wakeup_channel = soft_fabric_is_wakeup_channel,
    .drop_wakeup_channel = soft_fabric_drop_wakeup_channel,
    .open_directory_locks = open_directory_locks,
    .invalidate_key = soft_read_cache_invalidate_key,
    .invalidate_all = soft_read_cache_invalidate_all,
    .verb_fault = soft_fault_verb_error,
    .purge_held = soft_fault_purge,
    .frame_fault = soft_fault_frame,
    .execute = soft_execute,
    .release_mr = soft_direct_release_mr,
    .release_srq = soft_inbound_drop_srq,
};

/* Let the system choose the port of the device's address, an IPv4 one, and reserve it until the process ends: the GID
 * contains it, and peers find the device again when it is opened again. The socket is bound, does not listen, and lacks
 * SO_REUSEADDR, so no other socket can have the port; see reserve_port() in the fabric. Return 0 or an errno. */
static int choose_port(struct soft_device *device)
{
    struct sockaddr_in name = {.sin_family = AF_INET};
    socklen_t size = sizeof(name);
    int fd, error;

    memcpy(&name.sin_addr, device->address.bytes, sizeof(name.sin_addr));
    soft_descriptors_hold();
    fd = soft_descriptor_own(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    soft_descriptors_release();
    if (fd < 0)
        return errno;
    if (bind(fd, (struct sockaddr *)&name, size) || getsockname(fd, (struct sockaddr *)&name, &size)) {
        error = errno;
        soft_descriptor_close(fd);
        return error;
    }
    device->port_socket = fd;
    device->address.port = ntohs(name.sin_port);
    return 0;
}

static struct soft_device *device_new(const struct soft_address *address)
{
    struct soft_device *device = calloc(1, sizeof(*device));
    int error;

    if (!device)
        return NULL;
    device->hooks = &device_hooks;
    device->address = *address;
    device->port_socket = -1;
    error = address->family && !address->port ? choose_port(device) : 0;
    if (!error)
        error = soft_gids_init(device);
    if (error) {
        soft_descriptor_close(device->port_socket);
        free(device);
        errno = error;
        return NULL;
    }
    if (soft_table_init(&device->qps, SOFT_FIRST_QPN, SOFT_MAX_NUMBER) ||
        soft_table_init(&device->keys, SOFT_FIRST_MR, SOFT_MAX_NUMBER) ||
        soft_table_init(&device->srqs, SOFT_FIRST_SRQ, SOFT_MAX_NUMBER) ||
        soft_mutex_init(&device->lock, SOFT_RANK_DEVICE) || soft_mutex_init(&device->xrcd_lock, SOFT_RANK_XRCD))
        error = ENOMEM;
    if (!error) /* the last step that can fail, since the fabric is never freed */
        error = soft_fabric_new(device, &soft_remote_user);
    if (error) {
        soft_descriptor_close(device->gid_socket);
        soft_descriptor_close(device->port_socket);
        free(device);
        errno = error;
        return NULL;
    }
    device->device.node_type = IBV_NODE_CA;
    device->device.transport_type = IBV_TRANSPORT_IB;
    soft_device_name(&device->address, device->device.name, sizeof(device->device.name));
    memcpy(device->device.dev_name, device->device.name, sizeof(device->device.dev_name));
    return device;
}

/* Return whether the device is the one with this address. Port 0 names the device whose port the system chose for that
 * address, and its port names it as well. */
static bool has_address(const struct soft_device *device, const struct soft_address *address)
{
    struct soft_address asked = *address;

    if (asked.family && !asked.port && device->port_socket >= 0)
        asked.port = device->address.port;
    return soft_address_is_same(&device->address, &asked);
}

static struct soft_device *device_get(const struct soft_address *address)
{
    struct soft_device *device;

    errno = soft_watch_forks();
    if (errno)
        return NULL;
    soft_mutex_take(&device_lock);
    for (device = devices; device && !has_address(device, address);)
        device = device->next;
    if (!device && (device = device_new(address))) {
        device->next = devices;
        devices = device;
    }
    soft_mutex_give(&device_lock);
    return device;
}

/* ---- Contexts -------------------------------------------------------------------------------------------- */

static void link_context(struct soft_context *context, const struct soft_settings *settings)
{
    struct soft_device *device = context->device;
    struct soft_settings usual;

    soft_settings_default(&usual);
    soft_mutex_take(&device->lock);
    if (!device->contexts)
        soft_fabric_configure(device, settings ? settings : &usual);
    context->next = device->contexts;
    context->link = &device->contexts;
    if (context->next)
        context->next->link = &context->next;
    device->contexts = context;
    soft_mutex_give(&device->lock);
}

static void unlink_context(struct soft_context *context)
{
    soft_mutex_take(&context->device->lock);
    *context->link = context->next;
    if (context->next)
        context->next->link = context->link;
    if (!context->device->contexts) /* under the lock, since another context starts a fabric of its own */
        soft_fabric_stop(context->device);
    soft_mutex_give(&context->device->lock);
}

struct ibv_context *soft_open(const struct soft_options *options)
{
    struct soft_device *device;
    struct soft_context *context;
    struct verbs_context *verbs;
    char name[IBV_SYSFS_NAME_MAX];
    int error;

    if (options->error_text)
        options->error_text[0] = 0;
    if ((options->mode != SOFT_INLINE && options->mode != SOFT_THREAD) ||
        (options->mode == SOFT_INLINE && options->delay_ns) ||
        (options->address.family && !soft_address_is_usable(&options->address))) {
        errno = EINVAL;
        return NULL;
    }
    device = device_get(&options->address);
    if (!device) {
        error = errno;
        if (options->error_text && options->address.family && !options->address.port) {
            soft_device_name(&options->address, name, sizeof(name));
            snprintf(options->error_text, SOFT_ERROR_TEXT, "a TCP port of %s: %s", name, strerror(error));
        }
        errno = error;
        return NULL;
    }
    context = calloc(1, sizeof(*context));
    if (!context) {
        errno = ENOMEM;
        return NULL;
    }
    context->device = device;
    context->generation = soft_generation;
    context->mode = options->mode;
    atomic_init(&context->delay_ns, options->delay_ns);
    context->faults = soft_faults_new(atomic_load(&device->serial));
    error = context->faults ? 0 : ENOMEM;
    if (error)
        goto free_context;
    error = soft_worker_init(context);
    if (error)
        goto free_faults;

    verbs = &context->verbs;
    verbs->sz = sizeof(*verbs);
    soft_ops_fill(verbs);
    verbs->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    verbs->context.device = &device->device;
    verbs->context.cmd_fd = -1;
    verbs->context.num_comp_vectors = 1;
    error = soft_events_init(context);
    if (error)
        goto destroy_worker;
    error = pthread_mutex_init(&verbs->context.mutex, NULL);
    if (error)
        goto destroy_events;
    link_context(context, options->settings);
    error = options->address.family ? soft_fabric_listen(device) : 0; /* a device with an address listens at once */
    if (!error)
        return &verbs->context;

    if (options->error_text)
        soft_fabric_error(device, options->error_text, SOFT_ERROR_TEXT);
    unlink_context(context);
    pthread_mutex_destroy(&verbs->context.mutex);
destroy_events:
    soft_events_destroy(context);
destroy_worker:
    soft_worker_destroy(context);
free_faults:
    soft_faults_free(context);
free_context:
    free(context);
    errno = error;
    return NULL;
}

int soft_close_device(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (soft_stale(context))
        return ENODEV;
    if (context->pds || context->parent_domains || context->thread_domains || context->xrcds || context->mrs ||
        context->mws || context->ahs || context->channels || context->cqs || context->srqs || context->qps)
        return EBUSY;
    unlink_context(context); /* from here on no thread raises an event of the port */
    soft_worker_destroy(context);
    soft_events_destroy(context);
    pthread_mutex_destroy(&ibv_context->mutex);
    soft_faults_free(context);
    free(context);
    return 0;
}

bool soft_is_stale(const struct ibv_context *context)
{
    return soft_stale(to_soft_context(context));
}

void soft_get_counts(struct ibv_context *ibv_context, struct soft_counts *counts)
{
    struct soft_context *context = to_soft_context(ibv_context);

    counts->pds = context->pds;
    counts->parent_domains = context->parent_domains;
    counts->thread_domains = context->thread_domains;
    counts->mrs = context->mrs;
    counts->xrcds = context->xrcds;
    counts->mws = context->mws;
    counts->ahs = context->ahs;
    counts->channels = context->channels;
    counts->cqs = context->cqs;
    counts->srqs = context->srqs;
    counts->qps = context->qps;
    counts->overlaps = context->overlaps;
}

int soft_set_delay(struct ibv_context *ibv_context, uint64_t delay_ns)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (context->mode != SOFT_THREAD)
        return EINVAL;
    atomic_store(&context->delay_ns, delay_ns);
    return 0;
}

/* ---- Statistics of the fabric ---------------------------------------------------------------------------- */

void soft_get_fabric_stats(struct ibv_context *context, struct soft_fabric_stats *stats)
{
    soft_fabric_get_stats(to_soft_context(context)->device, stats);
}

size_t soft_get_stream_stats(struct ibv_context *context, struct soft_stream_stats *streams, size_t room)
{
    return soft_fabric_get_streams(to_soft_context(context)->device, streams, room);
}

void soft_get_fabric_error(struct ibv_context *context, char *why)
{
    soft_fabric_error(to_soft_context(context)->device, why, SOFT_ERROR_TEXT);
}

bool soft_has_fabric(const struct ibv_context *context)
{
    return soft_fabric_has_begun(to_soft_context(context)->device);
}

/* ---- Faults of the device -------------------------------------------------------------------------------- */

int soft_set_port(struct ibv_context *ibv_context, bool up)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_device *device = context->device;

    if (soft_stale(context))
        return ENODEV;
    soft_mutex_take(&device->lock);
    if (atomic_exchange(&device->port_down, !up) == up)
        for (context = device->contexts; context; context = context->next)
            if (!(atomic_load(&context->special) & SOFT_SPECIAL_LOST))
                soft_raise_event(context, &context->events.own, up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR);
    soft_mutex_give(&device->lock);
    grace_wait(); /* requests in flight have arrived; as in soft_lose, later ones see that the port is down */
    soft_read_cache_invalidate_all(device);
    return 0;
}

int soft_lose(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);
    bool is_first;

    if (soft_stale(context))
        return ENODEV;
    if (!grace_ready())
        return ENOMEM;
    is_first = !(atomic_fetch_or(&context->special, SOFT_SPECIAL_LOST) & SOFT_SPECIAL_LOST);
    /* Finish executions in progress: either grace_wait sees their section, or they see that the device is lost. For
     * that, a section reads the flag with sequential consistency: on ARMv8.0 a relaxed load may come before the section
     * begins. */
    grace_wait();
    soft_read_cache_invalidate_all(context->device);
    soft_direct_release_context(context);
    if (is_first) /* the receiver of the event may reuse the memory */
        soft_raise_event(context, &context->events.own, IBV_EVENT_DEVICE_FATAL);
    return 0;
}

/* Enter a grace section, if an object of this context can be broken: return 0 or an errno. */
static int break_begin(struct ibv_context *context, struct grace_reader **grace)
{
    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    if (!grace_ready())
        return ENOMEM;
    *grace = grace_enter();
    return 0;
}

int soft_break_qp(struct ibv_qp *qp)
{
    struct grace_reader *grace;
    int error = break_begin(qp->context, &grace);

    if (error)
        return error;
    soft_qp_break(to_soft_qp(qp));
    grace_leave(grace);
    return 0;
}

int soft_break_cq(struct ibv_cq *cq)
{
    struct grace_reader *grace;
    int error = break_begin(cq->context, &grace);

    if (error)
        return error;
    soft_cq_break(to_soft_cq(cq));
    grace_leave(grace);
    return 0;
}

int soft_break_srq(struct ibv_srq *srq)
{
    struct grace_reader *grace;
    int error = break_begin(srq->context, &grace);

    if (error)
        return error;
    soft_srq_break(to_soft_srq(srq));
    grace_leave(grace);
    return 0;
}

void soft_halt(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (soft_stale(context))
        return;
    soft_fabric_halt(context->device);
    soft_worker_halt(context);
}
