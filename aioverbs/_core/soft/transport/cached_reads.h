/* Reads that the requester makes by itself, by a licence of the owner of the memory. All under sq_lock. */
#ifndef AIOVERBS_SOFT_TRANSPORT_CACHED_READS_H
#define AIOVERBS_SOFT_TRANSPORT_CACHED_READS_H

#include <stdbool.h>
#include <stdint.h>

struct soft_frame;
struct soft_qp;
struct soft_request;
struct soft_wqe;

/* The answer to this read, which ends with this packet, may have a licence with it. One is asked for at a time. */
void soft_cached_read_ask(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t psn);
void soft_cached_read_answered(struct soft_qp *qp, const struct soft_frame *frame);

/* Whether the peer need not be asked for this. */
bool soft_cached_read_may(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length);

/* Reads without asking, with others of its kind that are posted behind it, where all before is done, so that what was
 * written before is seen. The peer hears nothing of it: no sequence number is used. `*left` of the turn counts it.
 * False: the peer is to be asked, for the first of them. */
bool soft_cached_read(struct soft_qp *qp, const struct soft_wqe *wqe, const struct soft_request *request,
                      int64_t *left);

#endif
