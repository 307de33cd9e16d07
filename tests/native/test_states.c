/* Tests of the state machine of each type of queue pair, against the tables of the architecture written down once more:
 * here by type, as the kernel has them. */
#include "support.h"
#include "support_srq.h"
#include "support_types.h"

struct rule {
    bool valid;
    int required, optional;
};

enum { RC, UC, UD, XRC_SEND, XRC_RECV, TYPES };

static const enum ibv_qp_type types[TYPES] = {
    [RC] = IBV_QPT_RC,
    [UC] = IBV_QPT_UC,
    [UD] = IBV_QPT_UD,
    [XRC_SEND] = IBV_QPT_XRC_SEND,
    [XRC_RECV] = IBV_QPT_XRC_RECV,
};

#define PKEY IBV_QP_PKEY_INDEX
#define PORT IBV_QP_PORT
#define ACCESS IBV_QP_ACCESS_FLAGS
#define QKEY IBV_QP_QKEY
#define AV IBV_QP_AV
#define CUR IBV_QP_CUR_STATE
#define RNR IBV_QP_MIN_RNR_TIMER
#define DEST IBV_QP_MAX_DEST_RD_ATOMIC
#define RETRIES (IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)
#define LINK (AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)

/* No state allows alternate paths: the device has no path migration. */
static const struct {
    enum ibv_qp_state from, to;
    int required[TYPES], optional[TYPES];
} transitions[] = {
    {IBV_QPS_RESET,
     IBV_QPS_INIT,
     {[RC] = PKEY | PORT | ACCESS,
      [UC] = PKEY | PORT | ACCESS,
      [UD] = PKEY | PORT | QKEY,
      [XRC_SEND] = PKEY | PORT | ACCESS,
      [XRC_RECV] = PKEY | PORT | ACCESS},
     {0}},
    {IBV_QPS_INIT,
     IBV_QPS_INIT,
     {0},
     {[RC] = PKEY | PORT | ACCESS,
      [UC] = PKEY | PORT | ACCESS,
      [UD] = PKEY | PORT | QKEY,
      [XRC_SEND] = PKEY | PORT | ACCESS,
      [XRC_RECV] = PKEY | PORT | ACCESS}},
    {IBV_QPS_INIT,
     IBV_QPS_RTR,
     {[RC] = LINK | DEST | RNR, [UC] = LINK, [UD] = 0, [XRC_SEND] = LINK, [XRC_RECV] = LINK | DEST | RNR},
     {[RC] = PKEY | ACCESS,
      [UC] = PKEY | ACCESS,
      [UD] = PKEY | QKEY,
      [XRC_SEND] = PKEY | ACCESS,
      [XRC_RECV] = PKEY | ACCESS}},
    {IBV_QPS_RTR,
     IBV_QPS_RTS,
     {[RC] = IBV_QP_TIMEOUT | RETRIES | IBV_QP_SQ_PSN,
      [UC] = IBV_QP_SQ_PSN,
      [UD] = IBV_QP_SQ_PSN,
      [XRC_SEND] = IBV_QP_TIMEOUT | RETRIES | IBV_QP_SQ_PSN,
      [XRC_RECV] = IBV_QP_TIMEOUT | IBV_QP_SQ_PSN},
     {[RC] = CUR | ACCESS | RNR,
      [UC] = CUR | ACCESS,
      [UD] = CUR | QKEY,
      [XRC_SEND] = CUR | ACCESS,
      [XRC_RECV] = CUR | ACCESS | RNR}},
    {IBV_QPS_RTS,
     IBV_QPS_RTS,
     {0},
     {[RC] = CUR | ACCESS | RNR,
      [UC] = CUR | ACCESS,
      [UD] = CUR | QKEY,
      [XRC_SEND] = CUR | ACCESS,
      [XRC_RECV] = CUR | ACCESS | RNR}},
    {IBV_QPS_RTS,
     IBV_QPS_SQD,
     {0},
     {[RC] = IBV_QP_EN_SQD_ASYNC_NOTIFY,
      [UC] = IBV_QP_EN_SQD_ASYNC_NOTIFY,
      [UD] = IBV_QP_EN_SQD_ASYNC_NOTIFY,
      [XRC_SEND] = IBV_QP_EN_SQD_ASYNC_NOTIFY,
      [XRC_RECV] = IBV_QP_EN_SQD_ASYNC_NOTIFY}},
    {IBV_QPS_SQD,
     IBV_QPS_RTS,
     {0},
     {[RC] = CUR | ACCESS | RNR,
      [UC] = CUR | ACCESS,
      [UD] = CUR | QKEY,
      [XRC_SEND] = CUR | ACCESS,
      [XRC_RECV] = CUR | ACCESS | RNR}},
    {IBV_QPS_SQD,
     IBV_QPS_SQD,
     {0},
     {[RC] = PORT | AV | IBV_QP_TIMEOUT | RETRIES | DEST | ACCESS | PKEY | RNR,
      [UC] = AV | ACCESS | PKEY,
      [UD] = PKEY | QKEY,
      [XRC_SEND] = PORT | AV | IBV_QP_TIMEOUT | RETRIES | ACCESS | PKEY,
      [XRC_RECV] = PORT | AV | IBV_QP_TIMEOUT | DEST | ACCESS | PKEY | RNR}},
    {IBV_QPS_SQE, IBV_QPS_RTS, {0}, {[UC] = CUR | ACCESS, [UD] = CUR | QKEY}},
};

