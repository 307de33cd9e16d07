/* The completer: what the answers of remote peers do to the requests that are in flight. */
#ifndef AIOVERBS_SOFT_TRANSPORT_COMPLETER_H
#define AIOVERBS_SOFT_TRANSPORT_COMPLETER_H

#include <stdbool.h>
#include <stdint.h>

struct soft_frame;
struct soft_link;

/* An answer came by a link. False: no honest peer gives it. */
bool soft_handle_response(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload);

#endif
