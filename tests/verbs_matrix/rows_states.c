/* States of queue pairs: allowed transitions, and their attributes. */
#include "probe.h"

static void report_step(enum ibv_qp_state state, struct ibv_qp_attr attr, int mask)
{
    report_int(step_as(a.qp, state, b.qp ? b.qp->qp_num : a.qp->qp_num, attr, mask));
}

static void at(enum ibv_qp_type type, enum ibv_qp_state state)
{
    make_end(&a, type);
    if (state != IBV_QPS_RESET)
        move_to_state(a.qp, state, a.qp->qp_num);
}

static void report_walk(enum ibv_qp_type type)
{
    static const enum ibv_qp_state way[] = {IBV_QPS_INIT, IBV_QPS_INIT, IBV_QPS_RTR,  IBV_QPS_RTS,
                                            IBV_QPS_RTS,  IBV_QPS_ERR,  IBV_QPS_RESET};

    make_end(&a, type);
    for (size_t i = 0; i < ROWS_OF(way); i++) {
        int again = i && way[i] == way[i - 1] && way[i] == IBV_QPS_RTS;

        report_int(step_as(a.qp, way[i], a.qp->qp_num, link_attr, again ? IBV_QP_STATE : mask_to(type, way[i])));
    }
}

ROW(modify_qp, "RC: RESET, INIT, INIT, RTR, RTS, RTS, ERR, RESET")
{
    report_walk(IBV_QPT_RC);
}

ROW(modify_qp, "UC: RESET, INIT, INIT, RTR, RTS, RTS, ERR, RESET")
{
    report_walk(IBV_QPT_UC);
}

ROW(modify_qp, "UD: RESET, INIT, INIT, RTR, RTS, RTS, ERR, RESET")
{
    report_walk(IBV_QPT_UD);
}

ROW(modify_qp, "XRC_SEND: RESET, INIT, INIT, RTR, RTS, RTS, ERR, RESET")
{
    report_walk(IBV_QPT_XRC_SEND);
}

#define JUMP_ROW(asked, type, from, to)                \
    ROW(modify_qp, asked)                              \
    {                                                  \
        at(type, from);                                \
        report_step(to, link_attr, mask_to(type, to)); \
    }

JUMP_ROW("RC: RESET to RTR", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_RTR)
JUMP_ROW("RC: RESET to RTS", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_RTS)
JUMP_ROW("RC: RESET to SQD", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_SQD)
JUMP_ROW("RC: RESET to ERR", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_ERR)
JUMP_ROW("RC: RESET to RESET", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_RESET)
JUMP_ROW("RC: INIT to RTS", IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTS)
JUMP_ROW("RC: INIT to SQD", IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_SQD)
JUMP_ROW("RC: RTR to INIT", IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_INIT)
JUMP_ROW("RC: RTR to RTR", IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTR)
JUMP_ROW("RC: RTR to SQD", IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_SQD)
JUMP_ROW("RC: RTS to INIT", IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_INIT)
JUMP_ROW("RC: RTS to RTR", IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTR)
JUMP_ROW("RC: RTS to SQE", IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_SQE)
JUMP_ROW("RC: RTS to RESET", IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RESET)
JUMP_ROW("RC: ERR to RTS", IBV_QPT_RC, IBV_QPS_ERR, IBV_QPS_RTS)
JUMP_ROW("RC: ERR to ERR", IBV_QPT_RC, IBV_QPS_ERR, IBV_QPS_ERR)
JUMP_ROW("UD: INIT to RTS", IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_RTS)
JUMP_ROW("UD: RTS to SQD", IBV_QPT_UD, IBV_QPS_RTS, IBV_QPS_SQD)

ROW(modify_qp, "an invalid state")
{
    at(IBV_QPT_RC, IBV_QPS_RESET);
    report_step((enum ibv_qp_state)99, link_attr, IBV_QP_STATE);
}

ROW(modify_qp, "RTS to SQD to RTS")
{
    at(IBV_QPT_RC, IBV_QPS_RTS);
    report_step(IBV_QPS_SQD, link_attr, IBV_QP_STATE);
    report("%s", state_name(state_of(a.qp)));
    report_step(IBV_QPS_RTS, link_attr, IBV_QP_STATE);
    report("%s", state_name(state_of(a.qp)));
}

ROW(modify_qp, "SQD to SQD: another timeout")
{
    at(IBV_QPT_RC, IBV_QPS_RTS);
    REQUIRE_INT(step(a.qp, IBV_QPS_SQD, 0));
    report_step(IBV_QPS_SQD, link_attr, IBV_QP_STATE | IBV_QP_TIMEOUT);
}

ROW(modify_qp, "without IBV_QP_STATE: access flags in RTS")
{
    at(IBV_QPT_RC, IBV_QPS_RTS);
    report_step(IBV_QPS_RTS, link_attr, IBV_QP_ACCESS_FLAGS);
}

