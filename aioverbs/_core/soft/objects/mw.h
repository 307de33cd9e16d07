/* Memory windows, and memory that peers address by the key of a region or of a window. */
#ifndef AIOVERBS_SOFT_OBJECTS_MW_H
#define AIOVERBS_SOFT_OBJECTS_MW_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/lock_order.h"
#include "soft/objects/mr.h"

struct soft_qp;
struct soft_wqe;

/* Memory window. The number of its key is const; the low byte of the key, and whether the window is bound, change with
 * each binding. */
struct soft_mw {
    struct soft_key key;
    struct ibv_mw mw;
    struct soft_pd *pd;    /* const */
    struct soft_lock lock; /* guards the fields below; held while bytes are copied through the window */
    bool bound;
    uint32_t rkey;
    uint64_t qp_serial; /* type 2: serial number of the queue pair of the binding, which alone may use the window */
    struct soft_mr *mr;
    uint64_t address, length;
    int access;
};

struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int soft_dealloc_mw(struct ibv_mw *mw);
/* Unbind a window that no key finds any more, so that its region can be deregistered. */
void soft_mw_unbind(struct soft_mw *mw);

/* Memory that a peer of `qp` addresses by the key of a region or window. Opened in a grace section, under rq_lock: NULL
 * as with soft_mr_reach; otherwise the address stays valid, and a window bound, until soft_remote_close. */
struct soft_remote {
    struct soft_mw *window; /* locked, or NULL */
};

/* Open a range through a window, as soft_remote_open does; a window that allows the access stays locked until
 * soft_remote_close. */
uint8_t *soft_mw_open(struct soft_mw *mw, struct soft_remote *remote, const struct soft_qp *qp,
                      const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access);

/* Return the address of a range by the key of a region or window, or NULL. */
static inline uint8_t *soft_remote_open(struct soft_remote *remote, struct soft_device *device,
                                        const struct soft_qp *qp, const struct soft_pd *pd, uint32_t key,
                                        uint64_t address, uint64_t length, int access)
{
    struct soft_key *found = soft_table_find(&device->keys, key >> 8);

    remote->window = NULL;
    if (!found)
        return soft_shared_open(remote, qp, pd, key, address, length, access);
    if (found->is_window)
        return soft_mw_open(container_of(found, struct soft_mw, key), remote, qp, pd, key, address, length, access);
    return soft_mr_reach(container_of(found, struct soft_mr, key), pd, key, address, length, access);
}

static inline void soft_remote_close(struct soft_remote *remote)
{
    if (remote->window)
        soft_lock_give(&remote->window->lock);
}

/* Execute a bind or an invalidation on a queue pair, in a grace section, under sq_lock or rq_lock. Return false where
 * the request is invalid. After an unbinding no access through the window is in progress. */
bool soft_mw_bind(const struct soft_qp *qp, const struct soft_wqe *wqe);
bool soft_mw_invalidate(const struct soft_qp *qp, const struct soft_pd *pd, uint32_t rkey);

#endif
