/* Memory windows, and memory that peers name by a key: of a region or of a window. */
#ifndef AIOVERBS_SOFT_OBJECTS_MW_H
#define AIOVERBS_SOFT_OBJECTS_MW_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/lock_order.h"
#include "soft/objects/mr.h"

struct soft_qp;
struct soft_wqe;

/* A window's key as a number stays; its low byte, and whether it leads anywhere, change with each binding. */
struct soft_mw {
    struct soft_key key;
    struct ibv_mw mw;
    struct soft_pd *pd;    /* const */
    struct soft_lock lock; /* guards what follows; held while bytes move through the window */
    bool bound;
    uint32_t rkey;
    uint64_t qp_serial; /* type 2: the queue pair that it was bound on, and that alone may be used */
    struct soft_mr *mr;
    uint64_t address, length;
    int access;
};

struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int soft_dealloc_mw(struct ibv_mw *mw);
void soft_mw_unbind(struct soft_mw *mw); /* nobody finds it any more: it gives the region free that it is bound to */

/* Memory that a peer of `qp` names by a region's or a window's key. In a grace section, under rq_lock. NULL as
 * for soft_mr_reach; else the address stays good, and a window bound, until soft_remote_close. */
struct soft_remote {
    struct soft_mw *window; /* locked, or NULL */
};

uint8_t *soft_mw_open(struct soft_mw *mw, struct soft_remote *remote, const struct soft_qp *qp,
                      const struct soft_pd *pd, uint32_t key, uint64_t address, uint64_t length, int access);

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

/* What a queue pair does with a window when it executes: in a grace section, under sq_lock or rq_lock. False: it is
 * not to be. After an unbinding nobody is in the window any more. */
bool soft_mw_bind(const struct soft_qp *qp, const struct soft_wqe *wqe);
bool soft_mw_invalidate(const struct soft_qp *qp, const struct soft_pd *pd, uint32_t rkey);

#endif
