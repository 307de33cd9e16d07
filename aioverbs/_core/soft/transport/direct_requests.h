/* Direct requests: memory from or to which a remote peer copies by itself (soft/transport/direct_requests.c). */
#ifndef AIOVERBS_SOFT_TRANSPORT_DIRECT_REQUESTS_H
#define AIOVERBS_SOFT_TRANSPORT_DIRECT_REQUESTS_H

#include <stdbool.h>
#include <stdint.h>

struct soft_context;
struct soft_device;
struct soft_mr;
struct soft_qp;

/* Revoke the copy tokens of all direct parts. Under sq_lock. Return true if the peer has ended its copies, or has had
 * the time allowed for that. */
bool soft_direct_revoke(struct soft_qp *qp);

/* The same for the parts up to sequence number `psn`, which was acknowledged. */
bool soft_direct_revoke_up_to(struct soft_qp *qp, uint32_t psn);

/* Return when to check next whether the peer has ended its copies: soon at first, and then less and less often. Under
 * sq_lock. */
uint64_t soft_direct_next_check(struct soft_qp *qp);

/* Wait until the peer copies nothing for this queue pair any more, SOFT_COPY_TIMEOUT_NS at most. The queue pair is in a
 * state in which nothing is sent. Call outside of grace sections, holding no lock but driver halves: threads that enter
 * these halves wait as long. */
void soft_direct_wait(struct soft_qp *qp);

/* Wait until no peer copies from or to a region that is being deregistered, and cannot be found any more. Requests in
 * flight that use the region fail when they are repeated. Waits like soft_direct_wait(), once for all queue pairs. */
void soft_direct_release_mr(struct soft_device *device, const struct soft_mr *mr);

/* Wait until no peer copies for the queue pairs of a lost context, which send nothing any more. Waits likewise. */
void soft_direct_release_context(const struct soft_context *context);

#endif