static const enum ibv_qp_state states[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
                                           IBV_QPS_SQD,   IBV_QPS_SQE,  IBV_QPS_ERR};

/* Only the send queue of an unreliable type stops alone. */
static bool is_reachable(int type, enum ibv_qp_state state)
{
    return state != IBV_QPS_SQE || type == UC || type == UD;
}

/* Every state allows RESET, and every state but RESET allows ERR, both with the state alone. */
static struct rule rule_of(int type, enum ibv_qp_state from, enum ibv_qp_state to)
{
    struct rule rule = {to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET), 0, 0};
    size_t i;

    for (i = 0; i < COUNT_OF(transitions); i++)
        if (transitions[i].from == from && transitions[i].to == to)
            rule = (struct rule){true, transitions[i].required[type], transitions[i].optional[type]};
    return rule;
}

/* Objects that queue pairs of all types are created on. */
struct stock {
    struct home home;
    struct ibv_cq *cq;
    struct ibv_xrcd *xrcd;
    struct ibv_ah *ah;
};

static void stock_open(struct stock *stock)
{
    home_open(&stock->home);
    stock->cq = home_cq(&stock->home, 64, NULL);
    stock->xrcd = make_xrcd(stock->home.context);
    stock->ah = make_ah(stock->home.base, 1);
}

static void stock_close(struct stock *stock)
{
    CHECK_EQ(soft_verbs.destroy_ah(stock->ah), 0);
    CHECK_EQ(verbs_close_xrcd(stock->xrcd), 0);
    CHECK_EQ(soft_verbs.destroy_cq(stock->cq), 0);
    home_close(&stock->home);
}

static struct ibv_qp *make_of(const struct stock *stock, int type)
{
    struct ibv_qp_init_attr_ex attr = {
        .send_cq = stock->cq,
        .recv_cq = stock->cq,
        .cap = {1, 1, 1, 1, 0},
        .qp_type = types[type],
        .comp_mask = type == XRC_RECV ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD,
        .pd = stock->home.pd,
        .xrcd = stock->xrcd,
    };
    struct ibv_qp *qp = verbs_create_qp_ex(stock->home.context, &attr);

    REQUIRE(qp != NULL);
    return qp;
}

/* Post a request with an invalid key. */
static void stop_sending(const struct stock *stock, struct ibv_qp *qp)
{
    struct ibv_sge sge = {.addr = 4096, .length = 1, .lkey = 0xffffff00};
    struct ibv_send_wr wr = request(IBV_WR_SEND, 1, &sge, 1);

    if (qp->qp_type == IBV_QPT_UD)
        wr = datagram(IBV_WR_SEND, 1, &sge, 1, stock->ah, qp->qp_num);
    REQUIRE_EQ(post(qp, &wr), 0);
    EXPECT(stock->cq, 1, IBV_WC_LOC_PROT_ERR);
}

/* Create a queue pair in this state, connected to itself. */
static struct ibv_qp *make(const struct stock *stock, int type, enum ibv_qp_state state)
{
    struct ibv_qp *qp = make_of(stock, type);

    if (state == IBV_QPS_INIT || state == IBV_QPS_RTR)
        type_raise(qp, state, &default_link, qp->qp_num);
    else if (state != IBV_QPS_RESET)
        type_raise(qp, IBV_QPS_RTS, &default_link, qp->qp_num);
    if (state == IBV_QPS_SQE)
        stop_sending(stock, qp);
    if (state == IBV_QPS_SQD || state == IBV_QPS_ERR)
        REQUIRE_EQ(qp_to(qp, state), 0);
    REQUIRE_EQ(qp_state(qp), state);
    return qp;
}

/* Return valid values of all attributes; the mask selects those that are used. */
static struct ibv_qp_attr good_attr(struct ibv_qp *qp, enum ibv_qp_state from, enum ibv_qp_state to)
{
    struct ibv_qp_attr attr = default_link;

    attr.qp_state = to;
    attr.cur_qp_state = from;
    attr.port_num = 1;
    attr.dest_qp_num = qp->qp_num;
    attr.ah_attr = path_to_self(qp->context);
    attr.qkey = TEST_QKEY;
    return attr;
}

/* Make one change with this mask: it works as expected, or is refused with nothing changed. */
static bool try_change(const struct stock *stock, int type, enum ibv_qp_state from, enum ibv_qp_state to, int mask,
                       int expected)
{
    struct ibv_qp *qp = make(stock, type, from);
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
        printf("type %d from %d to %d with 0x%x: %d, not %d; then in %d\n", types[type], from, to, mask, answer,
               expected, after.qp_state);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    return good;
}

