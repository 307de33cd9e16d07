/* A device's fabric: how it starts, how peers find it, and how it stops. */
#define _GNU_SOURCE
#include "soft/fabric/fabric.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>

#include "soft/base/address.h"
#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/fabric/directory.h"
#include "soft/fabric/link.h"
#include "soft/fabric/poll_loop.h"
#include "soft/fabric/read_cache.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/wakeup.h"
#include "soft/objects/device.h"

int soft_fabric_new(struct soft_device *device, const struct soft_fabric_user *user)
{
    struct soft_fabric *fabric;
    int error = soft_descriptors_watch_forks();

    if (error)
        return error;
    fabric = calloc(1, sizeof(*fabric));
    if (!fabric)
        return ENOMEM;
    fabric->device = device;
    fabric->user = user;
    fabric->port = device->address.family ? device->address.port : 0;
    fabric->entry.fd = fabric->epoll = fabric->read_cache_fd = -1;
    fabric->held_at = UINT64_MAX;
    fabric->wake = (struct soft_watch){SOFT_WATCH_WAKE, -1};
    fabric->unix_watch = (struct soft_watch){SOFT_WATCH_UNIX, -1};
    fabric->tcp_watch = (struct soft_watch){SOFT_WATCH_TCP, -1};
    fabric->timer = (struct soft_watch){SOFT_WATCH_TIMER, -1};
    soft_settings_default(&fabric->settings);
    error = soft_mutex_init(&fabric->setup, SOFT_RANK_SETUP);
    if (!error)
        error = soft_mutex_init(&fabric->progress, SOFT_RANK_PROGRESS);
    if (!error)
        error = soft_mutex_init(&fabric->held, SOFT_RANK_HELD);
    if (!error)
        error = soft_mutex_init(&fabric->links, SOFT_RANK_LINKS);
    if (!error)
        error = soft_mutex_init(&fabric->wakeup_lock, SOFT_RANK_WAKEUP);
    if (error)
        free(fabric);
    else
        device->fabric = fabric;
    return error;
}

void soft_fabric_configure(struct soft_device *device, const struct soft_settings *settings)
{
    struct soft_fabric *fabric = device->fabric;

    soft_mutex_take(&fabric->setup);
    if (!fabric->running) {
        fabric->settings = *settings;
        fabric->error[0] = 0;
    }
    soft_mutex_give(&fabric->setup);
}

const struct soft_settings *soft_fabric_settings(const struct soft_device *device)
{
    return &device->fabric->settings;
}

bool soft_fabric_has_begun(const struct soft_device *device)
{
    return atomic_load_explicit(&device->fabric->active, memory_order_relaxed);
}

/* ---- Starting, under setup ----------------------------------------------------------------------------------- */

