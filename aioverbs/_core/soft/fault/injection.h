/* The fault plan from the device's side: what is asked before something is done. */
#ifndef AIOVERBS_SOFT_FAULT_INJECTION_H
#define AIOVERBS_SOFT_FAULT_INJECTION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/fault/fault.h"
#include "soft/objects/context.h"
#include "soft/objects/cq_push.h"

struct soft_cq;
struct soft_cqe;
struct soft_qp;
struct soft_srq;
struct soft_stream;

struct soft_faults *soft_faults_new(uint64_t first_serial); /* of the queue pairs to come */
void soft_faults_free(struct soft_context *context);
int soft_fault_verb_error(struct soft_context *context, enum soft_verb verb); /* see soft_refusal */

/* These are asked only while SOFT_SPECIAL_FAULTS is set, under whatever lock of the queue pair: once for each request
 * or receive, and the first time that it is tried; for each attempt to deliver a message; for each request that is
 * posted. SUCCESS: nothing happens. */
enum ibv_wc_status soft_fault_status(struct soft_qp *qp, bool receive, uint32_t *vendor_err);
bool soft_fault_loses(struct soft_qp *qp);
uint64_t soft_fault_delay(struct soft_qp *qp);

/* Asked while fabric->disturbed is not 0, for each frame of this kind that goes over this stream, which is open; under
 * whatever lock. SOFT_MISHAPS: nothing happens. */
enum soft_mishap soft_fault_frame(struct soft_qp *qp, enum soft_frame_kind kind, const struct soft_stream *stream,
                                  uint64_t *delay_ns);

/* In place of soft_cq_push. */
bool soft_fault_complete(struct soft_context *context, struct soft_cq *cq, const struct soft_cqe *cqe);

/* Forgets what is held of a queue pair or shared receive queue, and gives credits back, as soft_cq_purge does, which
 * calls it before it looks at the ring: what is being released meanwhile must be in there when this returns. */
void soft_fault_purge(struct soft_context *context, const struct soft_cq *cq, const struct soft_qp *qp,
                      const struct soft_srq *srq);

/* Add a completion by way of the fault plan, which may hold it. Device halves call this instead of soft_cq_push. */
static inline bool soft_complete(struct soft_context *context, struct soft_cq *cq, const struct soft_cqe *cqe)
{
    if (atomic_load_explicit(&context->special, memory_order_relaxed) & SOFT_SPECIAL_FAULTS)
        return soft_fault_complete(context, cq, cqe);
    return soft_cq_push(cq, cqe);
}

#endif
