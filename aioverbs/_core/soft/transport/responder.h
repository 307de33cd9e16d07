/* What queue pairs do with requests that reach them. */
#ifndef AIOVERBS_SOFT_TRANSPORT_RESPONDER_H
#define AIOVERBS_SOFT_TRANSPORT_RESPONDER_H

#include <stdbool.h>

struct soft_device;
struct soft_qp;
struct soft_reply;
struct soft_request;
struct soft_srq;

/* What a peer does with a request that reached it. In a grace section, under the peer's rq_lock. */
void soft_respond(struct soft_qp *peer, const struct soft_request *request, struct soft_reply *reply);

/* Under rq_lock: the message under way, if there is one, ends before all of it came. Flushed, its receive completes;
 * else that is the oldest one of its queue again. */
void soft_inbound_abort(struct soft_qp *qp, bool flushed);

/* A shared receive queue goes, and cannot be found any more: what messages under way took from it goes with it.
 * grace_ready() was true. */
void soft_inbound_drop_srq(struct soft_device *device, const struct soft_srq *srq);

#endif
