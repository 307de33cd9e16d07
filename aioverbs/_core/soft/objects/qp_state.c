/* State machine of queue pairs: the attributes that each transition must and may have. */
#include "soft/objects/qp_state.h"

#include <errno.h>
#include <stdbool.h>

/* Sets of queue pair types. */
enum { RC = 1, UC = 2, UD = 4, INI = 8, TGT = 16, CONNECTED = RC | UC | INI | TGT, ALL = CONNECTED | UD };

#define PATH (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define RESPONDER (IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define REQUESTER (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)
#define PLACE (IBV_QP_PKEY_INDEX | IBV_QP_PORT)

/* Tables of the InfiniBand architecture, volume 1, chapter 11.2.5, with annex A14 for XRC, without alternate paths,
 * which this device does not have. A transition takes the attributes of all rows that match the type. As with kernel
 * providers, any state may change to RESET, and any state but RESET to ERR, with no attribute but the state. */
static const struct row {
    enum ibv_qp_state from, to;
    int types, required, optional;
} rows[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, CONNECTED, PLACE | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_RESET, IBV_QPS_INIT, UD, PLACE | IBV_QP_QKEY, 0},

    {IBV_QPS_INIT, IBV_QPS_INIT, CONNECTED, 0, PLACE | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_INIT, UD, 0, PLACE | IBV_QP_QKEY},

    {IBV_QPS_INIT, IBV_QPS_RTR, CONNECTED, PATH, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR, RC | TGT, RESPONDER, 0},
    {IBV_QPS_INIT, IBV_QPS_RTR, UD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},

    {IBV_QPS_RTR, IBV_QPS_RTS, ALL, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE},
    {IBV_QPS_RTR, IBV_QPS_RTS, RC | INI, REQUESTER, 0},
    {IBV_QPS_RTR, IBV_QPS_RTS, TGT, IBV_QP_TIMEOUT, 0},
    {IBV_QPS_RTR, IBV_QPS_RTS, CONNECTED, 0, IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS, RC | TGT, 0, IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTR, IBV_QPS_RTS, UD, 0, IBV_QP_QKEY},

    {IBV_QPS_RTS, IBV_QPS_RTS, ALL, 0, IBV_QP_CUR_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, CONNECTED, 0, IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTS, IBV_QPS_RTS, RC | TGT, 0, IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, UD, 0, IBV_QP_QKEY},

    {IBV_QPS_RTS, IBV_QPS_SQD, ALL, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},

    {IBV_QPS_SQD, IBV_QPS_RTS, ALL, 0, IBV_QP_CUR_STATE},
    {IBV_QPS_SQD, IBV_QPS_RTS, CONNECTED, 0, IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_SQD, IBV_QPS_RTS, RC | TGT, 0, IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_SQD, IBV_QPS_RTS, UD, 0, IBV_QP_QKEY},

    {IBV_QPS_SQD, IBV_QPS_SQD, ALL, 0, IBV_QP_PKEY_INDEX},
    {IBV_QPS_SQD, IBV_QPS_SQD, CONNECTED, 0, IBV_QP_AV | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_SQD, IBV_QPS_SQD, RC | INI | TGT, 0, IBV_QP_PORT | IBV_QP_TIMEOUT},
    {IBV_QPS_SQD, IBV_QPS_SQD, RC | INI, 0, REQUESTER},
    {IBV_QPS_SQD, IBV_QPS_SQD, RC | TGT, 0, RESPONDER},
    {IBV_QPS_SQD, IBV_QPS_SQD, UD, 0, IBV_QP_QKEY},

    {IBV_QPS_SQE, IBV_QPS_RTS, UD | UC, 0, IBV_QP_CUR_STATE},
    {IBV_QPS_SQE, IBV_QPS_RTS, UC, 0, IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_SQE, IBV_QPS_RTS, UD, 0, IBV_QP_QKEY},
};

static int set_of(enum ibv_qp_type type)
{
    switch (type) {
    case IBV_QPT_RC:
        return RC;
    case IBV_QPT_UC:
        return UC;
    case IBV_QPT_UD:
        return UD;
    case IBV_QPT_XRC_SEND:
        return INI;
    case IBV_QPT_XRC_RECV:
        return TGT;
    default:
        return 0;
    }
}

int soft_state_check(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
    int attributes = mask & ~IBV_QP_STATE, required = 0, optional = 0;
    bool possible = false;
    size_t i;

    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET))
        return attributes ? EINVAL : 0;
    for (i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (rows[i].from != from || rows[i].to != to || !(rows[i].types & set_of(type)))
            continue;
        possible = true;
        required |= rows[i].required;
        optional |= rows[i].optional;
    }
    if (!possible || (attributes & required) != required || (attributes & ~(required | optional)))
        return EINVAL;
    return 0;
}
