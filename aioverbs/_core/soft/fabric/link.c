/* Links: find them by GID, connect them, send over them, and queue the queue pairs that wait for them. */
#define _GNU_SOURCE
#include "soft/fabric/link.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "soft/base/address.h"
#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/base/util.h"
#include "soft/fabric/accept.h"
#include "soft/fabric/copy_token.h"
#include "soft/fabric/direct_copy.h"
#include "soft/fabric/directory.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/frame_faults.h"
#include "soft/fabric/handshake.h"
#include "soft/fabric/read_cache.h"
#include "soft/fabric/stream.h"
#include "soft/objects/device.h"
#include "soft/objects/link_waiter.h"
#include "soft/objects/qp.h"

/* ---- The table, under fabric->links -------------------------------------------------------------------------- */

static struct soft_link **bucket(struct soft_fabric *fabric, const union ibv_gid *gid)
{
    uint32_t hash = 2166136261u;
    unsigned int i;

    for (i = 0; i < sizeof(gid->raw); i++)
        hash = (hash ^ gid->raw[i]) * 16777619u;
    return &fabric->table[hash % (sizeof(fabric->table) / sizeof(fabric->table[0]))];
}

static struct soft_link *link_find(struct soft_fabric *fabric, const union ibv_gid *gid)
{
    struct soft_link *link;

    for (link = *bucket(fabric, gid); link; link = link->next)
        if (!memcmp(&link->remote, gid, sizeof(*gid)))
            return link;
    return NULL;
}

static struct soft_link *link_make(struct soft_fabric *fabric, const union ibv_gid *gid)
{
    struct soft_link *link = calloc(1, sizeof(*link)), **place = bucket(fabric, gid);

    if (!link)
        return NULL;
    if (soft_stream_init(&link->stream, fabric, true)) {
        free(link);
        return NULL;
    }
    link->remote = link->stream.peer[0] = *gid;
    link->tokens_fd = -1;
    link->next = *place;
    *place = link;
    return link;
}

struct soft_link *soft_link_find(struct soft_fabric *fabric, const union ibv_gid *gid)
{
    struct soft_link *link;

    assert_held(&fabric->progress);
    soft_mutex_take(&fabric->links);
    link = link_find(fabric, gid);
    soft_mutex_give(&fabric->links);
    return link;
}

struct soft_link *soft_link_get(struct soft_device *device, const union ibv_gid *remote)
{
    struct soft_fabric *fabric = device->fabric;
    struct soft_link *link;

    errno = soft_fabric_start(fabric);
    if (errno)
        return NULL;
    soft_mutex_take(&fabric->links);
    link = link_find(fabric, remote);
    if (!link)
        link = link_make(fabric, remote);
    if (link)
        link->references++;
    soft_mutex_give(&fabric->links);
    if (!link)
        errno = ENOMEM;
    return link;
}

void soft_link_put(struct soft_link *link)
{
    struct soft_fabric *fabric = link->stream.fabric;

    soft_mutex_take(&fabric->links);
    if (--link->references == 0)
        link->unused_since = soft_now_ns();
    soft_mutex_give(&fabric->links);
}

static void free_link(struct soft_link *link)
{
    if (link->stream.stage != SOFT_CLOSED)
        soft_stream_close(&link->stream, SOFT_END_UNUSED, "the link is not used");
    soft_read_cache_drop(link, true);
    soft_copy_tokens_destroy(link);
    soft_direct_destroy(link);
    soft_stream_destroy(&link->stream);
    free(link);
}

/* Remove one unused link from the table. One at a time, since closing a link needs fabric->links to be free. */
static struct soft_link *take_unused(struct soft_fabric *fabric, uint64_t now)
{
    struct soft_link **place, *link = NULL;
    unsigned int i;

    soft_mutex_take(&fabric->links);
    for (i = 0; i < sizeof(fabric->table) / sizeof(fabric->table[0]) && !link; i++)
        for (place = &fabric->table[i]; *place; place = &(*place)->next)
            if (!(*place)->references && !(*place)->todo && (*place)->unused_since + SOFT_LINGER_NS <= now) {
                link = *place;
                *place = link->next;
                break;
            }
    soft_mutex_give(&fabric->links);
    return link;
}

/* Return a link that has read cache pages of processes to which it is not connected any more, or NULL. */
static struct soft_link *find_outdated(struct soft_fabric *fabric)
{
    struct soft_link *link, *found = NULL;
    unsigned int i;

    soft_mutex_take(&fabric->links);
    for (i = 0; i < sizeof(fabric->table) / sizeof(fabric->table[0]) && !found; i++)
        for (link = fabric->table[i]; link && !found; link = link->next)
            found = soft_read_cache_is_outdated(link) ? link : NULL;
    soft_mutex_give(&fabric->links);
    return found;
}

