/* Completion channels. */
#ifndef AIOVERBS_SOFT_OBJECTS_COMP_CHANNEL_H
#define AIOVERBS_SOFT_OBJECTS_COMP_CHANNEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/lock_order.h"

struct soft_cq;

struct soft_channel {
    /* fd: an epoll with event_fd, and with the fabric's epoll while this is the wakeup channel */
    struct ibv_comp_channel channel;
    int event_fd;                 /* eventfd that is readable while there are events that no thread is about to take */
    struct soft_mutex lock;       /* guards the list, and the next two */
    struct soft_cq *first, *last; /* completion queues with pending events */
    uint32_t takers;              /* threads that poll peers, and take an event then */
    bool readable;                /* whether event_fd is */
    atomic_uint references;
};

struct ibv_comp_channel *soft_create_comp_channel(struct ibv_context *context);
int soft_destroy_comp_channel(struct ibv_comp_channel *channel);
int soft_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void soft_ack_cq_events(struct ibv_cq *cq, unsigned int count);
/* Add a completion event of a queue to its channel. */
void soft_channel_notify(struct soft_channel *channel, struct soft_cq *cq);
/* Drop the pending events of a queue; return how many events were delivered for it. */
uint32_t soft_channel_remove_cq(struct soft_channel *channel, struct soft_cq *cq);

#endif
