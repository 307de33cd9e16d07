/* Verbs of queue pairs. */
#ifndef AIOVERBS_SOFT_API_QP_H
#define AIOVERBS_SOFT_API_QP_H

#include "abi/libibverbs.h"

struct soft_qp;

struct ibv_qp *soft_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
int soft_destroy_qp(struct ibv_qp *qp);
int soft_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init_attr);
int soft_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);

/* Break the queue pair: it enters ERR and raises QP_FATAL. Call in a grace section, with no lock of the device held. */
void soft_qp_break(struct soft_qp *qp);

#endif
