/* The driver half of completion queues. */
#ifndef AIOVERBS_SOFT_OBJECTS_CQ_POLL_H
#define AIOVERBS_SOFT_OBJECTS_CQ_POLL_H

#include <stdint.h>

#include "abi/libibverbs.h"

struct soft_cq;
struct soft_qp;
struct soft_srq;

int soft_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
/* Set the methods of an extended queue: the readers that the `wc_flags` of its creation request. */
void soft_cq_ex_methods(struct ibv_cq_ex *ex, uint64_t wc_flags);

/* Remove the completions of `qp` or `srq` (either may be NULL) that were not polled yet, and return the credits of
 * shared receive queues. Call inside of the queue's driver half. */
void soft_cq_purge(struct soft_cq *cq, const struct soft_qp *qp, const struct soft_srq *srq);

#endif
