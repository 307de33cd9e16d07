/* Peers that connect: check them, and limit their number. All under progress. */
#define _GNU_SOURCE
#include "soft/fabric/accept.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/stream.h"

enum {
    MAX_ACCEPTS = 16, /* accepted connections per turn */
    MAX_CHECKED = 8,  /* streams that are checked for connected queue pairs, to find one to evict */
};

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

/* ---- Limits -------------------------------------------------------------------------------------------------- */

/* A peer that connects and sends nothing spends next to nothing, so there may be very many of them. Each kind of
 * streams has SOFT_MAX_HANDSHAKES places for handshakes. A connection that finds no place waits, in the listener's
 * backlog or in the queue of links to be connected; the end of a handshake makes room for it. No connection is rejected
 * for want of a place.
 *
 * If a connection waits and no handshake ends, the oldest handshake is evicted that has had SOFT_PATIENCE_NS; one that
 * sent nothing at all goes before one that sent HELLO. Whether the waiting connection will answer cannot be known
 * before it has a place. So silent peers delay honest ones by SOFT_PATIENCE_NS for each SOFT_MAX_HANDSHAKES of them
 * that came before, and keep none out; and a handshake that makes progress is never given up, unless it takes that
 * long.
 *
 * A connection in a backlog has at most SOMAXCONN before it, and silent peers that connect again are behind it: its
 * turn comes within the SOFT_CONNECT_NS for which it waits. */
_Static_assert(SOMAXCONN / SOFT_MAX_HANDSHAKES < SOFT_CONNECT_NS / SOFT_PATIENCE_NS, "");

static bool is_unfinished(enum soft_stage stage)
{
    return stage != SOFT_CLOSED && stage != SOFT_OPEN;
}

static struct soft_watch *listener_of(struct soft_fabric *fabric, enum soft_kind kind)
{
    return kind == SOFT_SERVED_UNIX ? &fabric->unix_watch : &fabric->tcp_watch;
}

static void set_listener_paused(struct soft_fabric *fabric, enum soft_kind kind, bool rest)
{
    struct soft_watch *listener = listener_of(fabric, kind);
    struct epoll_event event = {.events = rest ? 0 : EPOLLIN, .data.ptr = listener};

    if (fabric->listener_paused[kind] != rest && listener->fd >= 0)
        epoll_ctl(fabric->epoll, EPOLL_CTL_MOD, listener->fd, &event);
    fabric->listener_paused[kind] = rest;
}

void soft_listeners_resume(struct soft_fabric *fabric)
{
    set_listener_paused(fabric, SOFT_SERVED_UNIX, false);
    set_listener_paused(fabric, SOFT_SERVED_TCP, false);
}

/* Return whether the stream also has a pidfd of its peer's process, or may get one. */
static bool uses_two_descriptors(const struct soft_stream *stream, enum soft_stage stage)
{
    return stream->is_unix && (is_unfinished(stage) || (stage == SOFT_OPEN && stream->pidfd >= 0));
}

void soft_handshake_count(struct soft_stream *stream, enum soft_stage stage)
{
    struct soft_fabric *fabric = stream->fabric;
    enum soft_kind kind = soft_stream_kind(stream);
    bool was_full = fabric->handshakes_of[kind] >= SOFT_MAX_HANDSHAKES;
    int change = is_unfinished(stage) - is_unfinished(stream->stage);

    fabric->handshakes += (uint32_t)change;
    fabric->handshakes_of[kind] += (uint32_t)change;
    fabric->two_descriptors_of[kind] +=
        (uint32_t)(uses_two_descriptors(stream, stage) - uses_two_descriptors(stream, stream->stage));
    if (change >= 0)
        return;
    if (kind != SOFT_OUTGOING)
        set_listener_paused(fabric, kind, false);
    else if (was_full)
        soft_fabric_wake(fabric); /* the thread that reads connects the next link */
}

