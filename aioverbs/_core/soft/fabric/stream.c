/* A stream: its begin and end, and its sending side. */
#define _GNU_SOURCE
#include "soft/fabric/stream.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/fabric/accept.h"
#include "soft/fabric/copy_token.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/frame_faults.h"
#include "soft/fabric/link.h"
#include "soft/fabric/read_cache.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream_rx.h"
#include "soft/objects/device.h"

/* ---- Beginning ----------------------------------------------------------------------------------------------- */

int soft_stream_init(struct soft_stream *stream, struct soft_fabric *fabric, bool is_link)
{
    stream->watch.what = SOFT_WATCH_STREAM;
    stream->watch.fd = stream->received_fds[0] = stream->received_fds[1] = stream->pidfd = -1;
    stream->fabric = fabric;
    stream->is_link = is_link;
    stream->stage = SOFT_CLOSED;
    return soft_mutex_init(&stream->tx, SOFT_RANK_TX);
}

void soft_stream_destroy(struct soft_stream *stream)
{
    soft_copy_tokens_unmap(stream);
    soft_rings_unmap(stream);
    soft_descriptor_close(stream->pidfd);
    soft_mutex_destroy(&stream->tx);
    free(stream->in);
    free(stream->out);
}

void soft_stream_set_stage(struct soft_stream *stream, enum soft_stage stage)
{
    assert_held(&stream->fabric->progress);
    soft_handshake_count(stream, stage);
    soft_mutex_take(&stream->tx);
    stream->stage = stage;
    soft_stream_watch(stream);
    soft_mutex_give(&stream->tx);
}

static void close_socket(int fd, bool is_unix)
{
    if (is_unix)
        soft_descriptor_close_socket(fd);
    else
        soft_descriptor_close(fd);
}

int soft_stream_begin(struct soft_stream *stream, int fd, bool is_unix, enum soft_stage stage)
{
    struct soft_fabric *fabric = stream->fabric;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &stream->watch};
    static const int room = SOFT_SOCKET_ROOM;
    uint64_t now = soft_now_ns();

    assert_held(&stream->fabric->progress);
    stream->is_unix = is_unix;
    stream->deadline = now + (stream->is_link ? SOFT_CONNECT_NS : SOFT_HANDSHAKE_NS);
    stream->in_begin = stream->in_end = 0;
    stream->refusal = NULL;
    stream->rights = SOFT_RIGHTS_HANDSHAKE;
    stream->discarded = false;
    if (!stream->in)
        stream->in = malloc(SOFT_IN_SIZE);
    if (!stream->out) {
        stream->out_size = stream->is_link ? SOFT_OUT_REQUEST : SOFT_OUT_ANSWERS;
        stream->out = malloc(stream->out_size);
    }
    if (!stream->in || !stream->out || epoll_ctl(fabric->epoll, EPOLL_CTL_ADD, fd, &event)) {
        int error = stream->in && stream->out ? errno : ENOMEM;

        close_socket(fd, is_unix);
        return error;
    }
    if (is_unix) { /* TCP tunes its buffers itself */
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
        soft_descriptors_prepare_socket(fd);
    }
    stream->next = fabric->streams;
    stream->place = &fabric->streams;
    if (stream->next)
        stream->next->place = &stream->next;
    fabric->streams = stream;
    fabric->stream_count++;
    fabric->streams_of[soft_stream_kind(stream)]++;
    soft_mutex_take(&stream->tx);
    stream->watch.fd = fd;
    stream->events = EPOLLIN;
    stream->out_begin = stream->out_end = 0;
    stream->paused = stream->stalled = stream->unfinished = stream->blocked = false;
    atomic_store(&stream->starved, false);
    atomic_store(&stream->broken, false);
    soft_mutex_give(&stream->tx);
    soft_stream_set_stage(stream, stage);
    if (atomic_load(&fabric->sweep_at) > now + 50000000u)
        atomic_store(&fabric->sweep_at, now + 50000000u);
    return 0;
}

/* ---- Ending -------------------------------------------------------------------------------------------------- */

void soft_fabric_record_end(struct soft_fabric *fabric, enum soft_end end, const uint8_t *peer, const char *reason)
{
    struct soft_fabric_event *event;
    struct timespec now;

    assert_held(&fabric->progress);
    switch (end) {
    case SOFT_END_UNUSED:
        return;
    case SOFT_END_LOST:
        fabric->stats.lost++;
        return;
    case SOFT_END_CONNECT:
        fabric->stats.failed_connects++;
        return;
    case SOFT_END_REFUSED_PEER:
        fabric->stats.refused_peers++;
        break;
    case SOFT_END_REFUSED_FRAME:
        fabric->stats.refused_frames++;
        break;
    }
    event = &fabric->stats.event[fabric->event_count++ % SOFT_FABRIC_EVENTS];
    clock_gettime(CLOCK_REALTIME, &now);
    memset(event, 0, sizeof(*event));
    event->time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    if (peer)
        memcpy(event->peer, peer, sizeof(event->peer));
    snprintf(event->reason, sizeof(event->reason), "%s", reason);
}

