/* Requests to remote peers, as frames. All under sq_lock. */
#ifndef AIOVERBS_SOFT_TRANSPORT_REQUEST_FRAMES_H
#define AIOVERBS_SOFT_TRANSPORT_REQUEST_FRAMES_H

#include <stdint.h>
#include <sys/uio.h>

#include "soft/fabric/frame.h"
#include "soft/objects/limits.h"

struct soft_qp;
struct soft_request;

/* Part of a request, ready to be sent. */
struct soft_outgoing {
    struct soft_frame frame;
    struct iovec data[SOFT_MAX_SGE];
    unsigned int count;
    uint8_t list[SOFT_MAX_SGE * SOFT_SEGMENT_SIZE]; /* list of segments that `data` of a direct part refers to */
};

/* Make the part of the request that begins at `request->offset`. */
void soft_outgoing_make(struct soft_qp *qp, struct soft_outgoing *part, const struct soft_request *request);

/* Note that the part was sent, or, with an error, that it could not be. */
void soft_outgoing_sent(struct soft_qp *qp, const struct soft_outgoing *part, int error);

/* Make `data` refer to `frame.part` bytes of the request's memory, from `offset` on. */
void soft_slice(struct soft_outgoing *part, const struct soft_request *request, uint32_t offset);

#endif
