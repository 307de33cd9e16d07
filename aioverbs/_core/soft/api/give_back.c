/* Memory that idle queue pairs give back. */
#define _GNU_SOURCE
#include "soft/api/give_back.h"

#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>

#include "soft/base/util.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/qp.h"
#include "soft/objects/work_queue.h"

/* Give back the pages that lie between two addresses as a whole. Pages that are locked stay. */
static void give_back_pages(uint64_t begin, uint64_t end)
{
    uint64_t mask = soft_page() - 1;

    begin = (begin + mask) & ~mask;
    end &= ~mask;
    if (begin < end)
        madvise((void *)(uintptr_t)begin, end - begin, MADV_DONTNEED);
}

/* A message takes a receive under rq_lock before it writes there, so nothing writes to one that is not taken. */
static void give_back_receives(struct soft_qp *qp)
{
    uint64_t begin = 0, end = 0;
    uint32_t at, posted;

    assert_held(&qp->rq_lock);
    if (qp->srq || !qp->rq.depth)
        return;
    posted = atomic_load_explicit(qp->rq.posted, memory_order_acquire);
    for (at = qp->rq.consumed; at != posted; at++) {
        const struct soft_rwqe *rwqe = soft_ring_entry(&qp->rq, at);
        const struct ibv_sge *sge = (const struct ibv_sge *)(rwqe + 1), *last = sge + rwqe->num_sge;

        for (; sge != last; sge++) {
            if (sge->addr != end) { /* receives of one piece of memory are mostly neighbours */
                give_back_pages(begin, end);
                begin = sge->addr;
            }
            end = sge->addr + sge->length;
        }
    }
    give_back_pages(begin, end);
}

/* Progress keeps the link from being freed. */
void soft_give_back(struct ibv_qp *ibv_qp, void *unused, size_t length)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    struct soft_fabric *fabric = qp->context->device->fabric;
    struct soft_link *link;

    give_back_pages((uintptr_t)unused, (uintptr_t)unused + length);
    soft_mutex_take(&fabric->progress);
    soft_lock_take(&qp->rq_lock);
    give_back_receives(qp);
    link = qp->link;
    soft_lock_give(&qp->rq_lock);
    if (link)
        soft_rings_give_back(link);
    soft_mutex_give(&fabric->progress);
}
