/* Memory that idle queue pairs give back. */
#define _GNU_SOURCE
#include "soft/api/give_back.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#include "soft/base/epoch.h"
#include "soft/base/util.h"
#include "soft/fabric/shared_rings.h"
#include "soft/fabric/stream.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/mr.h"
#include "soft/objects/qp.h"
#include "soft/objects/work_queue.h"

#define LOCKED_BYTES (1u << 20) /* bytes of receives that are given back under one hold of their lock */

/* Give back the pages that lie between two addresses as a whole. Pages that are locked stay. */
static void give_back_pages(uint64_t begin, uint64_t end)
{
    uint64_t mask = soft_page() - 1;

    begin = (begin + mask) & ~mask;
    end &= ~mask;
    if (begin < end)
        madvise((void *)(uintptr_t)begin, end - begin, MADV_DONTNEED);
}

/* Neighbouring memory whose pages are given back together. */
struct range {
    uint64_t begin, end;
};

/* Add memory to a range, which begins anew if the memory is no neighbour. */
static void range_add(struct range *range, uint64_t address, uint32_t length)
{
    if (address != range->end) {
        give_back_pages(range->begin, range->end);
        range->begin = address;
    }
    range->end = address + length;
}

/* Return whether memory is that of a region of this process which messages may be written to. */
static bool is_here(const struct soft_qp *qp, const struct ibv_sge *sge)
{
    const uint8_t *at =
        soft_mr_resolve(qp->context->device, qp->pd, sge->lkey, sge->addr, sge->length, IBV_ACCESS_LOCAL_WRITE);

    return at && (uintptr_t)at == sge->addr;
}

/* Give back the pages of posted receives, from the one of a counter on, until `limit` bytes are done. Return the
 * counter of the next one. */
static uint32_t give_back_some(const struct soft_qp *qp, uint32_t at, uint32_t posted, uint64_t limit)
{
    struct range range = {0, 0};
    uint64_t bytes = 0;

    assert_held(&qp->rq_lock);
    for (; at != posted && bytes < limit; at++) {
        const struct soft_rwqe *rwqe = soft_ring_entry(&qp->rq, at);
        const struct ibv_sge *sge = (const struct ibv_sge *)(rwqe + 1), *last = sge + rwqe->num_sge;

        for (; sge != last; sge++) {
            bytes += sge->length;
            if (is_here(qp, sge))
                range_add(&range, sge->addr, sge->length);
        }
    }
    give_back_pages(range.begin, range.end);
    return at;
}

/* A message takes a receive under rq_lock before it writes there, so nothing writes to one that is not taken. In a
 * grace section. */
static void give_back_receives(struct soft_qp *qp)
{
    uint32_t at, done = 0;

    if (qp->srq || !qp->rq.depth)
        return;
    soft_lock_take(&qp->rq_lock);
    at = qp->rq.consumed;
    while (done < qp->rq.depth) {
        uint32_t posted = atomic_load_explicit(qp->rq.posted, memory_order_acquire), next;

        if ((int32_t)(qp->rq.consumed - at) > 0) /* messages have come meanwhile */
            at = qp->rq.consumed;
        if ((int32_t)(posted - at) <= 0)
            break;
        next = give_back_some(qp, at, posted, LOCKED_BYTES);
        done += next - at;
        at = next;
        soft_lock_give(&qp->rq_lock); /* lets messages in */
        soft_lock_take(&qp->rq_lock);
    }
    soft_lock_give(&qp->rq_lock);
}

/* Progress keeps the link from being freed. */
static void give_back_rings(struct soft_qp *qp)
{
    struct soft_fabric *fabric = qp->context->device->fabric;
    struct soft_link *link;

    soft_mutex_take(&fabric->progress);
    soft_lock_take(&qp->rq_lock);
    link = qp->link;
    soft_lock_give(&qp->rq_lock);
    if (link)
        soft_rings_give_back(link);
    soft_mutex_give(&fabric->progress);
}

void soft_give_back(struct ibv_qp *ibv_qp, void *unused, size_t length)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    struct grace_reader *self;

    if (soft_stale(qp->context) || !grace_ready())
        return;
    give_back_pages((uintptr_t)unused, (uintptr_t)unused + length);
    self = grace_enter();
    give_back_receives(qp);
    grace_leave(self);
    give_back_rings(qp);
}