/* Return whether `one` is evicted before `other`. */
static bool is_evicted_before(const struct soft_stream *one, const struct soft_stream *other)
{
    if ((one->stage == SOFT_PROVING) != (other->stage == SOFT_PROVING))
        return other->stage == SOFT_PROVING;
    return one->deadline < other->deadline;
}

bool soft_handshake_reserve(struct soft_fabric *fabric, enum soft_kind kind)
{
    uint64_t all = kind == SOFT_OUTGOING ? SOFT_CONNECT_NS : SOFT_HANDSHAKE_NS;
    uint64_t latest = soft_now_ns() + all - SOFT_PATIENCE_NS;
    struct soft_stream *stream, *first = NULL;

    assert_held(&fabric->progress);
    if (fabric->handshakes_of[kind] < SOFT_MAX_HANDSHAKES)
        return true;
    for (stream = fabric->streams; stream; stream = stream->next)
        if (is_unfinished(stream->stage) && soft_stream_kind(stream) == kind && stream->deadline <= latest &&
            (!first || is_evicted_before(stream, first)))
            first = stream;
    if (first)
        soft_stream_close(first, first->is_link ? SOFT_END_CONNECT : SOFT_END_REFUSED_PEER,
                          "the peer did not complete the handshake in time, and another connection waits");
    return first;
}

/* Return whether there is no room for another served stream of this kind. Served streams may use half of the process's
 * descriptors, a quarter for each kind; the others are the application's. A stream over a Unix socket uses two if its
 * peer makes direct copies, and counts as two until that is known. */
static bool is_full(const struct soft_fabric *fabric, enum soft_kind kind)
{
    uint32_t streams = fabric->streams_of[kind];
    struct rlimit limit;

    if (!streams || getrlimit(RLIMIT_NOFILE, &limit))
        return streams >= SOFT_MAX_SERVED;
    return streams >= SOFT_MAX_SERVED || streams + fabric->two_descriptors_of[kind] >= limit.rlim_cur / 4;
}

/* Return the stream of this kind whose time has been over for longest, or NULL. */
static struct soft_stream *find_overdue(struct soft_fabric *fabric, enum soft_kind kind, uint64_t now)
{
    struct soft_stream *stream, *first = NULL;

    for (stream = fabric->streams; stream; stream = stream->next) {
        uint64_t patience = is_unfinished(stream->stage) ? SOFT_HANDSHAKE_NS - SOFT_PATIENCE_NS : 0;

        if (soft_stream_kind(stream) == kind && stream->deadline <= now + patience &&
            (!first || stream->deadline < first->deadline))
            first = stream;
    }
    return first;
}

/* Make room for one more served stream of this kind, which is waiting. Return whether there is room.
 *
 * If there are as many as may be, evict a stream to which no queue pair is connected, and which has had
 * SOFT_HANDSHAKE_NS. Evict one more if the first had a single descriptor. The evicted peer connects again when it has
 * something to send. A stream to which a queue pair is connected has as much time again before it is checked anew. If
 * such streams have all places, the connection waits for as long as they stay; that is recorded once. */
static bool accept_reserve(struct soft_fabric *fabric, enum soft_kind kind)
{
    static const char crowded[] = "connected peers use a quarter of `ulimit -n` (or 4096 streams): raise that limit";
    uint64_t now = soft_now_ns();
    struct soft_stream *stream;
    unsigned int checked;

    for (checked = 0; is_full(fabric, kind); checked++) {
        struct grace_reader *grace;
        bool expected;

        stream = checked < MAX_CHECKED ? find_overdue(fabric, kind, now) : NULL;
        if (!stream) {
            if (checked && !fabric->crowding_recorded[kind]) {
                fabric->crowding_recorded[kind] = true;
                soft_fabric_record_end(fabric, SOFT_END_REFUSED_PEER, NULL, crowded);
            }
            return false;
        }
        grace = grace_enter();
        expected = stream->stage == SOFT_OPEN && fabric->user->is_connected_to_peer(stream);
        grace_leave(grace);
        if (expected)
            stream->deadline = now + SOFT_HANDSHAKE_NS;
        else
            soft_stream_close(stream, SOFT_END_REFUSED_PEER,
                              "no queue pair is connected to the peer, and another connection waits");
    }
    fabric->crowding_recorded[kind] = false;
    return true;
}

