/* The wakeup channel: a completion channel on which waiting for completions is also waiting for peers.
 *
 * A thread that arms a completion queue and sleeps on its channel's descriptor would be woken by the fabric thread,
 * which was woken by the socket: one context switch too many. So one channel may be the wakeup channel: the fabric's
 * epoll descriptor is added to that channel's. A thread that sleeps there wakes up when a peer sends something, reads
 * it in get_cq_event, and finds its event.
 *
 * A socket that becomes readable wakes that thread, and also the fabric thread if it sleeps in epoll_wait. That thread
 * gives the other one YIELD_MS to begin, and then yields to it as to a thread that polls: it sleeps, and looks every
 * YIELD_MS, without a lock, whether the other one has polled since. So while frames come, they wake the one thread that
 * waits for them, and the fabric thread wakes once with the first frame after a pause. Whichever thread reads holds
 * progress. If the other one does not poll for YIELD_MS, since it runs something else or has ended, the fabric thread
 * reads again.
 *
 * The channel is dropped when its thread was woken for nothing of its own, or while another thread reads, when the
 * thread does not read in time, and when a socket is full. Then the fabric thread reads and sends, as without a wakeup
 * channel. */
#define _GNU_SOURCE
#include "soft/fabric/wakeup.h"

#include <sys/epoll.h>

#include "soft/base/lock_order.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/stream.h"
#include "soft/objects/comp_channel.h"
#include "soft/objects/device.h"

bool soft_wakeup_channel_set(struct soft_fabric *fabric, struct soft_channel *channel)
{
    struct epoll_event event = {.events = EPOLLIN};

    if (atomic_load(&fabric->wakeup_channel))
        return true;
    if (atomic_load(&fabric->outgoing))
        return false;
    soft_mutex_take(&fabric->wakeup_lock);
    if (!atomic_load(&fabric->wakeup_channel) && atomic_load(&fabric->active) && !atomic_load(&fabric->outgoing) &&
        !epoll_ctl(channel->channel.fd, EPOLL_CTL_ADD, fabric->epoll, &event))
        atomic_store(&fabric->wakeup_channel, channel);
    soft_mutex_give(&fabric->wakeup_lock);
    return atomic_load(&fabric->wakeup_channel);
}

bool soft_wakeup_channel_clear(struct soft_fabric *fabric, const struct soft_channel *channel)
{
    struct soft_channel *wakeup_channel;
    bool cleared;

    if (!atomic_load(&fabric->wakeup_channel))
        return false;
    soft_mutex_take(&fabric->wakeup_lock);
    wakeup_channel = atomic_load(&fabric->wakeup_channel);
    cleared = wakeup_channel && (!channel || wakeup_channel == channel);
    if (cleared) {
        epoll_ctl(wakeup_channel->channel.fd, EPOLL_CTL_DEL, fabric->epoll, NULL);
        atomic_store(&fabric->wakeup_channel, NULL);
    }
    soft_mutex_give(&fabric->wakeup_lock);
    return cleared;
}

bool soft_fabric_is_wakeup_channel(const struct soft_device *device, const struct soft_channel *channel)
{
    return atomic_load_explicit(&device->fabric->wakeup_channel, memory_order_relaxed) == channel;
}

void soft_fabric_drop_wakeup_channel(struct soft_device *device, const struct soft_channel *channel)
{
    if (soft_wakeup_channel_clear(device->fabric, channel))
        soft_fabric_stop_polling(device, NULL);
}
