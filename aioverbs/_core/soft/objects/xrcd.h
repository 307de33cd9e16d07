/* XRC domains. */
#ifndef AIOVERBS_SOFT_OBJECTS_XRCD_H
#define AIOVERBS_SOFT_OBJECTS_XRCD_H

#include <stdatomic.h>

#include "abi/libibverbs.h"
#include "soft/base/util.h"

struct soft_xrc_inode;

struct soft_xrcd {
    struct ibv_xrcd xrcd;
    struct soft_xrc_inode *shared; /* const: state that all handles of one inode's domain share */
    atomic_uint references;        /* number of queue pairs and shared receive queues created with this handle */
};

static inline struct soft_xrcd *to_soft_xrcd(struct ibv_xrcd *xrcd)
{
    return container_of(xrcd, struct soft_xrcd, xrcd);
}

struct ibv_xrcd *soft_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int soft_close_xrcd(struct ibv_xrcd *xrcd);

#endif
