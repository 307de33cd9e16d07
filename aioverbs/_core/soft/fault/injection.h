/* Fault plan, as the device consults it before an action. */
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

struct soft_faults *soft_faults_new(uint64_t first_serial); /* serial number of the next queue pair */
void soft_faults_free(struct soft_context *context);
/* Return the errno of a call that is to fail, or 0. */
int soft_fault_verb_error(struct soft_context *context, enum soft_verb verb);

/* Fault of a request or receive, loss of a message, delay of a request. Call only while SOFT_SPECIAL_FAULTS is set,
 * under any lock of the queue pair: soft_fault_status() once for each request or receive, when it is first tried;
 * soft_fault_loses() for each attempt to deliver a message; soft_fault_delay() for each posted request. IBV_WC_SUCCESS:
 * no fault. */
enum ibv_wc_status soft_fault_status(struct soft_qp *qp, bool receive, uint32_t *vendor_err);
bool soft_fault_loses(struct soft_qp *qp);
uint64_t soft_fault_delay(struct soft_qp *qp);

/* Fault of a frame. Call while fabric->frame_fault_plans is not 0, for each frame of this kind on the stream, which is
 * open; under any lock. SOFT_FRAME_FAULT_KINDS: no fault. */
enum soft_frame_fault_kind soft_fault_frame(struct soft_qp *qp, enum soft_frame_kind kind,
                                            const struct soft_stream *stream, uint64_t *delay_ns);

/* Add a completion, or hold it. Used in place of soft_cq_push(). */
bool soft_fault_complete(struct soft_context *context, struct soft_cq *cq, const struct soft_cqe *cqe);

/* Drop held completions of a queue pair or shared receive queue, and return credits, like soft_cq_purge(). That calls
 * this function before it purges the ring: a completion that is being released meanwhile must be in the ring when this
 * returns. */
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
