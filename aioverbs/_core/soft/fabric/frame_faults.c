/* Faults of a network, on demand: of connections and of single frames. */
#define _GNU_SOURCE
#include "soft/fabric/frame_faults.h"

#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/read_cache.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/stream_rx.h"
#include "soft/objects/device.h"
#include "soft/objects/fault_counts.h"
#include "soft/objects/hooks.h"
#include "soft/objects/qp.h"

/* A delayed frame: one to be sent, or one received and not yet handled. */
struct soft_held_frame {
    struct soft_held_frame *next;
    uint64_t due; /* CLOCK_MONOTONIC */
    bool in;
    struct soft_frame frame;
    uint8_t payload[];
};

#define AGAIN_NS 500000u /* delay after which a due frame is tried again that found no room */

/* ---- Connections ----------------------------------------------------------------------------------------- */

bool soft_stream_matches_gid(const struct soft_stream *stream, const union ibv_gid *gid)
{
    return soft_stream_is_from(stream, gid) ||
           (stream->is_link && soft_link_is_to(container_of(stream, struct soft_link, stream), gid));
}

unsigned int soft_fabric_cut(struct soft_device *device, const union ibv_gid *peer)
{
    struct soft_fabric *fabric = device->fabric;
    struct soft_stream *stream;
    unsigned int count = 0;

    soft_mutex_take(&fabric->progress);
    for (stream = fabric->streams; stream; stream = stream->next) {
        if (peer && !soft_stream_matches_gid(stream, peer))
            continue;
        soft_mutex_take(&stream->tx);
        soft_stream_break(stream);
        soft_mutex_give(&stream->tx);
        if (stream->is_link)
            soft_read_cache_suspend(container_of(stream, struct soft_link, stream), true);
        count++;
    }
    soft_read_cache_invalidate_all(device);
    soft_mutex_give(&fabric->progress);
    return count;
}

unsigned int soft_fabric_stall(struct soft_device *device, const union ibv_gid *peer, bool stall)
{
    struct soft_fabric *fabric = device->fabric;
    struct soft_stream *stream;
    unsigned int count = 0;

    soft_mutex_take(&fabric->progress);
    for (stream = fabric->streams; stream; stream = stream->next) {
        if (stream->stage != SOFT_OPEN || (peer && !soft_stream_matches_gid(stream, peer)))
            continue;
        soft_mutex_take(&stream->tx);
        stream->stalled = stall;
        soft_stream_watch(stream);
        soft_mutex_give(&stream->tx);
        if (!stall && soft_stream_uses_rings(stream))
            soft_rings_disarm(stream); /* the peer was not asked to ring for bytes */
        if (stream->is_link)
            soft_read_cache_suspend(container_of(stream, struct soft_link, stream), stall);
        count++;
    }
    if (stall) /* peers that get no answers any more */
        soft_read_cache_invalidate_all(device);
    else
        soft_fabric_wake(fabric); /* streams may have had more at hand than fitted into a turn */
    soft_mutex_give(&fabric->progress);
    return count;
}

/* ---- Delayed frames -------------------------------------------------------------------------------------- */

