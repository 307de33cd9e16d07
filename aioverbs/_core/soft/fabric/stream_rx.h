/* Receiving side of streams. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_STREAM_RX_H
#define AIOVERBS_SOFT_FABRIC_STREAM_RX_H

#include <stdbool.h>
#include <stdint.h>

struct soft_fabric;
struct soft_frame;
struct soft_stream;

/* Read and handle frames. Return false if there was nothing to read. The stream may be closed after that, and a served
 * one freed. */
bool soft_stream_receive(struct soft_stream *stream);

/* The same for a stream that uses rings, without a look at the socket. Return false if no frame was handled. */
bool soft_stream_receive_ring(struct soft_stream *stream);

/* Read the doorbell from the socket whose frames were read before: it would wake a thread for nothing. */
void soft_stream_drain_doorbells(struct soft_stream *stream);

/* Send deferred answers, if there are any. Answers to messages are not urgent for a thread that polls: its own next
 * message is sent first, and the answers when it finds nothing more to do, or stops polling. If the peer sleeps, the
 * doorbell for that message is also the one for the answers (soft/fabric/shared_rings.h), which wait for it for some
 * more polls. Answers are deferred only while the fabric thread yields, which comes back within YIELD_MS and sends
 * them. */
void soft_stream_send_deferred(struct soft_fabric *fabric);

/* Handle a frame that was delayed. Return false if it has to wait for room, or because nothing is read. */
bool soft_stream_handle_delayed(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload);

#endif
