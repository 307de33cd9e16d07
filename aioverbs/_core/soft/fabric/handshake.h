/* The handshake of a stream. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_HANDSHAKE_H
#define AIOVERBS_SOFT_FABRIC_HANDSHAKE_H

#include <stdbool.h>
#include <stdint.h>

struct soft_link;
struct soft_stream;

bool soft_handshake_begin(struct soft_link *link); /* HELLO; false: it does not go out */

/* The next message, where all of it is at hand: how many bytes it was, or 0. Where it is wrong the stream is refused. */
uint32_t soft_handshake_handle(struct soft_stream *stream, const uint8_t *bytes, uint32_t size);

#endif
