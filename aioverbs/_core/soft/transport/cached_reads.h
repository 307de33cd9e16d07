/* Reads that the requester makes by itself, by a read cache grant of the memory's owner. All under sq_lock. */
#ifndef AIOVERBS_SOFT_TRANSPORT_CACHED_READS_H
#define AIOVERBS_SOFT_TRANSPORT_CACHED_READS_H

#include <stdbool.h>
#include <stdint.h>

struct soft_frame;
struct soft_qp;
struct soft_request;
struct soft_wqe;

/* Ask for a grant with the answer to a read that ends with packet `psn`, and store the grant when the answer comes. A
 * queue pair asks for one grant at a time. */
void soft_cached_read_ask(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t psn);
void soft_cached_read_answered(struct soft_qp *qp, const struct soft_frame *frame);

/* Return whether a grant covers the read, so that the peer need not be asked. */
bool soft_cached_read_may(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length);

/* Make a read without asking the peer, together with reads behind it that grants cover. All requests before it must be
 * finished, so that their effects are seen. The peer is not notified: no sequence number is used. The cost is
 * subtracted from `*left` of the turn. Return false if the peer must be asked for the first read. */
bool soft_cached_read(struct soft_qp *qp, const struct soft_wqe *wqe, const struct soft_request *request,
                      int64_t *left);

/* Read memory of the peer that is mapped here, at once and without a request, whatever requests are in flight. Return
 * false if the peer must be asked; `to` may have any content then. */
bool soft_cached_read_now(struct soft_qp *qp, void *to, uint64_t address, uint32_t key, uint32_t length);

#endif