ROW(modify_qp, "an empty mask in RTS")
{
    at(IBV_QPT_RC, IBV_QPS_RTS);
    report_step(IBV_QPS_RTS, link_attr, 0);
}

ROW(modify_qp, "CUR_STATE differs from the state")
{
    struct ibv_qp_attr attr = link_attr;

    at(IBV_QPT_RC, IBV_QPS_RTR);
    attr.cur_qp_state = IBV_QPS_RTS;
    report_step(IBV_QPS_RTS, attr, mask_to(IBV_QPT_RC, IBV_QPS_RTS) | IBV_QP_CUR_STATE);
}

ROW(modify_qp, "CUR_STATE equals the state")
{
    struct ibv_qp_attr attr = link_attr;

    at(IBV_QPT_RC, IBV_QPS_RTR);
    attr.cur_qp_state = IBV_QPS_RTR;
    report_step(IBV_QPS_RTS, attr, mask_to(IBV_QPT_RC, IBV_QPS_RTS) | IBV_QP_CUR_STATE);
}

/* ---- Masks ------------------------------------------------------------------------------------------------ */

#define WITHOUT_ROW(asked, type, from, to, bit)                 \
    ROW(modify_qp, asked)                                       \
    {                                                           \
        at(type, from);                                         \
        report_step(to, link_attr, mask_to(type, to) & ~(bit)); \
    }

WITHOUT_ROW("to INIT without PKEY_INDEX", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX)
WITHOUT_ROW("to INIT without PORT", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PORT)
WITHOUT_ROW("to INIT without ACCESS_FLAGS", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_ACCESS_FLAGS)
WITHOUT_ROW("UD: to INIT without QKEY", IBV_QPT_UD, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_QKEY)
WITHOUT_ROW("to RTR without AV", IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_AV)
WITHOUT_ROW("to RTR without MIN_RNR_TIMER", IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_MIN_RNR_TIMER)
WITHOUT_ROW("to RTS without SQ_PSN", IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN)
WITHOUT_ROW("to RTS without RETRY_CNT", IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_RETRY_CNT)

#define WITH_ROW(asked, type, from, to, bit)                        \
    ROW(modify_qp, asked)                                           \
    {                                                               \
        at(type, from);                                             \
        report_step(to, link_attr, mask_to(type, to) | (int)(bit)); \
    }

WITH_ROW("to INIT with DEST_QPN", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_DEST_QPN)
WITH_ROW("to INIT with QKEY", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_QKEY)
WITH_ROW("to RTR with TIMEOUT", IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_TIMEOUT)
WITH_ROW("to RTS with DEST_QPN", IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_DEST_QPN)
WITH_ROW("UC: to RTR with MIN_RNR_TIMER", IBV_QPT_UC, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_MIN_RNR_TIMER)
WITH_ROW("UD: to RTR with DEST_QPN", IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_DEST_QPN)
WITH_ROW("to INIT with an unknown bit", IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, 1u << 30)

/* ---- Values ----------------------------------------------------------------------------------------------- */

#define VALUE_ROW(asked, from, to, field, value)        \
    ROW(modify_qp, asked)                               \
    {                                                   \
        struct ibv_qp_attr attr = link_attr;            \
                                                        \
        at(IBV_QPT_RC, from);                           \
        attr.field = (value);                           \
        report_step(to, attr, mask_to(IBV_QPT_RC, to)); \
    }

VALUE_ROW("port 0", IBV_QPS_RESET, IBV_QPS_INIT, port_num, 0)
VALUE_ROW("port 2", IBV_QPS_RESET, IBV_QPS_INIT, port_num, 2)
VALUE_ROW("a partition key beyond the table", IBV_QPS_RESET, IBV_QPS_INIT, pkey_index, 1000)
VALUE_ROW("an unknown access flag", IBV_QPS_RESET, IBV_QPS_INIT, qp_access_flags, 1u << 15)
VALUE_ROW("an MTU that is none", IBV_QPS_INIT, IBV_QPS_RTR, path_mtu, (enum ibv_mtu)6)
VALUE_ROW("an MTU of 0", IBV_QPS_INIT, IBV_QPS_RTR, path_mtu, (enum ibv_mtu)0)
VALUE_ROW("a packet number of 25 bits", IBV_QPS_INIT, IBV_QPS_RTR, rq_psn, 1u << 24)
VALUE_ROW("min_rnr_timer 32", IBV_QPS_INIT, IBV_QPS_RTR, min_rnr_timer, 32)
VALUE_ROW("max_dest_rd_atomic 255", IBV_QPS_INIT, IBV_QPS_RTR, max_dest_rd_atomic, 255)
VALUE_ROW("timeout 32", IBV_QPS_RTR, IBV_QPS_RTS, timeout, 32)
VALUE_ROW("retry_cnt 8", IBV_QPS_RTR, IBV_QPS_RTS, retry_cnt, 8)
VALUE_ROW("rnr_retry 8", IBV_QPS_RTR, IBV_QPS_RTS, rnr_retry, 8)
VALUE_ROW("max_rd_atomic 255", IBV_QPS_RTR, IBV_QPS_RTS, max_rd_atomic, 255)