/* Update the events that epoll watches. A thread on the wakeup channel waits for answers, so the fabric thread sends
 * when a full socket has room again. */
static void set_events(struct soft_stream *stream, uint32_t events)
{
    struct soft_fabric *fabric = stream->fabric;
    uint32_t before = stream->events;

    assert_held(&stream->tx);
    stream->events = events;
    if (before & ~events & EPOLLOUT)
        atomic_fetch_sub(&fabric->outgoing, 1);
    if (events & ~before & EPOLLOUT) {
        atomic_fetch_add(&fabric->outgoing, 1);
        soft_fabric_drop_wakeup_channel(fabric->device, NULL);
    }
}

void soft_stream_drop_received(struct soft_stream *stream)
{
    unsigned int i;

    for (i = 0; i < SOFT_MEMORY_FILES; i++) {
        soft_descriptor_close(stream->received_fds[i]);
        stream->received_fds[i] = -1;
    }
}

void soft_stream_close(struct soft_stream *stream, enum soft_end end, const char *reason)
{
    struct soft_fabric *fabric = stream->fabric;
    struct soft_link *link = stream->is_link ? container_of(stream, struct soft_link, stream) : NULL;
    int fd = stream->watch.fd;

    assert_held(&stream->fabric->progress);
    soft_stream_send_deferred(fabric); /* this stream may owe a doorbell, or pay for one */
    soft_fabric_record_end(fabric, end, stream->peer[0].raw, reason);
    snprintf(stream->reason, sizeof(stream->reason), "%s", reason);
    *stream->place = stream->next;
    if (stream->next)
        stream->next->place = stream->place;
    fabric->stream_count--;
    fabric->streams_of[soft_stream_kind(stream)]--;
    fabric->closes++;
    if (fabric->hot == stream)
        fabric->hot = NULL;
    soft_handshake_count(stream, SOFT_CLOSED);
    atomic_store(&stream->direct, false);
    stream->has_read_cache = false;
    if (link)
        soft_read_cache_suspend(link, true);
    soft_stream_drop_received(stream);
    soft_mutex_take(&stream->tx);
    stream->stage = SOFT_CLOSED;
    soft_rings_unmap(stream);
    stream->watch.fd = -1;
    stream->out_begin = stream->out_end = 0;
    soft_frames_drop_held(stream);
    set_events(stream, 0);
    if (link) {
        link->connect_requested = false;
        link->retry_at = end == SOFT_END_UNUSED ? 0 : soft_now_ns() + SOFT_CONNECT_RETRY_NS;
    }
    soft_mutex_give(&stream->tx);
    epoll_ctl(fabric->epoll, EPOLL_CTL_DEL, fd, NULL);
    close_socket(fd, stream->is_unix);
    /* Their memory is going away: nothing is executed for waiting queue pairs any more. */
    if (link && atomic_load(&fabric->halted))
        return;
    if (link) {
        struct grace_reader *grace = grace_enter();

        soft_link_kick(link, true);
        grace_leave(grace);
        return;
    }
    soft_stream_destroy(stream);
    free(stream);
}

void soft_stream_refuse(struct soft_stream *stream, const char *reason)
{
    if (stream->refusal)
        return;
    stream->refusal = reason;
    stream->refused_as = stream->stage == SOFT_OPEN ? SOFT_END_REFUSED_FRAME : SOFT_END_REFUSED_PEER;
}

/* ---- Sending, under tx --------------------------------------------------------------------------------------- */

void soft_stream_watch(struct soft_stream *stream)
{
    bool uses_rings = stream->ring_out.data && stream->stage == SOFT_OPEN;
    bool reads = !stream->paused && !stream->stalled && !stream->unfinished;
    bool kicks = stream->is_link && stream->stage == SOFT_OPEN &&
                 soft_link_has_waiters(container_of(stream, struct soft_link, stream));
    struct epoll_event event = {.data.ptr = &stream->watch};
    uint32_t events = reads || uses_rings ? EPOLLIN : 0; /* doorbells are always read */

    assert_held(&stream->tx);
    /* EPOLLOUT: the socket has room; of a stream with rings it says only that waiters may go on. An honest peer reads
     * its doorbells, so there is room. Where one does not, the queue pairs that wait for it are not woken, and this
     * device has no wakeup channel, as while the socket of a peer is full that has no rings. */
    if (uses_rings ? kicks && !stream->blocked : stream->stage == SOFT_CONNECTING || stream->blocked || kicks)
        events |= EPOLLOUT;
    if (events == stream->events)
        return;
    set_events(stream, events);
    event.events = events;
    epoll_ctl(stream->fabric->epoll, EPOLL_CTL_MOD, stream->watch.fd, &event);
}