void soft_links_sweep(struct soft_fabric *fabric, uint64_t now)
{
    struct soft_link *link;

    assert_held(&fabric->progress);
    while ((link = take_unused(fabric, now)))
        free_link(link);
    while ((link = find_outdated(fabric))) /* links are freed only here, so `link` stays valid */
        soft_read_cache_drop(link, false);
}

/* Revoke the copy tokens of all links. Return whether no peer is copying. With `last`, give up peers that are. */
static bool links_revoke_tokens(struct soft_fabric *fabric, bool last)
{
    struct soft_link *link;
    bool left = true;
    unsigned int i;

    soft_mutex_take(&fabric->links);
    for (i = 0; i < sizeof(fabric->table) / sizeof(fabric->table[0]); i++)
        for (link = fabric->table[i]; link; link = link->next)
            if (!soft_copy_tokens_revoke_all(link)) {
                if (last)
                    soft_copy_tokens_give_up(link);
                else
                    left = false;
            }
    soft_mutex_give(&fabric->links);
    return left;
}

void soft_links_revoke_tokens(struct soft_fabric *fabric)
{
    uint64_t end = soft_now_ns() + SOFT_COPY_TIMEOUT_NS;

    assert_held(&fabric->setup);
    while (!links_revoke_tokens(fabric, soft_now_ns() >= end))
        nanosleep(&(struct timespec){.tv_nsec = SOFT_YIELD_NS}, NULL);
}

/* ---- Connecting, under progress ------------------------------------------------------------------------------ */

static void connect_failed(struct soft_link *link, const char *reason)
{
    struct soft_stream *stream = &link->stream;
    struct grace_reader *grace;

    if (stream->watch.fd >= 0) {
        soft_stream_close(stream, SOFT_END_CONNECT, reason);
        return;
    }
    soft_fabric_record_end(stream->fabric, SOFT_END_CONNECT, link->remote.raw, reason);
    snprintf(stream->reason, sizeof(stream->reason), "%s", reason);
    soft_mutex_take(&stream->tx);
    link->connect_requested = false;
    link->retry_at = soft_now_ns() + SOFT_CONNECT_RETRY_NS;
    soft_mutex_give(&stream->tx);
    grace = grace_enter();
    soft_link_kick(link, true);
    grace_leave(grace);
}