ROW(modify_qp, "a queue pair's number of 25 bits")
{
    at(IBV_QPT_RC, IBV_QPS_INIT);
    report_int(step_as(a.qp, IBV_QPS_RTR, 1u << 24, link_attr, mask_to(IBV_QPT_RC, IBV_QPS_RTR)));
}

static void report_path(struct ibv_ah_attr path)
{
    struct ibv_qp_attr attr = link_attr;

    at(IBV_QPT_RC, IBV_QPS_INIT);
    attr.qp_state = IBV_QPS_RTR;
    attr.dest_qp_num = a.qp->qp_num;
    attr.ah_attr = path;
    REPORT_INT(verbs->modify_qp(a.qp, &attr, mask_to(IBV_QPT_RC, IBV_QPS_RTR)));
}

ROW(modify_qp, "a path without a GRH")
{
    struct ibv_ah_attr path = path_to_self();

    path.is_global = 0;
    report_path(path);
}

ROW(modify_qp, "a path from an invalid GID index")
{
    struct ibv_ah_attr path = path_to_self();

    path.grh.sgid_index = 99;
    report_path(path);
}

ROW(modify_qp, "a path from port 2")
{
    struct ibv_ah_attr path = path_to_self();

    path.port_num = 2;
    report_path(path);
}

/* ---- Consequences of states
 * ----------------------------------------------------------------------------------------- */

ROW(modify_qp, "to ERR: posted requests are flushed")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post_receive(&a, 64));
    REQUIRE_INT(post_receive(&a, 64));
    REQUIRE_INT(step(a.qp, IBV_QPS_ERR, 0));
    report_statuses(a.recv_cq, 2);
}

ROW(modify_qp, "to RESET: posted requests are dropped")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post_receive(&a, 64));
    REQUIRE_INT(step(a.qp, IBV_QPS_RESET, 0));
    report_no_completion(a.recv_cq);
}

ROW(modify_qp, "to RESET: unpolled completions")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    wait_until_idle(100);
    REQUIRE_INT(step(a.qp, IBV_QPS_RESET, 0));
    report_no_completion(a.send_cq);
}

ROW(modify_qp, "to RESET and on to RTS: it works again")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(step(a.qp, IBV_QPS_ERR, 0));
    REQUIRE_INT(step(b.qp, IBV_QPS_ERR, 0));
    REQUIRE_INT(step(a.qp, IBV_QPS_RESET, 0));
    REQUIRE_INT(step(b.qp, IBV_QPS_RESET, 0));
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    move_to_state(b.qp, IBV_QPS_RTS, a.qp->qp_num);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
}

ROW(modify_qp, "a peer in RESET: no response")
{
    link_attr.retry_cnt = 1;
    link_attr.timeout = 12;
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(step(b.qp, IBV_QPS_RESET, 0));
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
}

ROW(modify_qp, "a peer in ERR: no response")
{
    link_attr.retry_cnt = 1;
    link_attr.timeout = 12;
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(step(b.qp, IBV_QPS_ERR, 0));
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
}

ROW(modify_qp, "a peer in INIT: no response")
{
    link_attr.retry_cnt = 1;
    link_attr.timeout = 12;
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(step(b.qp, IBV_QPS_RESET, 0));
    move_to_state(b.qp, IBV_QPS_INIT, a.qp->qp_num);
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
}

ROW(modify_qp, "a destroyed peer: no response")
{
    link_attr.retry_cnt = 1;
    link_attr.timeout = 12;
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(verbs->destroy_qp(b.qp));
    REQUIRE_INT(post(&a, request(IBV_WR_RDMA_WRITE, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
    report("%s", state_name(state_of(a.qp)));
}

ROW(get_async_event, "SQD with EN_SQD_ASYNC_NOTIFY")
{
    struct ibv_qp_attr attr = link_attr;

    make_pair(IBV_QPT_RC);
    attr.en_sqd_async_notify = 1;
    report_step(IBV_QPS_SQD, attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
    report_event();
}

ROW(get_async_event, "a message arrives in RTR")
{
    make_end(&a, IBV_QPT_RC);
    make_end(&b, IBV_QPT_RC);
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    move_to_state(b.qp, IBV_QPS_RTR, a.qp->qp_num);
    REQUIRE_INT(post_receive(&b, 64));
    REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
    require_success(a.send_cq, 1);
    report_event();
    report_completions(b.recv_cq, 1);
}
