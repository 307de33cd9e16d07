/* Completion queues on a parent domain. */
#include "shim.h"

/* Up to v54, soft-RoCE's own next_poll steps over the end of the queue, and then finds old completions for ever. A
 * session with a single completion is valid: callers start another session for more. */
static int next_poll(struct ibv_cq_ex *cq)
{
    (void)cq;
    return ENOENT;
}

struct ibv_cq_ex *shim_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    struct ibv_cq_ex *cq;
    bool known;

    pthread_mutex_lock(&shim_lock);
    known = !(attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) || shim_find(PARENT, attr->parent_domain);
    pthread_mutex_unlock(&shim_lock);
    if (!known)
        return shim_refused(EINVAL);
    cq = shim_original_create_cq_ex(context, attr);
    if (cq)
        cq->next_poll = next_poll;
    return cq;
}