void soft_stream_break(struct soft_stream *stream)
{
    assert_held(&stream->tx);
    atomic_store(&stream->broken, true);
    atomic_store(&stream->starved, false);
    stream->blocked = false;
    stream->out_begin = stream->out_end = 0;
    shutdown(stream->watch.fd, SHUT_RDWR);
}

_Static_assert(SOFT_FRAME_SKIPPED == SOFT_RING_SIZE, "");

static size_t size_of(const struct iovec *pieces, unsigned int count)
{
    size_t size = 0;

    while (count--)
        size += pieces++->iov_len;
    return size;
}

/* Skip the rest of the ring where that keeps its pages untouched by the next `size` bytes. An honest peer leaves the
 * begin of a frame in the ring, so an empty one is between two frames. */
static void skip_rest(struct soft_stream *stream, size_t size)
{
    uint32_t rest = soft_ring_rest(&stream->ring_out, size);
    struct soft_frame frame = {.kind = SOFT_FRAME_SKIP, .size = rest - SOFT_FRAME_SIZE};
    uint8_t header[SOFT_FRAME_SIZE];

    assert_held(&stream->tx);
    if (rest < SOFT_FRAME_SIZE)
        return;
    soft_frame_pack(&frame, header);
    soft_ring_write(&stream->ring_out, &(struct iovec){header, sizeof(header)}, 1); /* there is room */
    soft_ring_pass(&stream->ring_out, frame.size);
}

/* Write as many bytes as the ring takes, without a doorbell. Return their number, or -1 if the stream is broken. */
static ssize_t try_write(struct soft_stream *stream, const struct iovec *pieces, unsigned int count)
{
    int32_t written;

    assert_held(&stream->tx);
    skip_rest(stream, size_of(pieces, count));
    written = soft_ring_write(&stream->ring_out, pieces, count);
    if (written < 0) /* no honest peer writes such an index */
        soft_stream_break(stream);
    return written;
}

/* The same for the socket of a stream that has no rings. */
static ssize_t try_send(struct soft_stream *stream, struct iovec *pieces, unsigned int count)
{
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};
    ssize_t sent;

    assert_held(&stream->tx);
    if (stream->ring_out.data)
        return try_write(stream, pieces, count);
    do
        sent = sendmsg(stream->watch.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return sent;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)
        return 0;
    soft_stream_break(stream);
    return -1;
}

/* Have the peer woken for bytes that were sent. A socket does that by itself. */
static void wake_reader(struct soft_stream *stream)
{
    assert_held(&stream->tx);
    if (stream->ring_out.data)
        soft_rings_notify(stream, SOFT_WANTS_BYTES);
}

/* Queue the bytes of the pieces that were not sent; there is room for them. */
static void queue_unsent(struct soft_stream *stream, const struct iovec *pieces, unsigned int count, size_t sent)
{
    assert_held(&stream->tx);
    if (stream->out_begin == stream->out_end)
        stream->out_begin = stream->out_end = 0;
    for (; count--; pieces++) {
        size_t skip = sent < pieces->iov_len ? sent : pieces->iov_len;

        sent -= skip;
        if (pieces->iov_len == skip)
            continue;
        memcpy(stream->out + stream->out_end, (const char *)pieces->iov_base + skip, pieces->iov_len - skip);
        stream->out_end += (uint32_t)(pieces->iov_len - skip);
    }
}

/* All is sent: the stream has no use for the peer's doorbell. */
static void end_starving(struct soft_stream *stream)
{
    assert_held(&stream->tx);
    if (!atomic_load_explicit(&stream->starved, memory_order_relaxed))
        return;
    soft_ring_unwant(stream->ring_out.own, SOFT_WANTS_ROOM);
    atomic_store_explicit(&stream->starved, false, memory_order_relaxed);
}

bool soft_stream_flush_silently(struct soft_stream *stream)
{
    uint64_t before = stream->bytes_out;

    assert_held(&stream->tx);
    if (!soft_stream_pending(stream) || stream->broken)
        return false;
    do {
        struct iovec rest = {stream->out + stream->out_begin, soft_stream_pending(stream)};
        ssize_t sent = try_send(stream, &rest, 1);

        if (sent < 0)
            return false;
        stream->bytes_out += (uint64_t)sent;
        stream->out_begin += (uint32_t)sent;
        stream->blocked = stream->out_begin != stream->out_end;
    } while (stream->blocked && stream->ring_out.data && soft_rings_want_room(stream));
    if (!stream->blocked) {
        stream->out_begin = stream->out_end = 0;
        end_starving(stream);
    }
    return stream->bytes_out != before;
}