static void try_masks(const struct stock *stock, int type, enum ibv_qp_state from, enum ibv_qp_state to)
{
    struct rule rule = rule_of(type, from, to);
    int all = IBV_QP_STATE | rule.required | rule.optional;
    int bit;

    if (!rule.valid) {
        CHECK(try_change(stock, type, from, to, IBV_QP_STATE, EINVAL));
        CHECK(try_change(stock, type, from, to, init_mask(types[type]), EINVAL));
        CHECK(try_change(stock, type, from, to, rtr_mask(types[type]), EINVAL));
        CHECK(try_change(stock, type, from, to, rts_mask(types[type]), EINVAL));
        return;
    }
    CHECK(try_change(stock, type, from, to, IBV_QP_STATE | rule.required, 0));
    CHECK(try_change(stock, type, from, to, all, 0));
    for (bit = 1; bit > 0 && bit < 1 << 30; bit <<= 1) {
        if (bit == IBV_QP_STATE)
            continue;
        if (rule.required & bit)
            CHECK(try_change(stock, type, from, to, all & ~bit, EINVAL));
        else if (rule.optional & bit)
            CHECK(try_change(stock, type, from, to, (all & ~rule.optional) | bit, 0));
        else
            CHECK(try_change(stock, type, from, to, (all & ~rule.optional) | bit, EINVAL));
    }
}

static void every_transition(void)
{
    struct stock stock;
    size_t i;
    int type, to;

    stock_open(&stock);
    for (type = 0; type < TYPES; type++)
        for (i = 0; i < COUNT_OF(states); i++)
            for (to = IBV_QPS_RESET; is_reachable(type, states[i]) && to <= IBV_QPS_UNKNOWN; to++)
                try_masks(&stock, type, states[i], (enum ibv_qp_state)to);
    stock_close(&stock);
}

/* Without IBV_QP_STATE a queue pair keeps its state, and accepts attributes that it may change there. */
static void without_state(void)
{
    struct stock stock;
    int type, bit;
    size_t i;

    stock_open(&stock);
    for (type = 0; type < TYPES; type++) {
        for (i = 0; i < COUNT_OF(states); i++) {
            enum ibv_qp_state at = states[i];
            struct rule rule = rule_of(type, at, at);

            if (!is_reachable(type, at))
                continue;
            CHECK(try_change(&stock, type, at, at, 0, rule.valid ? 0 : EINVAL));
            for (bit = 2; bit <= IBV_QP_RATE_LIMIT; bit <<= 1)
                CHECK(try_change(&stock, type, at, at, bit, rule.optional & bit ? 0 : EINVAL));
        }
    }
    stock_close(&stock);
}

/* cur_qp_state is the state that the caller expects; if it is wrong, nothing is changed. */
static void current_state(void)
{
    struct ibv_qp_attr attr;
    struct stock stock;
    struct ibv_qp *qp;
    int type, believed;

    stock_open(&stock);
    for (type = 0; type < TYPES; type++) {
        qp = make(&stock, type, IBV_QPS_SQD);
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
    }
    stock_close(&stock);
}

/* Check the effect of each state on a send and a receive. */
static void check_posting(const struct stock *stock, int type, enum ibv_qp_state state)
{
    bool sends = type != XRC_RECV &&
                 (state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_SQE || state == IBV_QPS_ERR);
    bool receives = type != XRC_RECV && type != XRC_SEND && state != IBV_QPS_RESET;
    struct ibv_recv_wr recv = {.wr_id = 2}, *bad_recv = NULL;
    struct ibv_qp *qp = make(stock, type, state);
    struct ibv_send_wr send = request(IBV_WR_SEND, 1, NULL, 0), *bad_send = NULL;

    if (type == UD)
        send = datagram(IBV_WR_SEND, 1, NULL, 0, stock->ah, 0xabcdef);
    CHECK_EQ(verbs_post_recv(qp, &recv, &bad_recv), receives ? 0 : EINVAL);
    if (!receives)
        CHECK(bad_recv == &recv);
    CHECK_EQ(verbs_post_send(qp, &send, &bad_send), sends ? 0 : EINVAL);
    if (!sends)
        CHECK(bad_send == &send);
    if (state == IBV_QPS_SQE)
        EXPECT(stock->cq, 1, IBV_WC_WR_FLUSH_ERR);
    settle(qp->context);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
}

static void posting_by_state(void)
{
    struct stock stock;
    size_t i;
    int type;

    stock_open(&stock);
    for (type = 0; type < TYPES; type++)
        for (i = 0; i < COUNT_OF(states); i++)
            if (is_reachable(type, states[i]))
                check_posting(&stock, type, states[i]);
    stock_close(&stock);
}

CHECK_MAIN(CASE(every_transition), CASE(without_state), CASE(current_state), CASE(posting_by_state))
