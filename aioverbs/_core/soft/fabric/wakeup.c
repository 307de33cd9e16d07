/* Whose waiting for completions is waiting for peers, too.
 *
 * Who arms a queue and sleeps on its channel's descriptor would be woken by the thread, which was woken by the socket:
 * one hop too many. So one channel leads: the fabric's epoll descriptor is in its own, and who sleeps there wakes up
 * when a peer sends something, reads it in get_cq_event, and finds his event. A leader that was woken for nothing of
 * his own resigns, and one that does not come in time is deposed, as are all where a socket is full: then the thread
 * reads and sends, as where nobody leads. */
#define _GNU_SOURCE
#include "soft/fabric/wakeup.h"

#include <sys/epoll.h>

#include "soft/base/lock_order.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/stream.h"
#include "soft/objects/comp_channel.h"
#include "soft/objects/device.h"

bool soft_lead(struct soft_fabric *fabric, struct soft_channel *channel)
{
    struct epoll_event event = {.events = EPOLLIN};

    if (atomic_load(&fabric->leader))
        return true;
    if (atomic_load(&fabric->outgoing))
        return false;
    soft_mutex_take(&fabric->leading);
    if (!atomic_load(&fabric->leader) && atomic_load(&fabric->active) && !atomic_load(&fabric->outgoing) &&
        !epoll_ctl(channel->channel.fd, EPOLL_CTL_ADD, fabric->epoll, &event))
        atomic_store(&fabric->leader, channel);
    soft_mutex_give(&fabric->leading);
    return atomic_load(&fabric->leader);
}

bool soft_lead_depose(struct soft_fabric *fabric, const struct soft_channel *channel)
{
    struct soft_channel *leader;
    bool led;

    if (!atomic_load(&fabric->leader))
        return false;
    soft_mutex_take(&fabric->leading);
    leader = atomic_load(&fabric->leader);
    led = leader && (!channel || leader == channel);
    if (led) {
        epoll_ctl(leader->channel.fd, EPOLL_CTL_DEL, fabric->epoll, NULL);
        atomic_store(&fabric->leader, NULL);
    }
    soft_mutex_give(&fabric->leading);
    return led;
}

bool soft_fabric_leads(const struct soft_device *device, const struct soft_channel *channel)
{
    return atomic_load_explicit(&device->fabric->leader, memory_order_relaxed) == channel;
}

void soft_fabric_resign(struct soft_device *device, const struct soft_channel *channel)
{
    if (soft_lead_depose(device->fabric, channel))
        soft_fabric_rest(device, NULL);
}
