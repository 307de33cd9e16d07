/* Reading: which thread does it, when that thread sleeps, and when it polls again without sleeping.
 *
 * A thread that sleeps on a completion channel may be woken by peers and read: see soft/fabric/wakeup.c. A thread that
 * polls a completion queue reads too; then the fabric thread yields, and only checks now and then whether that thread
 * still polls. Otherwise the fabric thread sleeps in epoll_wait. After it has handled something it polls for a while
 * (spins), as long as that has paid off lately. */
#define _GNU_SOURCE
#include "soft/fabric/poll_loop.h"

#include <assert.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/fabric/accept.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame_faults.h"
#include "soft/fabric/link.h"
#include "soft/fabric/ring.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/stream_rx.h"
#include "soft/fabric/wakeup.h"
#include "soft/objects/comp_channel.h"
#include "soft/objects/device.h"

enum {
    EVENTS = 32,         /* events per epoll_wait(), and turns of streams that use rings */
    HOT_POLLS = 8,       /* polls of the last active stream, or of rings, for each poll of sockets */
    RING_POLLS = 64,     /* the same, or YIELD_MS, if no frames come through sockets */
    LAST_LOOKS = 4,      /* times that a poller reads rings again, into which peers write meanwhile */
    POLLS_TO_YIELD = 16, /* polls by other threads after which the fabric thread yields */
    YIELD_MS = 1,        /* interval at which the fabric thread checks that the poller still polls */
    SPIN_CREDIT = 4,     /* sleeps longer than the spin time after which the fabric thread spins no more */
};
#define SWEEP_NS 50000000u /* interval while there are handshakes; else a second */

/* ---- Rings, under progress ----------------------------------------------------------------------------------- */

/* Send what is queued, since there may be room, and let waiting queue pairs go on. */
static void send_queued(struct soft_stream *stream)
{
    struct soft_link *link = stream->is_link ? container_of(stream, struct soft_link, stream) : NULL;
    struct grace_reader *grace;

    soft_mutex_take(&stream->tx);
    soft_stream_flush(stream);
    soft_stream_watch(stream);
    soft_mutex_give(&stream->tx);
    if (link && stream->stage == SOFT_OPEN) {
        grace = grace_enter();
        soft_link_kick(link, false);
        grace_leave(grace);
    }
}

/* Return whether a ring that was full has enough room to go on. This is less than the peer waits for before it rings,
 * which a thread that polls need not have it do. */
static bool has_ring_room(struct soft_stream *stream)
{
    uint32_t room = 0;

    if (!atomic_load_explicit(&stream->starved, memory_order_relaxed))
        return false;
    soft_mutex_take(&stream->tx);
    if (!soft_ring_room(&stream->ring_out, &room))
        soft_stream_break(stream);
    soft_mutex_give(&stream->tx);
    return room >= SOFT_RING_ROOM / 2;
}

/* Handle what is in rings, a turn of each stream that has something, and `most` turns at most; the next call goes on
 * with the next stream. Return the number of turns. */
static unsigned int poll_rings(struct soft_fabric *fabric, unsigned int most)
{
    unsigned int turns = 0;
    struct soft_stream *stream;
    uint32_t streams;

    assert_held(&fabric->progress);
    soft_rings_look(fabric);
    streams = fabric->unarmed;
    while (streams-- && turns < most && (stream = soft_rings_next(fabric))) {
        bool something = has_ring_room(stream);

        if (something)
            send_queued(stream);
        if (stream->unfinished || stream->paused || stream->refusal || soft_ring_has_news(&stream->ring_in))
            something |= soft_stream_receive_ring(stream); /* may close the stream, which is something */
        if (!something)
            soft_rings_found_nothing(stream);
        turns += something;
    }
    return turns;
}

/* ---- Handling events, under progress ------------------------------------------------------------------------- */

/* Return whether the event was more than a doorbell for frames that were handled before. */
static bool handle_stream(struct soft_stream *stream, uint32_t events)
{
    struct soft_link *link = stream->is_link ? container_of(stream, struct soft_link, stream) : NULL;

    if (stream->stage == SOFT_CONNECTING) {
        soft_link_connected(link);
        return true;
    }
    if (events & EPOLLOUT || has_ring_room(stream))
        send_queued(stream);
    /* A paused or stalled stream is not read, but its end is noticed. The socket of one with rings is read always. */
    if ((stream->paused || stream->stalled) && events & (EPOLLHUP | EPOLLERR) && !soft_stream_uses_rings(stream)) {
        soft_stream_close(stream, SOFT_END_LOST, "the peer closed the connection");
        return true;
    }
    if (events & ~(uint32_t)EPOLLOUT || stream->paused)
        return soft_stream_receive(stream) || events & EPOLLOUT;
    return true;
}

