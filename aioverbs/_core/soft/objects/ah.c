/* Address handles: destinations of datagrams. Posting copies the attributes, so a handle can be destroyed at any time.
 */
#include "soft/objects/ah.h"

#include <stdlib.h>

#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/pd.h"

int soft_ah_check(const struct ibv_ah_attr *attr)
{
    /* A RoCE path needs a GRH. */
    return attr->is_global && attr->grh.sgid_index < SOFT_GIDS && attr->port_num == 1 ? 0 : EINVAL;
}

struct ibv_ah *soft_create_ah(struct ibv_pd *ibv_pd, struct ibv_ah_attr *attr)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    int error = soft_stale(context) ? ENODEV : soft_ah_check(attr);
    struct soft_ah *ah = NULL;

    if (!error && !(ah = calloc(1, sizeof(*ah))))
        error = ENOMEM;
    if (error) {
        errno = error;
        return NULL;
    }
    ah->pd = to_soft_pd(ibv_pd);
    ah->attr = *attr;
    ah->ah.context = ibv_pd->context;
    ah->ah.pd = ibv_pd;
    ah->ah.handle = atomic_fetch_add(&context->next_handle, 1);
    atomic_fetch_add(&ah->pd->references, 1);
    atomic_fetch_add(&context->ahs, 1);
    return &ah->ah;
}

int soft_destroy_ah(struct ibv_ah *ibv_ah)
{
    struct soft_ah *ah = container_of(ibv_ah, struct soft_ah, ah);
    struct soft_context *context = to_soft_context(ibv_ah->context);

    if (soft_stale(context))
        return ENODEV;
    atomic_fetch_sub(&ah->pd->references, 1);
    atomic_fetch_sub(&context->ahs, 1);
    free(ah);
    return 0;
}
