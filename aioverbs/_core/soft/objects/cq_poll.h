/* The driver half of completion queues. */
#ifndef AIOVERBS_SOFT_OBJECTS_CQ_POLL_H
#define AIOVERBS_SOFT_OBJECTS_CQ_POLL_H

#include <stdint.h>

#include "abi/libibverbs.h"

struct soft_cq;
struct soft_qp;
struct soft_srq;

int soft_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
void soft_cq_ex_methods(struct ibv_cq_ex *ex, uint64_t wc_flags);

/* Removes what `qp` or `srq` completed and nobody polled; either may be NULL. The caller is inside of the queue's
 * driver half. Credits of shared receive queues are given back. */
void soft_cq_purge(struct soft_cq *cq, const struct soft_qp *qp, const struct soft_srq *srq);

#endif
