/* Memory windows: keys to a part of a region, which work requests bind and invalidate. */
#include "soft/objects/mw.h"

#include <stdlib.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/hooks.h"
#include "soft/objects/mr.h"
#include "soft/objects/pd.h"
#include "soft/objects/qp.h"
#include "soft/objects/shared_keys.h"
#include "soft/objects/work_queue.h"

#define SOFT_WINDOW_ACCESS (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

/* ---- Allocation ------------------------------------------------------------------------------------------ */

struct ibv_mw *soft_alloc_mw(struct ibv_pd *ibv_pd, enum ibv_mw_type type)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    struct soft_mw *mw = NULL;
    uint8_t use;
    int error = soft_stale(context) ? ENODEV : 0;

    if (!error && type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)
        error = EINVAL;
    if (!error && !(mw = calloc(1, sizeof(*mw))))
        error = ENOMEM;
    if (!error)
        error = soft_key_reserve(to_soft_pd(ibv_pd), &mw->key, &use);
    if (error) {
        free(mw);
        errno = error;
        return NULL;
    }
    mw->key.is_window = true;
    mw->pd = to_soft_pd(ibv_pd);
    mw->mw = (struct ibv_mw){ibv_pd->context, ibv_pd, mw->key.number << 8 | use, mw->key.number, type};
    mw->rkey = mw->mw.rkey;
    soft_lock_init(&mw->lock, SOFT_RANK_MW);
    soft_pd_add_key(mw->pd, &mw->key);
    atomic_fetch_add(&context->mws, 1);
    soft_key_publish(context->device, &mw->key);
    return &mw->mw;
}

/* Unbind the window, if it is bound. Call under the window's lock. */
static void unbind(struct soft_mw *mw)
{
    struct soft_device *device = to_soft_context(mw->mw.context)->device;

    assert_held(&mw->lock);
    if (!mw->bound)
        return;
    mw->bound = false;
    device->hooks->invalidate_key(device, mw->key.number);
    atomic_fetch_sub(&mw->mr->windows, 1);
}

void soft_mw_unbind(struct soft_mw *mw)
{
    soft_lock_take(&mw->lock);
    unbind(mw);
    soft_lock_give(&mw->lock);
}

int soft_dealloc_mw(struct ibv_mw *ibv_mw)
{
    struct soft_mw *mw = container_of(ibv_mw, struct soft_mw, mw);
    struct soft_context *context = to_soft_context(ibv_mw->context);

    if (soft_stale(context))
        return ENODEV;
    soft_key_withdraw(context->device, &mw->key);
    grace_wait(); /* no key finds the window, and no access through it is in progress */
    soft_mw_unbind(mw);
    soft_pd_remove_key(mw->pd, &mw->key);
    soft_key_release(context->device, &mw->key);
    atomic_fetch_sub(&context->mws, 1);
    free(mw);
    return 0;
}

/* ---- Binding --------------------------------------------------------------------------------------------- */

static struct soft_mw *find_window(const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key)
{
    struct soft_key *found = soft_key_find(qp->context->device, pd, key);

    return found && found->is_window ? container_of(found, struct soft_mw, key) : NULL;
}

/* Return the region of a bind request; NULL where the request breaks a rule of the InfiniBand architecture, chapter
 * 10.6.7.2.1. */
static struct soft_mr *bind_region(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    struct soft_key *found = soft_key_find(qp->context->device, qp->pd, wqe->imm_data);
    struct soft_mr *mr;
    uint64_t offset;

    if (!found || found->is_window)
        return NULL;
    mr = container_of(found, struct soft_mr, key);
    if (mr->mr.lkey != wqe->imm_data || mr->pd->domain != qp->pd->domain || !(mr->access & IBV_ACCESS_MW_BIND))
        return NULL;
    if ((wqe->bind.access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) &&
        !(mr->access & IBV_ACCESS_LOCAL_WRITE))
        return NULL;
    offset = wqe->remote_addr - (uintptr_t)mr->mr.addr;
    if (offset > mr->mr.length || wqe->bind.length > mr->mr.length - offset)
        return NULL;
    return mr;
}

bool soft_mw_bind(const struct soft_qp *qp, const struct soft_wqe *wqe)
{
    struct soft_mw *mw = find_window(qp, qp->pd, wqe->rkey);
    struct soft_mr *mr = NULL;
    bool second, good;

    if (!mw || mw->pd->domain != qp->pd->domain || (wqe->bind.access & ~(uint64_t)SOFT_WINDOW_ACCESS))
        return false;
    second = mw->mw.type == IBV_MW_TYPE_2;
    if (wqe->bind.length) {
        mr = bind_region(qp, wqe);
        if (!mr)
            return false;
    } else if (second) { /* a window of type 2 is unbound by invalidation alone */
        return false;
    }
    soft_lock_take(&mw->lock);
    good = !second || !mw->bound;
    if (good) {
        unbind(mw);
        mw->rkey = wqe->rkey;
        soft_key_set_use(qp->context->device, &mw->key, (uint8_t)mw->rkey);
        if (mr) {
            /* Deregistering withdraws the region's key first, and waits for this section before it reads the count. */
            atomic_fetch_add(&mr->windows, 1);
            mw->mr = mr;
            mw->address = wqe->remote_addr;
            mw->length = wqe->bind.length;
            mw->access = (int)wqe->bind.access;
            mw->qp_serial = qp->serial;
            mw->bound = true;
        }
    }
    soft_lock_give(&mw->lock);
    return good;
}

bool soft_mw_invalidate(const struct soft_qp *qp, const struct soft_pd *pd, uint32_t rkey)
{
    struct soft_mw *mw = find_window(qp, pd, rkey);
    bool good;

    if (!mw || mw->mw.type != IBV_MW_TYPE_2 || mw->pd->domain != pd->domain)
        return false;
    soft_lock_take(&mw->lock);
    good = mw->bound && mw->rkey == rkey && mw->qp_serial == qp->serial;
    if (good)
        unbind(mw);
    soft_lock_give(&mw->lock);
    return good;
}

/* ---- Access by peers ------------------------------------------------------------------------------------- */

/* Return whether the window allows an access. Call under the window's lock.
 *
 * A window of type 2 belongs to its queue pair across resets: ibv_alloc_mw(3) lists what ends a binding, and RESET is
 * not among these, nor with soft-RoCE. A serial number is never reused: after the queue pair is destroyed the key
 * allows no access. */
static bool allows_access(const struct soft_mw *mw, const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key,
                          uint64_t address, uint64_t length, int access)
{
    uint64_t offset = address - mw->address;

    assert_held(&mw->lock);
    if (!mw->bound || mw->rkey != key || mw->pd->domain != pd->domain || (mw->access & access) != access)
        return false;
    if (mw->mw.type == IBV_MW_TYPE_2 && mw->qp_serial != qp->serial)
        return false;
    if (atomic_load(&mw->mr->key.dead)) /* the region's instance of the domain was deallocated, the window's was not */
        return false;
    return offset <= mw->length && length <= mw->length - offset;
}

uint8_t *soft_mw_open(struct soft_mw *mw, struct soft_remote *remote, const struct soft_qp *qp,
                      const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access)
{
    soft_lock_take(&mw->lock);
    if (!allows_access(mw, qp, pd, key, address, length, access)) {
        soft_lock_give(&mw->lock);
        return NULL;
    }
    remote->window = mw;
    return (uint8_t *)(uintptr_t)address;
}
