/* Unsupported verbs: on-demand paging and the null region, counters, device memory, flow steering, rate limits, tag
 * matching, receive work queues, queue pairs shared by number, multicast, contexts over another descriptor. As with
 * providers of libibverbs, such an op fails with EOPNOTSUPP and is never NULL: a caller finds out by calling it. */
#include "soft/api/unsupported.h"

#pragma GCC diagnostic ignored "-Wunused-parameter" /* these functions need only the types of their parameters */

/* Define an op that returns an errno, and one that returns an object, named as in `struct verbs_context`. */
#define UNSUPPORTED(op, ...)   \
    static int op(__VA_ARGS__) \
    {                          \
        return EOPNOTSUPP;     \
    }
#define UNSUPPORTED_OBJECT(type, op, ...) \
    static struct type *op(__VA_ARGS__)   \
    {                                     \
        errno = EOPNOTSUPP;               \
        return NULL;                      \
    }

UNSUPPORTED(advise_mr, struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *list,
            uint32_t count)
UNSUPPORTED_OBJECT(ibv_mr, alloc_null_mr, struct ibv_pd *pd)

UNSUPPORTED_OBJECT(ibv_counters, create_counters, struct ibv_context *context, struct ibv_counters_init_attr *attr)
UNSUPPORTED(destroy_counters, struct ibv_counters *counters)
UNSUPPORTED(read_counters, struct ibv_counters *counters, uint64_t *values, uint32_t count, uint32_t flags)
UNSUPPORTED(attach_counters_point_flow, struct ibv_counters *counters, struct ibv_counter_attach_attr *attr,
            struct ibv_flow *flow)

UNSUPPORTED_OBJECT(ibv_dm, alloc_dm, struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
UNSUPPORTED(free_dm, struct ibv_dm *dm)
UNSUPPORTED_OBJECT(ibv_mr, reg_dm_mr, struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length,
                   unsigned int access)

UNSUPPORTED_OBJECT(ibv_flow, create_flow, struct ibv_qp *qp, struct ibv_flow_attr *attr)
UNSUPPORTED(destroy_flow, struct ibv_flow *flow)
UNSUPPORTED_OBJECT(ibv_flow_action, create_flow_action_esp, struct ibv_context *context,
                   struct ibv_flow_action_esp_attr *attr)
UNSUPPORTED(modify_flow_action_esp, struct ibv_flow_action *action, struct ibv_flow_action_esp_attr *attr)
UNSUPPORTED(destroy_flow_action, struct ibv_flow_action *action)

UNSUPPORTED_OBJECT(ibv_wq, create_wq, struct ibv_context *context, struct ibv_wq_init_attr *attr)
UNSUPPORTED(modify_wq, struct ibv_wq *wq, struct ibv_wq_attr *attr)
UNSUPPORTED(destroy_wq, struct ibv_wq *wq)
UNSUPPORTED_OBJECT(ibv_rwq_ind_table, create_rwq_ind_table, struct ibv_context *context,
                   struct ibv_rwq_ind_table_init_attr *attr)
UNSUPPORTED(destroy_rwq_ind_table, struct ibv_rwq_ind_table *table)

UNSUPPORTED(modify_qp_rate_limit, struct ibv_qp *qp, struct ibv_qp_rate_limit_attr *attr)
UNSUPPORTED_OBJECT(ibv_qp, open_qp, struct ibv_context *context, struct ibv_qp_open_attr *attr)

static int post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *wr, struct ibv_ops_wr **bad)
{
    *bad = wr;
    return EOPNOTSUPP;
}

/* Functions of the other table, which libibverbs exports. */
struct ibv_context *soft_import_device(int cmd_fd)
{
    errno = EOPNOTSUPP;
    return NULL;
}

struct ibv_pd *soft_import_pd(struct ibv_context *context, uint32_t handle)
{
    errno = EOPNOTSUPP;
    return NULL;
}

void soft_unimport_pd(struct ibv_pd *pd)
{
    /* No such protection domain exists. */
}

int soft_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    return EOPNOTSUPP;
}

int soft_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
    return EOPNOTSUPP;
}

void soft_unsupported_fill(struct verbs_context *verbs)
{
    verbs->advise_mr = advise_mr;
    verbs->alloc_null_mr = alloc_null_mr;
    verbs->create_counters = create_counters;
    verbs->destroy_counters = destroy_counters;
    verbs->read_counters = read_counters;
    verbs->attach_counters_point_flow = attach_counters_point_flow;
    verbs->alloc_dm = alloc_dm;
    verbs->free_dm = free_dm;
    verbs->reg_dm_mr = reg_dm_mr;
    verbs->ibv_create_flow = create_flow;
    verbs->ibv_destroy_flow = destroy_flow;
    verbs->create_flow_action_esp = create_flow_action_esp;
    verbs->modify_flow_action_esp = modify_flow_action_esp;
    verbs->destroy_flow_action = destroy_flow_action;
    verbs->create_wq = create_wq;
    verbs->modify_wq = modify_wq;
    verbs->destroy_wq = destroy_wq;
    verbs->create_rwq_ind_table = create_rwq_ind_table;
    verbs->destroy_rwq_ind_table = destroy_rwq_ind_table;
    verbs->modify_qp_rate_limit = modify_qp_rate_limit;
    verbs->open_qp = open_qp;
    verbs->post_srq_ops = post_srq_ops;
}
