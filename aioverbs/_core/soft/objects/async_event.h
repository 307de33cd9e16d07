/* Asynchronous events of a context and of its objects. */
#ifndef AIOVERBS_SOFT_OBJECTS_ASYNC_EVENT_H
#define AIOVERBS_SOFT_OBJECTS_ASYNC_EVENT_H

#include <pthread.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/lock_order.h"

struct soft_context;

/* Source of events: a queue pair, a completion queue, a shared receive queue, or the context itself, for its port and
 * device. A pending event is not added a second time, but becomes the latest of its source. */
enum { SOFT_EVENTS_PER_SOURCE = 8 };

struct soft_event_source {
    struct soft_event_source *next; /* under events.lock, like all fields */
    void *element;                  /* const: the ibv object; NULL for the context */
    uint32_t delivered;             /* number of events that get_async_event returned */
    uint8_t pending;                /* number of pending events in `types` */
    uint8_t types[SOFT_EVENTS_PER_SOURCE];
};

struct soft_events {
    struct soft_mutex lock;
    struct soft_event_source *first, *last;
    struct soft_event_source own; /* events of the port and the device */
};

int soft_events_init(struct soft_context *context); /* Create async_fd: return 0 or an errno. */
void soft_events_destroy(struct soft_context *context);
/* Add an event to its source, and make async_fd readable. Never blocks on a user. */
void soft_raise_event(struct soft_context *context, struct soft_event_source *source, enum ibv_event_type type);

/* End a source in a destroy verb, when nothing raises events of the source any more: drop its pending events, then wait
 * until `*completed` (under `mutex`, signalled by `cond`) equals the number of events that were delivered. */
void soft_events_drain(struct soft_context *context, struct soft_event_source *source, pthread_mutex_t *mutex,
                       pthread_cond_t *cond, const uint32_t *completed);
/* Verbs: ibv_get_async_event and ibv_ack_async_event. */
int soft_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
void soft_ack_async_event(struct ibv_async_event *event);

#endif
