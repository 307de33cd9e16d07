/* The requester for remote peers, whose answers come later. All under sq_lock, in a grace section, unless it is said
 * otherwise. */
#ifndef AIOVERBS_SOFT_TRANSPORT_REQUESTER_H
#define AIOVERBS_SOFT_TRANSPORT_REQUESTER_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/objects/qp.h"

struct soft_device;
struct soft_frame;
struct soft_mr;
struct soft_request;

/* Whether the peer is not of this device. */
static inline bool soft_is_remote(const struct soft_qp *qp)
{
    return qp->link && qp->qp.qp_type != IBV_QPT_UD;
}

/* Sends what there is to send, repeats, flushes. When to come again: 0 when its turn is over but not its work. */
uint64_t soft_ask(struct soft_qp *qp);

/* 0: it left, or was dropped. Else it waits for the way, until then. */
uint64_t soft_ask_datagram(struct soft_qp *qp, const struct soft_wqe *wqe, const struct soft_request *request);

/* In a state in which nothing is sent, outside of grace sections, no lock held but driver halves: waits until the peer
 * moves no byte of it any more, which takes SOFT_LEASE_NS at most. Whoever comes to these halves waits as long. */
void soft_ask_settle(struct soft_qp *qp);

/* Nothing is under way any more, and the peer has left all memory. Its answers find nothing. */
void soft_ask_no_more(struct soft_qp *qp);

/* A region is given back, and cannot be found any more: no peer moves bytes of it from here on. What was under way with
 * it fails when it is repeated. Waits as soft_ask_settle does, in the same place: once for all queue pairs. */
void soft_ask_without(struct soft_device *device, const struct soft_mr *mr);

/* The context is lost, so its queue pairs send nothing: no peer moves bytes for them from here on. Waits likewise. */
void soft_ask_end(const struct soft_context *context);

/* An answer came by a link. False: no honest peer gives it. */
bool soft_answered(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload);

#endif
