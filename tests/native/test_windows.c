/* Tests of memory windows: keys for a part of a region, bound and invalidated by work requests, and refused
 * afterwards. */
#include "support.h"
#include "support_types.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "soft/base/id_table.h"

#define WINDOW 4096u
#define WINDOW_ALL (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

/* The windows belong to a; b accesses memory through them. */
struct field {
    struct pair pair;
    struct ibv_mw *mw;
};

static struct ibv_mw *make_window(struct ibv_pd *pd, enum ibv_mw_type type)
{
    struct ibv_mw *mw = verbs_alloc_mw(pd, type);

    REQUIRE(mw != NULL);
    return mw;
}

static void field_open(struct field *field, enum ibv_mw_type type)
{
    TYPED_PAIR_OPEN(&field->pair, .type = IBV_QPT_RC);
    field->mw = make_window(field->pair.own.base, type);
}

static void field_close(struct field *field)
{
    if (field->mw)
        CHECK_EQ(verbs_dealloc_mw(field->mw), 0);
    pair_close(&field->pair);
}

/* Reset both ends after an error broke them. */
static void revive(struct pair *pair)
{
    CHECK_EQ(qp_to(pair->a.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(qp_to(pair->b.qp, IBV_QPS_RESET), 0);
    qp_connect(pair->a.qp, &default_link, pair->b.qp->qp_num);
    qp_connect(pair->b.qp, &default_link, pair->a.qp->qp_num);
}

static struct ibv_mw_bind_info part_of(const struct end *end, size_t offset, uint64_t length)
{
    return (struct ibv_mw_bind_info){
        .mr = end->mr,
        .addr = (uintptr_t)end->memory + offset,
        .length = length,
        .mw_access_flags = WINDOW_ALL,
    };
}

/* ---- Requests ---------------------------------------------------------------------------------------------- */

/* Bind a window of type 1. Return the completion's status. */
static enum ibv_wc_status bind1(struct end *end, struct ibv_mw *mw, struct ibv_mw_bind_info info)
{
    struct ibv_mw_bind bind = {.wr_id = 70, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};
    struct ibv_wc wc = {.status = IBV_WC_GENERAL_ERR};

    REQUIRE_EQ(verbs_bind_mw(end->qp, mw, &bind), 0);
    REQUIRE(wait_completion(end->send_cq, &wc));
    CHECK_EQ(wc.wr_id, 70);
    if (wc.status == IBV_WC_SUCCESS)
        CHECK_EQ(wc.opcode, IBV_WC_BIND_MW);
    return wc.status;
}

static struct ibv_send_wr bind2_request(struct ibv_mw *mw, uint32_t rkey, struct ibv_mw_bind_info info)
{
    struct ibv_send_wr wr = request(IBV_WR_BIND_MW, 71, NULL, 0);

    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = info;
    return wr;
}

static enum ibv_wc_status run(struct end *end, struct ibv_send_wr *wr)
{
    struct ibv_wc wc = {.status = IBV_WC_GENERAL_ERR};

    REQUIRE_EQ(post(end->qp, wr), 0);
    REQUIRE(wait_completion(end->send_cq, &wc));
    CHECK_EQ(wc.wr_id, wr->wr_id);
    return wc.status;
}

static enum ibv_wc_status bind2(struct end *end, struct ibv_mw *mw, uint32_t rkey, struct ibv_mw_bind_info info)
{
    struct ibv_send_wr wr = bind2_request(mw, rkey, info);

    return run(end, &wr);
}

static enum ibv_wc_status invalidate(struct end *end, uint32_t rkey)
{
    struct ibv_send_wr wr = request(IBV_WR_LOCAL_INV, 72, NULL, 0);

    wr.invalidate_rkey = rkey;
    return run(end, &wr);
}

/* Write one byte to that place of a's memory, by this key. Return b's status. */
static enum ibv_wc_status poke(struct pair *pair, uint32_t rkey, size_t offset, uint8_t value)
{
    struct ibv_sge sge = span(&pair->b, 0, 1);
    struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 73, &sge, 1, &pair->a, offset);

    wr.wr.rdma.rkey = rkey;
    pair->b.memory[0] = value;
    return run(&pair->b, &wr);
}

static void check_open(struct pair *pair, uint32_t rkey, size_t offset)
{
    uint8_t value = (uint8_t)(pair->a.memory[offset] + 1);

    CHECK_EQ(poke(pair, rkey, offset, value), IBV_WC_SUCCESS);
    CHECK_EQ(pair->a.memory[offset], value);
}

static void check_shut(struct pair *pair, uint32_t rkey, size_t offset)
{
    uint8_t before = pair->a.memory[offset];

    CHECK_EQ(poke(pair, rkey, offset, (uint8_t)(before + 1)), IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(pair->a.memory[offset], before);
    CHECK(wait_state(pair->a.qp, IBV_QPS_ERR));
    revive(pair);
}

/* ---- Type 1 ------------------------------------------------------------------------------------------------ */

static void type_1(void)
{
    struct field field;
    uint32_t first, second, third;

    field_open(&field, IBV_MW_TYPE_1);
    check_shut(&field.pair, field.mw->rkey, 0);
    CHECK_EQ(bind1(&field.pair.a, field.mw, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
    first = field.mw->rkey;
    check_open(&field.pair, first, 0);
    check_open(&field.pair, first, WINDOW - 1);
    check_shut(&field.pair, first, WINDOW); /* what it is bound to survives all of these */
    check_open(&field.pair, first, 1);

    CHECK_EQ(bind1(&field.pair.a, field.mw, part_of(&field.pair.a, 2 * WINDOW, 1)), IBV_WC_SUCCESS);
    second = field.mw->rkey;
    CHECK(second != first && second >> 8 == first >> 8);
    check_open(&field.pair, second, 2 * WINDOW);
    check_shut(&field.pair, second, 0);
    check_shut(&field.pair, first, 2 * WINDOW);

    CHECK_EQ(bind1(&field.pair.a, field.mw, part_of(&field.pair.a, 0, 0)), IBV_WC_SUCCESS);
    third = field.mw->rkey;
    check_shut(&field.pair, second, 2 * WINDOW);
    check_shut(&field.pair, third, 2 * WINDOW);
    check_shut(&field.pair, third, 0);
    field_close(&field);
}

/* A window has rights of its own: less than the region's, or more. */
static void rights(void)
{
    struct ibv_mw_bind_info info;
    struct ibv_send_wr wr;
    struct field field;
    struct ibv_sge sge;
    struct end quiet;

    field_open(&field, IBV_MW_TYPE_1);
    info = part_of(&field.pair.a, 0, WINDOW);
    info.mw_access_flags = IBV_ACCESS_REMOTE_READ;
    CHECK_EQ(bind1(&field.pair.a, field.mw, info), IBV_WC_SUCCESS);
    check_shut(&field.pair, field.mw->rkey, 0);
    sge = span(&field.pair.b, 0, 8);
    wr = request_to(IBV_WR_RDMA_READ, 1, &sge, 1, &field.pair.a, 0);
    wr.wr.rdma.rkey = field.mw->rkey;
    CHECK_EQ(run(&field.pair.b, &wr), IBV_WC_SUCCESS);
    wr = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &sge, 1, &field.pair.a, 0);
    wr.wr.atomic.rkey = field.mw->rkey;
    CHECK_EQ(run(&field.pair.b, &wr), IBV_WC_REM_ACCESS_ERR);
    CHECK(wait_state(field.pair.a.qp, IBV_QPS_ERR));
    revive(&field.pair);

    /* A region without remote rights of its own. */
    TYPED_OPEN(&quiet, &field.pair.own, .type = IBV_QPT_RC, .access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    CHECK_EQ(bind1(&field.pair.a, field.mw, part_of(&quiet, 0, 8)), IBV_WC_SUCCESS);
    sge = span(&field.pair.b, 0, 8);
    wr = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &sge, 1, &quiet, 0);
    wr.wr.atomic.rkey = field.mw->rkey;
    wr.wr.atomic.compare_add = 5;
    CHECK_EQ(run(&field.pair.b, &wr), IBV_WC_SUCCESS);
    CHECK_EQ(quiet.memory[0], 5);
    CHECK_EQ(soft_verbs.dereg_mr(quiet.mr), EBUSY);
    CHECK_EQ(bind1(&field.pair.a, field.mw, part_of(&quiet, 0, 0)), IBV_WC_SUCCESS);
    end_close(&quiet);
    field_close(&field);
}

/* ---- Type 2 ------------------------------------------------------------------------------------------------ */

static void type_2(void)
{
    struct field field;
    uint32_t first, second;

    field_open(&field, IBV_MW_TYPE_2);
    first = field.mw->rkey ^ 1;
    second = field.mw->rkey ^ 2;
    check_shut(&field.pair, field.mw->rkey, 0);
    CHECK_EQ(bind2(&field.pair.a, field.mw, first, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
    check_open(&field.pair, first, 0);
    check_shut(&field.pair, second, 0);
    check_open(&field.pair, first, 0);
    CHECK_EQ(bind2(&field.pair.a, field.mw, second, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_MW_BIND_ERR);
    revive(&field.pair);
    check_open(&field.pair, first, 0);
    CHECK_EQ(invalidate(&field.pair.a, first), IBV_WC_SUCCESS);
    check_shut(&field.pair, first, 0);
    CHECK_EQ(bind2(&field.pair.a, field.mw, second, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
    check_open(&field.pair, second, 0);
    check_shut(&field.pair, first, 0);
    field_close(&field);
}

/* A window is unbound by invalidation, not by a binding of no bytes. */
static void no_empty_binding(void)
{
    struct field field;

    field_open(&field, IBV_MW_TYPE_2);
    CHECK_EQ(bind2(&field.pair.a, field.mw, field.mw->rkey ^ 1, part_of(&field.pair.a, 0, 0)), IBV_WC_MW_BIND_ERR);
    field_close(&field);
}

/* The peer invalidates the window with its message. */
static void send_with_invalidate(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct field field;
    struct ibv_wc wc;
    uint32_t rkey;

    field_open(&field, IBV_MW_TYPE_2);
    rkey = field.mw->rkey ^ 1;
    CHECK_EQ(bind2(&field.pair.a, field.mw, rkey, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
    CHECK_EQ(post_room(&field.pair.a, 10, 0, 8), 0);
    sge = span(&field.pair.b, 0, 8);
    wr = request(IBV_WR_SEND_WITH_INV, 1, &sge, 1);
    wr.invalidate_rkey = rkey;
    CHECK_EQ(run(&field.pair.b, &wr), IBV_WC_SUCCESS);
    wc = EXPECT(field.pair.a.recv_cq, 10, IBV_WC_SUCCESS);
    CHECK_EQ(wc.wc_flags, IBV_WC_WITH_INV);
    CHECK_EQ(wc.invalidated_rkey, rkey);
    CHECK_EQ(wc.byte_len, 8);
    check_shut(&field.pair, rkey, 0);

    /* Once more: nothing is bound by that key any more. */
    CHECK_EQ(post_room(&field.pair.a, 11, 0, 8), 0);
    CHECK_EQ(run(&field.pair.b, &wr), IBV_WC_REM_OP_ERR);
    EXPECT(field.pair.a.recv_cq, 11, IBV_WC_MW_BIND_ERR);
    CHECK(wait_state(field.pair.a.qp, IBV_QPS_ERR));
    CHECK_EQ(qp_state(field.pair.b.qp), IBV_QPS_ERR);
    field_close(&field);
}

/* A window of type 2 belongs to the queue pair on which it was bound; the region's key does not. */
static void another_queue_pair(void)
{
    struct field field;
    struct pair other;
    uint32_t rkey;

    field_open(&field, IBV_MW_TYPE_2);
    rkey = field.mw->rkey ^ 1;
    other = (struct pair){.own = field.pair.own};
    TYPED_OPEN(&other.a, &field.pair.own, .type = IBV_QPT_RC);
    TYPED_OPEN(&other.b, &field.pair.own, .type = IBV_QPT_RC);
    qp_connect(other.a.qp, &default_link, other.b.qp->qp_num);
    qp_connect(other.b.qp, &default_link, other.a.qp->qp_num);
    CHECK_EQ(bind2(&other.a, field.mw, rkey, part_of(&other.a, 0, WINDOW)), IBV_WC_SUCCESS);
    check_open(&other, rkey, 0);

    /* By the same memory, through a queue pair of the same domain: */
    CHECK_EQ(poke(&(struct pair){.a = other.a, .b = field.pair.b}, rkey, 0, 99), IBV_WC_REM_ACCESS_ERR);
    CHECK(other.a.memory[0] != 99);
    CHECK(wait_state(field.pair.a.qp, IBV_QPS_ERR));
    revive(&field.pair);
    CHECK_EQ(invalidate(&field.pair.a, rkey), IBV_WC_LOC_QP_OP_ERR);
    check_open(&other, rkey, 0);

    /* With its queue pair the key is dead, and the region is held until the window goes. */
    CHECK_EQ(soft_verbs.destroy_qp(other.a.qp), 0);
    other.a.qp = NULL;
    CHECK_EQ(soft_verbs.dereg_mr(other.a.mr), EBUSY);
    CHECK_EQ(verbs_dealloc_mw(field.mw), 0);
    field.mw = NULL;
    end_close(&other.a);
    end_close(&other.b);
    field_close(&field);
}

/* A binding does not end with a connection: ibv_alloc_mw(3) lists what ends it, and RESET is not in the list. So the
 * queue pair's next peer can use it, until the window is invalidated there, or deallocated. */
static void reset_ends_no_binding(void)
{
    struct field field;
    struct end next;
    uint32_t rkey;

    field_open(&field, IBV_MW_TYPE_2);
    rkey = field.mw->rkey ^ 1;
    CHECK_EQ(bind2(&field.pair.a, field.mw, rkey, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
    CHECK_EQ(qp_to(field.pair.a.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(soft_verbs.dereg_mr(field.pair.a.mr), EBUSY);
    TYPED_OPEN(&next, &field.pair.own, .type = IBV_QPT_RC);
    qp_connect(field.pair.a.qp, &default_link, next.qp->qp_num);
    qp_connect(next.qp, &default_link, field.pair.a.qp->qp_num);
    CHECK_EQ(poke(&(struct pair){.a = field.pair.a, .b = next}, rkey, 0, 99), IBV_WC_SUCCESS);
    CHECK_EQ(field.pair.a.memory[0], 99);
    CHECK_EQ(invalidate(&field.pair.a, rkey), IBV_WC_SUCCESS);
    CHECK_EQ(poke(&(struct pair){.a = field.pair.a, .b = next}, rkey, 0, 98), IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(field.pair.a.memory[0], 99);
    end_close(&next);
    field_close(&field);
}

/* Keys that are not those of a bound window. */
static void nothing_to_invalidate(void)
{
    struct field field;
    struct ibv_mw *one;

    field_open(&field, IBV_MW_TYPE_2);
    CHECK_EQ(invalidate(&field.pair.a, field.mw->rkey), IBV_WC_LOC_QP_OP_ERR);
    CHECK_EQ(qp_state(field.pair.a.qp), IBV_QPS_ERR);
    revive(&field.pair);
    CHECK_EQ(invalidate(&field.pair.a, field.pair.a.mr->rkey), IBV_WC_LOC_QP_OP_ERR);
    revive(&field.pair);
    CHECK_EQ(invalidate(&field.pair.a, 0xffffff00), IBV_WC_LOC_QP_OP_ERR);
    revive(&field.pair);
    one = make_window(field.pair.own.base, IBV_MW_TYPE_1);
    CHECK_EQ(bind1(&field.pair.a, one, part_of(&field.pair.a, 0, 8)), IBV_WC_SUCCESS);
    CHECK_EQ(invalidate(&field.pair.a, one->rkey), IBV_WC_LOC_QP_OP_ERR);
    revive(&field.pair);
    check_open(&field.pair, one->rkey, 0);
    CHECK_EQ(verbs_dealloc_mw(one), 0);
    field_close(&field);
}

/* ---- Rules of binding -------------------------------------------------------------------------------------- */

enum breach { NO_MW_BIND, OTHER_DOMAIN, BELOW, ABOVE, NO_LOCAL_WRITE, UNKNOWN_ACCESS, BREACHES };

static void check_breach(enum ibv_mw_type type, enum breach breach)
{
    int access = breach == NO_MW_BIND ? ACCESS_ALL : ACCESS_ALL | IBV_ACCESS_MW_BIND;
    struct ibv_mw_bind_info info;
    struct ibv_pd *foreign;
    struct field field;
    struct ibv_mr *mr;

    field_open(&field, type);
    foreign = soft_verbs.alloc_pd(field.pair.own.context);
    if (breach == NO_LOCAL_WRITE)
        access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND;
    mr = soft_verbs.reg_mr(breach == OTHER_DOMAIN ? foreign : field.pair.own.base, field.pair.a.memory, WINDOW, access);
    REQUIRE(foreign != NULL && mr != NULL);
    info = part_of(&field.pair.a, 0, WINDOW);
    info.mr = mr;
    if (breach == BELOW)
        info.addr -= 1;
    if (breach == ABOVE)
        info.length += 1;
    if (breach == UNKNOWN_ACCESS)
        info.mw_access_flags |= IBV_ACCESS_MW_BIND;
    if (type == IBV_MW_TYPE_1)
        CHECK_EQ(bind1(&field.pair.a, field.mw, info), IBV_WC_MW_BIND_ERR);
    else
        CHECK_EQ(bind2(&field.pair.a, field.mw, field.mw->rkey ^ 1, info), IBV_WC_MW_BIND_ERR);
    CHECK_EQ(qp_state(field.pair.a.qp), IBV_QPS_ERR);
    revive(&field.pair);
    check_shut(&field.pair, type == IBV_MW_TYPE_1 ? field.mw->rkey : field.mw->rkey ^ 1, 0);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0); /* nothing was bound to it */
    CHECK_EQ(soft_verbs.dealloc_pd(foreign), 0);
    field_close(&field);
}

static void refused_access(void)
{
    int breach;

    for (breach = 0; breach < BREACHES; breach++) {
        check_breach(IBV_MW_TYPE_1, (enum breach)breach);
        check_breach(IBV_MW_TYPE_2, (enum breach)breach);
    }
}

/* A window of another domain than the queue pair's. */
static void foreign_window(void)
{
    struct ibv_pd *foreign;
    struct ibv_mw *mw;
    struct field field;

    field_open(&field, IBV_MW_TYPE_1);
    foreign = soft_verbs.alloc_pd(field.pair.own.context);
    mw = make_window(foreign, IBV_MW_TYPE_1);
    CHECK_EQ(bind1(&field.pair.a, mw, part_of(&field.pair.a, 0, 8)), IBV_WC_MW_BIND_ERR);
    revive(&field.pair);
    check_shut(&field.pair, mw->rkey, 0);
    CHECK_EQ(soft_verbs.dealloc_pd(foreign), EBUSY);
    CHECK_EQ(verbs_dealloc_mw(mw), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(foreign), 0);
    field_close(&field);
}

/* Requests that are refused when posted. */
static void refused_at_post(void)
{
    struct ibv_mw_bind bind = {.wr_id = 1};
    struct ibv_send_wr wr;
    struct field field, other;
    struct ibv_mw *one;

    field_open(&field, IBV_MW_TYPE_2);
    field_open(&other, IBV_MW_TYPE_1);
    one = make_window(field.pair.own.base, IBV_MW_TYPE_1);
    bind.bind_info = part_of(&field.pair.a, 0, 8);
    CHECK_EQ(verbs_bind_mw(field.pair.a.qp, field.mw, &bind), EINVAL); /* of type 2 */
    CHECK_EQ(verbs_bind_mw(field.pair.a.qp, other.mw, &bind), EINVAL); /* of another context */
    bind.bind_info.mr = other.pair.a.mr;
    CHECK_EQ(verbs_bind_mw(field.pair.a.qp, one, &bind), EINVAL);
    bind.bind_info.mr = NULL;
    CHECK_EQ(verbs_bind_mw(field.pair.a.qp, one, &bind), EINVAL);
    bind.bind_info = part_of(&field.pair.a, 0, 8);
    bind.bind_info.mw_access_flags |= IBV_ACCESS_ZERO_BASED;
    CHECK_EQ(verbs_bind_mw(field.pair.a.qp, one, &bind), EOPNOTSUPP);
    bind.bind_info = part_of(&field.pair.a, 0, 8);
    bind.send_flags = IBV_SEND_INLINE;
    CHECK_EQ(verbs_bind_mw(field.pair.a.qp, one, &bind), EINVAL);
    wr = bind2_request(one, one->rkey, part_of(&field.pair.a, 0, 8)); /* of type 1 */
    CHECK_EQ(post(field.pair.a.qp, &wr), EINVAL);
    wr = bind2_request(field.mw, field.mw->rkey ^ 0x100, part_of(&field.pair.a, 0, 8)); /* not its key */
    CHECK_EQ(post(field.pair.a.qp, &wr), EINVAL);
    wr = bind2_request(NULL, 0, part_of(&field.pair.a, 0, 8));
    CHECK_EQ(post(field.pair.a.qp, &wr), EINVAL);
    EXPECT_NOTHING(field.pair.a.send_cq);
    CHECK_EQ(qp_state(field.pair.a.qp), IBV_QPS_RTS);
    CHECK_REFUSED(verbs_alloc_mw(field.pair.own.base, (enum ibv_mw_type)3), EINVAL);
    CHECK_REFUSED(verbs_alloc_mw(field.pair.own.base, (enum ibv_mw_type)0), EINVAL);
    CHECK_EQ(verbs_dealloc_mw(one), 0);
    field_close(&other);
    field_close(&field);
}

/* ---- Lives ------------------------------------------------------------------------------------------------- */

static void region_is_held(void)
{
    struct field field;
    struct ibv_mw *second;
    struct soft_counts counts;

    field_open(&field, IBV_MW_TYPE_2);
    second = make_window(field.pair.own.base, IBV_MW_TYPE_1);
    soft_get_counts(field.pair.own.context, &counts);
    CHECK_EQ(counts.mws, 2);
    CHECK_EQ(bind2(&field.pair.a, field.mw, field.mw->rkey ^ 1, part_of(&field.pair.a, 0, 8)), IBV_WC_SUCCESS);
    CHECK_EQ(bind1(&field.pair.a, second, part_of(&field.pair.a, 0, 8)), IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.dereg_mr(field.pair.a.mr), EBUSY);
    CHECK_EQ(verbs_dealloc_mw(second), 0); /* bound as it is */
    CHECK_EQ(soft_verbs.dereg_mr(field.pair.a.mr), EBUSY);
    check_open(&field.pair, field.mw->rkey ^ 1, 0); /* the region serves as before */
    check_open(&field.pair, field.pair.a.mr->rkey, 0);
    CHECK_EQ(invalidate(&field.pair.a, field.mw->rkey ^ 1), IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.dereg_mr(field.pair.a.mr), 0);
    field.pair.a.mr = NULL;
    field_close(&field);
}

/* The key of a deallocated window is refused, and so is a later binding. */
static void deallocated_window(void)
{
    struct field field;
    uint32_t rkey;

    field_open(&field, IBV_MW_TYPE_1);
    CHECK_EQ(bind1(&field.pair.a, field.mw, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
    rkey = field.mw->rkey;
    check_open(&field.pair, rkey, 0);
    CHECK_EQ(verbs_dealloc_mw(field.mw), 0);
    field.mw = make_window(field.pair.own.base, IBV_MW_TYPE_1);
    CHECK(field.mw->rkey >> 8 != rkey >> 8);
    check_shut(&field.pair, rkey, 0);
    field_close(&field);
}

/* ---- Keys ---------------------------------------------------------------------------------------------------- */

/* Return the key of the next region with the window's number. */
static uint32_t next_of(struct ibv_pd *pd, uint32_t number)
{
    static uint8_t memory[8];
    uint32_t key = 0, i;

    for (i = 0; i < 4 * SOFT_MIN_FREED && key >> 8 != number; i++) {
        struct ibv_mr *mr = soft_verbs.reg_mr(pd, memory, sizeof(memory), ACCESS_ALL);

        REQUIRE(mr != NULL);
        key = mr->rkey;
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    }
    CHECK_EQ(key >> 8, number);
    return key;
}

/* Old keys of a window do not reach regions registered later. */
static void a_region_has_no_key_that_a_window_was_bound_by(void)
{
    static const uint8_t steps[][4] = {{1, 1, 1, 1}, {1}, {7, 100, 3}, {255, 2}, {0}};
    struct field field;
    size_t i, step;

    for (i = 0; i < COUNT_OF(steps); i++) {
        uint32_t key, number;

        field_open(&field, IBV_MW_TYPE_2);
        key = field.mw->rkey;
        number = key >> 8;
        for (step = 0; step < COUNT_OF(steps[i]) && steps[i][step]; step++) {
            key = number << 8 | (uint8_t)(key + steps[i][step]);
            CHECK_EQ(bind2(&field.pair.a, field.mw, key, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
            CHECK_EQ(invalidate(&field.pair.a, key), IBV_WC_SUCCESS);
        }
        CHECK_EQ(verbs_dealloc_mw(field.mw), 0);
        field.mw = NULL;
        CHECK_EQ(next_of(field.pair.own.base, number) & 0xff, (uint8_t)(key + 1));
        field_close(&field);
    }
}

static void regions_get_no_key_of_a_type_1_window(void)
{
    struct field field;
    uint32_t key = 0, i;

    field_open(&field, IBV_MW_TYPE_1);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(bind1(&field.pair.a, field.mw, part_of(&field.pair.a, 0, WINDOW)), IBV_WC_SUCCESS);
        key = field.mw->rkey;
    }
    CHECK_EQ(verbs_dealloc_mw(field.mw), 0);
    field.mw = NULL;
    CHECK_EQ(next_of(field.pair.own.base, key >> 8) & 0xff, (uint8_t)(key + 1));
    field_close(&field);
}

/* ---- Races ------------------------------------------------------------------------------------------------- */

enum { ROUNDS = UNDER_TSAN ? 60 : 16 };

struct race {
    struct home writer_home;
    struct end owner, writer; /* of a home each, since a thread domain is one thread's */
    atomic_uint rkey, stop;
    atomic_ullong written;
};

/* Write by the current key, and reconnect after a refusal. */
static void *keep_writing(void *argument)
{
    struct race *race = argument;

    while (!atomic_load(&race->stop)) {
        struct ibv_sge sge = span(&race->writer, 0, 512);
        struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &race->owner, 0);
        struct ibv_wc wc;

        wr.wr.rdma.rkey = atomic_load(&race->rkey);
        CHECK_EQ(post(race->writer.qp, &wr), 0);
        REQUIRE(wait_completion(race->writer.send_cq, &wc));
        if (wc.status == IBV_WC_SUCCESS)
            atomic_fetch_add(&race->written, 1);
    }
    return NULL;
}

static void race_open(struct race *race, struct home *home)
{
    memset(race, 0, sizeof(*race));
    home_open(home);
    home_open(&race->writer_home);
    TYPED_OPEN(&race->owner, home, .type = IBV_QPT_UC); /* goes on after what it refuses */
    TYPED_OPEN(&race->writer, &race->writer_home, .type = IBV_QPT_UC);
    type_connect(race->owner.qp, &default_link, race->writer.qp->qp_num);
    type_connect(race->writer.qp, &default_link, race->owner.qp->qp_num);
}

static void race_close(struct race *race, struct home *home)
{
    end_close(&race->writer);
    end_close(&race->owner);
    home_close(&race->writer_home);
    home_close(home);
}

/* Check that nothing is written by a window's key after it was invalidated. The memory is accessed without a lock: the
 * device orders the accesses, which ThreadSanitizer verifies here. */
static void check_quiet(struct race *race)
{
    size_t i;

    CHECK_EQ(race->owner.memory[511], 0x55); /* the writer had come by it */
    memset(race->owner.memory, 0xaa, 512);
    sched_yield();
    for (i = 0; i < 512; i++)
        REQUIRE_EQ(race->owner.memory[i], 0xaa);
}

enum end_of_window { INVALIDATED, UNBOUND, MOVED, DEALLOCATED, ENDS };

static void race_once(struct race *race, struct home *home, enum end_of_window how)
{
    bool second = how == INVALIDATED;
    struct ibv_mw *mw = make_window(home->base, second ? IBV_MW_TYPE_2 : IBV_MW_TYPE_1);
    uint64_t before, end = now_ns() + WAIT_S * 1000000000ull;
    struct ibv_mw_bind_info info = part_of(&race->owner, 0, 512);
    uint32_t rkey = mw->rkey ^ 1;

    if (second) {
        REQUIRE_EQ(bind2(&race->owner, mw, rkey, info), IBV_WC_SUCCESS);
    } else {
        REQUIRE_EQ(bind1(&race->owner, mw, info), IBV_WC_SUCCESS);
        rkey = mw->rkey;
    }
    atomic_store(&race->rkey, rkey);
    before = atomic_load(&race->written); /* one may be under way by the last key: the others come by this one */
    while (atomic_load(&race->written) < before + 3 && now_ns() < end)
        sched_yield();
    CHECK(atomic_load(&race->written) >= before + 3);
    if (how == INVALIDATED)
        CHECK_EQ(invalidate(&race->owner, rkey), IBV_WC_SUCCESS);
    if (how == UNBOUND)
        CHECK_EQ(bind1(&race->owner, mw, part_of(&race->owner, 0, 0)), IBV_WC_SUCCESS);
    if (how == MOVED)
        CHECK_EQ(bind1(&race->owner, mw, part_of(&race->owner, WINDOW, 512)), IBV_WC_SUCCESS);
    if (how == DEALLOCATED)
        CHECK_EQ(verbs_dealloc_mw(mw), 0);
    check_quiet(race);
    if (how != DEALLOCATED)
        CHECK_EQ(verbs_dealloc_mw(mw), 0);
}

/* Unreliable: a refused write completes, too; so `written` counts posted writes, and the memory shows which were
 * executed. */
static void unbound_under_load(void)
{
    struct race race;
    struct home home;
    pthread_t thread;
    int i;

    race_open(&race, &home);
    memset(race.writer.memory, 0x55, 512);
    REQUIRE_EQ(pthread_create(&thread, NULL, keep_writing, &race), 0);
    for (i = 0; i < ROUNDS; i++)
        race_once(&race, &home, (enum end_of_window)(i % ENDS));
    atomic_store(&race.stop, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    race_close(&race, &home);
}

CHECK_MAIN(CASE(type_1), CASE(rights), CASE(type_2), CASE(no_empty_binding), CASE(send_with_invalidate),
           CASE(another_queue_pair), CASE(reset_ends_no_binding), CASE(nothing_to_invalidate), CASE(refused_access),
           CASE(foreign_window), CASE(refused_at_post), CASE(region_is_held), CASE(deallocated_window),
           CASE(a_region_has_no_key_that_a_window_was_bound_by), CASE(regions_get_no_key_of_a_type_1_window),
           CASE(unbound_under_load))
