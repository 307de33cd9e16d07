/* The fault plan. */
#include "soft.h"

#include <stdlib.h>

struct soft_faults {
    int to_come;
};

struct soft_faults *soft_faults_new(void)
{
    return calloc(1, sizeof(struct soft_faults));
}

void soft_faults_free(struct soft_faults *faults)
{
    free(faults);
}

int soft_fault_refusal(struct soft_context *context, enum soft_verb verb)
{
    (void)context, (void)verb;
    return 0;
}

enum ibv_wc_status soft_fault_status(struct soft_qp *qp, bool receive, uint32_t *vendor_err)
{
    (void)qp, (void)receive, (void)vendor_err;
    return IBV_WC_SUCCESS;
}

bool soft_fault_loses(struct soft_qp *qp)
{
    (void)qp;
    return false;
}

uint64_t soft_fault_delay(struct soft_qp *qp)
{
    (void)qp;
    return 0;
}

bool soft_fault_complete(struct soft_context *context, struct soft_cq *cq, const struct soft_cqe *cqe)
{
    (void)context;
    return soft_cq_push(cq, cqe);
}

void soft_fault_purge(struct soft_context *context, const struct soft_cq *cq, const struct soft_qp *qp,
                      const struct soft_srq *srq)
{
    (void)context, (void)cq, (void)qp, (void)srq;
}
