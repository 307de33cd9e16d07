/* The state machine of an RC queue pair, against the tables of the architecture written down once more. */
#include "support.h"

#define BITS_INIT (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define BITS_RTR (MASK_RTR & ~IBV_QP_STATE)
#define BITS_RTS (MASK_RTS & ~IBV_QP_STATE)

struct rule {
    bool valid;
    int required, optional;
};

/* A queue pair goes to RESET from everywhere and to ERR from everywhere but RESET, both with the state alone.
 * Alternate paths are nowhere: the device has no path migration. */
static const struct rule rules[IBV_QPS_UNKNOWN][IBV_QPS_UNKNOWN + 1] =
    {
        [IBV_QPS_RESET] = {[IBV_QPS_RESET] = {true, 0, 0}, [IBV_QPS_INIT] = {true, BITS_INIT, 0}},
        [IBV_QPS_INIT] =
            {
                [IBV_QPS_RESET] = {true, 0, 0},
                [IBV_QPS_INIT] = {true, 0, BITS_INIT},
                [IBV_QPS_RTR] = {true, BITS_RTR, IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
                [IBV_QPS_ERR] = {true, 0, 0},
            },
        [IBV_QPS_RTR] =
            {
                [IBV_QPS_RESET] = {true, 0, 0},
                [IBV_QPS_RTS] = {true, BITS_RTS, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
                [IBV_QPS_ERR] = {true, 0, 0},
            },
        [IBV_QPS_RTS] =
            {
                [IBV_QPS_RESET] = {true, 0, 0},
                [IBV_QPS_RTS] = {true, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
                [IBV_QPS_SQD] = {true, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
                [IBV_QPS_ERR] = {true, 0, 0},
            },
        [IBV_QPS_SQD] =
            {
                [IBV_QPS_RESET] = {true, 0, 0},
                [IBV_QPS_RTS] = {true, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
                [IBV_QPS_SQD] = {true, 0,
                                 IBV_QP_PORT | IBV_QP_AV | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                     IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_ACCESS_FLAGS |
                                     IBV_QP_PKEY_INDEX | IBV_QP_MIN_RNR_TIMER},
                [IBV_QPS_ERR] = {true, 0, 0},
            },
        [IBV_QPS_ERR] = {[IBV_QPS_RESET] = {true, 0, 0}, [IBV_QPS_ERR] = {true, 0, 0}},
};

static const enum ibv_qp_state reachable[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR,
                                              IBV_QPS_RTS,   IBV_QPS_SQD,  IBV_QPS_ERR};

/* A queue pair of this state that is its own peer. */
static struct ibv_qp *make(const struct home *home, struct ibv_cq *cq, enum ibv_qp_state state)
{
    struct ibv_qp *qp = make_qp(home->pd, cq, 1);

    if (state != IBV_QPS_RESET)
        REQUIRE_EQ(qp_to_init(qp, &default_link), 0);
    if (state != IBV_QPS_RESET && state != IBV_QPS_INIT)
        REQUIRE_EQ(qp_to_rtr(qp, &default_link, qp->qp_num), 0);
    if (state == IBV_QPS_RTS || state == IBV_QPS_SQD)
        REQUIRE_EQ(qp_to_rts(qp, &default_link), 0);
    if (state == IBV_QPS_SQD || state == IBV_QPS_ERR)
        REQUIRE_EQ(qp_to(qp, state), 0);
    REQUIRE_EQ(qp_state(qp), state);
    return qp;
}

/* Good values for all attributes at once; the mask says which are looked at. */
static struct ibv_qp_attr good_attr(struct ibv_qp *qp, enum ibv_qp_state from, enum ibv_qp_state to)
{
    struct ibv_qp_attr attr = default_link;

    attr.qp_state = to;
    attr.cur_qp_state = from;
    attr.port_num = 1;
    attr.dest_qp_num = qp->qp_num;
    attr.ah_attr = path_to_self(qp->context);
    return attr;
}

/* One change with this mask: as expected, or refused with nothing changed. */
static bool try_change(const struct home *home, struct ibv_cq *cq, enum ibv_qp_state from, enum ibv_qp_state to,
                       int mask, int expected)
{
    struct ibv_qp *qp = make(home, cq, from);
    struct ibv_qp_attr attr = good_attr(qp, from, to), before, after;
    struct ibv_qp_init_attr init_attr;
    int answer;
    bool good;

    CHECK_EQ(soft_verbs.query_qp(qp, &before, IBV_QP_STATE, &init_attr), 0);
    answer = soft_verbs.modify_qp(qp, &attr, mask);
    CHECK_EQ(soft_verbs.query_qp(qp, &after, IBV_QP_STATE, &init_attr), 0);
    good = answer == expected;
    if (answer)
        good = good && !memcmp(&before, &after, sizeof(before));
    else
        good = good && after.qp_state == (mask & IBV_QP_STATE ? to : from) && qp->state == after.qp_state;
    if (!good)
        printf("from %d to %d with 0x%x: %d, not %d; then in %d\n", from, to, mask, answer, expected, after.qp_state);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    return good;
}

static void try_masks(const struct home *home, struct ibv_cq *cq, enum ibv_qp_state from, enum ibv_qp_state to)
{
    const struct rule *rule = &rules[from][to];
    int all = IBV_QP_STATE | rule->required | rule->optional;
    int bit;

    if (!rule->valid) {
        CHECK(try_change(home, cq, from, to, IBV_QP_STATE, EINVAL));
        CHECK(try_change(home, cq, from, to, MASK_INIT, EINVAL));
        CHECK(try_change(home, cq, from, to, MASK_RTR, EINVAL));
        CHECK(try_change(home, cq, from, to, MASK_RTS, EINVAL));
        return;
    }
    CHECK(try_change(home, cq, from, to, IBV_QP_STATE | rule->required, 0));
    CHECK(try_change(home, cq, from, to, all, 0));
    for (bit = 1; bit > 0 && bit < 1 << 30; bit <<= 1) {
        if (bit == IBV_QP_STATE)
            continue;
        if (rule->required & bit)
            CHECK(try_change(home, cq, from, to, all & ~bit, EINVAL));
        else if (rule->optional & bit)
            CHECK(try_change(home, cq, from, to, (all & ~rule->optional) | bit, 0));
        else
            CHECK(try_change(home, cq, from, to, (all & ~rule->optional) | bit, EINVAL));
    }
}

static void every_transition(void)
{
    struct home home;
    struct ibv_cq *cq;
    size_t i;
    int to;

    home_open(&home);
    cq = home_cq(&home, 4, NULL);
    for (i = 0; i < COUNT_OF(reachable); i++)
        for (to = IBV_QPS_RESET; to <= IBV_QPS_UNKNOWN; to++)
            try_masks(&home, cq, reachable[i], (enum ibv_qp_state)to);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* Without IBV_QP_STATE a queue pair stays where it is, and takes what it may take there. */
static void without_state(void)
{
    struct home home;
    struct ibv_cq *cq;
    size_t i;
    int bit;

    home_open(&home);
    cq = home_cq(&home, 4, NULL);
    for (i = 0; i < COUNT_OF(reachable); i++) {
        enum ibv_qp_state at = reachable[i];
        const struct rule *rule = &rules[at][at];

        CHECK(try_change(&home, cq, at, at, 0, rule->valid ? 0 : EINVAL));
        for (bit = 2; bit <= IBV_QP_RATE_LIMIT; bit <<= 1)
            CHECK(try_change(&home, cq, at, at, bit, rule->optional & bit ? 0 : EINVAL));
    }
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* cur_qp_state is what the caller believes; where he is wrong, nothing is done. */
static void current_state(void)
{
    struct ibv_qp_attr attr;
    struct home home;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    int believed;

    home_open(&home);
    cq = home_cq(&home, 4, NULL);
    qp = make(&home, cq, IBV_QPS_SQD);
    for (believed = IBV_QPS_RESET; believed <= IBV_QPS_UNKNOWN; believed++) {
        if (believed == IBV_QPS_SQD)
            continue;
        attr = good_attr(qp, (enum ibv_qp_state)believed, IBV_QPS_RTS);
        CHECK_EQ(soft_verbs.modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL);
        CHECK_EQ(qp_state(qp), IBV_QPS_SQD);
    }
    attr = good_attr(qp, IBV_QPS_SQD, IBV_QPS_RTS);
    CHECK_EQ(soft_verbs.modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), 0);
    CHECK_EQ(qp_state(qp), IBV_QPS_RTS);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* Which verbs of posting each state takes. */
static void posting_by_state(void)
{
    struct home home;
    struct ibv_cq *cq;
    size_t i;

    home_open(&home);
    cq = home_cq(&home, 16, NULL);
    for (i = 0; i < COUNT_OF(reachable); i++) {
        enum ibv_qp_state state = reachable[i];
        bool sends = state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_ERR;
        struct ibv_send_wr send = request(IBV_WR_SEND, 1, NULL, 0), *bad_send = NULL;
        struct ibv_recv_wr recv = {.wr_id = 2}, *bad_recv = NULL;
        struct ibv_qp *qp = make(&home, cq, state);

        CHECK_EQ(verbs_post_recv(qp, &recv, &bad_recv), state == IBV_QPS_RESET ? EINVAL : 0);
        if (state == IBV_QPS_RESET)
            CHECK(bad_recv == &recv);
        CHECK_EQ(verbs_post_send(qp, &send, &bad_send), sends ? 0 : EINVAL);
        if (!sends)
            CHECK(bad_send == &send);
        settle();
        CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    }
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

CHECK_MAIN(CASE(every_transition), CASE(without_state), CASE(current_state), CASE(posting_by_state))
