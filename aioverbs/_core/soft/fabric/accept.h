/* Accept peers, and limit handshakes. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_ACCEPT_H
#define AIOVERBS_SOFT_FABRIC_ACCEPT_H

#include <stdbool.h>

#include "soft/fabric/stream.h"

/* Accept waiting connections, as far as the limits of handshakes and streams allow; may close other streams of the same
 * kind. */
void soft_fabric_accept(struct soft_fabric *fabric, const struct soft_watch *listener);
void soft_listeners_resume(struct soft_fabric *fabric); /* resume listeners that were paused */

/* Make room for one more handshake of this kind, which is waiting: another one may be given up. Return whether there is
 * room. */
bool soft_handshake_reserve(struct soft_fabric *fabric, enum soft_kind kind);

/* Count handshakes, before the stream changes to `stage`; resume listeners or links that wait for a place. */
void soft_handshake_count(struct soft_stream *stream, enum soft_stage stage);

static inline enum soft_kind soft_stream_kind(const struct soft_stream *stream)
{
    return stream->is_link ? SOFT_OUTGOING : stream->is_unix ? SOFT_SERVED_UNIX : SOFT_SERVED_TCP;
}

/* Set options of a TCP socket: send at once, and notice within seconds that the other host is gone. */
void soft_tcp_options(int fd);

#endif
