/* Direct requests: memory from or to which a remote peer copies by itself, and how that permission is revoked.
 *
 * The application may reuse the memory of a request when the request completes, and the memory of a region when the
 * region is deregistered. So the copy token of each part is revoked before that: those of an acknowledged request
 * before it completes, and all of them before a request is refused, flushed or repeated (repeating may copy the same
 * memory), and before the queue pair is reset or destroyed. If the peer is still copying, none of these happens yet;
 * only the tokens that could be revoked are. The requester checks again later. An honest peer never delays a response
 * in this way, since it ends its copies before it responds. */
#include "soft/transport/direct_requests.h"

#include <time.h>

#include "soft/base/epoch.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/fabric/fabric.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/limits.h"
#include "soft/objects/mr.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/objects/work_queue.h"
#include "soft/transport/requester.h"

/* Longest interval between two checks whether a peer has ended its copies. */
#define LOOK_AGAIN_NS 10000000u

static struct soft_direct_part *direct_part_at(struct soft_qp *qp, uint32_t at)
{
    return &qp->direct_parts[at % SOFT_DIRECT_PARTS];
}

/* Revoke the copy tokens of the `count` oldest parts. Parts that the peer is copying remain. Return whether none
 * does. */
static bool try_revoke(struct soft_qp *qp, uint32_t count)
{
    struct soft_requester *req = &qp->req;
    uint32_t end = req->direct_first + count, at = end, left = end;

    while (at-- != req->direct_first) {
        struct soft_direct_part *part = direct_part_at(qp, at);

        if (soft_copy_token_close(qp->link, part->copy_token, part->serial))
            continue;
        if (!part->revoked_at)
            part->revoked_at = soft_now_ns();
        *direct_part_at(qp, --left) = *part;
    }
    count = left - req->direct_first;
    req->direct_first = left;
    req->direct_count -= count;
    atomic_fetch_sub(&qp->context->device->direct_parts, count);
    return left == end;
}

/* Return when the wait for the peer began. At least one token was revoked in vain. */
static uint64_t revoked_since(struct soft_qp *qp)
{
    struct soft_requester *req = &qp->req;
    uint64_t first = soft_now_ns();
    uint32_t i;

    for (i = 0; i < req->direct_count; i++) {
        uint64_t revoked_at = direct_part_at(qp, req->direct_first + i)->revoked_at;

        if (revoked_at && revoked_at < first)
            first = revoked_at;
    }
    return first;
}

/* Revoke the copy tokens of the `count` oldest parts. Return true if the peer has ended the copies of all these parts,
 * or has had the time allowed for that. */
static bool revoke_oldest(struct soft_qp *qp, uint32_t count)
{
    uint32_t others = qp->req.direct_count - count;

    if (try_revoke(qp, count))
        return true;
    if (soft_copy_token_may_wait(qp->link, revoked_since(qp)))
        return false;
    soft_copy_tokens_give_up(qp->link);
    return try_revoke(qp, qp->req.direct_count - others);
}

bool soft_direct_revoke(struct soft_qp *qp)
{
    return revoke_oldest(qp, qp->req.direct_count);
}

uint64_t soft_direct_next_check(struct soft_qp *qp)
{
    uint64_t since = revoked_since(qp), now = soft_now_ns(), delay = SOFT_YIELD_NS / 2 + (now - since) / 4;

    return now + (delay < LOOK_AGAIN_NS ? delay : LOOK_AGAIN_NS);
}

bool soft_direct_revoke_up_to(struct soft_qp *qp, uint32_t psn)
{
    struct soft_requester *req = &qp->req;
    uint32_t count = 0;

    while (count < req->direct_count &&
           ((psn - direct_part_at(qp, req->direct_first + count)->psn) & SOFT_PSN_MASK) <= SOFT_PSN_MASK / 2)
        count++;
    return revoke_oldest(qp, count);
}

void soft_direct_wait(struct soft_qp *qp)
{
    bool settled = false;

    while (!settled) {
        soft_lock_take(&qp->sq_lock);
        settled = soft_direct_revoke(qp);
        soft_lock_give(&qp->sq_lock);
        if (!settled)
            nanosleep(&(struct timespec){.tv_nsec = SOFT_YIELD_NS}, NULL);
    }
}

static bool request_uses_mr(const struct soft_qp *qp, const struct soft_mr *mr)
{
    uint32_t at, end = qp->req.window.sent + (qp->req.window.offset != 0);
    unsigned int i;

    for (at = qp->req.window.finished; at != end; at++) {
        const struct soft_wqe *wqe = soft_request_at(qp, at);
        const struct ibv_sge *sge = (const struct ibv_sge *)(wqe + 1);

        for (i = 0; i < wqe->num_sge && !(wqe->flags & IBV_SEND_INLINE); i++)
            if (sge[i].lkey == mr->mr.lkey)
                return qp->pd->domain == mr->pd->domain;
    }
    return false;
}

/* Revoke the copy tokens of a queue pair of the context, or, if that is NULL, of a queue pair that uses the region. In
 * a grace section. Return false if the peer is still copying; with `last`, give the peer up instead. The queue pair
 * sends nothing more before the peer has ended its copies, so repeated calls have nothing new to wait for. */
static bool qp_release_mr(struct soft_qp *qp, const struct soft_context *context, const struct soft_mr *mr, bool last)
{
    bool left = true, kick = false;

    soft_lock_take(&qp->sq_lock);
    if (qp->req.direct_count && (context ? qp->context == context : request_uses_mr(qp, mr))) {
        left = soft_direct_revoke(qp);
        if (!left && last) {
            soft_copy_tokens_give_up(qp->link);
            left = soft_direct_revoke(qp);
        }
        kick = !left && !qp->req.rewind;
        qp->req.rewind |= kick;
    }
    soft_lock_give(&qp->sq_lock);
    if (kick) /* from here on the queue pair's own timer checks when it may go on */
        soft_kick(qp);
    return left;
}

static void wait_for_peers(struct soft_device *device, const struct soft_context *context, const struct soft_mr *mr)
{
    uint64_t end = soft_now_ns() + SOFT_COPY_TIMEOUT_NS;
    bool left = !atomic_load(&device->direct_parts), last = false;

    while (!left) {
        uint32_t number;

        left = true;
        for (number = SOFT_FIRST_QPN; number < soft_table_end(&device->qps); number++) {
            struct grace_reader *grace = grace_enter(); /* one section for each: other threads wait for grace periods */
            struct soft_qp *qp = soft_table_find(&device->qps, number);

            if (qp && !qp_release_mr(qp, context, mr, last))
                left = false;
            grace_leave(grace);
        }
        if (!left)
            nanosleep(&(struct timespec){.tv_nsec = SOFT_YIELD_NS}, NULL);
        last = soft_now_ns() >= end;
    }
}

void soft_direct_release_mr(struct soft_device *device, const struct soft_mr *mr)
{
    wait_for_peers(device, NULL, mr);
}

void soft_direct_release_context(const struct soft_context *context)
{
    wait_for_peers(context->device, context, NULL);
}