/* Give streams another turn that had more frames at hand than fit into one. */
static void resume_unfinished(struct soft_fabric *fabric)
{
    struct soft_stream *stream, *next;

    for (stream = fabric->streams; stream; stream = next) {
        next = stream->next;
        if (stream->unfinished)
            soft_stream_receive(stream);
    }
}

bool soft_fabric_handle_events(struct soft_fabric *fabric, const struct epoll_event *events, int count)
{
    const struct soft_watch *listeners[2];
    bool timer_expired = false, woken = false, something = false;
    int i, listener_count = 0;
    eventfd_t value;

    assert_held(&fabric->progress);
    for (i = 0; i < count; i++) {
        struct soft_watch *watch = events[i].data.ptr;

        switch (watch->what) {
        case SOFT_WATCH_WAKE:
            (void)eventfd_read(watch->fd, &value);
            if (atomic_load(&fabric->stop)) /* the wakeup was for the fabric thread */
                soft_fabric_wake(fabric);
            woken = true;
            break;
        case SOFT_WATCH_UNIX:
        case SOFT_WATCH_TCP:
            listeners[listener_count++] = watch;
            break;
        case SOFT_WATCH_TIMER:
            timer_expired = read(watch->fd, &value, sizeof(value)) > 0 || timer_expired;
            break;
        case SOFT_WATCH_STREAM:
            if (count == 1 && !container_of(watch, struct soft_stream, watch)->ring_memory)
                fabric->hot = container_of(watch, struct soft_stream, watch);
            something |= handle_stream(container_of(watch, struct soft_stream, watch), events[i].events);
            continue;
        }
        something = true;
    }
    /* After the other events: accepting may close other streams. */
    for (i = 0; i < listener_count; i++)
        soft_fabric_accept(fabric, listeners[i]);
    if (woken) {
        poll_rings(fabric, EVENTS);
        resume_unfinished(fabric);
        soft_links_connect(fabric);
    }
    if (timer_expired)
        soft_frames_release_due(fabric, soft_now_ns());
    return something;
}

bool soft_fabric_poll_locked(struct soft_fabric *fabric, bool all)
{
    struct epoll_event events[EVENTS];
    bool something = poll_rings(fabric, EVENTS);
    struct soft_stream *hot;
    unsigned int interval = 1;
    int count;

    assert_held(&fabric->progress);
    if (something)
        fabric->hot = NULL; /* the round trip is over a ring */
    hot = fabric->hot;
    /* A round trip is over one stream: reading from it is cheaper than asking epoll. */
    if (hot && (hot->stage != SOFT_OPEN || hot->paused || hot->stalled || hot->unfinished))
        hot = NULL;
    if (hot)
        interval = HOT_POLLS;
    else if (fabric->ring_count && !atomic_load(&fabric->outgoing))
        interval = fabric->ring_count == fabric->stream_count ? RING_POLLS : HOT_POLLS;
    /* A thread that sleeps on the wakeup channel was woken by a doorbell, mostly. What it rang for is handled by now,
     * and the thread reads it when it arms the rings. Anything else that epoll reports wakes that thread again. */
    if (all && something && interval == RING_POLLS)
        all = false;
    if (!all && ++fabric->hot_polls % interval && !atomic_load_explicit(&fabric->sockets_due, memory_order_relaxed))
        return (hot && soft_stream_receive(hot)) || something;
    atomic_store_explicit(&fabric->sockets_due, false, memory_order_relaxed);
    count = epoll_wait(fabric->epoll, events, EVENTS, 0);
    return (count > 0 && soft_fabric_handle_events(fabric, events, count)) || something;
}

/* End a handshake that takes too long. What has come is handled first: it may be this process that is late. */
static void end_overdue_handshake(struct soft_stream *stream)
{
    uint32_t closes = stream->fabric->closes;

    if (stream->stage != SOFT_CONNECTING)
        soft_stream_receive(stream);
    if (stream->fabric->closes == closes && stream->stage != SOFT_OPEN)
        soft_stream_close(stream, stream->is_link ? SOFT_END_CONNECT : SOFT_END_REFUSED_PEER,
                          "the peer did not complete the handshake in time");
}

/* Handle deadlines: end handshakes that take too long, free unused links, and let waiting connections in, for which
 * streams past their time may be closed. And look at rings whose peers have not rung, though they should have. */
