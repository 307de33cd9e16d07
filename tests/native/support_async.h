/* Asynchronous events, in few words. */
#ifndef AIOVERBS_TESTS_SUPPORT_ASYNC_H
#define AIOVERBS_TESTS_SUPPORT_ASYNC_H

#include "support_check.h"

/* From here on get_async_event answers EAGAIN where nothing waits. */
void async_nonblocking(struct ibv_context *context);

/* The next event, which must be there and be this one, and is acknowledged. */
void expect_async_at(struct ibv_context *context, enum ibv_event_type type, const void *element,
                     struct check_place place);
#define EXPECT_ASYNC(context, type, element) expect_async_at(context, type, element, HERE)

/* The same of the port, or of the device. */
void expect_async_port_at(struct ibv_context *context, enum ibv_event_type type, struct check_place place);
#define EXPECT_ASYNC_PORT(context, type) expect_async_port_at(context, type, HERE)

/* None waits, neither in the descriptor's opinion nor in the verb's, on a context that does not block. */
void expect_no_async_at(struct ibv_context *context, struct check_place place);
#define EXPECT_NO_ASYNC(context) expect_no_async_at(context, HERE)

#endif
