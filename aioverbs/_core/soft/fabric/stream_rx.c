/* Receiving side of a stream: bytes become messages of the handshake, and then frames. All under progress. */
#define _GNU_SOURCE
#include "soft/fabric/stream_rx.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/memfd.h"
#include "soft/base/util.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/frame_faults.h"
#include "soft/fabric/handshake.h"
#include "soft/fabric/stream.h"

#define ANSWER_BYTES (512u << 10) /* copied bytes after which queued answers are sent */

/* Turn of one stream, in bytes of data; each frame also counts as FRAME_COST. Whatever a peer sends, other streams and
 * threads that wait for a grace period are delayed only by a turn and its last frame. The number of bytes on the stream
 * says little: a frame of a hundred bytes may have 4 MiB copied. */
#define TURN_BYTES (1 << 20)
#define FRAME_COST 4096

#if !defined(SO_PASSRIGHTS) && defined(SO_ZEROCOPY) && SO_ZEROCOPY == 60 /* numbers of most architectures */
#define SO_PASSRIGHTS 83
#endif

/* Have the kernel refuse descriptors that are sent from here on. Return false if it cannot, before Linux 6.16. */
static bool refuse_rights(int fd)
{
#ifdef SO_PASSRIGHTS
    static const int none = 0;

    return !setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &none, sizeof(none));
#else
    (void)fd;
    return false;
#endif
}

/* Stop accepting descriptors, after the handshake. If the kernel refuses them, descriptors sent before may still be
 * queued, until a read finds the socket empty: sending checks the option and queues under the lock under which reading
 * finds the queue empty. If the kernel cannot refuse them, descriptors may come at any time, and checking before each
 * read takes as long as reading a small message. A peer of this user is not checked, since it could stop the process as
 * well. */
static void stop_rights(struct soft_stream *stream)
{
    if (stream->rights != SOFT_RIGHTS_HANDSHAKE)
        return;
    if (refuse_rights(stream->watch.fd))
        stream->rights = SOFT_RIGHTS_DRAIN;
    else
        stream->rights = stream->uid == geteuid() ? SOFT_RIGHTS_CLOSE : SOFT_RIGHTS_REJECT;
}

/* Read from a Unix socket. A memory file may come with the first bytes, and no descriptor at any other time: recv()
 * would have the kernel close it in this thread. A rejected descriptor stays in the socket, for another thread to
 * close. So does a file that may be larger than asked for: the last close of a file of gigabytes takes a second. */
static ssize_t receive_with_descriptors(struct soft_stream *stream, void *to, size_t size)
{
    int *kept = stream->stage == SOFT_GREETING && !stream->discarded ? &stream->received_fd : NULL;
    bool unwanted = false;
    ssize_t got;

    if (stream->stage == SOFT_OPEN)
        stop_rights(stream);
    got = stream->rights == SOFT_RIGHTS_CLOSE
              ? soft_descriptors_receive_discarding(stream->watch.fd, to, size, &unwanted)
              : soft_descriptors_receive(stream->watch.fd, to, size, kept, &unwanted);
    if (kept && *kept >= 0 && !soft_sealed_is_small(*kept)) {
        soft_descriptor_discard(*kept);
        *kept = -1;
        stream->discarded = true;
    }
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && stream->rights == SOFT_RIGHTS_DRAIN)
        stream->rights = SOFT_RIGHTS_REFUSED;
    if (unwanted)
        soft_stream_refuse(stream, "unexpected descriptors came, or too many for `ulimit -n`");
    return got;
}

static ssize_t receive(struct soft_stream *stream)
{
    uint8_t *to = stream->in + stream->in_end;
    size_t room = SOFT_IN_SIZE - stream->in_end;
    ssize_t got;

    do
        got = stream->is_unix && stream->rights != SOFT_RIGHTS_REFUSED ? receive_with_descriptors(stream, to, room)
                                                                       : recv(stream->watch.fd, to, room, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got > 0) {
        stream->in_end += (uint32_t)got;
        stream->bytes_in += (uint64_t)got;
    }
    return got;
}

/* ---- Handling ------------------------------------------------------------------------------------------------ */

