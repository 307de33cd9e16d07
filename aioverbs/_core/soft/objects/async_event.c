/* Asynchronous events of objects. `async_fd` is readable exactly while an event is pending. */
#define _GNU_SOURCE
#include "soft/objects/async_event.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "soft/base/lock_order.h"
#include "soft/objects/context.h"

int soft_events_init(struct soft_context *context)
{
    int error, fd = eventfd(0, EFD_CLOEXEC);

    if (fd < 0)
        return errno;
    error = soft_mutex_init(&context->events.lock, SOFT_RANK_EVENTS);
    if (error) {
        close(fd);
        return error;
    }
    context->verbs.context.async_fd = fd;
    return 0;
}

void soft_events_destroy(struct soft_context *context)
{
    soft_mutex_destroy(&context->events.lock);
    close(context->verbs.context.async_fd);
}

/* ---- The list of sources with events that wait, all under events.lock -------------------------------------- */

/* Call when the list became empty or stopped being empty. The counter is 0 or 1, so neither call blocks, whatever flags
 * the user sets on the descriptor; a call fails only where the user has closed the descriptor. */
static void async_fd_set_readable(struct soft_context *context, bool readable)
{
    eventfd_t value;

    if (readable)
        (void)eventfd_write(context->verbs.context.async_fd, 1);
    else
        (void)eventfd_read(context->verbs.context.async_fd, &value);
}

static void event_source_append(struct soft_events *events, struct soft_event_source *source)
{
    source->next = NULL;
    if (events->last)
        events->last->next = source;
    else
        events->first = source;
    events->last = source;
}

static void unlink_source(struct soft_events *events, struct soft_event_source *source)
{
    struct soft_event_source **link, *last = NULL;

    for (link = &events->first; *link != source; link = &(*link)->next)
        last = *link;
    *link = source->next;
    if (events->last == source)
        events->last = last;
}

static void remove_type(struct soft_event_source *source, unsigned int index)
{
    source->pending--;
    memmove(&source->types[index], &source->types[index + 1], source->pending - index);
}

/* Return the source that has waited longest, and its oldest event; the source moves to the end of the list if it has
 * further events. */
static struct soft_event_source *event_source_take(struct soft_context *context, enum ibv_event_type *type)
{
    struct soft_events *events = &context->events;
    struct soft_event_source *source = events->first;

    if (!source)
        return NULL;
    *type = source->types[0];
    source->delivered++;
    unlink_source(events, source);
    remove_type(source, 0);
    if (source->pending)
        event_source_append(events, source);
    if (!events->first)
        async_fd_set_readable(context, false);
    return source;
}

/* ---- Raising ----------------------------------------------------------------------------------------------- */

void soft_raise_event(struct soft_context *context, struct soft_event_source *source, enum ibv_event_type type)
{
    struct soft_events *events = &context->events;
    unsigned int i;

    soft_mutex_take(&events->lock);
    for (i = 0; i < source->pending; i++)
        if (source->types[i] == type)
            break;
    if (i < source->pending) {
        remove_type(source, i);
    } else if (!source->pending) {
        if (!events->first)
            async_fd_set_readable(context, true);
        event_source_append(events, source);
    }
    source->types[source->pending++] = (uint8_t)type;
    soft_mutex_give(&events->lock);
}

/* ---- Taking and acknowledging ------------------------------------------------------------------------------- */

/* Member of the event's union that is set. */
enum subject { OF_PORT, OF_CQ, OF_QP, OF_SRQ };

static enum subject subject_of(enum ibv_event_type type)
{
    switch (type) {
    case IBV_EVENT_CQ_ERR:
        return OF_CQ;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        return OF_QP;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        return OF_SRQ;
    default:
        return OF_PORT;
    }
}

static void async_event_fill(struct ibv_async_event *event, const struct soft_event_source *source,
                             enum ibv_event_type type)
{
    memset(event, 0, sizeof(*event));
    event->event_type = type;
    switch (subject_of(type)) {
    case OF_CQ:
        event->element.cq = source->element;
        break;
    case OF_QP:
        event->element.qp = source->element;
        break;
    case OF_SRQ:
        event->element.srq = source->element;
        break;
    case OF_PORT:
        event->element.port_num = 1;
        break;
    }
}

int soft_get_async_event(struct ibv_context *ibv_context, struct ibv_async_event *event)
{
    struct soft_context *context = to_soft_context(ibv_context);

    for (;;) {
        struct pollfd readable = {.fd = ibv_context->async_fd, .events = POLLIN};
        const struct soft_event_source *source;
        enum ibv_event_type type;

        if (soft_stale(context)) {
            errno = ENODEV;
            return -1;
        }
        soft_mutex_take(&context->events.lock);
        source = event_source_take(context, &type);
        if (source) /* from here on the object's destruction waits for the acknowledgement */
            async_event_fill(event, source, type);
        soft_mutex_give(&context->events.lock);
        if (source)
            return 0;
        if (fcntl(ibv_context->async_fd, F_GETFL) & O_NONBLOCK) {
            errno = EAGAIN;
            return -1;
        }
        if (poll(&readable, 1, -1) < 0)
            return -1;
    }
}

/* The object may be destroyed as soon as the mutex is released. */
static void async_event_acknowledge(const struct ibv_context *context, pthread_mutex_t *mutex, pthread_cond_t *cond,
                                    uint32_t *completed)
{
    if (soft_stale(to_soft_context(context))) /* another thread may have held the mutex at the fork */
        return;
    pthread_mutex_lock(mutex);
    ++*completed;
    pthread_cond_signal(cond);
    pthread_mutex_unlock(mutex);
}

void soft_ack_async_event(struct ibv_async_event *event)
{
    struct ibv_cq *cq = event->element.cq;
    struct ibv_qp *qp = event->element.qp;
    struct ibv_srq *srq = event->element.srq;

    switch (subject_of(event->event_type)) {
    case OF_CQ:
        async_event_acknowledge(cq->context, &cq->mutex, &cq->cond, &cq->async_events_completed);
        break;
    case OF_QP:
        async_event_acknowledge(qp->context, &qp->mutex, &qp->cond, &qp->events_completed);
        break;
    case OF_SRQ:
        async_event_acknowledge(srq->context, &srq->mutex, &srq->cond, &srq->events_completed);
        break;
    case OF_PORT: /* closing a context does not wait for acknowledgements */
        break;
    }
}

void soft_events_drain(struct soft_context *context, struct soft_event_source *source, pthread_mutex_t *mutex,
                       pthread_cond_t *cond, const uint32_t *completed)
{
    uint32_t delivered;

    soft_mutex_take(&context->events.lock);
    if (source->pending) {
        unlink_source(&context->events, source);
        source->pending = 0;
        if (!context->events.first)
            async_fd_set_readable(context, false);
    }
    delivered = source->delivered;
    soft_mutex_give(&context->events.lock);
    pthread_mutex_lock(mutex);
    while (*completed != delivered)
        pthread_cond_wait(cond, mutex);
    pthread_mutex_unlock(mutex);
}
