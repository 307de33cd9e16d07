/* Poll completion queues, reading only the fields that each kind of completion needs. */
#ifndef AIOVERBS_CQ_POLL_H
#define AIOVERBS_CQ_POLL_H

#include <errno.h>
#include <stdint.h>

#include "data_path/wr_id_table.h"
#include "data_path/loop_budget.h"
#include "abi/libibverbs.h"
#include "abi/verbs_ops.h"

/* No Python object is created or dropped between start_poll and end_poll: that could run a finalizer that uses this
 * queue, or let another thread run that waits for the queue's lock while it keeps this thread from the GIL. */
static inline int poll_extended(struct ibv_cq_ex *cq, int wanted, struct ibv_wc *wcs)
{
    struct ibv_poll_cq_attr attr = {0};
    int found = 0, error = cq->start_poll(cq, &attr);

    if (error)
        return error == ENOENT ? 0 : -error;
    for (;;) {
        struct ibv_wc *wc = &wcs[found++];

        wc->wr_id = cq->wr_id;
        wc->status = cq->status;
        if (wc->status != IBV_WC_SUCCESS) {
            wc->vendor_err = cq->read_vendor_err(cq);
            wc->qp_num = cq->read_qp_num(cq);
        } else if (wc->wr_id & SLOTS_RECEIVE) {
            wc->opcode = cq->read_opcode(cq);
            wc->qp_num = cq->read_qp_num(cq);
            wc->byte_len = cq->read_byte_len(cq);
            wc->imm_data = cq->read_imm_data(cq);
            wc->src_qp = cq->read_src_qp(cq);
            wc->wc_flags = cq->read_wc_flags(cq);
        }
        if (found == wanted || cq->next_poll(cq))
            break;
    }
    cq->end_poll(cq);
    return found;
}

/* Poll once. Return the number of completions, or a negative error number; some devices only return -1. */
static inline int poll_take(struct ibv_cq *cq, struct ibv_cq_ex *extended, int wanted, struct ibv_wc *wcs)
{
    return extended ? poll_extended(extended, wanted, wcs) : verbs_poll_cq(cq, wanted, wcs);
}

/* Poll until a completion is found or the time `until` (turn_clock) is reached. */
static inline int poll_spin(struct ibv_cq *cq, struct ibv_cq_ex *extended, int wanted, struct ibv_wc *wcs,
                            uint64_t until)
{
    int found, i;

    do {
        for (i = 0; i < 16; i++) {
            found = poll_take(cq, extended, wanted, wcs);
            if (found)
                return found;
        }
    } while (turn_clock() < until);
    return 0;
}

#endif
