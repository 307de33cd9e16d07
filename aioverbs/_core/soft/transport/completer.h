/* Apply responses of remote peers to the requests in flight. */
#ifndef AIOVERBS_SOFT_TRANSPORT_COMPLETER_H
#define AIOVERBS_SOFT_TRANSPORT_COMPLETER_H

#include <stdbool.h>
#include <stdint.h>

struct soft_frame;
struct soft_link;

/* Handle a response that came over a link. Return false if no honest peer sends it. */
bool soft_handle_response(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload);

#endif
