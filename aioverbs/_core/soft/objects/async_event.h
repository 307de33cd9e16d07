/* Asynchronous events of a context and of the objects in it. */
#ifndef AIOVERBS_SOFT_OBJECTS_ASYNC_EVENT_H
#define AIOVERBS_SOFT_OBJECTS_ASYNC_EVENT_H

#include <pthread.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/lock_order.h"

struct soft_context;

/* What may raise events: a queue pair, a completion queue, a shared receive queue, and the context itself, for its
 * port and device. An event that waits already is not added a second time but becomes the source's latest. */
enum { SOFT_EVENTS_PER_SOURCE = 8 };

struct soft_event_source {
    struct soft_event_source *next; /* under events.lock, like all of it */
    void *element;                  /* const: the ibv object; NULL for the context */
    uint32_t delivered;             /* handed out by get_async_event */
    uint8_t pending;                /* how many of `types` */
    uint8_t types[SOFT_EVENTS_PER_SOURCE];
};

struct soft_events {
    struct soft_mutex lock;
    struct soft_event_source *first, *last;
    struct soft_event_source own; /* of the port and the device */
};

int soft_events_init(struct soft_context *context); /* makes async_fd */
void soft_events_destroy(struct soft_context *context);
void soft_raise_event(struct soft_context *context, struct soft_event_source *source, enum ibv_event_type type);

/* For a destroy verb: drops what waits, then waits until `*completed` (under `mutex`, signalled by `cond`) says that
 * each event that was taken is acknowledged. Nobody raises events of this source any more. */
void soft_events_drain(struct soft_context *context, struct soft_event_source *source, pthread_mutex_t *mutex,
                       pthread_cond_t *cond, const uint32_t *completed);
int soft_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
void soft_ack_async_event(struct ibv_async_event *event);

#endif