/* ---- Credentials --------------------------------------------------------------------------------------------- */

/* Return NULL, or why the peer is rejected. */
static const char *check_peer(struct soft_fabric *fabric, int fd, bool is_unix, struct ucred *peer)
{
    socklen_t size = sizeof(*peer);

    if (is_unix && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, peer, &size))
        return "the kernel does not report the peer's user";
    if (is_unix && !soft_settings_allow(&fabric->settings, peer->uid))
        return "the peer's user is not allowed: add it to AIOVERBS_SOFT_USERS";
    return NULL;
}

static void accept_stream(struct soft_fabric *fabric, int fd, bool is_unix)
{
    struct ucred peer = {.uid = (uid_t)-1};
    const char *wrong = check_peer(fabric, fd, is_unix, &peer);
    struct soft_stream *stream = wrong ? NULL : calloc(1, sizeof(*stream));

    if (!wrong && (!stream || soft_stream_init(stream, fabric, false))) {
        free(stream);
        wrong = "no memory for another peer";
    }
    if (wrong) {
        if (is_unix)
            soft_descriptor_close_socket(fd);
        else
            soft_descriptor_close(fd);
        soft_fabric_record_end(fabric, SOFT_END_REFUSED_PEER, NULL, wrong);
        return;
    }
    if (!is_unix)
        soft_tcp_options(fd);
    stream->pid = (uint32_t)peer.pid;
    stream->uid = peer.uid;
    if (soft_stream_begin(stream, fd, is_unix, SOFT_GREETING)) {
        soft_stream_destroy(stream);
        free(stream);
        soft_fabric_record_end(fabric, SOFT_END_REFUSED_PEER, NULL, "no memory for another peer");
    }
}

/* Return whether a connection waits. No stream is evicted for one that was closed, or accepted by another thread. */
static bool has_pending_connection(const struct soft_watch *listener)
{
    struct pollfd ready = {.fd = listener->fd, .events = POLLIN};

    return poll(&ready, 1, 0) > 0;
}

void soft_fabric_accept(struct soft_fabric *fabric, const struct soft_watch *listener)
{
    enum soft_kind kind = listener->what == SOFT_WATCH_UNIX ? SOFT_SERVED_UNIX : SOFT_SERVED_TCP;
    int count, fd;

    assert_held(&fabric->progress);
    for (count = 0; count < MAX_ACCEPTS; count++) {
        if ((is_full(fabric, kind) || fabric->handshakes_of[kind] >= SOFT_MAX_HANDSHAKES) &&
            !has_pending_connection(listener))
            return;
        /* Even a rejected connection may leave a socket to be closed. */
        if (kind == SOFT_SERVED_UNIX && soft_descriptors_are_stuck()) {
            if (has_pending_connection(listener))
                soft_fabric_record_end(fabric, SOFT_END_REFUSED_PEER, NULL,
                                       "descriptors that a peer sent cannot be closed");
            set_listener_paused(fabric, kind, true);
            return;
        }
        if (!soft_handshake_reserve(fabric, kind) || !accept_reserve(fabric, kind)) {
            set_listener_paused(fabric, kind, true);
            return;
        }
        soft_descriptors_hold();
        fd = soft_descriptor_own(accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
        soft_descriptors_release();
        if (fd >= 0) {
            accept_stream(fabric, fd, kind == SOFT_SERVED_UNIX);
            continue;
        }
        /* The connection stays in the backlog, and the listener would be ready for ever. */
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            soft_fabric_record_end(fabric, SOFT_END_REFUSED_PEER, NULL, "no descriptors are left for another peer");
            set_listener_paused(fabric, SOFT_SERVED_UNIX, true);
            set_listener_paused(fabric, SOFT_SERVED_TCP, true);
        }
        return; /* no connection is left, or one was closed meanwhile: epoll reports the others */
    }
}
