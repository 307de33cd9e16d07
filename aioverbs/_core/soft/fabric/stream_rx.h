/* The receiving side of streams. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_STREAM_RX_H
#define AIOVERBS_SOFT_FABRIC_STREAM_RX_H

#include <stdbool.h>
#include <stdint.h>

struct soft_fabric;
struct soft_frame;
struct soft_stream;

/* Reads and handles; false where there was nothing. The stream may be closed, and a served one freed, after that. */
bool soft_stream_receive(struct soft_stream *stream);

/* Sends the answers that wait, if there are some. Answers to messages are not urgent for who polls: his own next message
 * goes first, and they when he finds nothing more to do, or rests. Only while the thread stands back, which comes by
 * within STAND_BACK_MS and sees to it. */
void soft_stream_send_deferred(struct soft_fabric *fabric);

/* A frame that came before: false where it has to wait for room, or since nothing is read. */
bool soft_stream_handle_delayed(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload);

#endif
