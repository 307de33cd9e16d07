/* Reads of a peer's memory that is mapped here. */
#include "soft/api/mapped_read.h"

#include "soft/base/epoch.h"
#include "soft/objects/context.h"
#include "soft/objects/qp.h"
#include "soft/transport/cached_reads.h"

/* Under sq_lock, as posted reads are that a grant covers: others that wait for it are those that post to, or poll for,
 * this queue pair. */
bool soft_read_mapped(struct ibv_qp *ibv_qp, void *to, uint64_t address, uint32_t key, uint32_t length)
{
    struct soft_qp *qp = to_soft_qp(ibv_qp);
    struct grace_reader *self;
    bool done;

    if (soft_stale(qp->context) || !grace_ready())
        return false;
    self = grace_enter();
    soft_lock_take(&qp->sq_lock);
    done = soft_cached_read_now(qp, to, address, key, length);
    soft_lock_give(&qp->sq_lock);
    grace_leave(self);
    return done;
}
