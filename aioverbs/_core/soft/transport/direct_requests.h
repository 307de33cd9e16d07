/* Direct requests: memory that a remote peer moves bytes of by itself (soft/transport/direct_requests.c). */
#ifndef AIOVERBS_SOFT_TRANSPORT_DIRECT_REQUESTS_H
#define AIOVERBS_SOFT_TRANSPORT_DIRECT_REQUESTS_H

#include <stdbool.h>
#include <stdint.h>

struct soft_context;
struct soft_device;
struct soft_mr;
struct soft_qp;

/* Under sq_lock: take back all memory that the peer may move bytes of. True: the peer has left it, or had the time that
 * it may take. */
bool soft_direct_revoke(struct soft_qp *qp);

/* The same for what was sent up to this sequence number, which was answered. */
bool soft_direct_revoke_up_to(struct soft_qp *qp, uint32_t psn);

/* Under sq_lock: when the peer may have left the memory that it is waited for to leave: soon, and then less and less
 * often. */
uint64_t soft_direct_next_check(struct soft_qp *qp);

/* In a state in which nothing is sent, outside of grace sections, no lock held but driver halves: waits until the peer
 * moves no byte of it any more, which takes SOFT_COPY_TIMEOUT_NS at most. Whoever comes to these halves waits as long. */
void soft_direct_wait(struct soft_qp *qp);

/* A region is given back, and cannot be found any more: no peer moves bytes of it from here on. What was under way with
 * it fails when it is repeated. Waits as soft_direct_wait does, in the same place: once for all queue pairs. */
void soft_direct_release_mr(struct soft_device *device, const struct soft_mr *mr);

/* The context is lost, so its queue pairs send nothing: no peer moves bytes for them from here on. Waits likewise. */
void soft_direct_release_context(const struct soft_context *context);

#endif