static int fabric_watch(struct soft_fabric *fabric, struct soft_watch *what, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};

    what->fd = fd;
    return epoll_ctl(fabric->epoll, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

static int fabric_make_descriptors(struct soft_fabric *fabric)
{
    int wake, timer, error;

    soft_descriptors_hold();
    fabric->epoll = soft_descriptor_own(epoll_create1(EPOLL_CLOEXEC));
    wake = fabric->epoll < 0 ? -1 : soft_descriptor_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    timer = wake < 0 ? -1 : soft_descriptor_own(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    error = timer < 0 ? errno : 0;
    fabric->wake.fd = wake;
    fabric->timer.fd = timer;
    soft_descriptors_release();
    if (!error)
        error = fabric_watch(fabric, &fabric->wake, wake);
    return error ? error : fabric_watch(fabric, &fabric->timer, timer);
}

static void drop_descriptors(struct soft_fabric *fabric)
{
    soft_descriptor_close(fabric->timer.fd);
    soft_descriptor_close(fabric->epoll);
    fabric->timer.fd = fabric->epoll = -1;
    fabric->held_at = UINT64_MAX;
}

/* Close the eventfd, when no thread sends any more: any sender may write to it at any time, whether or not the fabric
 * thread exists. */
static void drop_wake(struct soft_fabric *fabric)
{
    soft_descriptor_close(fabric->wake.fd);
    fabric->wake.fd = -1;
}

/* Start the fabric thread, with all signals blocked: they are for the application's threads. */
static int start_thread(struct soft_fabric *fabric)
{
    sigset_t all, before;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&fabric->thread, NULL, soft_fabric_main, fabric);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

void soft_fabric_wake(struct soft_fabric *fabric)
{
    (void)eventfd_write(fabric->wake.fd, 1); /* cannot fail: the counter is never full */
}

static int fabric_start(struct soft_fabric *fabric)
{
    int error;

    if (fabric->running)
        return 0;
    if (atomic_load(&fabric->halted))
        return ECANCELED;
    error = fabric_make_descriptors(fabric);
    atomic_store(&fabric->stop, false);
    if (!error)
        error = start_thread(fabric);
    if (error) {
        drop_descriptors(fabric);
        drop_wake(fabric);
        return error;
    }
    fabric->running = true;
    atomic_store_explicit(&fabric->active, true, memory_order_release);
    return 0;
}

int soft_fabric_start(struct soft_fabric *fabric)
{
    int error;

    /* Executing a datagram holds a sq_lock, in a grace section. A thread that has `setup` may wait for `progress`, and
     * the owner of that for this sq_lock: so this thread must not wait for `setup`. It need not: a thread that begins
     * to listen sets `active` before it waits; one that halts sets `halted` at once; one that stops does so when no
     * queue pair is left; all others hold `setup` briefly. */
    for (;;) {
        if (atomic_load_explicit(&fabric->active, memory_order_acquire))
            return 0;
        if (atomic_load(&fabric->halted))
            return ECANCELED;
        if (soft_mutex_try(&fabric->setup))
            break;
        nanosleep(&(struct timespec){.tv_nsec = SOFT_YIELD_NS}, NULL);
    }
    error = fabric_start(fabric);
    soft_mutex_give(&fabric->setup);
    return error;
}

/* ---- Listening, under setup ---------------------------------------------------------------------------------- */

static int tcp_socket(const struct sockaddr_storage *address, socklen_t size)
{
    static const int one = 1;
    int fd, error;

    soft_descriptors_hold();
    fd = soft_descriptor_own(socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    soft_descriptors_release();
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)); /* earlier connections may linger */
    if (address->ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
    if (!bind(fd, (const struct sockaddr *)address, size) && !listen(fd, SOMAXCONN))
        return fd;
    error = errno;
    soft_descriptor_close(fd);
    errno = error;
    return -1;
}

/* Let the socket that reserves the port of the device, if there is one, keep other sockets from that port, or not. The
 * kernel compares the options of both sockets when one is bound, and again when it begins to listen, so SO_REUSEADDR is
 * set while this process begins to listen. A socket of another process that is bound meanwhile can listen only if that
 * happens before this one listens, and before the option is cleared: then listening fails here. */
static void reserve_port(const struct soft_device *device, bool exclusively)
{
    const int reuse = !exclusively;

    if (device->port_socket >= 0)
        setsockopt(device->port_socket, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
}

/* Listen on TCP, if the device has an address. */
static int listen_tcp(struct soft_fabric *fabric)
{
    struct sockaddr_storage address;
    socklen_t size = soft_gid_address(&fabric->device->gids[1], fabric->port, &address);
    int fd = -1, error = EADDRNOTAVAIL;

    if (size) {
        reserve_port(fabric->device, false);
        fd = tcp_socket(&address, size);
        error = fd < 0 ? errno : fabric_watch(fabric, &fabric->tcp_watch, fd);
        reserve_port(fabric->device, true);
    }
    if (error)
        snprintf(fabric->error, sizeof(fabric->error), "the TCP port of %s: %s", fabric->device->device.name,
                 strerror(error));
    return error;
}

static void close_listeners(struct soft_fabric *fabric)
{
    soft_directory_unregister(&fabric->entry);
    soft_descriptor_close(fabric->tcp_watch.fd);
    fabric->unix_watch.fd = fabric->tcp_watch.fd = -1;
    fabric->listening = false;
}

static int listen_all(struct soft_fabric *fabric)
{
    int error = fabric->port ? listen_tcp(fabric) : 0;

    assert_held(&fabric->setup);
    if (!error)
        error = soft_directory_register(&fabric->settings, fabric->device->gids, &fabric->entry, fabric->error,
                                        sizeof(fabric->error));
    if (!error)
        error = fabric_watch(fabric, &fabric->unix_watch, fabric->entry.fd);
    fabric->listening = !error;
    return error;
}

int soft_fabric_listen(struct soft_device *device)
{
    struct soft_fabric *fabric = device->fabric;
    int error;

    soft_mutex_take(&fabric->setup);
    error = fabric_start(fabric);
    if (error)
        snprintf(fabric->error, sizeof(fabric->error), "the fabric thread does not start: %s", strerror(error));
    if (!error && !fabric->listening) {
        soft_mutex_take(&fabric->progress); /* the thread that reads uses the listeners */
        fabric->error[0] = 0;
        error = listen_all(fabric);
        if (error)
            close_listeners(fabric);
        soft_mutex_give(&fabric->progress);
    }
    soft_mutex_give(&fabric->setup);
    return error;
}

void soft_fabric_error(struct soft_device *device, char *text, size_t size)
{
    soft_mutex_take(&device->fabric->setup);
    snprintf(text, size, "%s", device->fabric->error);
    soft_mutex_give(&device->fabric->setup);
}

/* ---- Stopping ------------------------------------------------------------------------------------------------ */

/* Close all streams. Under progress, after the thread ended. */
static void fabric_close_all(struct soft_fabric *fabric)
{
    struct soft_link *link;
    unsigned int i;

    assert_held(&fabric->progress);
    close_listeners(fabric);
    while (fabric->streams)
        soft_stream_close(fabric->streams, SOFT_END_UNUSED, "the device was closed");
    soft_mutex_take(&fabric->links);
    for (; (link = fabric->first_todo); fabric->first_todo = link->next_todo) {
        link->todo = false;
        soft_mutex_take(&link->stream.tx);
        link->connect_requested = false;
        soft_mutex_give(&link->stream.tx);
    }
    for (i = 0; i < sizeof(fabric->table) / sizeof(fabric->table[0]); i++)
        for (link = fabric->table[i]; link; link = link->next)
            link->unused_since = 0;
    soft_mutex_give(&fabric->links);
}

/* Stop the fabric. `for_good`: the process ends, while other threads may be sending. So grace sections and sq_locks are
 * not waited for, and queue pairs that wait for a link are not kicked. Links, which are freed only after a grace
 * period, stay until no queue pair is left, and so does the eventfd that wakes the thread. */
static void stop(struct soft_fabric *fabric, bool for_good)
{
    soft_mutex_take(&fabric->setup);
    atomic_store(&fabric->halted, for_good); /* before other threads can see that `active` is false */
    if (fabric->running) {
        atomic_store(&fabric->stop, true);
        soft_fabric_wake(fabric);
        pthread_join(fabric->thread, NULL);
        soft_mutex_take(&fabric->progress);
        atomic_store_explicit(&fabric->active, false, memory_order_release);
        soft_wakeup_channel_clear(fabric, NULL); /* from here on no channel becomes the wakeup channel */
        if (for_good || grace_ready())
            fabric_close_all(fabric);
        drop_descriptors(fabric);
        soft_mutex_give(&fabric->progress);
        fabric->running = false;
    }
    if (!for_good && grace_ready()) {
        soft_mutex_take(&fabric->progress);
        soft_links_sweep(fabric, UINT64_MAX);
        soft_mutex_give(&fabric->progress);
    }
    if (for_good)
        soft_links_revoke_tokens(fabric);
    else
        drop_wake(fabric);
    soft_mutex_give(&fabric->setup);
}

void soft_fabric_stop(struct soft_device *device)
{
    stop(device->fabric, false);
    soft_read_cache_destroy(device->fabric);
}

void soft_fabric_halt(struct soft_device *device)
{
    stop(device->fabric, true);
}
