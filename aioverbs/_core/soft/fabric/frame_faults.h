/* Faults of frames and connections, as a fault plan orders them: while fabric->frame_fault_plans is not 0. */
#ifndef AIOVERBS_SOFT_FABRIC_FRAME_FAULTS_H
#define AIOVERBS_SOFT_FABRIC_FRAME_FAULTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "soft/fabric/stream.h"

/* Return whether the peer has this GID, or the link is for it. Under progress, or under tx of an open stream. */
bool soft_stream_matches_gid(const struct soft_stream *stream, const union ibv_gid *gid);

/* Apply the fault plan to a frame. Return whether the frame is to be handled or sent now; otherwise it is lost or
 * delayed. In a grace section; for a frame to send, under tx and with room for it; for a received one, under
 * progress. */
bool soft_frame_fault_out(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                          unsigned int count);
bool soft_frame_fault_in(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload);

/* Handle or send the delayed frames that are due. Under progress, not in a grace section. */
void soft_frames_release_due(struct soft_fabric *fabric, uint64_t now);

/* Drop the delayed frames of a stream. Under tx. */
void soft_frames_drop_held(struct soft_stream *stream);

/* Return whether a fault plan may affect frames. The load may be relaxed, like that of SOFT_SPECIAL_FAULTS. */
static inline bool soft_has_frame_faults(const struct soft_stream *stream)
{
    return atomic_load_explicit(&stream->fabric->frame_fault_plans, memory_order_relaxed);
}

#endif
