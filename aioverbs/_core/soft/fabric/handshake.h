/* The handshake of a stream. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_HANDSHAKE_H
#define AIOVERBS_SOFT_FABRIC_HANDSHAKE_H

#include <stdbool.h>
#include <stdint.h>

struct soft_link;
struct soft_stream;

bool soft_handshake_begin(struct soft_link *link); /* send HELLO; return false if it was not sent */

/* Handle the next message, if it is complete. Return its size in bytes, or 0. A wrong message refuses the stream. */
uint32_t soft_handshake_handle(struct soft_stream *stream, const uint8_t *bytes, uint32_t size);

#endif
