/* Shared receive queues. */
#include "soft.h"

struct ibv_srq *soft_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
    (void)pd, (void)attr;
    errno = EOPNOTSUPP;
    return NULL;
}

struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
    (void)context, (void)attr;
    errno = EOPNOTSUPP;
    return NULL;
}

int soft_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
    (void)srq, (void)attr, (void)mask;
    return EOPNOTSUPP;
}

int soft_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
    (void)srq, (void)attr;
    return EOPNOTSUPP;
}

int soft_destroy_srq(struct ibv_srq *srq)
{
    (void)srq;
    return EOPNOTSUPP;
}

int soft_get_srq_num(struct ibv_srq *srq, uint32_t *number)
{
    (void)srq, (void)number;
    return EOPNOTSUPP;
}

int soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)srq;
    *bad = wr;
    return EOPNOTSUPP;
}

bool soft_srq_has(struct soft_srq *srq)
{
    (void)srq;
    return false;
}

bool soft_srq_take(struct soft_srq *srq, struct soft_receive *receive)
{
    (void)srq, (void)receive;
    return false;
}

void soft_srq_break(struct soft_srq *srq)
{
    (void)srq;
}