/* Return whether there is room for the answer to a request. If not, pause: nothing is read until there is. */
static bool has_room(struct soft_stream *stream)
{
    bool room;

    soft_mutex_take(&stream->tx);
    if (!stream->blocked && soft_stream_pending(stream) > SOFT_SMALL_ANSWERS - 4096)
        soft_stream_flush(stream);
    room = !stream->blocked && soft_stream_pending(stream) <= SOFT_SMALL_ANSWERS - 4096;
    if (stream->paused == room) {
        stream->paused = !room;
        soft_stream_watch(stream);
    }
    soft_mutex_give(&stream->tx);
    return room;
}

/* Pass a frame to the transport. In a grace section. */
static void dispatch(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload)
{
    const struct soft_fabric_user *user = stream->fabric->user;

    if (!(stream->is_link ? user->response(container_of(stream, struct soft_link, stream), frame, payload)
                          : user->request(stream, frame, payload)))
        soft_stream_refuse(stream, "a frame was refused");
}

/* Send queued answers. */
static void send_answers(struct soft_stream *stream)
{
    soft_mutex_take(&stream->tx);
    if (!stream->blocked)
        soft_stream_flush(stream);
    soft_stream_watch(stream);
    soft_mutex_give(&stream->tx);
}

void soft_stream_send_deferred(struct soft_fabric *fabric)
{
    struct soft_stream *stream = atomic_load(&fabric->deferred);

    assert_held(&fabric->progress);
    if (!stream)
        return;
    atomic_store(&fabric->deferred, NULL);
    send_answers(stream);
}

/* Defer the answers of the stream to the next soft_stream_send_deferred(). The fabric thread clears `thread_yields`
 * before it checks for deferred answers, so one of the two threads sees the other's store. */
static void defer_answers(struct soft_stream *stream)
{
    struct soft_fabric *fabric = stream->fabric;

    if (atomic_load(&fabric->deferred) != stream)
        soft_stream_send_deferred(fabric);
    atomic_store(&fabric->deferred, stream);
    if (!atomic_load(&fabric->thread_yields))
        soft_stream_send_deferred(fabric);
}

/* Summary of the frames handled in a turn. */
struct handled {
    bool answers; /* there are answers to send */
    bool urgent;  /* the peer may wait for one of the answers */
    uint64_t moved;
};

/* Return whether a request is a message, which the polling thread itself receives and answers. Other requests complete
 * without that thread. */
