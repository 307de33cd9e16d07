/* XRC domains. */
#include "soft.h"

struct ibv_xrcd *soft_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
    (void)context, (void)attr;
    errno = EOPNOTSUPP;
    return NULL;
}

int soft_close_xrcd(struct ibv_xrcd *xrcd)
{
    (void)xrcd;
    return EOPNOTSUPP;
}
