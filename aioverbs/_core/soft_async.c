/* Asynchronous events. */
#define _GNU_SOURCE
#include "soft.h"

#include <sys/eventfd.h>
#include <unistd.h>

int soft_events_init(struct soft_context *context)
{
    context->verbs.context.async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return context->verbs.context.async_fd < 0 ? errno : 0;
}

void soft_events_destroy(struct soft_context *context)
{
    close(context->verbs.context.async_fd);
}

void soft_raise(struct soft_context *context, struct soft_event_source *source, enum ibv_event_type type)
{
    (void)context, (void)source, (void)type;
}

void soft_events_finish(struct soft_context *context, struct soft_event_source *source, pthread_mutex_t *mutex,
                        pthread_cond_t *cond, const uint32_t *completed)
{
    (void)context, (void)source, (void)mutex, (void)cond, (void)completed;
}

int soft_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    (void)context, (void)event;
    errno = EOPNOTSUPP;
    return -1;
}

void soft_ack_async_event(struct ibv_async_event *event)
{
    (void)event;
}
