#include "support_async.h"

#include <fcntl.h>

#include "support.h"

void async_nonblocking(struct ibv_context *context)
{
    int flags = fcntl(context->async_fd, F_GETFL);

    REQUIRE(flags >= 0);
    REQUIRE_EQ(fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK), 0);
}

static struct ibv_async_event next_event(struct ibv_context *context, enum ibv_event_type type,
                                         struct check_place place)
{
    struct ibv_async_event event;

    if (!check_true(wait_readable(context->async_fd), place, "no event came"))
        check_stop();
    memset(&event, 0xff, sizeof(event));
    if (!check_equal(soft_verbs.get_async_event(context, &event), 0, place, "get_async_event", "an event"))
        check_stop();
    check_equal(event.event_type, type, place, "event.event_type", "what was expected");
    return event;
}

void expect_async_at(struct ibv_context *context, enum ibv_event_type type, const void *element,
                     struct check_place place)
{
    struct ibv_async_event event = next_event(context, type, place);

    check_true((const void *)event.element.qp == element, place, "the event is about something else");
    soft_verbs.ack_async_event(&event);
}

void expect_async_port_at(struct ibv_context *context, enum ibv_event_type type, struct check_place place)
{
    struct ibv_async_event event = next_event(context, type, place);

    check_equal(event.element.port_num, 1, place, "event.element.port_num", "1");
    soft_verbs.ack_async_event(&event);
}

void expect_no_async_at(struct ibv_context *context, struct check_place place)
{
    struct ibv_async_event event;

    check_true(!is_readable(context->async_fd), place, "an event waits");
    errno = 0;
    check_equal(soft_verbs.get_async_event(context, &event), -1, place, "get_async_event", "nothing");
    check_equal(errno, EAGAIN, place, "errno", "EAGAIN");
}
