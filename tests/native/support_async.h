/* Helpers for asynchronous events. */
#ifndef AIOVERBS_TESTS_SUPPORT_ASYNC_H
#define AIOVERBS_TESTS_SUPPORT_ASYNC_H

#include "support_check.h"

/* Make the context's descriptor non-blocking: get_async_event fails with EAGAIN if no event is pending. */
void async_nonblocking(struct ibv_context *context);

/* Take and acknowledge the next event, which must be pending and be this one. */
void expect_async_at(struct ibv_context *context, enum ibv_event_type type, const void *element,
                     struct check_place place);
#define EXPECT_ASYNC(context, type, element) expect_async_at(context, type, element, HERE)

/* The same for an event of the port or of the device. */
void expect_async_port_at(struct ibv_context *context, enum ibv_event_type type, struct check_place place);
#define EXPECT_ASYNC_PORT(context, type) expect_async_port_at(context, type, HERE)

/* Check that no event is pending, by the descriptor and by the verb. The context must be non-blocking. */
void expect_no_async_at(struct ibv_context *context, struct check_place place);
#define EXPECT_NO_ASYNC(context) expect_no_async_at(context, HERE)

#endif
