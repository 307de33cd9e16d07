/* Letting peers in, and the places for handshakes. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_ACCEPT_H
#define AIOVERBS_SOFT_FABRIC_ACCEPT_H

#include <stdbool.h>

#include "soft/fabric/stream.h"

/* Those that wait there, as far as there are places for their handshakes; may close others of the same kind. */
void soft_fabric_accept(struct soft_fabric *fabric, const struct soft_watch *listener);
void soft_listeners_resume(struct soft_fabric *fabric); /* those that rest */

/* Whether one more handshake of this kind may begin, for which somebody waits: another one may have to be given up. */
bool soft_handshake_reserve(struct soft_fabric *fabric, enum soft_kind kind);

/* The stream is about to go over to `stage`: counts handshakes, and lets those in that wait for a place. */
void soft_handshake_count(struct soft_stream *stream, enum soft_stage stage);

static inline enum soft_kind soft_stream_kind(const struct soft_stream *stream)
{
    return stream->is_link ? SOFT_OUTGOING : stream->is_unix ? SOFT_SERVED_UNIX : SOFT_SERVED_TCP;
}

/* A socket for TCP that sends at once, and notices within seconds that the other host is gone. */
void soft_tcp_options(int fd);

#endif
