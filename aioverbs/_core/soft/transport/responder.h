/* Responder: executes requests at the queue pair that they are for. */
#ifndef AIOVERBS_SOFT_TRANSPORT_RESPONDER_H
#define AIOVERBS_SOFT_TRANSPORT_RESPONDER_H

#include <stdbool.h>

struct soft_device;
struct soft_qp;
struct soft_reply;
struct soft_request;
struct soft_srq;

/* Execute a request at `peer`. In a grace section, under the peer's rq_lock. */
void soft_respond(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply);

/* Abort the message that is being received, if there is one. Under rq_lock. `flushed`: its receive completes as
 * flushed; otherwise that receive is the oldest one of its queue again. */
void soft_inbound_abort(struct soft_qp *qp, bool flushed);

/* Release what messages in progress took from a shared receive queue, which is being destroyed and cannot be found any
 * more. grace_ready() has returned true. */
void soft_inbound_drop_srq(struct soft_device *device, const struct soft_srq *srq);

#endif
