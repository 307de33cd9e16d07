/* Tests of shared receive queues alone: receives are taken once, in order, also after resizing. test_srq_traffic.c has
 * tests of queue pairs that take from them. */
#include "support.h"
#include "support_fork.h"
#include "support_srq.h"
#include "support_threads.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>

#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/cq_push.h"

/* ---- Creation ---------------------------------------------------------------------------------------------- */

/* At least the requested size is granted, and reported. */
static void granted_sizes(void)
{
    static const struct {
        uint32_t asked, granted;
    } table[] = {{1, 1}, {2, 2}, {3, 4}, {16, 16}, {1000, 1024}, {SOFT_MAX_SRQ_WR, SOFT_MAX_SRQ_WR}};
    struct home home;
    size_t i;

    home_open(&home);
    for (i = 0; i < COUNT_OF(table); i++) {
        struct ibv_srq_init_attr attr = {
            .srq_context = &home,
            .attr = {.max_wr = table[i].asked, .max_sge = (uint32_t)i, .srq_limit = 1},
        };
        struct ibv_srq *srq = soft_verbs.create_srq(home.pd, &attr);
        struct ibv_srq_attr told;

        REQUIRE(srq != NULL);
        CHECK_EQ(attr.attr.max_wr, table[i].granted);
        CHECK_EQ(attr.attr.max_sge, i);
        told = srq_query(srq);
        CHECK_EQ(told.max_wr, table[i].granted);
        CHECK_EQ(told.max_sge, i);
        CHECK_EQ(told.srq_limit, 0); /* the verb has it that creation arms no limit */
        CHECK(srq->context == home.context && srq->srq_context == &home && srq->pd == home.pd);
        CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    }
    home_close(&home);
}

static void wrong_sizes(void)
{
    struct home home;

    home_open(&home);
    CHECK_REFUSED(try_srq(&home, 0, 1), EINVAL);
    CHECK_REFUSED(try_srq(&home, SOFT_MAX_SRQ_WR + 1, 1), EINVAL);
    CHECK_REFUSED(try_srq(&home, UINT32_MAX, 1), EINVAL);
    CHECK_REFUSED(try_srq(&home, 1, SOFT_MAX_SGE + 1), EINVAL);
    CHECK_REFUSED(try_srq(&home, 1, UINT32_MAX), EINVAL);
    home_close(&home);
}

/* Each way to make valid attributes of an extended queue invalid. */
static void extended_attributes(void)
{
    const uint32_t pd_bit = IBV_SRQ_INIT_ATTR_PD, type_bit = IBV_SRQ_INIT_ATTR_TYPE;
    const uint32_t all = pd_bit | type_bit | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    struct home home, other;
    struct ibv_srq_init_attr_ex good = {.attr = {.max_wr = 8, .max_sge = 1}, .srq_type = IBV_SRQT_XRC}, attr;
    struct ibv_xrcd *foreign_xrcd;
    struct ibv_cq *foreign_cq;
    struct ibv_srq *srq;

    home_open(&home);
    home_open(&other);
    foreign_xrcd = make_xrcd(other.context);
    foreign_cq = home_cq(&other, 4, NULL);
    good.pd = home.pd;
    good.xrcd = make_xrcd(home.context);
    good.cq = home_cq(&home, 4, NULL);

    attr = good, attr.comp_mask = pd_bit; /* without a type it is a basic one */
    srq = verbs_create_srq_ex(home.context, &attr);
    REQUIRE(srq != NULL);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    attr = good, attr.comp_mask = pd_bit | type_bit, attr.srq_type = IBV_SRQT_BASIC;
    srq = verbs_create_srq_ex(home.context, &attr);
    REQUIRE(srq != NULL);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    attr.comp_mask = all;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr.comp_mask = type_bit;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr = good, attr.comp_mask = all | IBV_SRQ_INIT_ATTR_TM, attr.srq_type = IBV_SRQT_TM;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EOPNOTSUPP);
    attr.comp_mask = all;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EOPNOTSUPP);
    attr.srq_type = 77;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr = good, attr.comp_mask = all | IBV_SRQ_INIT_ATTR_RESERVED;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EOPNOTSUPP);

    attr = good, attr.comp_mask = all & ~pd_bit;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr.comp_mask = all & ~(uint32_t)IBV_SRQ_INIT_ATTR_XRCD;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr.comp_mask = all & ~(uint32_t)IBV_SRQ_INIT_ATTR_CQ;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    good.comp_mask = all;
    attr = good, attr.pd = NULL;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr.pd = other.pd;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr = good, attr.xrcd = NULL;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr.xrcd = foreign_xrcd;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr = good, attr.cq = NULL;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr.cq = foreign_cq;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);
    attr = good, attr.attr.max_wr = 0;
    CHECK_REFUSED(verbs_create_srq_ex(home.context, &attr), EINVAL);

    srq = verbs_create_srq_ex(home.context, &good);
    REQUIRE(srq != NULL);
    CHECK_EQ(good.attr.max_wr, 8);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(good.cq), 0);
    CHECK_EQ(verbs_close_xrcd(good.xrcd), 0);
    CHECK_EQ(soft_verbs.destroy_cq(foreign_cq), 0);
    CHECK_EQ(verbs_close_xrcd(foreign_xrcd), 0);
    home_close(&other);
    home_close(&home);
}

