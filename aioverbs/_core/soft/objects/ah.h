/* Address handles. */
#ifndef AIOVERBS_SOFT_OBJECTS_AH_H
#define AIOVERBS_SOFT_OBJECTS_AH_H

#include "abi/libibverbs.h"

struct soft_pd;

struct soft_ah {
    struct ibv_ah ah;
    struct soft_pd *pd;
    struct ibv_ah_attr attr;
};

/* Check a path: return 0, or EINVAL where no path from this device has such attributes. */
int soft_ah_check(const struct ibv_ah_attr *attr);
struct ibv_ah *soft_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int soft_destroy_ah(struct ibv_ah *ah);

#endif
