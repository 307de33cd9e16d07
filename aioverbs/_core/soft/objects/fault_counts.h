/* Faults of frames, and a queue pair's counts for the fault plan. */
#ifndef AIOVERBS_SOFT_OBJECTS_FAULT_COUNTS_H
#define AIOVERBS_SOFT_OBJECTS_FAULT_COUNTS_H

#include <stdint.h>

/* Kinds of frames of a queue pair that has a remote peer. A request has one or more frames; one response may
 * acknowledge many of them, so the number of responses depends on timing. */
enum soft_frame_kind {
    SOFT_REQUEST_OUT, /* requests of the queue pair */
    SOFT_ANSWER_IN,   /* responses to them */
    SOFT_REQUEST_IN,  /* requests of the peer */
    SOFT_ANSWER_OUT,
    SOFT_FRAME_KINDS,
};

/* Fault of a frame: it is lost; it is delivered a second time, after the frames that come meanwhile; it is delivered
 * later, and the frames after it overtake it; or its stream is cut, and all frames in flight are lost. */
enum soft_frame_fault_kind { SOFT_DROP, SOFT_DUPLICATE, SOFT_DELAY, SOFT_CUT, SOFT_FRAME_FAULT_KINDS };

/* Bytes of delayed frames that a stream holds; further delayed frames are lost. */
#define SOFT_HELD_BYTES (4u << 20)

/* Chances drawn for a queue pair since `epoch`. Under the plan's lock. */
struct soft_fault_counts {
    uint64_t epoch, attempts, delays;
};

/* Frames of a queue pair since `epoch`. Under the plan's lock of frames. */
struct soft_frame_counts {
    uint64_t epoch, frames[SOFT_FRAME_KINDS];
};

#endif