static bool is_message(uint8_t opcode)
{
    return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* Handle one frame. In a grace section. Return its size in bytes, or 0 if it is incomplete, has to wait, or is refused.
 * Its cost is subtracted from `*left` of the turn. */
static uint32_t handle_frame(struct soft_stream *stream, const uint8_t *bytes, uint32_t size, struct handled *handled,
                             int64_t *left)
{
    struct soft_frame frame;
    const char *wrong;

    if (size < SOFT_FRAME_SIZE)
        return 0;
    wrong = soft_frame_parse(bytes, &frame);
    if (!wrong && frame.kind != (stream->is_link ? SOFT_FRAME_RESPONSE : SOFT_FRAME_REQUEST))
        wrong = "a frame of this kind does not belong on this side";
    if (!wrong && frame.flags & SOFT_FRAME_DIRECT && !atomic_load(&stream->direct))
        wrong = "a frame asks for a direct copy, which was not negotiated";
    if (wrong) {
        soft_stream_refuse(stream, wrong);
        return 0;
    }
    if (size - SOFT_FRAME_SIZE < frame.size)
        return 0;
    if (!stream->is_link && !has_room(stream))
        return 0;
    stream->frames_in++;
    bytes += SOFT_FRAME_SIZE;
    if (!soft_has_frame_faults(stream) || soft_frame_fault_in(stream, &frame, bytes))
        dispatch(stream, &frame, bytes);
    handled->moved += frame.part;
    /* Direct data of a link's request is copied by the peer. */
    *left -= FRAME_COST + (stream->is_link ? frame.size : frame.part);
    handled->answers |= !stream->is_link;
    handled->urgent |= !is_message(frame.opcode);
    return SOFT_FRAME_SIZE + frame.size;
}

/* Return whether the next frame of an open stream is complete. */
static bool is_frame_at_hand(const struct soft_stream *stream)
{
    uint32_t size = stream->in_end - stream->in_begin;
    struct soft_frame frame;

    return size >= SOFT_FRAME_SIZE &&
           (soft_frame_parse(stream->in + stream->in_begin, &frame) || size - SOFT_FRAME_SIZE >= frame.size);
}

/* Set whether the stream needs another turn. It gets one after the streams whose events epoll reports before `wake`. */
static void set_unfinished(struct soft_stream *stream, bool unfinished)
{
    if (unfinished)
        soft_fabric_wake(stream->fabric);
    if (stream->unfinished == unfinished)
        return;
    soft_mutex_take(&stream->tx);
    stream->unfinished = unfinished;
    soft_stream_watch(stream);
    soft_mutex_give(&stream->tx);
}

/* Handle the frames at hand, or as many as fit into the turn. Answers are sent together, but do not wait until large
 * data of later frames is copied: the peer goes on meanwhile. */
static void handle(struct soft_stream *stream, int64_t *left)
{
    struct grace_reader *grace = grace_enter();
    struct handled handled = {0};
    uint32_t done;

    do {
        const uint8_t *bytes = stream->in + stream->in_begin;
        uint32_t size = stream->in_end - stream->in_begin;

        if (stream->stage == SOFT_OPEN) {
            done = handle_frame(stream, bytes, size, &handled, left);
            if (handled.answers && handled.moved >= ANSWER_BYTES) {
                stream->fabric->user->batch_end(stream);
                send_answers(stream);
                handled = (struct handled){0};
            }
        } else {
            done = soft_handshake_handle(stream, bytes, size);
        }
        stream->in_begin += done;
    } while (done && *left > 0 && !stream->refusal);
    if (handled.answers) /* even if refused: the coalesced acknowledgement must not go out over another stream */
        stream->fabric->user->batch_end(stream);
    grace_leave(grace);
    if (handled.answers && (handled.urgent || stream->refusal))
        send_answers(stream);
    else if (handled.answers)
        defer_answers(stream);
    /* Make room for the next frame: if it does not fit behind the bytes at hand, move them to the front. */
    if (stream->in_begin == stream->in_end) {
        stream->in_begin = stream->in_end = 0;
    } else if (stream->in_begin && SOFT_IN_SIZE - stream->in_begin < SOFT_FRAME_SIZE + SOFT_FRAGMENT) {
        memmove(stream->in, stream->in + stream->in_begin, stream->in_end - stream->in_begin);
        stream->in_end -= stream->in_begin;
        stream->in_begin = 0;
    }
    set_unfinished(stream, *left <= 0 && !stream->refusal && is_frame_at_hand(stream));
}

bool soft_stream_handle_delayed(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload)
{
    struct grace_reader *grace;

    assert_held(&stream->fabric->progress);
    if (stream->stalled || (!stream->is_link && !has_room(stream)))
        return false;
    grace = grace_enter();
    dispatch(stream, frame, payload);
    if (!stream->is_link)
        stream->fabric->user->batch_end(stream);
    grace_leave(grace);
    if (!stream->is_link)
        send_answers(stream);
    set_unfinished(stream, !stream->refusal && is_frame_at_hand(stream)); /* the stream may have been paused */
    return true;
}

bool soft_stream_receive(struct soft_stream *stream)
{
    bool something = false;
    int64_t left = TURN_BYTES;

    assert_held(&stream->fabric->progress);
    if (stream->stalled)
        return false;
    if (stream->unfinished || (stream->paused && has_room(stream))) { /* frames that had to wait come first */
        something = true;
        handle(stream, &left);
    }
    while (left > 0 && !stream->refusal && !stream->paused) {
        uint32_t room = SOFT_IN_SIZE - stream->in_end;
        ssize_t got = receive(stream);

        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        something = true;
        if (got <= 0) {
            bool unfinished = stream->is_link && stream->stage != SOFT_OPEN;

            soft_stream_close(stream, unfinished ? SOFT_END_CONNECT : SOFT_END_LOST,
                              got ? strerror(errno) : "the peer closed the connection");
            return true;
        }
        if (stream->refusal)
            break; /* for a descriptor that came with the bytes */
        handle(stream, &left);
        if ((uint32_t)got < room && stream->rights != SOFT_RIGHTS_DRAIN)
            break; /* the socket was empty */
    }
    if (stream->refusal) {
        soft_stream_close(stream, stream->refused_as, stream->refusal);
        return true;
    }
    return something;
}