static int new_socket(int family)
{
    int fd;

    soft_descriptors_hold();
    fd = soft_descriptor_own(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    soft_descriptors_release();
    if (fd >= 0 && family != AF_UNIX)
        soft_tcp_options(fd);
    return fd;
}

/* Begin to connect. Return 0 or an errno. */
static int connect_to(struct soft_link *link, const struct sockaddr *address, socklen_t size)
{
    struct soft_stream *stream = &link->stream;
    int fd = new_socket(address->sa_family), error = 0;

    if (fd < 0)
        return errno;
    if (connect(fd, address, size) && errno != EINPROGRESS) {
        error = errno;
        soft_descriptor_close(fd);
        return error;
    }
    error = soft_stream_begin(stream, fd, address->sa_family == AF_UNIX, SOFT_CONNECTING);
    if (!error && stream->is_unix)
        soft_link_connected(link); /* a Unix socket connects at once, or connect() fails */
    return error;
}

/* Connect a link: over the directory's Unix socket, or else over TCP. TCP is used only if this device has an address
 * itself: otherwise a peer that names a GID (as an offer does) could have any process connect to an address of that
 * peer's choice. */
static void connect_link(struct soft_link *link)
{
    struct soft_fabric *fabric = link->stream.fabric;
    struct sockaddr_storage address;
    struct sockaddr_un path;
    socklen_t size;
    int error;

    soft_mutex_take(&link->stream.tx);
    link->attempts++;
    soft_mutex_give(&link->stream.tx);
    error = soft_directory_find(&fabric->settings, &link->remote, &path);
    if (!error)
        error = connect_to(link, (struct sockaddr *)&path, sizeof(path));
    if (error == ENOENT || error == ECONNREFUSED) {
        size = soft_gid_address(&link->remote, fabric->port, &address);
        if (size && !fabric->port) {
            connect_failed(link, "the GID is an IP address, and this device has none: set AIOVERBS_SOFT_ADDRESS");
            return;
        }
        error = size ? connect_to(link, (struct sockaddr *)&address, size) : ENOENT;
    }
    if (error)
        connect_failed(link, error == ENOENT ? "no device with this GID was found" : strerror(error));
}

static bool has_todo(struct soft_fabric *fabric)
{
    bool found;

    soft_mutex_take(&fabric->links);
    found = fabric->first_todo;
    soft_mutex_give(&fabric->links);
    return found;
}

/* Remove the first link of the todo queue. There is one: links are removed under progress only. */
static struct soft_link *take_todo(struct soft_fabric *fabric)
{
    struct soft_link *link;

    soft_mutex_take(&fabric->links);
    link = fabric->first_todo;
    fabric->first_todo = link->next_todo;
    link->todo = false;
    soft_mutex_give(&fabric->links);
    return link;
}

void soft_links_connect(struct soft_fabric *fabric)
{
    assert_held(&fabric->progress);
    while (has_todo(fabric) && soft_handshake_reserve(fabric, SOFT_OUTGOING))
        connect_link(take_todo(fabric));
}

/* Ask the kernel for the process that listens there. Return whether its user is allowed. */
static bool check_peer_process(struct soft_stream *stream)
{
    struct ucred peer;
    socklen_t size = sizeof(peer);
    int pidfd;

    if (getsockopt(stream->watch.fd, SOL_SOCKET, SO_PEERCRED, &peer, &size))
        return false;
    stream->pid = (uint32_t)peer.pid;
    stream->uid = peer.uid;
    pidfd = soft_process_open(stream->pid);
    soft_mutex_take(&stream->tx);
    if (soft_process_has_exited(stream->pidfd)) /* copies of a process that has exited cannot be waited for */
        soft_copy_tokens_free_busy(container_of(stream, struct soft_link, stream));
    soft_descriptor_close(stream->pidfd);
    stream->pidfd = pidfd;
    soft_mutex_give(&stream->tx);
    return soft_settings_allow(&stream->fabric->settings, peer.uid);
}

void soft_link_connected(struct soft_link *link)
{
    struct soft_stream *stream = &link->stream;
    int error = 0;
    socklen_t size = sizeof(error);

    assert_held(&link->stream.fabric->progress);
    getsockopt(stream->watch.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
        connect_failed(link, strerror(error));
        return;
    }
    if (stream->is_unix && !check_peer_process(stream)) {
        soft_stream_close(stream, SOFT_END_REFUSED_PEER,
                          "the peer's user is not allowed: add it to AIOVERBS_SOFT_USERS");
        return;
    }
    soft_stream_set_stage(stream, SOFT_GREETING);
    stream->why_not_direct[0] = stream->why_not_rings[0] = 0;
    if (!soft_handshake_begin(link))
        connect_failed(link, "HELLO could not be sent to the peer");
}

void soft_link_opened(struct soft_link *link)
{
    struct soft_stream *stream = &link->stream;

    assert_held(&link->stream.fabric->progress);
    stream->fabric->stats.connected++;
    soft_mutex_take(&stream->tx);
    stream->connected_times++;
    link->opened = link->attempts;
    soft_mutex_give(&stream->tx);
    soft_stream_set_stage(stream, SOFT_OPEN); /* there is room: waiting queue pairs are kicked */
}

/* ---- Waiting, under tx --------------------------------------------------------------------------------------- */

/* Insert a waiter in the order of tickets. A new ticket is the last; a queue pair whose turn is not over keeps its
 * ticket. */
static void link_wait(struct soft_link *link, struct soft_waiter *waiter)
{
    struct soft_waiter *before = link->last;

    assert_held(&link->stream.tx);
    if (waiter->link)
        return;
    if (!waiter->ticket)
        waiter->ticket = ++link->tickets;
    else
        for (before = NULL;
             (before ? before->next : link->first) && (before ? before->next : link->first)->ticket < waiter->ticket;)
            before = before ? before->next : link->first;
    waiter->link = link;
    waiter->before = before;
    waiter->next = before ? before->next : link->first;
    *(before ? &before->next : &link->first) = waiter;
    *(waiter->next ? &waiter->next->before : &link->last) = waiter;
    link->waiting++;
}

static void link_stop_waiting(struct soft_link *link, struct soft_waiter *waiter)
{
    assert_held(&link->stream.tx);
    *(waiter->before ? &waiter->before->next : &link->first) = waiter->next;
    *(waiter->next ? &waiter->next->before : &link->last) = waiter->before;
    waiter->link = NULL;
    waiter->next = waiter->before = NULL;
    link->waiting--;
}

void soft_link_kick(struct soft_link *link, bool all)
{
    struct soft_stream *stream = &link->stream;
    unsigned int limit, kicked;

    assert_held(&link->stream.fabric->progress);
    soft_mutex_take(&stream->tx);
    /* The rest follow in the next turn: when another thread executes them, there is room for long. */
    limit = all ? link->waiting : 16;
    for (kicked = 0; kicked < limit && link->first && (all || !(stream->blocked || stream->broken)); kicked++) {
        struct soft_waiter *waiter = link->first;

        link_stop_waiting(link, waiter);
        if (waiter->allowance <= 0) /* bytes sent beyond the last turn count */
            waiter->allowance += SOFT_TURN_BYTES;
        /* The queue pair cannot be freed: soft_link_forget() needs this lock, and then waits for this grace section. */
        soft_mutex_give(&stream->tx);
        stream->fabric->user->kick(container_of(waiter, struct soft_qp, waiter));
        soft_mutex_take(&stream->tx);
    }
    if (stream->stage != SOFT_CLOSED)
        soft_stream_watch(stream);
    soft_mutex_give(&stream->tx);
}

void soft_link_forget(struct soft_link *link, struct soft_qp *qp)
{
    soft_mutex_take(&link->stream.tx);
    if (qp->waiter.link == link)
        link_stop_waiting(link, &qp->waiter);
    qp->waiter.ticket = 0;
    qp->waiter.allowance = 0;
    qp->waiter.attempt = 0;
    soft_mutex_give(&link->stream.tx);
}

/* ---- Sending ------------------------------------------------------------------------------------------------- */

/* Wait for a connection. Under tx. Set `*make` if one is to be requested. If an attempt had begun before `waiter`
 * asked, its failure says nothing about the peer: the attempt may have gone to a previous process. Nor does an attempt
 * that succeeded, if its connection ended before it was the turn of `waiter`. */
static int wait_for_connection(struct soft_link *link, struct soft_waiter *waiter, bool *make)
{
    bool attempt_failed = waiter->attempt > link->opened && waiter->attempt <= link->attempts;

    assert_held(&link->stream.tx);
    if (waiter->attempt <= link->opened)
        waiter->attempt = link->attempts + 1;
    if (link->stream.stage == SOFT_CLOSED) {
        if (link->retry_at && link->retry_at > soft_now_ns()) {
            waiter->retry_at = attempt_failed ? 0 : link->retry_at;
            if (attempt_failed)
                waiter->attempt = 0;
            return EHOSTUNREACH;
        }
        *make = !link->connect_requested;
        link->connect_requested = true;
    }
    link_wait(link, waiter);
    return ENOTCONN;
}

static void request_connection(struct soft_link *link)
{
    struct soft_fabric *fabric = link->stream.fabric;

    soft_mutex_take(&fabric->links);
    link->todo = true;
    link->next_todo = NULL;
    *(fabric->first_todo ? &fabric->last_todo->next_todo : &fabric->first_todo) = link;
    fabric->last_todo = link;
    soft_mutex_give(&fabric->links);
    soft_fabric_wake(fabric);
}

int soft_link_send(struct soft_link *link, struct soft_qp *qp, const struct soft_frame *frame, const struct iovec *data,
                   unsigned int count)
{
    struct soft_stream *stream = &link->stream;
    struct soft_waiter *waiter = &qp->waiter;
    bool make = false;
    int error = 0;

    assert_held(&qp->sq_lock);
    soft_mutex_take(&stream->tx);
    if (stream->stage == SOFT_OPEN)
        waiter->attempt = 0;
    if (stream->stage != SOFT_OPEN) {
        error = wait_for_connection(link, waiter, &make);
    } else if (waiter->link || stream->blocked || stream->broken || (link->first && waiter->allowance <= 0)) {
        error = EAGAIN;
    } else if (soft_has_frame_faults(stream) && !soft_frame_fault_out(stream, frame, data, count)) {
        error = 0; /* to the sender, the frame is on its way */
    } else if (soft_stream_write(stream, frame, data, count)) {
        error = EAGAIN; /* the stream broke: closing it kicks the waiters */
    } else {
        if (waiter->allowance > 0)
            waiter->allowance -= SOFT_FRAME_SIZE + frame->size;
        if (waiter->allowance <= 0)
            waiter->ticket = 0;
        if (stream->blocked)
            soft_stream_watch(stream);
    }
    if (error == EAGAIN) {
        link_wait(link, waiter);
        soft_stream_watch(stream);
    }
    soft_mutex_give(&stream->tx);
    if (make)
        request_connection(link);
    return error;
}

bool soft_link_is_to(const struct soft_link *link, const union ibv_gid *gid)
{
    return !memcmp(&link->remote, gid, sizeof(*gid));
}

bool soft_link_has_frame_faults(const struct soft_link *link)
{
    return soft_has_frame_faults(&link->stream);
}

struct soft_stream *soft_link_stream(struct soft_link *link)
{
    return &link->stream;
}