void soft_fabric_sweep(struct soft_fabric *fabric, uint64_t now)
{
    struct soft_stream *stream, *next;

    assert_held(&fabric->progress);
    for (stream = fabric->streams; stream; stream = next) {
        next = stream->next;
        if (stream->stage != SOFT_OPEN && stream->deadline <= now)
            end_overdue_handshake(stream);
    }
    soft_rings_sweep(fabric);
    soft_links_sweep(fabric, now);
    soft_listeners_resume(fabric);
    soft_links_connect(fabric);
    atomic_store(&fabric->sweep_at, now + (fabric->handshakes ? SWEEP_NS : 20ull * SWEEP_NS));
}

/* ---- Threads that poll --------------------------------------------------------------------------------------- */

/* Have peers ring again: a thread sleeps, or this one is about to. */
static void arm_again(struct soft_fabric *fabric)
{
    unsigned int looks = 0, turns = 0;

    while (soft_rings_arm(fabric)) {
        if (looks++ == LAST_LOOKS || turns >= EVENTS) {
            soft_fabric_wake(fabric);
            return;
        }
        turns += poll_rings(fabric, EVENTS - turns);
    }
}

bool soft_fabric_poll(struct soft_device *device, bool all)
{
    struct soft_fabric *fabric = device->fabric;
    bool something = false;

    if (!atomic_load_explicit(&fabric->active, memory_order_acquire))
        return false;
    atomic_fetch_add_explicit(&fabric->polls, 1, memory_order_relaxed);
    if (!grace_ready())
        return false;
    if (!soft_mutex_try(&fabric->progress))
        return true;
    if (atomic_load_explicit(&fabric->active, memory_order_relaxed)) {
        if (all || !fabric->polls_for_reply)
            soft_stream_send_deferred(fabric); /* the poller has found nothing more to do */
        else
            fabric->polls_for_reply--;
        something = soft_fabric_poll_locked(fabric, all);
        if (all || !atomic_load(&fabric->thread_yields))
            arm_again(fabric);
    }
    soft_mutex_give(&fabric->progress);
    return something;
}

/* Arm the rings for a thread that is about to sleep on the wakeup channel. If one has something, that thread wakes up
 * again. Return false if another thread reads just now: waking up would be in vain until it has done so. */
static bool arm_for_sleep(struct soft_fabric *fabric)
{
    bool something;

    if (!soft_mutex_try(&fabric->progress))
        return false;
    soft_stream_send_deferred(fabric);
    something = atomic_load_explicit(&fabric->active, memory_order_relaxed) && soft_rings_arm(fabric);
    soft_mutex_give(&fabric->progress);
    if (something)
        soft_fabric_wake(fabric);
    return true;
}

void soft_fabric_stop_polling(struct soft_device *device, struct soft_channel *channel)
{
    struct soft_fabric *fabric = device->fabric;

    if (!atomic_load_explicit(&fabric->active, memory_order_acquire))
        return;
    if (channel && soft_wakeup_channel_set(fabric, channel) && arm_for_sleep(fabric))
        return;
    atomic_store(&fabric->polls, 0);
    if (atomic_load(&fabric->thread_yields))
        soft_fabric_wake(fabric);
}

/* ---- Fabric thread ------------------------------------------------------------------------------------------- */

/* Stop yielding. From here on no thread defers answers; answers deferred before are sent. */
static void resume_thread(struct soft_fabric *fabric)
{
    atomic_store(&fabric->thread_yields, false);
    if (!atomic_load(&fabric->deferred))
        return;
    soft_mutex_take(&fabric->progress);
    soft_stream_send_deferred(fabric);
    soft_mutex_give(&fabric->progress);
}

static bool is_polled(struct soft_fabric *fabric)
{
    return atomic_load(&fabric->polls) >= POLLS_TO_YIELD;
}

/* Sleep while another thread polls: only the timeout and requests for this thread wake it. */
static void yield_to_poller(struct soft_fabric *fabric)
{
    struct pollfd wake = {.fd = fabric->wake.fd, .events = POLLIN};
    unsigned int polls = atomic_load(&fabric->polls);

    atomic_store(&fabric->thread_yields, true);
    atomic_store_explicit(&fabric->sockets_due, true, memory_order_relaxed);
    if (is_polled(fabric) && !atomic_load(&fabric->stop)) /* the poller may have stopped just now */
        poll(&wake, 1, YIELD_MS);
    resume_thread(fabric);
    if (wake.revents || atomic_load(&fabric->polls) == polls)
        atomic_store(&fabric->polls, 0); /* the poller stopped without soft_fabric_stop_polling() */
}

