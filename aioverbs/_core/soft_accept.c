/* Peers that connect: who may, and how many. All under progress. */
#define _GNU_SOURCE
#include "soft_stream.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "soft_descriptors.h"

enum { AT_ONCE = 16 }; /* in one turn */

void soft_tcp_options(int fd)
{
    static const int one = 1, idle_s = 5, again_s = 2, times = 3, unacknowledged_ms = 10000;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &again_s, sizeof(again_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof(times));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof(unacknowledged_ms));
}

/* NULL, or why the peer may not be one. */
static const char *check_peer(struct soft_fabric *fabric, int fd, bool is_unix, struct ucred *peer)
{
    socklen_t size = sizeof(*peer);

    if (is_unix && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, peer, &size))
        return "the peer's user cannot be told";
    if (is_unix && !soft_settings_allow(&fabric->settings, peer->uid))
        return "the peer is of a user that is not allowed: AIOVERBS_SOFT_USERS names others";
    if (fabric->handshakes >= SOFT_MAX_HANDSHAKES)
        return "too many peers that connect have not said who they are";
    if (fabric->served_count >= SOFT_MAX_SERVED)
        return "too many peers are connected";
    return NULL;
}

static void serve(struct soft_fabric *fabric, int fd, bool is_unix)
{
    struct ucred peer = {.uid = (uid_t)-1};
    const char *wrong = check_peer(fabric, fd, is_unix, &peer);
    struct soft_stream *stream = wrong ? NULL : calloc(1, sizeof(*stream));

    if (!wrong && (!stream || soft_stream_init(stream, fabric, false))) {
        free(stream);
        wrong = "no memory for another peer";
    }
    if (wrong) {
        soft_descriptor_close(fd);
        soft_fabric_note(fabric, SOFT_END_REFUSED_PEER, NULL, wrong);
        return;
    }
    if (!is_unix)
        soft_tcp_options(fd);
    stream->pid = (uint32_t)peer.pid;
    stream->uid = peer.uid;
    if (soft_stream_begin(stream, fd, is_unix, SOFT_GREETING)) {
        soft_stream_destroy(stream);
        free(stream);
        soft_fabric_note(fabric, SOFT_END_REFUSED_PEER, NULL, "no memory for another peer");
    }
}

void soft_listeners_rest(struct soft_fabric *fabric, bool rest)
{
    const struct soft_watch *listeners[] = {&fabric->unix_watch, &fabric->tcp_watch};
    struct epoll_event event = {.events = rest ? 0 : EPOLLIN};
    unsigned int i;

    fabric->listeners_rest = rest;
    for (i = 0; i < 2; i++) {
        event.data.ptr = (void *)(uintptr_t)listeners[i];
        if (listeners[i]->fd >= 0)
            epoll_ctl(fabric->epoll, EPOLL_CTL_MOD, listeners[i]->fd, &event);
    }
}

void soft_fabric_accept(struct soft_fabric *fabric, const struct soft_watch *listener)
{
    int count, fd;

    for (count = 0; count < AT_ONCE; count++) {
        soft_descriptors_hold();
        fd = soft_descriptor_own(accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
        soft_descriptors_release();
        if (fd >= 0) {
            serve(fabric, fd, listener->what == SOFT_WATCH_UNIX);
            continue;
        }
        /* Who waits goes on waiting: the listener would be ready for ever. */
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            soft_fabric_note(fabric, SOFT_END_REFUSED_PEER, NULL, "no descriptors are left for another peer");
            soft_listeners_rest(fabric, true);
        }
        return; /* none is left, or one went away meanwhile: then epoll tells of the others */
    }
}