/* Objects that a queue is created on cannot be destroyed before it. */
static void parents_are_busy(void)
{
    struct soft_counts counts;
    struct ibv_xrcd *xrcd;
    struct ibv_srq *basic, *xrc;
    struct ibv_cq *cq;
    struct home home;

    home_open(&home);
    xrcd = make_xrcd(home.context);
    cq = home_cq(&home, 4, NULL);
    basic = make_srq(&home, 4);
    xrc = try_xrc_srq(&home, xrcd, cq, 4);
    REQUIRE(xrc != NULL);
    soft_get_counts(home.context, &counts);
    CHECK_EQ(counts.srqs, 2);
    CHECK_EQ(counts.xrcds, 1);
    CHECK_EQ(soft_verbs.dealloc_pd(home.pd), EBUSY);
    CHECK_EQ(soft_verbs.close_device(home.context), EBUSY);
    CHECK_EQ(soft_verbs.destroy_srq(basic), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(home.pd), EBUSY);
    CHECK_EQ(verbs_close_xrcd(xrcd), EBUSY);
    CHECK_EQ(soft_verbs.destroy_cq(cq), EBUSY);
    CHECK_EQ(soft_verbs.destroy_srq(xrc), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    home_close(&home);
}

/* XRC queues have numbers, valid in all contexts of the device; a basic queue has none. */
static void numbers(void)
{
    uint32_t first = 0, second = 0, none = 77;
    struct ibv_srq *basic, *xrc[2];
    struct soft_device *device;
    struct ibv_xrcd *xrcd;
    struct ibv_cq *cq;
    struct home home;

    home_open(&home);
    device = to_soft_context(home.context)->device;
    xrcd = make_xrcd(home.context);
    cq = home_cq(&home, 4, NULL);
    basic = make_srq(&home, 4);
    xrc[0] = try_xrc_srq(&home, xrcd, cq, 4);
    xrc[1] = try_xrc_srq(&home, xrcd, cq, 4);
    REQUIRE(xrc[0] && xrc[1]);
    CHECK_EQ(verbs_get_srq_num(basic, &none), EINVAL);
    CHECK_EQ(none, 77);
    CHECK_EQ(verbs_get_srq_num(xrc[0], &first), 0);
    CHECK_EQ(verbs_get_srq_num(xrc[1], &second), 0);
    CHECK(first && second && first != second);
    CHECK(soft_table_find(&device->srqs, first) == to_soft_srq(xrc[0]));
    CHECK_EQ(soft_verbs.destroy_srq(xrc[0]), 0);
    CHECK(soft_table_find(&device->srqs, first) == NULL);
    CHECK_EQ(soft_verbs.destroy_srq(xrc[1]), 0);
    xrc[0] = try_xrc_srq(&home, xrcd, cq, 4);
    REQUIRE(xrc[0] != NULL);
    CHECK_EQ(verbs_get_srq_num(xrc[0], &none), 0);
    CHECK(none != first && none != second); /* an old number reaches no queue for a while */
    CHECK_EQ(soft_verbs.destroy_srq(xrc[0]), 0);
    CHECK_EQ(soft_verbs.destroy_srq(basic), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    home_close(&home);
}

/* Completions of an XRC queue are removed with it; those of another one stay. */
static void completions_are_dropped(void)
{
    struct soft_cqe cqe = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_RECV};
    struct ibv_srq *srq, *other;
    struct ibv_xrcd *xrcd;
    struct soft_cq *soft;
    struct ibv_cq *cq;
    struct home home;
    uint32_t i;

    home_open(&home);
    xrcd = make_xrcd(home.context);
    cq = home_cq(&home, 16, NULL);
    soft = to_soft_cq(cq);
    srq = try_xrc_srq(&home, xrcd, cq, 8);
    other = try_xrc_srq(&home, xrcd, cq, 8);
    REQUIRE(srq && other && grace_ready());
    grace_enter();
    for (i = 0; i < 8; i++) {
        cqe.srq = to_soft_srq(i % 2 ? other : srq);
        soft_cq_push(soft, &cqe);
    }
    grace_leave(grace_self);
    CHECK_EQ(atomic_load(&soft->producer) - atomic_load(soft->consumer), 8);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(atomic_load(&soft->producer) - atomic_load(soft->consumer), 4);
    CHECK_EQ(soft_verbs.destroy_srq(other), 0);
    CHECK_EQ(atomic_load(&soft->producer) - atomic_load(soft->consumer), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    home_close(&home);
}

/* ---- Posting and taking ------------------------------------------------------------------------------------- */

/* A chain is taken in order, many times around the ring, each receive with its list. */
static void order_and_lists(void)
{
    uint64_t posted = 0, taken = 0;
    struct soft_receive receive;
    struct ibv_srq *srq;
    struct home home;
    int round, i;

    home_open(&home);
    srq = make_srq(&home, 8);
    CHECK(!soft_srq_has_receive(to_soft_srq(srq)));
    CHECK(!srq_take(srq, &receive, false));
    for (round = 0; round < 20; round++) {
        struct ibv_sge sges[5][4];
        struct ibv_recv_wr chain[5], *bad = chain;

        for (i = 0; i < 5; i++, posted++) {
            int count = (int)(posted % 5), j;

            for (j = 0; j < count; j++)
                sges[i][j] = (struct ibv_sge){posted * 100 + (unsigned int)j, (uint32_t)posted, (uint32_t)j};
            chain[i] = (struct ibv_recv_wr){
                .wr_id = posted,
                .sg_list = sges[i],
                .num_sge = count,
                .next = i < 4 ? &chain[i + 1] : NULL,
            };
        }
        REQUIRE_EQ(verbs_post_srq_recv(srq, chain, &bad), 0);
        CHECK(bad == NULL);
        memset(sges, 0xff, sizeof(sges)); /* the caller's again */
        CHECK(soft_srq_has_receive(to_soft_srq(srq)));
        for (i = 0; i < 5; i++, taken++) {
            uint32_t j;

            REQUIRE(srq_take(srq, &receive, true));
            CHECK_EQ(receive.wr_id, taken);
            REQUIRE_EQ(receive.num_sge, taken % 5);
            for (j = 0; j < receive.num_sge; j++) {
                CHECK_EQ(receive.sges[j].addr, taken * 100 + j);
                CHECK_EQ(receive.sges[j].length, taken);
                CHECK_EQ(receive.sges[j].lkey, j);
            }
        }
        CHECK(!soft_srq_has_receive(to_soft_srq(srq)));
    }
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* The first invalid request of a chain is returned; those before it are posted. */
static void wrong_requests(void)
{
    struct ibv_sge sges[5] = {{0}};
    struct ibv_recv_wr chain[3] = {{.wr_id = 1, .next = &chain[1]}, {.wr_id = 2, .next = &chain[2]}, {.wr_id = 3}};
    struct soft_receive receive;
    struct ibv_recv_wr *bad;
    struct ibv_srq *srq;
    struct home home;

    home_open(&home);
    srq = make_srq(&home, 8);
    chain[1].sg_list = sges;
    chain[1].num_sge = 5;
    bad = NULL;
    CHECK_EQ(verbs_post_srq_recv(srq, chain, &bad), EINVAL);
    CHECK(bad == &chain[1]);
    chain[1].num_sge = -1;
    CHECK_EQ(verbs_post_srq_recv(srq, &chain[1], &bad), EINVAL);
    CHECK(bad == &chain[1]);
    srq_expect(srq, 1);
    CHECK(!srq_take(srq, &receive, false));
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* A receive counts until its completion was polled, not until it was taken. */
static void depth_is_of_unpolled_receives(void)
{
    struct ibv_recv_wr chain[2] = {{.wr_id = 103, .next = &chain[1]}, {.wr_id = 104}}, *bad = NULL;
    struct soft_receive receive;
    struct ibv_srq *srq;
    struct home home;
    uint64_t i;

    home_open(&home);
    srq = make_srq(&home, 4);
    for (i = 100; i < 103; i++)
        CHECK_EQ(srq_post(srq, i), 0);
    CHECK_EQ(verbs_post_srq_recv(srq, chain, &bad), ENOMEM);
    CHECK(bad == &chain[1]);
    for (i = 100; i < 104; i++) {
        CHECK(srq_take(srq, &receive, false));
        CHECK_EQ(receive.wr_id, i);
    }
    CHECK(!srq_take(srq, &receive, false));
    CHECK_EQ(srq_post(srq, 104), ENOMEM);
    soft_srq_credit(to_soft_srq(srq), 1);
    CHECK_EQ(srq_post(srq, 104), 0);
    CHECK_EQ(srq_post(srq, 105), ENOMEM);
    soft_srq_credit(to_soft_srq(srq), 3);
    srq_expect(srq, 104);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* A broken queue provides no receives, but accepts posts, and can be destroyed like any other. */
static void broken(void)
{
    struct soft_receive receive;
    struct ibv_srq *srq;
    struct home home;

    home_open(&home);
    srq = make_srq(&home, 4);
    CHECK_EQ(srq_post(srq, 1), 0);
    CHECK(soft_srq_has_receive(to_soft_srq(srq)));
    REQUIRE(grace_ready());
    grace_enter();
    soft_srq_break(to_soft_srq(srq));
    soft_srq_break(to_soft_srq(srq));
    grace_leave(grace_self);
    CHECK(!soft_srq_has_receive(to_soft_srq(srq)));
    CHECK(!srq_take(srq, &receive, false));
    CHECK_EQ(srq_post(srq, 2), 0);
    CHECK(!srq_take(srq, &receive, false));
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* ---- The limit ---------------------------------------------------------------------------------------------- */

/* The limit is reached when fewer receives than that are left after one was taken; its event comes once. */
static void limit_disarms_itself(void)
{
    struct ibv_srq *srq;
    struct home home;
    uint64_t i;

    home_open(&home);
    srq = make_srq(&home, 8);
    for (i = 0; i < 8; i++)
        CHECK_EQ(srq_post(srq, i), 0);
    CHECK_EQ(srq_arm(srq, 9), EINVAL);
    CHECK_EQ(srq_query(srq).srq_limit, 0);
    CHECK_EQ(srq_arm(srq, 6), 0);
    for (i = 0; i < 3; i++) {
        CHECK_EQ(srq_query(srq).srq_limit, 6); /* 8, 7 and 6 are enough */
        srq_expect(srq, i);
    }
    CHECK_EQ(srq_query(srq).srq_limit, 0);
    CHECK_EQ(srq_arm(srq, 8), 0); /* fewer are there already: the next one that is taken tells */
    CHECK_EQ(srq_query(srq).srq_limit, 8);
    srq_expect(srq, 3);
    CHECK_EQ(srq_query(srq).srq_limit, 0);
    CHECK_EQ(srq_arm(srq, 2), 0);
    CHECK_EQ(srq_arm(srq, 0), 0); /* disarmed by the user */
    for (i = 4; i < 8; i++)
        srq_expect(srq, i);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* ---- Resizing ----------------------------------------------------------------------------------------------- */

/* Posted receives are kept, in order, even if they wrapped around the end of the ring. */
static void resize_keeps_receives(void)
{
    static const uint32_t sizes[] = {64, 8, 16, 5, 1024, 6};
    uint64_t posted = 0, taken = 0;
    struct ibv_srq *srq;
    struct home home;
    size_t i;
    int j;

    home_open(&home);
    srq = make_srq(&home, 8);
    for (i = 0; i < COUNT_OF(sizes); i++) {
        struct ibv_srq_attr attr = {.max_wr = sizes[i]};

        while (posted - taken < 7)
            CHECK_EQ(srq_post(srq, posted++), 0);
        for (j = 0; j < 2; j++)
            srq_expect(srq, taken++);
        REQUIRE_EQ(soft_verbs.modify_srq(srq, &attr, IBV_SRQ_MAX_WR), 0);
        CHECK_EQ(attr.max_wr, soft_power_of_two(sizes[i]));
        CHECK_EQ(srq_query(srq).max_wr, attr.max_wr);
        for (j = 0; j < 3; j++)
            srq_expect(srq, taken++);
    }
    while (posted - taken < 8)
        CHECK_EQ(srq_post(srq, posted++), 0);
    CHECK_EQ(srq_post(srq, posted), ENOMEM);
    while (taken < posted)
        srq_expect(srq, taken++);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

static void expect_unchanged(struct ibv_srq *srq, uint32_t max_wr, uint32_t limit)
{
    struct ibv_srq_attr attr = srq_query(srq);

    CHECK_EQ(attr.max_wr, max_wr);
    CHECK_EQ(attr.srq_limit, limit);
}

/* If one attribute is invalid, none is changed. */
static void refused_changes(void)
{
    struct soft_receive receive;
    struct ibv_srq_attr attr;
    struct ibv_srq *srq;
    struct home home;
    uint64_t i;

    home_open(&home);
    srq = make_srq(&home, 16);
    for (i = 0; i < 9; i++)
        CHECK_EQ(srq_post(srq, i), 0);
    CHECK_EQ(srq_arm(srq, 3), 0);
    attr = (struct ibv_srq_attr){.max_wr = 32, .srq_limit = 5};
    CHECK_EQ(soft_verbs.modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT | 4), EINVAL);
    expect_unchanged(srq, 16, 3);
    CHECK_EQ(soft_verbs.modify_srq(srq, &attr, 0), 0);
    expect_unchanged(srq, 16, 3);
    CHECK_EQ(srq_resize(srq, 0), EINVAL);
    CHECK_EQ(srq_resize(srq, SOFT_MAX_SRQ_WR + 1), EINVAL);
    CHECK_EQ(srq_resize(srq, 8), EINVAL); /* 9 are posted */
    attr.srq_limit = 33;
    CHECK_EQ(soft_verbs.modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT), EINVAL);
    attr = (struct ibv_srq_attr){.max_wr = 8, .srq_limit = 1};
    CHECK_EQ(soft_verbs.modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT), EINVAL);
    expect_unchanged(srq, 16, 3);
    CHECK(srq_take(srq, &receive, false));
    CHECK_EQ(srq_resize(srq, 8), EINVAL); /* taken, but not polled */
    soft_srq_credit(to_soft_srq(srq), 1);
    CHECK_EQ(srq_resize(srq, 8), 0);
    expect_unchanged(srq, 8, 3);
    for (i = 1; i < 7; i++)
        srq_expect(srq, i);
    CHECK_EQ(srq_arm(srq, 3), 0);         /* again, since it was reached */
    CHECK_EQ(srq_resize(srq, 2), EINVAL); /* a limit above what would be granted */
    expect_unchanged(srq, 8, 3);
    attr = (struct ibv_srq_attr){.max_wr = 2, .srq_limit = 2};
    CHECK_EQ(soft_verbs.modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT), 0);
    expect_unchanged(srq, 2, 2);
    srq_expect(srq, 7);
    srq_expect(srq, 8);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

/* ---- Threads ------------------------------------------------------------------------------------------------ */

static int post_there(void *srq)
{
    return srq_post(srq, 1);
}

static int resize_there(void *srq)
{
    return srq_resize(srq, 64);
}

static int destroy_there(void *srq)
{
    return soft_verbs.destroy_srq(srq);
}

static int arm_there(void *srq)
{
    return srq_arm(srq, 2);
}

static int query_there(void *srq)
{
    return srq_query(srq).max_wr != 4;
}

static void overlap(void *argument)
{
    struct ibv_srq *srq = argument;

    REQUIRE_EQ(soft_half_enter(&to_soft_srq(srq)->half, "test"), 0);
    CHECK_EQ(call_elsewhere(post_there, srq), EBUSY);
    CHECK_EQ(call_elsewhere(resize_there, srq), EBUSY);
    CHECK_EQ(call_elsewhere(destroy_there, srq), EBUSY);
    CHECK_EQ(srq_post(srq, 1), EBUSY); /* nor this thread a second time */
    CHECK_EQ(call_elsewhere(arm_there, srq), 0);
    CHECK_EQ(call_elsewhere(query_there, srq), 0);
    soft_half_leave(&to_soft_srq(srq)->half);
}

/* On a thread domain a thread that enters while another one is inside is refused and counted; one that rearms the limit
 * is not. */
static void overlaps_are_refused(void)
{
    struct soft_counts counts;
    struct ibv_srq *srq;
    struct home home;
    char *text;

    if (!variant->thread_domain)
        return;
    home_open(&home);
    srq = make_srq(&home, 4);
    text = stderr_of(overlap, srq);
    CHECK(strstr(text, "post_srq_recv on shared receive queue") != NULL);
    free(text);
    soft_get_counts(home.context, &counts);
    CHECK_EQ(counts.overlaps, 4);
    CHECK_EQ(srq_query(srq).srq_limit, 2);
    CHECK_EQ(call_elsewhere(post_there, srq), 0);
    srq_expect(srq, 1);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    home_close(&home);
}

struct crowd {
    struct ibv_srq *srq;
    atomic_uint *seen; /* of each wr_id: how often it was taken */
    uint64_t total;
    atomic_ullong taken;
    atomic_bool give_up;
};

struct member {
    struct crowd *crowd;
    enum { TAKER, POSTER, RESIZER } role;
    unsigned int seed;
};

static void take_all(struct crowd *crowd, unsigned int seed)
{
    uint64_t taken, before = 0, last = 0, deadline = now_ns() + WAIT_S * 1000000000ull;
    struct soft_receive receive;

    while ((taken = atomic_load(&crowd->taken)) < crowd->total) {
        if (taken != before) { /* a receive was taken: there is progress, if slow */
            before = taken;
            deadline = now_ns() + WAIT_S * 1000000000ull;
        }
        if (!srq_take(crowd->srq, &receive, false)) {
            if (!CHECK(now_ns() < deadline)) {
                atomic_store(&crowd->give_up, true);
                return;
            }
            sched_yield();
            continue;
        }
        CHECK(receive.wr_id > last); /* each sees a part of one order */
        last = receive.wr_id;
        CHECK_EQ(receive.num_sge, 1);
        CHECK_EQ(receive.sges[0].addr, receive.wr_id * 3);
        atomic_fetch_add(&crowd->seen[receive.wr_id], 1);
        atomic_fetch_add(&crowd->taken, 1);
        if (next_random(&seed, 4) == 0)
            sched_yield();
        soft_srq_credit(to_soft_srq(crowd->srq), 1);
    }
}

static void resize_at_random(struct ibv_srq *srq, unsigned int *seed)
{
    int error = srq_resize(srq, 1u << next_random(seed, 8));

    CHECK(error == 0 || error == EINVAL); /* too much is outstanding */
    error = srq_arm(srq, next_random(seed, 4));
    CHECK(error == 0 || error == EINVAL);
}

/* On a thread domain this thread resizes the queue, too. */
static void post_all(struct crowd *crowd, unsigned int seed)
{
    uint64_t wr_id = 1;

    while (wr_id <= crowd->total && !atomic_load(&crowd->give_up)) {
        struct ibv_sge sge = {wr_id * 3, 1, 1};
        struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;
        int error = verbs_post_srq_recv(crowd->srq, &wr, &bad);

        if (error == ENOMEM)
            sched_yield();
        else if (CHECK_EQ(error, 0))
            wr_id++;
        else
            return;
        if (variant->thread_domain && next_random(&seed, 50) == 0)
            resize_at_random(crowd->srq, &seed);
    }
}

static void take_part(void *argument)
{
    struct member *member = argument;
    struct crowd *crowd = member->crowd;

    if (member->role == TAKER)
        take_all(crowd, member->seed);
    else if (member->role == POSTER)
        post_all(crowd, member->seed);
    else
        while (atomic_load(&crowd->taken) < crowd->total && !atomic_load(&crowd->give_up))
            resize_at_random(crowd->srq, &member->seed), sleep_us(20);
}

/* Two threads take, one posts, one resizes: each receive is taken once. */
static void many_threads_at_one_queue(void)
{
    struct crowd crowd = {.total = SCALED(20000)};
    struct member members[4] = {{&crowd, TAKER, 1}, {&crowd, TAKER, 2}, {&crowd, POSTER, 3}, {&crowd, RESIZER, 4}};
    struct home home;
    uint64_t i;

    home_open(&home);
    crowd.srq = make_srq(&home, 16);
    crowd.seen = calloc(crowd.total + 1, sizeof(*crowd.seen));
    REQUIRE(crowd.seen != NULL);
    run_threads(variant->thread_domain ? 3 : 4, take_part, members, sizeof(members[0]));
    for (i = 1; i <= crowd.total; i++)
        if (crowd.seen[i] != 1 && !CHECK_EQ(crowd.seen[i], 1))
            break;
    free(crowd.seen);
    CHECK_EQ(atomic_load(&to_soft_srq(crowd.srq)->outstanding), 0);
    CHECK_EQ(soft_verbs.destroy_srq(crowd.srq), 0);
    home_close(&home);
}

/* ---- Forks -------------------------------------------------------------------------------------------------- */

static void use_of_the_parents(void *argument)
{
    struct ibv_srq **srqs = argument;
    struct ibv_srq_attr attr = {.max_wr = 8};
    uint32_t number;
    int i;

    for (i = 0; i < 2; i++) {
        CHECK_EQ(srq_post(srqs[i], 1), ENODEV);
        CHECK_EQ(soft_verbs.query_srq(srqs[i], &attr), ENODEV);
        CHECK_EQ(srq_arm(srqs[i], 1), ENODEV);
        CHECK_EQ(srq_resize(srqs[i], 8), ENODEV);
        CHECK_EQ(verbs_get_srq_num(srqs[i], &number), ENODEV);
        CHECK_EQ(soft_verbs.destroy_srq(srqs[i]), ENODEV);
    }
    attr = (struct ibv_srq_attr){.max_wr = 8};
    CHECK_REFUSED(soft_verbs.create_srq(srqs[0]->pd, &(struct ibv_srq_init_attr){.attr = attr}), ENODEV);
}

/* In a child of a fork the queue is the parent's. */
static void stale_after_fork(void)
{
    struct ibv_srq *srqs[2];
    struct ibv_xrcd *xrcd;
    struct ibv_cq *cq;
    struct home home;

    home_open(&home);
    xrcd = make_xrcd(home.context);
    cq = home_cq(&home, 4, NULL);
    srqs[0] = make_srq(&home, 4);
    srqs[1] = try_xrc_srq(&home, xrcd, cq, 4);
    REQUIRE(srqs[1] != NULL);
    in_child(use_of_the_parents, srqs);
    CHECK_EQ(srq_post(srqs[0], 1), 0);
    CHECK_EQ(soft_verbs.destroy_srq(srqs[0]), 0);
    CHECK_EQ(soft_verbs.destroy_srq(srqs[1]), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    home_close(&home);
}

CHECK_MAIN(CASE(granted_sizes), CASE(wrong_sizes), CASE(extended_attributes), CASE(parents_are_busy), CASE(numbers),
           CASE(completions_are_dropped), CASE(order_and_lists), CASE(wrong_requests),
           CASE(depth_is_of_unpolled_receives), CASE(broken), CASE(limit_disarms_itself), CASE(resize_keeps_receives),
           CASE(refused_changes), CASE(overlaps_are_refused), CASE(many_threads_at_one_queue), CASE(stale_after_fork))