/* Return whether the thread that sleeps on the wakeup channel handles the events; it has YIELD_MS to begin. */
static bool poller_takes_over(struct soft_fabric *fabric)
{
    struct pollfd wake = {.fd = fabric->wake.fd, .events = POLLIN};
    unsigned int polls = atomic_load(&fabric->polls);

    atomic_store(&fabric->thread_yields, true);
    if (atomic_load(&fabric->wakeup_channel)) /* the channel may have been dropped just now */
        poll(&wake, 1, YIELD_MS);
    resume_thread(fabric);
    if (wake.revents || !atomic_load(&fabric->wakeup_channel))
        return false;
    return atomic_load(&fabric->polls) != polls || !soft_wakeup_channel_clear(fabric, NULL);
}

/* Sleep until there is an event or a deadline. */
static int sleep_for_events(struct soft_fabric *fabric, struct epoll_event *events)
{
    uint64_t now = soft_now_ns(), sweep_at = atomic_load(&fabric->sweep_at), left = sweep_at > now ? sweep_at - now : 0;

    return epoll_wait(fabric->epoll, events, EVENTS, (int)(left / 1000000u) + 1);
}

/* Poll again and again (spin). Stop when nothing came for a while, when another thread polls, or at a deadline. */
static void spin(struct soft_fabric *fabric)
{
    uint64_t until = soft_now_ns() + fabric->settings.spin_ns, now;

    do {
        bool something;

        soft_mutex_take(&fabric->progress);
        something = soft_fabric_poll_locked(fabric, false);
        soft_mutex_give(&fabric->progress);
        if (something)
            until = soft_now_ns() + fabric->settings.spin_ns;
        now = soft_now_ns();
    } while (!is_polled(fabric) && !atomic_load(&fabric->stop) && now < until && now < atomic_load(&fabric->sweep_at));
}

/* Handle events that epoll returned while this thread did not hold the lock. */
static void handle_unlocked_events(struct soft_fabric *fabric, const struct epoll_event *events, int count,
                                   uint32_t closes)
{
    uint64_t now = soft_now_ns();

    soft_mutex_take(&fabric->progress);
    poll_rings(fabric, EVENTS);
    if (fabric->closes == closes) /* otherwise a stream may be freed: epoll reports the other events again */
        soft_fabric_handle_events(fabric, events, count);
    if (now >= atomic_load(&fabric->sweep_at))
        soft_fabric_sweep(fabric, now);
    soft_mutex_give(&fabric->progress);
}

/* Arm the rings. Return whether there is nothing to do but to wait for events; `*closes` is for
 * handle_unlocked_events(). */
static bool prepare_to_sleep(struct soft_fabric *fabric, uint32_t *closes)
{
    bool something;

    soft_mutex_take(&fabric->progress);
    assert(!atomic_load(&fabric->deferred)); /* no thread defers any more since this one does not yield */
    something = soft_rings_arm(fabric);
    *closes = fabric->closes;
    soft_mutex_give(&fabric->progress);
    return !something;
}

void *soft_fabric_main(void *argument)
{
    struct soft_fabric *fabric = argument;
    int spin_credit = 0;

    prctl(PR_SET_TIMERSLACK, 1000);
    while (!grace_ready())
        sched_yield(); /* out of memory for one record: peers wait until there is some */
    prctl(PR_SET_NAME, "aioverbs-fabric");
    while (!atomic_load(&fabric->stop)) {
        struct epoll_event events[EVENTS];
        uint64_t slept = soft_now_ns();
        uint32_t closes;
        bool sleeps;
        int count;

        if (is_polled(fabric) && slept < atomic_load(&fabric->sweep_at)) {
            yield_to_poller(fabric);
            continue;
        }
        sleeps = prepare_to_sleep(fabric, &closes);
        count = sleeps ? sleep_for_events(fabric, events) : epoll_wait(fabric->epoll, events, EVENTS, 0);
        if (is_polled(fabric) && soft_now_ns() < atomic_load(&fabric->sweep_at))
            continue; /* the poller reads it */
        if (count > 0 && atomic_load(&fabric->wakeup_channel) && poller_takes_over(fabric))
            continue;
        handle_unlocked_events(fabric, events, count, closes);
        if (sleeps && count <= 0)
            continue;
        /* Spinning pays off if events come within the spin time. */
        if (soft_now_ns() - slept < fabric->settings.spin_ns)
            spin_credit = SPIN_CREDIT;
        else if (spin_credit)
            spin_credit--;
        if (spin_credit && fabric->settings.spin_ns)
            spin(fabric);
    }
    return NULL;
}
