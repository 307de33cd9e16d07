/* Ops that the software device lacks, as nearly all devices do: the result is an error, never a crash. Their objects
 * cannot be created; ops that take one are called with a zeroed block, which an answer of EOPNOTSUPP does not read. */
#include "probe.h"

static _Alignas(16) unsigned char nothing[512];

#define NOTHING ((void *)nothing)
#define INT_ROW(op, asked, ...)                           \
    ROW(op, asked)                                        \
    {                                                     \
        REPORT_INT(CALL_OP(EOPNOTSUPP, op, __VA_ARGS__)); \
    }
#define MADE_ROW(op, asked, ...)                       \
    ROW(op, asked)                                     \
    {                                                  \
        REPORT_OBJECT(CALL_OP(NULL, op, __VA_ARGS__)); \
    }

INT_ROW(free_dm, "none", NOTHING)
MADE_ROW(reg_dm_mr, "none", domain(), NOTHING, 0, 4096, IBV_ACCESS_LOCAL_WRITE)
MADE_ROW(create_counters, "one", context, NOTHING)
INT_ROW(destroy_counters, "none", NOTHING)
INT_ROW(read_counters, "none", NOTHING, NOTHING, 0, 0)
INT_ROW(attach_counters_point_flow, "none", NOTHING, NOTHING, NULL)
MADE_ROW(create_flow_action_esp, "one", context, NOTHING)
INT_ROW(modify_flow_action_esp, "none", NOTHING, NOTHING)
INT_ROW(destroy_flow_action, "none", NOTHING)
MADE_ROW(ibv_create_flow, "one", NOTHING, NOTHING)
INT_ROW(ibv_destroy_flow, "none", NOTHING)
MADE_ROW(create_wq, "one", context, NOTHING)
INT_ROW(modify_wq, "none", NOTHING, NOTHING)
INT_ROW(destroy_wq, "none", NOTHING)
MADE_ROW(create_rwq_ind_table, "one", context, NOTHING)
INT_ROW(destroy_rwq_ind_table, "none", NOTHING)
INT_ROW(post_srq_ops, "none", shared_queue(4), NOTHING, NOTHING)

static const union ibv_gid group = {.raw = {0xff, 0x0e, [10] = 0xff, 0xff, 224, 0, 1, 1}};

ROW(attach_mcast, "a datagram queue pair to a group")
{
    make_pair(IBV_QPT_UD);
    REPORT_INT(verbs->attach_mcast(a.qp, &group, 0));
}

ROW(detach_mcast, "a group never attached")
{
    make_pair(IBV_QPT_UD);
    REPORT_INT(verbs->detach_mcast(a.qp, &group, 0));
}
