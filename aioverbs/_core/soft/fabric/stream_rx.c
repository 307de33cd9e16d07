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
#include "soft/fabric/ring.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"

#define ANSWER_BYTES (512u << 10) /* copied bytes after which queued answers are sent */
/* Polls for which a doorbell stays owed: more than the tasks of an event loop make before one of them replies. They
 * take less time than the peer to wake up. */
#define POLLS_FOR_REPLY 16

/* Turn of one stream, in bytes of data; each frame also counts as FRAME_COST. Whatever a peer sends, other streams and
 * threads that wait for a grace period are delayed only by a turn and its last frame. The number of bytes on the stream
 * says little: a frame of a hundred bytes may have 4 MiB copied. */
#define TURN_BYTES (1 << 20)
#define FRAME_COST 4096
#define DRAIN_READS 4 /* reads of a socket in a turn of a stream that uses rings */

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

/* Read from a Unix socket. Memory files may come with the first bytes, and no descriptor at any other time: recv()
 * would have the kernel close it in this thread. A rejected descriptor stays in the socket, for another thread to
 * close. So does a file that may be larger than asked for: the last close of a file of gigabytes takes a second. */
static ssize_t receive_with_descriptors(struct soft_stream *stream, void *to, size_t size)
{
    bool may_come = stream->stage == SOFT_GREETING && !stream->discarded && stream->received_fds[0] < 0;
    unsigned int most = !may_come ? 0 : stream->is_link ? SOFT_WELCOME_FILES : SOFT_MEMORY_FILES;
    int *kept = stream->received_fds;
    bool unwanted = false;
    unsigned int i;
    ssize_t got;

    if (stream->stage == SOFT_OPEN)
        stop_rights(stream);
    got = stream->rights == SOFT_RIGHTS_CLOSE
              ? soft_descriptors_receive_discarding(stream->watch.fd, to, size, &unwanted)
              : soft_descriptors_receive(stream->watch.fd, to, size, kept, most, &unwanted);
    for (i = 0; i < most; i++)
        if (kept[i] >= 0 && !soft_sealed_is_small(kept[i])) {
            soft_descriptor_discard(kept[i]);
            kept[i] = -1;
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
    if (got > 0 && !soft_stream_uses_rings(stream)) {
        stream->in_end += (uint32_t)got;
        stream->bytes_in += (uint64_t)got;
    }
    return got;
}

/* ---- Bytes to handle ----------------------------------------------------------------------------------------- */

#define RELEASE_BYTES (SOFT_RING_SIZE / 8) /* read bytes after which a producer may use their places */

/* Return the bytes at hand, of which a ring may get more with each call. They may change while they are read if the
 * peer can write to them: in a ring. */
static const uint8_t *bytes_at_hand(struct soft_stream *stream, uint32_t *size)
{
    if (!soft_stream_uses_rings(stream)) {
        *size = stream->in_end - stream->in_begin;
        return stream->in + stream->in_begin;
    }
    *size = stream->ring_in.tail - stream->ring_in.head;
    return soft_ring_bytes(&stream->ring_in);
}

/* Look whether the peer has written more to the ring, before the socket's end came. */
static void look_for_more(struct soft_stream *stream)
{
    uint32_t available;

    if (!soft_stream_uses_rings(stream) || stream->ended)
        return;
    soft_rings_disarm(stream);
    if (!soft_ring_available(&stream->ring_in, &available))
        soft_stream_refuse(stream, "the peer wrote an invalid index of a ring");
}

/* Let the peer use the places of the bytes that were read, and wake it if it waits for room. */
static void release_ring(struct soft_stream *stream)
{
    soft_ring_release(&stream->ring_in);
    if (soft_ring_free(&stream->ring_in) >= SOFT_RING_ROOM)
        soft_rings_notify(stream, SOFT_WANTS_ROOM);
}

static void advance_in(struct soft_stream *stream, uint32_t done, bool in_ring)
{
    if (!in_ring) {
        stream->in_begin += done;
        return;
    }
    stream->ring_in.head += done;
    stream->bytes_in += done;
    if (stream->ring_in.head - stream->ring_in.released >= RELEASE_BYTES)
        release_ring(stream);
}

/* Make room for the next frame: if it does not fit behind the bytes at hand, move them to the front. */
static void make_room(struct soft_stream *stream)
{
    if (soft_stream_uses_rings(stream)) {
        stream->in_begin = stream->in_end = 0; /* doorbells that came with the end of the handshake */
        if (stream->ring_in.head != stream->ring_in.released)
            release_ring(stream);
    } else if (stream->in_begin == stream->in_end) {
        stream->in_begin = stream->in_end = 0;
    } else if (stream->in_begin && SOFT_IN_SIZE - stream->in_begin < SOFT_FRAME_SIZE + SOFT_FRAGMENT) {
        memmove(stream->in, stream->in + stream->in_begin, stream->in_end - stream->in_begin);
        stream->in_end -= stream->in_begin;
        stream->in_begin = 0;
    }
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
        if (room && soft_stream_uses_rings(stream))
            soft_rings_disarm(stream); /* the peer was not asked to ring for bytes */
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
    struct soft_stream *stream;

    assert_held(&fabric->progress);
    fabric->polls_for_reply = 0;
    while ((stream = atomic_load(&fabric->deferred))) {
        atomic_store(&fabric->deferred, stream->next_deferred);
        stream->is_deferred = false;
        send_answers(stream);
        soft_rings_pay(stream);
    }
}

/* Write the answers to a ring whose reader sleeps, and owe the doorbell, if another one may pay for it. */
static void answer_silently(struct soft_stream *stream)
{
    struct soft_stream *payer = soft_rings_find_payer(stream);

    if (!payer)
        return;
    soft_mutex_take(&stream->tx);
    if (!stream->blocked && soft_stream_flush_silently(stream)) {
        soft_rings_owe(stream, payer);
        stream->fabric->polls_for_reply = POLLS_FOR_REPLY;
    }
    soft_stream_watch(stream);
    soft_mutex_give(&stream->tx);
}

/* Defer the answers of the stream to the next soft_stream_send_deferred(). The fabric thread clears `thread_yields`
 * before it checks for deferred answers, so one of the two threads sees the other's store. */
static void defer_answers(struct soft_stream *stream)
{
    struct soft_fabric *fabric = stream->fabric;

    answer_silently(stream);
    if (!stream->is_deferred) {
        stream->is_deferred = true;
        stream->next_deferred = atomic_load(&fabric->deferred);
        atomic_store(&fabric->deferred, stream);
    }
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
    uint8_t header[SOFT_FRAME_SIZE]; /* a copy: what is checked does not change any more */
    struct soft_frame frame;
    const char *wrong;

    if (size < SOFT_FRAME_SIZE)
        return 0;
    memcpy(header, bytes, sizeof(header));
    wrong = soft_frame_parse(header, &frame);
    if (!wrong && frame.kind == SOFT_FRAME_SKIP && soft_stream_uses_rings(stream)) {
        *left -= FRAME_COST;
        return size - SOFT_FRAME_SIZE < frame.size ? 0 : SOFT_FRAME_SIZE + frame.size;
    }
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
static bool is_frame_at_hand(struct soft_stream *stream)
{
    uint32_t size;
    const uint8_t *bytes = bytes_at_hand(stream, &size);
    uint8_t header[SOFT_FRAME_SIZE];
    struct soft_frame frame;

    if (size < SOFT_FRAME_SIZE)
        return false;
    memcpy(header, bytes, sizeof(header));
    return soft_frame_parse(header, &frame) || size - SOFT_FRAME_SIZE >= frame.size;
}

/* Set whether the stream needs another turn. It gets one after the streams whose events epoll reports before `wake`; if
 * it uses rings, from the next thread that polls, or before a thread sleeps (soft_rings_arm). */
static void set_unfinished(struct soft_stream *stream, bool unfinished)
{
    if (unfinished && soft_stream_uses_rings(stream))
        soft_rings_disarm(stream);
    else if (unfinished)
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

    look_for_more(stream);
    do {
        bool in_ring = soft_stream_uses_rings(stream); /* not yet, if these bytes complete the handshake */
        uint32_t size;
        const uint8_t *bytes = bytes_at_hand(stream, &size);

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
        advance_in(stream, done, in_ring);
    } while (done && *left > 0 && !stream->refusal);
    if (handled.answers) /* even if refused: the coalesced acknowledgement must not go out over another stream */
        stream->fabric->user->batch_end(stream);
    grace_leave(grace);
    if (handled.answers && (handled.urgent || stream->refusal))
        send_answers(stream);
    else if (handled.answers)
        defer_answers(stream);
    make_room(stream);
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

bool soft_stream_receive_ring(struct soft_stream *stream)
{
    uint32_t head = stream->ring_in.head, tail = stream->ring_in.tail;
    int64_t left = TURN_BYTES;

    assert_held(&stream->fabric->progress);
    if (!stream->refusal) { /* otherwise it came with a doorbell */
        if (stream->stalled || atomic_load(&stream->broken) || (stream->paused && !has_room(stream)))
            return false;
        handle(stream, &left);
    }
    if (stream->refusal) {
        soft_stream_close(stream, stream->refused_as, stream->refusal);
        return true;
    }
    /* Part of a frame is something, too: a peer that writes byte by byte takes turns as others do. */
    return stream->ring_in.head != head || stream->ring_in.tail != tail;
}

/* Receive doorbells; until the socket is empty, if it may still have descriptors, but a few times only: a peer may send
 * faster than this thread reads, and epoll reports the rest again. Set whether some came. Return as receive() does. */
static ssize_t receive_bytes(struct soft_stream *stream, bool *some)
{
    unsigned int reads = 0;
    ssize_t got;

    *some = false;
    do {
        got = receive(stream);
        *some |= got > 0;
    } while (got > 0 && stream->rights == SOFT_RIGHTS_DRAIN && !stream->refusal && ++reads < DRAIN_READS);
    if (*some && !stream->is_link)
        soft_rings_look_aside(stream);
    return got;
}

/* The end of the socket epoll reports again. */
void soft_stream_drain_doorbells(struct soft_stream *stream)
{
    bool some;

    assert_held(&stream->fabric->progress);
    if (!stream->rung)
        return;
    receive_bytes(stream, &some);
    stream->rung = !some;
}

/* Close a stream whose socket has ended, after what its peer had written to the ring before is handled, a turn at a
 * time. A stream that is broken or stalled is not read any more, so it is closed at once, whatever is left. */
static void receive_last(struct soft_stream *stream, const char *reason)
{
    int64_t left = TURN_BYTES;
    bool reads = !atomic_load(&stream->broken) && !stream->stalled;

    look_for_more(stream);
    soft_mutex_take(&stream->tx);
    if (stream->ring_out.invalid) /* why this side broke the stream */
        soft_stream_refuse(stream, "the peer wrote an invalid index of a ring");
    soft_mutex_give(&stream->tx);
    stream->ended = true;
    if (reads)
        handle(stream, &left);
    if (stream->refusal)
        soft_stream_close(stream, stream->refused_as, stream->refusal);
    else if (!reads || !stream->unfinished)
        soft_stream_close(stream, SOFT_END_LOST, reason);
}

/* Read from the socket of a stream that uses rings, and then from the ring. */
static bool receive_doorbells(struct soft_stream *stream)
{
    bool some;
    ssize_t got = receive_bytes(stream, &some);

    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) {
        receive_last(stream, got ? strerror(errno) : "the peer closed the connection");
        return true;
    }
    if (some) {
        soft_rings_disarm(stream); /* the peer has taken the wish away */
        stream->rung = false;
    }
    return soft_stream_receive_ring(stream);
}

bool soft_stream_receive(struct soft_stream *stream)
{
    bool something = false;
    int64_t left = TURN_BYTES;

    assert_held(&stream->fabric->progress);
    if (soft_stream_uses_rings(stream))
        return receive_doorbells(stream);
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
        if (soft_stream_uses_rings(stream) && !stream->refusal)
            return soft_stream_receive_ring(stream); /* the handshake is over */
        if ((uint32_t)got < room && stream->rights != SOFT_RIGHTS_DRAIN)
            break; /* the socket was empty */
    }
    if (stream->refusal) {
        soft_stream_close(stream, stream->refused_as, stream->refusal);
        return true;
    }
    return something;
}
