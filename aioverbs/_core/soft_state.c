/* The queue pair's state machine: which attributes each transition must and may have. Pure. */
#include <errno.h>

#include "soft.h"

#define RC_RTR \
    (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define RC_RTS (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)
#define RC_CHANGEABLE (IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER)
#define RC_ALIVE (IBV_QP_CUR_STATE | RC_CHANGEABLE)

/* The tables of the InfiniBand architecture, volume 1, chapter 11.2.5, without alternate paths, which this device
 * does not have. To RESET a queue pair goes from everywhere, to ERR from everywhere but RESET, as with kernel
 * providers; both with nothing but the state. */
static const struct transition {
    enum ibv_qp_type type;
    enum ibv_qp_state from, to;
    int required, optional;
} transitions[] = {
    {IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, RC_RTR, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS, RC_RTS, RC_ALIVE},
    {IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTS, 0, RC_ALIVE},
    {IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPT_RC, IBV_QPS_SQD, IBV_QPS_RTS, 0, RC_ALIVE},
    {IBV_QPT_RC, IBV_QPS_SQD, IBV_QPS_SQD, 0,
     RC_CHANGEABLE | IBV_QP_PORT | IBV_QP_AV | IBV_QP_PKEY_INDEX | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
         IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC},
};

int soft_state_check(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
    int attributes = mask & ~IBV_QP_STATE;
    size_t i;

    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET))
        return attributes ? EINVAL : 0;
    for (i = 0; i < sizeof(transitions) / sizeof(transitions[0]); i++) {
        const struct transition *t = &transitions[i];

        if (t->type != type || t->from != from || t->to != to)
            continue;
        if ((attributes & t->required) != t->required || (attributes & ~(t->required | t->optional)))
            return EINVAL;
        return 0;
    }
    return EINVAL;
}
