/* Completion channels: a file descriptor that is readable while a completion event is pending. If a thread is about to
 * take an event, because it reads what peers sent, the descriptor need not tell that there is one. */
#define _GNU_SOURCE
#include "soft/objects/comp_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/device.h"
#include "soft/objects/hooks.h"

static int channel_make_descriptors(struct soft_channel *channel)
{
    struct epoll_event event = {.events = EPOLLIN};
    int error;

    channel->channel.fd = epoll_create1(EPOLL_CLOEXEC);
    if (channel->channel.fd < 0)
        return errno;
    channel->event_fd = eventfd(0, EFD_CLOEXEC);
    if (channel->event_fd >= 0) {
        if (!epoll_ctl(channel->channel.fd, EPOLL_CTL_ADD, channel->event_fd, &event))
            return 0;
        error = errno;
        close(channel->event_fd);
    } else {
        error = errno;
    }
    close(channel->channel.fd);
    return error;
}

static void close_descriptors(const struct soft_channel *channel)
{
    close(channel->event_fd);
    close(channel->channel.fd);
}

struct ibv_comp_channel *soft_create_comp_channel(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_channel *channel;
    int error;

    if (soft_stale(context)) {
        errno = ENODEV;
        return NULL;
    }
    channel = calloc(1, sizeof(*channel));
    if (!channel) {
        errno = ENOMEM;
        return NULL;
    }
    channel->channel.context = ibv_context;
    error = channel_make_descriptors(channel);
    if (!error) {
        error = soft_mutex_init(&channel->lock, SOFT_RANK_CHANNEL);
        if (error)
            close_descriptors(channel);
    }
    if (error) {
        free(channel);
        errno = error;
        return NULL;
    }
    atomic_fetch_add(&context->channels, 1);
    return &channel->channel;
}

int soft_destroy_comp_channel(struct ibv_comp_channel *ibv_channel)
{
    struct soft_channel *channel = container_of(ibv_channel, struct soft_channel, channel);
    struct soft_context *context = to_soft_context(ibv_channel->context);

    if (soft_stale(context))
        return ENODEV;
    if (atomic_load(&channel->references))
        return EBUSY;
    context->device->hooks->drop_wakeup_channel(context->device, channel);
    close_descriptors(channel);
    soft_mutex_destroy(&channel->lock);
    atomic_fetch_sub(&context->channels, 1);
    free(channel);
    return 0;
}

/* Call under the lock when the list or the number of takers has changed. The counter is 0 or 1, so neither call blocks,
 * whatever flags the user sets on the descriptor; a call fails only where the user has closed the descriptor. */
static void channel_update(struct soft_channel *channel)
{
    bool readable = channel->first && !channel->takers;
    eventfd_t value;

    assert_held(&channel->lock);
    if (readable == channel->readable)
        return;
    channel->readable = readable;
    if (readable)
        (void)eventfd_write(channel->event_fd, 1);
    else
        (void)eventfd_read(channel->event_fd, &value);
}

static void channel_append(struct soft_channel *channel, struct soft_cq *cq)
{
    assert_held(&channel->lock);
    cq->next_event = NULL;
    if (channel->last)
        channel->last->next_event = cq;
    else
        channel->first = cq;
    channel->last = cq;
}

static struct soft_cq *pop(struct soft_channel *channel)
{
    struct soft_cq *cq = channel->first;

    assert_held(&channel->lock);
    if (cq) {
        channel->first = cq->next_event;
        if (!channel->first)
            channel->last = NULL;
    }
    return cq;
}

void soft_channel_notify(struct soft_channel *channel, struct soft_cq *cq)
{
    soft_mutex_take(&channel->lock);
    if (cq->events_pending++ == 0) {
        channel_append(channel, cq);
        channel_update(channel);
    }
    soft_mutex_give(&channel->lock);
}

/* Drop the pending events of a queue that is being destroyed; return how many of its events were ever delivered. */
uint32_t soft_channel_remove_cq(struct soft_channel *channel, struct soft_cq *cq)
{
    struct soft_cq **link, *last = NULL;
    uint32_t delivered;

    soft_mutex_take(&channel->lock);
    if (cq->events_pending) {
        for (link = &channel->first; *link != cq; link = &(*link)->next_event)
            last = *link;
        *link = cq->next_event;
        if (channel->last == cq)
            channel->last = last;
        cq->events_pending = 0;
        channel_update(channel);
    }
    delivered = cq->events_delivered;
    soft_mutex_give(&channel->lock);
    return delivered;
}

static void begin_to_take(struct soft_channel *channel)
{
    soft_mutex_take(&channel->lock);
    channel->takers++;
    soft_mutex_give(&channel->lock);
}

/* Return the queue of the next pending event, or NULL. `begun`: after begin_to_take(). */
static struct soft_cq *channel_take(struct soft_channel *channel, bool begun)
{
    struct soft_cq *cq;

    soft_mutex_take(&channel->lock);
    channel->takers -= begun;
    cq = pop(channel);
    if (cq) {
        cq->events_delivered++;
        if (--cq->events_pending)
            channel_append(channel, cq);
    }
    channel_update(channel);
    soft_mutex_give(&channel->lock);
    return cq;
}

/* Poll peers for a wakeup channel without events: their frames may complete a request that raises one. If peers sent
 * something else, or another thread reads, the channel is no wakeup channel any more: its descriptor would stay
 * readable, although its thread can do nothing. */
static struct soft_cq *take_from_peers(struct soft_device *device, struct soft_channel *channel)
{
    struct soft_cq *cq;
    bool something;

    begin_to_take(channel);
    something = device->hooks->poll_peers(device, true);
    cq = channel_take(channel, true);
    if (something && !cq)
        device->hooks->drop_wakeup_channel(device, channel);
    return cq;
}

int soft_get_cq_event(struct ibv_comp_channel *ibv_channel, struct ibv_cq **ibv_cq, void **cq_context)
{
    struct soft_channel *channel = container_of(ibv_channel, struct soft_channel, channel);
    struct soft_device *device = to_soft_context(ibv_channel->context)->device;
    struct soft_cq *cq;

    for (;;) {
        struct pollfd readable = {.fd = ibv_channel->fd, .events = POLLIN};

        if (soft_stale(to_soft_context(ibv_channel->context))) {
            errno = ENODEV;
            return -1;
        }
        cq = channel_take(channel, false);
        if (!cq && device->hooks->is_wakeup_channel(device, channel))
            cq = take_from_peers(device, channel);
        if (cq) {
            *ibv_cq = (struct ibv_cq *)&cq->ex;
            *cq_context = cq->ex.cq_context;
            return 0;
        }
        if (fcntl(ibv_channel->fd, F_GETFL) & O_NONBLOCK) {
            errno = EAGAIN;
            return -1;
        }
        if (poll(&readable, 1, -1) < 0)
            return -1;
    }
}

void soft_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
    if (soft_stale(to_soft_context(cq->context))) /* another thread may have held the mutex at the fork */
        return;
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += count;
    pthread_cond_signal(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}
