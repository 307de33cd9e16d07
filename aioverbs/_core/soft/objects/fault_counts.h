/* What may become of frames, and what a queue pair counts for the fault plan. */
#ifndef AIOVERBS_SOFT_OBJECTS_FAULT_COUNTS_H
#define AIOVERBS_SOFT_OBJECTS_FAULT_COUNTS_H

#include <stdint.h>

/* What goes to and fro on behalf of a queue pair that has a remote peer. One request has one frame or more; one answer
 * may acknowledge many of them, so that how many there are depends on what is at hand at once. */
enum soft_frame_kind {
    SOFT_REQUEST_OUT, /* its own requests */
    SOFT_ANSWER_IN,   /* and what is answered to these */
    SOFT_REQUEST_IN,  /* the peer's requests */
    SOFT_ANSWER_OUT,
    SOFT_FRAME_KINDS,
};

/* What becomes of a frame: it is lost; comes a second time, behind what comes meanwhile; comes later, and what follows
 * it overtakes it; or its stream is cut, and it is lost as all is that is on its way. */
enum soft_frame_fault_kind { SOFT_DROP, SOFT_DUPLICATE, SOFT_DELAY, SOFT_CUT, SOFT_FRAME_FAULT_KINDS };

/* A stream keeps that much at most of what comes later; what is more is lost. */
#define SOFT_HELD_BYTES (4u << 20)

/* What chances were drawn for a queue pair since `epoch`. Under the plan's lock. */
struct soft_fault_counts {
    uint64_t epoch, attempts, delays;
};

/* The same of frames, under another lock. */
struct soft_frame_counts {
    uint64_t epoch, frames[SOFT_FRAME_KINDS];
};

#endif
