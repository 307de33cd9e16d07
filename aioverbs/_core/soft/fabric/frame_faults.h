/* What is done to frames by a fault plan: while fabric->disturbed is not 0. */
#ifndef AIOVERBS_SOFT_FABRIC_FRAME_FAULTS_H
#define AIOVERBS_SOFT_FABRIC_FRAME_FAULTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "soft/fabric/stream.h"

/* Whether the peer has this GID, or is looked for by it. Under progress, or under tx of one that is open. */
bool soft_stream_matches_gid(const struct soft_stream *stream, const union ibv_gid *gid);

/* In a grace section, under tx, where there is room for a frame; under progress: whether it is to go on now. Else it is
 * lost, or comes later. */
bool soft_frame_fault_out(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                          unsigned int count);
bool soft_frame_fault_in(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload);

/* Under progress, not in a grace section: those that are due. */
void soft_frames_release_due(struct soft_fabric *fabric, uint64_t now);

/* Under tx: what is on its way is lost. */
void soft_frames_drop_held(struct soft_stream *stream);

/* Relaxed, as SOFT_SPECIAL_FAULTS is looked for. */
static inline bool soft_has_frame_faults(const struct soft_stream *stream)
{
    return atomic_load_explicit(&stream->fabric->frame_fault_plans, memory_order_relaxed);
}

#endif