/* Arm the timer. Under `held`. Any thread that reads handles the timer. */
static void arm_timer(struct soft_fabric *fabric, uint64_t due)
{
    struct itimerspec when = {.it_value = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)}};

    assert_held(&fabric->held);
    fabric->held_at = due;
    /* Cannot fail: the timer exists and the time is valid. */
    timerfd_settime(fabric->timer.fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void arm_timer_before(struct soft_fabric *fabric, uint64_t due)
{
    soft_mutex_take(&fabric->held);
    if (due < fabric->held_at)
        arm_timer(fabric, due);
    soft_mutex_give(&fabric->held);
}

/* Hold a copy of a frame, behind the frames due before it. Under tx. Return false if it has no room, or there is no
 * memory. */
static bool frame_hold(struct soft_stream *stream, bool in, const struct soft_frame *frame, const struct iovec *data,
                       unsigned int count, uint64_t due)
{
    struct soft_held_frame **place = &stream->held, *held;
    uint32_t size = SOFT_FRAME_SIZE + frame->size;
    uint8_t *to;

    assert_held(&stream->tx);
    if (size > SOFT_HELD_BYTES - stream->held_bytes)
        return false;
    held = malloc(sizeof(*held) + frame->size);
    if (!held)
        return false;
    *held = (struct soft_held_frame){.due = due, .in = in, .frame = *frame};
    for (to = held->payload; count--; to += (data++)->iov_len)
        memcpy(to, data->iov_base, data->iov_len);
    while (*place && (*place)->due <= due)
        place = &(*place)->next;
    held->next = *place;
    *place = held;
    stream->held_bytes += size;
    arm_timer_before(stream->fabric, due);
    return true;
}

/* Apply the fault that the plan has for a frame. Return whether the frame is to be handled or sent now. Under tx. */
static bool apply_fault(struct soft_stream *stream, enum soft_frame_kind kind, const struct soft_frame *frame,
                        const struct iovec *data, unsigned int count)
{
    bool in = kind == SOFT_ANSWER_IN || kind == SOFT_REQUEST_IN;
    struct soft_qp *qp = soft_table_find(&stream->fabric->device->qps, in ? frame->to : frame->from);
    uint64_t delay_ns, now = soft_now_ns();

    assert_held(&stream->tx);
    if (!qp)
        return true;
    switch (stream->fabric->device->hooks->frame_fault(qp, kind, stream, &delay_ns)) {
    case SOFT_DROP:
        return false;
    case SOFT_DUPLICATE:
        frame_hold(stream, in, frame, data, count, now);
        return true;
    case SOFT_DELAY:
        frame_hold(stream, in, frame, data, count, now + delay_ns);
        return false;
    case SOFT_CUT:
        soft_stream_break(stream);
        return false;
    default:
        return true;
    }
}

bool soft_frame_fault_out(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                          unsigned int count)
{
    return apply_fault(stream, stream->is_link ? SOFT_REQUEST_OUT : SOFT_ANSWER_OUT, frame, data, count);
}

bool soft_frame_fault_in(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload)
{
    struct iovec data = {(void *)(uintptr_t)payload, frame->size};
    bool goes_on;

    soft_mutex_take(&stream->tx);
    goes_on = apply_fault(stream, stream->is_link ? SOFT_ANSWER_IN : SOFT_REQUEST_IN, frame, &data, 1);
    soft_mutex_give(&stream->tx);
    return goes_on;
}

static void drop_first(struct soft_stream *stream)
{
    struct soft_held_frame *held = stream->held;

    stream->held = held->next;
    stream->held_bytes -= SOFT_FRAME_SIZE + held->frame.size;
    free(held);
}

void soft_frames_drop_held(struct soft_stream *stream)
{
    assert_held(&stream->tx);
    while (stream->held)
        drop_first(stream);
}

/* Send a delayed frame. Under tx. Return whether it was sent, or never will be. */
static bool held_frame_send(struct soft_stream *stream, const struct soft_held_frame *held)
{
    struct iovec data = {(void *)(uintptr_t)held->payload, held->frame.size};

    assert_held(&stream->tx);
    if (!stream->blocked)
        soft_stream_flush(stream);
    if (!stream->broken && soft_stream_pending(stream))
        return false;
    soft_stream_write(stream, &held->frame, &data, 1);
    soft_stream_watch(stream);
    return true;
}

/* Handle or send the due frames of a stream, as far as there is room. The stream may be closed by that. */
static void release(struct soft_stream *stream, uint64_t now)
{
    struct soft_fabric *fabric = stream->fabric;
    struct soft_held_frame *held;
    bool gone = true;

    assert_held(&stream->fabric->progress);
    soft_mutex_take(&stream->tx);
    while ((held = stream->held) && held->due <= now && gone && !stream->refusal) {
        if (held->in) { /* other frames may be added meanwhile; frames are removed only here */
            stream->held = held->next;
            soft_mutex_give(&stream->tx);
            gone = soft_stream_handle_delayed(stream, &held->frame, held->payload);
            soft_mutex_take(&stream->tx);
            held->next = stream->held;
            stream->held = held;
        } else {
            gone = held_frame_send(stream, held);
        }
        if (gone)
            drop_first(stream);
    }
    if (held)
        arm_timer_before(fabric, gone ? held->due : now + AGAIN_NS);
    soft_mutex_give(&stream->tx);
    if (stream->refusal)
        soft_stream_close(stream, stream->refused_as, stream->refusal);
}

void soft_frames_release_due(struct soft_fabric *fabric, uint64_t now)
{
    struct soft_stream *stream, *next;

    soft_mutex_take(&fabric->held);
    fabric->held_at = UINT64_MAX;
    soft_mutex_give(&fabric->held);
    for (stream = fabric->streams; stream; stream = next) {
        next = stream->next;
        release(stream, now);
    }
}