void soft_stream_flush(struct soft_stream *stream)
{
    if (soft_stream_flush_silently(stream))
        wake_reader(stream);
}

int soft_stream_write(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                      unsigned int count)
{
    struct iovec pieces[1 + SOFT_FRAME_SEGMENTS + 1];
    uint8_t header[SOFT_FRAME_SIZE];
    ssize_t sent = 0;
    unsigned int i;

    assert_held(&stream->tx);
    if (stream->broken)
        return EPIPE;
    soft_frame_pack(frame, header);
    pieces[0] = (struct iovec){header, sizeof(header)};
    for (i = 0; i < count; i++)
        pieces[1 + i] = data[i];
    if (!soft_stream_pending(stream))
        sent = try_send(stream, pieces, 1 + count);
    if (sent < 0)
        return EPIPE;
    if (sent)
        wake_reader(stream);
    stream->frames_out++;
    stream->bytes_out += (uint64_t)sent;
    if ((size_t)sent < sizeof(header) + frame->size) {
        queue_unsent(stream, pieces, 1 + count, (size_t)sent);
        stream->blocked = true;
        if (stream->ring_out.data)
            soft_stream_flush(stream); /* there may be room by now; if not, the peer is asked to ring */
    }
    return 0;
}

bool soft_stream_send_message(struct soft_stream *stream, const void *message, size_t size,
                              const int fds[SOFT_MEMORY_FILES])
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(SOFT_MEMORY_FILES * sizeof(int))];
    } control = {0};
    struct iovec piece = {(void *)(uintptr_t)message, size};
    struct msghdr wrapped = {.msg_iov = &piece, .msg_iovlen = 1};
    unsigned int i, count = 0;

    for (i = 0; i < SOFT_MEMORY_FILES; i++)
        if (fds[i] >= 0)
            memcpy(CMSG_DATA(&control.header) + count++ * sizeof(int), &fds[i], sizeof(int));
    if (count) {
        wrapped.msg_control = &control;
        wrapped.msg_controllen = CMSG_SPACE(count * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(count * sizeof(int));
    }
    return sendmsg(stream->watch.fd, &wrapped, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)size;
}

/* ---- Answers ------------------------------------------------------------------------------------------------- */

/* Queue an answer: small ones are sent together when the batch ends. */
static void queue_answer(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                         unsigned int count)
{
    uint8_t header[SOFT_FRAME_SIZE];
    struct iovec first = {header, sizeof(header)};

    soft_frame_pack(frame, header);
    queue_unsent(stream, &first, 1, 0);
    queue_unsent(stream, data, count, 0);
    stream->frames_out++;
}

void soft_stream_answer(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                        unsigned int count)
{
    uint32_t size = SOFT_FRAME_SIZE + frame->size;

    soft_mutex_take(&stream->tx);
    if (stream->broken) {
        soft_mutex_give(&stream->tx);
        return;
    }
    if (size > 4096 && !stream->blocked)
        soft_stream_flush(stream);
    if (soft_has_frame_faults(stream) && !soft_frame_fault_out(stream, frame, data, count)) {
        soft_mutex_give(&stream->tx);
        return;
    }
    if (size > stream->out_size - stream->out_end) /* answers within the promised limits have room */
        soft_stream_refuse(stream, "more was answered than was requested");
    else if (size <= 4096 || stream->blocked)
        queue_answer(stream, frame, data, count);
    else
        soft_stream_write(stream, frame, data, count);
    soft_mutex_give(&stream->tx);
}

/* ---- Queries of the transport -------------------------------------------------------------------------------- */

bool soft_stream_is_from(const struct soft_stream *stream, const union ibv_gid *gid)
{
    return !memcmp(&stream->peer[0], gid, sizeof(*gid)) || !memcmp(&stream->peer[1], gid, sizeof(*gid));
}

const union ibv_gid *soft_stream_gid(const struct soft_stream *stream, unsigned int index)
{
    return &stream->peer[index];
}

bool soft_stream_has_read_cache(const struct soft_stream *stream)
{
    return stream->has_read_cache;
}

struct soft_coalesced_ack *soft_stream_coalesced_ack(struct soft_stream *stream)
{
    return &stream->fabric->ack;
}

struct soft_device *soft_stream_device(const struct soft_stream *stream)
{
    return stream->fabric->device;
}
