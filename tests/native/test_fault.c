/* Tests of fault plans for verbs: the calls that fail, which then do nothing, and a lost device. */
#include "support.h"
#include "support_async.h"
#include "support_fork.h"
#include "support_verbs.h"

#include "soft/api/device.h"
#include "soft/base/settings.h"
#include "soft/fault/fault.h"
#include "soft/objects/context.h"
#include "soft/objects/pd_share.h"
#include "soft/objects/verbs.h"

#define FIRST(n) ((struct soft_strike){.first = (n)})
#define ALWAYS ((struct soft_strike){.first = 1, .every = 1})

/* Return whether the device consults the plan. */
static bool is_asked(struct ibv_context *context)
{
    return atomic_load(&to_soft_context(context)->special) & SOFT_SPECIAL_FAULTS;
}

static int query(struct ibv_context *context)
{
    struct ibv_device_attr attr;

    return soft_verbs.query_device(context, &attr);
}

static void names(void)
{
    unsigned int i, j;

    for (i = 0; i < SOFT_VERB_COUNT; i++) {
        REQUIRE(soft_verb_name((enum soft_verb)i) != NULL);
        for (j = 0; j < i; j++)
            CHECK(strcmp(soft_verb_name((enum soft_verb)i), soft_verb_name((enum soft_verb)j)));
    }
    CHECK(!strcmp(soft_verb_name(SOFT_VERB_close_device), "close_device"));
    CHECK(!strcmp(soft_verb_name(SOFT_VERB_destroy_ah), "destroy_ah"));
    CHECK(!soft_verb_name(SOFT_ANY_VERB));
}

/* Each verb fails as planned, in its own way, does nothing, and works again. */
static void each_verb(void)
{
    struct soft_fault_record record;
    struct world world;
    size_t before;
    unsigned int i;

    world_open(&world);
    for (i = 0; i < SOFT_VERB_COUNT; i++) {
        enum soft_verb verb = (enum soft_verb)i;
        struct soft_counts counts, after;

        before = soft_fault_records(world.home.context, 0, NULL, 0);
        soft_get_counts(world.home.context, &counts);
        if (!CHECK_EQ(call_verb(&world, verb), 0))
            printf("that is %s\n", soft_verb_name(verb));
        REQUIRE_EQ(soft_fault_verb(world.home.context, verb, FIRST(1), ENOSPC), 0);
        CHECK(is_asked(world.home.context));
        if (!CHECK_EQ(call_verb(&world, verb), ENOSPC))
            printf("that is %s\n", soft_verb_name(verb));
        CHECK(!is_asked(world.home.context)); /* it can strike no more */
        CHECK_EQ(call_verb(&world, verb), 0);
        soft_get_counts(world.home.context, &after);
        CHECK(!memcmp(&counts, &after, sizeof(counts)));
        CHECK_EQ(soft_fault_records(world.home.context, before, &record, 1), before + 1);
        CHECK_EQ(record.what, SOFT_RECORD_VERB);
        CHECK_EQ(record.which, verb);
        CHECK_EQ(record.ordinal, 1);
        CHECK_EQ(record.value, ENOSPC);
    }
    world_close(&world);
}

/* If the last verb fails, the context is unchanged. */
static void closing(void)
{
    struct home home;

    home_open(&home);
    CHECK_EQ(soft_fault_verb(home.context, SOFT_VERB_close_device, FIRST(1), EAGAIN), 0);
    CHECK_EQ(soft_fault_verb(home.context, SOFT_VERB_open_xrcd, FIRST(1), EAGAIN), 0); /* goes with the context */
    if (home.td) {
        CHECK_EQ(soft_verbs.dealloc_pd(home.pd), 0);
        CHECK_EQ(verbs_dealloc_td(home.td), 0);
        home.td = NULL;
    }
    CHECK_EQ(soft_verbs.dealloc_pd(home.base), 0);
    CHECK_EQ(soft_verbs.close_device(home.context), EAGAIN);
    CHECK_EQ(query(home.context), 0);
    CHECK_EQ(soft_verbs.close_device(home.context), 0);
}

/* ---- Which calls ------------------------------------------------------------------------------------------ */

static void first_every_times(void)
{
    static const struct {
        struct soft_strike strike;
        const char *calls; /* x: refused */
    } table[] = {
        {{1, 0, 0}, "x..........."}, {{3, 0, 0}, "..x........."}, {{3, 0, 5}, "..x........."},
        {{1, 1, 0}, "xxxxxxxxxxxx"}, {{2, 1, 3}, ".xxx........"}, {{2, 3, 0}, ".x..x..x..x."},
        {{2, 3, 2}, ".x..x......."}, {{1, 5, 1}, "x..........."}, {{12, 1, 0}, "...........x"},
    };
    struct home home;
    size_t i;
    int n;

    home_open(&home);
    for (i = 0; i < COUNT_OF(table); i++) {
        REQUIRE_EQ(soft_fault_verb(home.context, SOFT_VERB_query_device, table[i].strike, EIO), 0);
        for (n = 0; table[i].calls[n]; n++) {
            union ibv_gid gid;

            CHECK_EQ(query(home.context), table[i].calls[n] == 'x' ? EIO : 0);
            CHECK_EQ(soft_verbs.query_gid(home.context, 1, 0, &gid), 0); /* another verb does not count */
        }
        soft_fault_clear(home.context);
        CHECK(!is_asked(home.context));
        CHECK_EQ(query(home.context), 0);
    }
    home_close(&home);
}

static void all_verbs_together(void)
{
    struct soft_fault_record records[2];
    struct ibv_port_attr port;
    struct home home;

    home_open(&home);
    REQUIRE_EQ(soft_fault_verb(home.context, SOFT_ANY_VERB, (struct soft_strike){2, 2, 2}, ENOMEM), 0);
    CHECK_EQ(query(home.context), 0);
    CHECK_EQ(verbs_query_port(home.context, 1, &port), ENOMEM);
    CHECK_EQ(query(home.context), 0);
    CHECK_REFUSED(soft_verbs.alloc_pd(home.context), ENOMEM);
    CHECK_EQ(query(home.context), 0);
    CHECK_EQ(verbs_query_port(home.context, 1, &port), 0);
    CHECK_EQ(soft_fault_records(home.context, 0, records, 2), 2);
    CHECK_EQ(records[0].which, SOFT_VERB_query_port);
    CHECK_EQ(records[0].ordinal, 2);
    CHECK_EQ(records[1].which, SOFT_VERB_alloc_pd);
    CHECK_EQ(records[1].ordinal, 4);
    home_close(&home);
}

/* Each rule counts from its creation; if two strike at once, the older one decides. */
static void several_rules(void)
{
    struct home home;

    home_open(&home);
    CHECK_EQ(query(home.context), 0);
    REQUIRE_EQ(soft_fault_verb(home.context, SOFT_VERB_query_device, FIRST(3), EIO), 0);
    CHECK_EQ(query(home.context), 0);
    REQUIRE_EQ(soft_fault_verb(home.context, SOFT_VERB_query_device, (struct soft_strike){1, 1, 3}, EPERM), 0);
    CHECK_EQ(query(home.context), EPERM);
    CHECK_EQ(query(home.context), EIO);
    CHECK_EQ(query(home.context), EPERM);
    CHECK_EQ(query(home.context), 0);
    CHECK_EQ(soft_fault_records(home.context, 0, NULL, 0), 3);
    home_close(&home);
}

static void bad_arguments(void)
{
    struct ibv_context *context;
    struct home home;

    home_open(&home);
    context = home.context;
    CHECK_EQ(soft_fault_verb(context, SOFT_VERB_query_gid, (struct soft_strike){0, 1, 1}, EIO), EINVAL);
    CHECK_EQ(soft_fault_verb(context, (enum soft_verb)(SOFT_ANY_VERB + 1), FIRST(1), EIO), EINVAL);
    CHECK_EQ(soft_fault_verb(context, SOFT_VERB_query_gid, FIRST(1), 0), EINVAL);
    CHECK_EQ(soft_fault_verb(context, SOFT_VERB_query_gid, FIRST(1), -EIO), EINVAL);
    CHECK_EQ(soft_fault_verbs_at_random(context, 1000001, EIO), EINVAL);
    CHECK_EQ(soft_fault_verbs_at_random(context, 1, 0), EINVAL);
    CHECK_EQ(soft_fault_request(context, 0, false, FIRST(0), IBV_WC_GENERAL_ERR, 0), EINVAL);
    CHECK_EQ(soft_fault_request(context, 0, false, FIRST(1), IBV_WC_SUCCESS, 0), EINVAL);
    CHECK_EQ(soft_fault_request(context, 0, true, FIRST(1), (enum ibv_wc_status)24, 0), EINVAL);
    CHECK_EQ(soft_fault_loss(context, 0, FIRST(0)), EINVAL);
    CHECK_EQ(soft_fault_loss_at_random(context, 1000001), EINVAL);
    CHECK_EQ(soft_fault_jitter(context, UINT64_MAX), EINVAL);
    CHECK_EQ(soft_fault_jitter(context, 1), variant->options.mode == SOFT_THREAD ? 0 : EINVAL);
    CHECK_EQ(soft_fault_calls(context, (enum soft_verb)(SOFT_ANY_VERB + 1)), 0);
    soft_fault_clear(context);
    CHECK(!is_asked(context));
    home_close(&home);
}

/* ---- Chances ---------------------------------------------------------------------------------------------- */

enum { DRAWN = 200 };

/* Call two verbs in an order that differs: note the result of each verb's n-th call. */
static void draw(struct ibv_context *context, uint64_t seed, bool in_turn, bool refused[2][DRAWN])
{
    union ibv_gid gid;
    int i, verb;

    soft_fault_seed(context, seed);
    for (i = 0; i < 2 * DRAWN; i++) {
        verb = in_turn ? i % 2 : i / DRAWN;
        errno = 0;
        refused[verb][in_turn ? i / 2 : i % DRAWN] =
            verb ? soft_verbs.query_gid(context, 1, 0, &gid) == -1 && errno == ENFILE : query(context) == ENFILE;
    }
}

static int count_true(const bool *drawn)
{
    int i, count = 0;

    for (i = 0; i < DRAWN; i++)
        count += drawn[i];
    return count;
}

/* The same seed makes the same calls fail, in whatever order verbs are called; another seed other calls. */
static void at_random(void)
{
    bool first[2][DRAWN], again[2][DRAWN], other[2][DRAWN];
    struct home home, second;

    home_open(&home);
    home_open(&second);
    REQUIRE_EQ(soft_fault_verbs_at_random(home.context, 250000, ENFILE), 0);
    draw(home.context, 1, true, first);
    draw(home.context, 1, false, again);
    draw(home.context, 2, true, other);
    CHECK(!memcmp(first, again, sizeof(first)));
    CHECK(memcmp(first, other, sizeof(first)));
    CHECK(memcmp(first[0], first[1], sizeof(first[0])));
    CHECK(count_true(first[0]) > DRAWN / 8 && count_true(first[0]) < DRAWN / 2);
    CHECK_EQ(soft_fault_records(home.context, 0, NULL, 0),
             2 * (count_true(first[0]) + count_true(first[1])) + count_true(other[0]) + count_true(other[1]));
    REQUIRE_EQ(soft_fault_verbs_at_random(second.context, 250000, ENFILE), 0);
    draw(second.context, 1, true, again); /* another context, the same chances */
    CHECK(!memcmp(first, again, sizeof(first)));
    REQUIRE_EQ(soft_fault_verbs_at_random(home.context, 1000000, ENFILE), 0);
    draw(home.context, 3, true, again);
    CHECK_EQ(count_true(again[0]) + count_true(again[1]), 2 * DRAWN);
    REQUIRE_EQ(soft_fault_verbs_at_random(home.context, 0, 0), 0);
    CHECK(!is_asked(home.context));
    draw(home.context, 3, true, again);
    CHECK_EQ(count_true(again[0]) + count_true(again[1]), 0);
    soft_fault_clear(second.context);
    home_close(&home);
    home_close(&second);
}

/* ---- Counting and records ---------------------------------------------------------------------------------- */

static void counting(void)
{
    struct ibv_port_attr port;
    struct home home;
    int i;

    home_open(&home);
    CHECK_EQ(query(home.context), 0);
    CHECK_EQ(soft_fault_calls(home.context, SOFT_ANY_VERB), 0);
    for (i = 0; i < 2; i++) {
        soft_fault_count(home.context, true); /* from 0 */
        CHECK(is_asked(home.context));
        REQUIRE_EQ(soft_fault_verb(home.context, SOFT_VERB_query_device, FIRST(1), EIO), 0);
        CHECK_EQ(query(home.context), EIO); /* is a call, too */
        CHECK_EQ(query(home.context), 0);
        CHECK_EQ(verbs_query_port(home.context, 1, &port), 0);
        soft_fault_clear(home.context); /* goes on counting */
        CHECK_EQ(query(home.context), 0);
        CHECK_EQ(soft_fault_calls(home.context, SOFT_VERB_query_device), 3);
        CHECK_EQ(soft_fault_calls(home.context, SOFT_VERB_query_port), 1);
        CHECK_EQ(soft_fault_calls(home.context, SOFT_VERB_alloc_pd), 0);
        CHECK_EQ(soft_fault_calls(home.context, SOFT_ANY_VERB), 4);
        soft_fault_count(home.context, false);
        CHECK(!is_asked(home.context));
        CHECK_EQ(query(home.context), 0);
        CHECK_EQ(soft_fault_calls(home.context, SOFT_ANY_VERB), 4);
    }
    home_close(&home);
}

static void records(void)
{
    enum { KEPT = 4096, MADE = KEPT + 50 };
    static struct soft_fault_record told[MADE];
    struct home home;
    int i;

    home_open(&home);
    CHECK_EQ(soft_fault_records(home.context, 0, told, MADE), 0);
    REQUIRE_EQ(soft_fault_verb(home.context, SOFT_VERB_query_device, ALWAYS, EIO), 0);
    for (i = 0; i < MADE; i++)
        CHECK_EQ(query(home.context), EIO);
    soft_fault_clear(home.context);
    memset(told, 0xff, sizeof(told));
    CHECK_EQ(soft_fault_records(home.context, 0, told, MADE), MADE);
    for (i = 0; i < KEPT; i++)
        CHECK_EQ(told[i].ordinal, i + 1);
    CHECK_EQ(told[KEPT].ordinal, UINT64_MAX); /* counted, not kept */
    memset(told, 0xff, sizeof(told));
    CHECK_EQ(soft_fault_records(home.context, KEPT - 1, told, 2), MADE);
    CHECK_EQ(told[0].ordinal, KEPT);
    CHECK_EQ(told[1].ordinal, UINT64_MAX);
    CHECK_EQ(soft_fault_records(home.context, 5, told, 1), MADE);
    CHECK_EQ(told[0].ordinal, 6);
    CHECK_EQ(told[1].ordinal, UINT64_MAX);
    CHECK_EQ(soft_fault_records(home.context, MADE + 1, told, MADE), MADE);
    CHECK_EQ(soft_fault_records(home.context, SIZE_MAX, told, MADE), MADE);
    home_close(&home);
}

/* ---- Each in turn ------------------------------------------------------------------------------------------ */

/* Work like a careful program, which frees what it has when a verb fails. Return the first errno. */
static int work(struct ibv_context *context)
{
    struct ibv_qp_init_attr attr = {.cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, NULL, 0), *bad;
    struct ibv_pd *pd = NULL;
    struct ibv_mr *mr = NULL;
    struct ibv_cq *cq = NULL;
    struct ibv_qp *qp = NULL;
    char memory[8];
    int error = 0;

    errno = 0;
    if (!(pd = soft_verbs.alloc_pd(context)) || !(mr = soft_verbs.reg_mr(pd, memory, 8, 0)) ||
        !(cq = soft_verbs.create_cq(context, 4, NULL, NULL, 0)))
        error = errno;
    attr.send_cq = attr.recv_cq = cq;
    if (!error && !(qp = soft_verbs.create_qp(pd, &attr)))
        error = errno;
    if (!error)
        error = qp_to_init(qp, &default_link);
    if (!error)
        error = verbs_post_send(qp, &wr, &bad) == EINVAL ? 0 : EINTR; /* EINTR: the plan's; not in this state */
    /* To give back fails at most once, since the plan strikes once. */
#define GIVE_BACK(object, call)                  \
    do {                                         \
        int failed_ = object ? call(object) : 0; \
                                                 \
        if (failed_) {                           \
            CHECK_EQ(error, 0);                  \
            error = failed_;                     \
            CHECK_EQ(call(object), 0);           \
        }                                        \
    } while (0)
    GIVE_BACK(qp, soft_verbs.destroy_qp);
    GIVE_BACK(cq, soft_verbs.destroy_cq);
    GIVE_BACK(mr, soft_verbs.dereg_mr);
    GIVE_BACK(pd, soft_verbs.dealloc_pd);
#undef GIVE_BACK
    return error;
}

/* Every call fails once: nothing is left behind. */
static void each_call_in_turn(void)
{
    struct soft_counts before, after;
    uint64_t calls, k;
    struct home home;

    home_open(&home);
    soft_get_counts(home.context, &before);
    soft_fault_count(home.context, true);
    CHECK_EQ(work(home.context), 0);
    calls = soft_fault_calls(home.context, SOFT_ANY_VERB);
    soft_fault_count(home.context, false);
    CHECK(calls >= 10 && calls < 30);
    for (k = 1; k <= calls + 1; k++) {
        REQUIRE_EQ(soft_fault_verb(home.context, SOFT_ANY_VERB, FIRST(k), EINTR), 0);
        CHECK_EQ(work(home.context), k <= calls ? EINTR : 0);
        soft_fault_clear(home.context);
        soft_get_counts(home.context, &after);
        CHECK(!memcmp(&before, &after, sizeof(before)));
    }
    CHECK_EQ(soft_fault_records(home.context, 0, NULL, 0), calls);
    home_close(&home);
}

/* ---- A device that is lost ---------------------------------------------------------------------------------- */

static bool takes_what_is_there(enum soft_verb verb)
{
    return verb == SOFT_VERB_get_async_event || verb == SOFT_VERB_get_cq_event || verb == SOFT_VERB_poll_cq ||
           verb == SOFT_VERB_start_poll;
}

/* Verbs fail with EIO, except those that take what is there or destroy objects: nothing is left, and nothing hangs. */
static void lost(void)
{
    struct ibv_recv_wr recv = {.wr_id = 5}, *bad;
    struct world world;
    struct ibv_wc wc;
    unsigned int i;

    world_open(&world);
    CHECK_EQ(verbs_post_recv(world.qp, &recv, &bad), 0);
    CHECK_EQ(post_nothing(world.qp, 6), 0);
    wait_executed(world.qp, 1);
    CHECK_EQ(soft_lose(world.home.context), 0);
    EXPECT_ASYNC_PORT(world.home.context, IBV_EVENT_DEVICE_FATAL);
    EXPECT(world.cq, 6, IBV_WC_SUCCESS);
    for (i = 0; i < SOFT_VERB_COUNT; i++) {
        enum soft_verb verb = (enum soft_verb)i;

        if (verb_destroys(verb) || verb == SOFT_VERB_alloc_shpd)
            continue;
        if (!CHECK_EQ(call_verb(&world, verb), takes_what_is_there(verb) ? 0 : EIO))
            printf("that is %s\n", soft_verb_name(verb));
    }
    CHECK_EQ(soft_alloc_shpd(world.home.base, 1, &i), EIO);
    CHECK_EQ(soft_break_qp(world.qp), 0); /* what was posted is not flushed, either */
    settle(world.home.context);
    CHECK_EQ(verbs_poll_cq(world.cq, 1, &wc), 0);
    EXPECT_ASYNC(world.home.context, IBV_EVENT_QP_FATAL, world.qp);
    world_close(&world);
}

/* Requests that wait for a retry when the device is lost are not retried, and are dropped with their queue. */
static void lost_with_work_under_way(void)
{
    struct ibv_qp_attr link = default_link;
    struct pair pair;

    link.timeout = 20; /* 4.3 s, in which the device is lost */
    link.retry_cnt = 0;
    PAIR_OPEN(&pair, .unconnected = true);
    qp_connect(pair.a.qp, &link, pair.b.qp->qp_num); /* a peer that does not answer yet */
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    wait_begun(pair.a.qp);
    CHECK_EQ(soft_lose(pair.own.context), 0);
    EXPECT_NOTHING(pair.a.send_cq);
    end_wait(pair.a.qp); /* which would be an error now */
    EXPECT_NOTHING(pair.a.send_cq);
    pair_close(&pair);
}

/* The loss affects one context only: the other sees a peer that does not answer. */
static void lost_by_one(void)
{
    struct pair pair;
    struct home homes[2];

    home_open(&homes[0]);
    home_open(&homes[1]);
    PAIR_OPEN(&pair, .homes = {&homes[0], &homes[1]});
    CHECK_EQ(post_nothing(pair.a.qp, 1), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(soft_lose(homes[1].context), 0);
    CHECK_EQ(query(homes[0].context), 0);
    CHECK_EQ(query(homes[1].context), EIO);
    CHECK_EQ(post_nothing(pair.a.qp, 2), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_RETRY_EXC_ERR);
    pair_close(&pair);
    home_close(&homes[0]);
    home_close(&homes[1]);
}

/* ---- Elsewhere ---------------------------------------------------------------------------------------------- */

static void in_the_child(void *argument)
{
    struct ibv_context *context = ((struct home *)argument)->context;
    struct soft_fault_record record;

    CHECK_EQ(query(context), ENODEV); /* and not what the plan has */
    CHECK_EQ(soft_fault_verb(context, SOFT_ANY_VERB, FIRST(1), EIO), ENODEV);
    CHECK_EQ(soft_fault_verbs_at_random(context, 1, EIO), ENODEV);
    CHECK_EQ(soft_fault_request(context, 0, false, FIRST(1), IBV_WC_GENERAL_ERR, 0), ENODEV);
    CHECK_EQ(soft_fault_loss(context, 0, FIRST(1)), ENODEV);
    CHECK_EQ(soft_fault_loss_at_random(context, 1), ENODEV);
    if (variant->options.mode == SOFT_THREAD)
        CHECK_EQ(soft_fault_jitter(context, 1), ENODEV);
    CHECK_EQ(soft_fault_hold(context, 0), ENODEV);
    CHECK_EQ(soft_fault_held(context), 0);
    CHECK_EQ(soft_fault_release(context, 0, false), 0);
    CHECK_EQ(soft_fault_calls(context, SOFT_ANY_VERB), 0);
    CHECK_EQ(soft_fault_records(context, 0, &record, 1), 0);
    soft_fault_unhold(context);
    soft_fault_seed(context, 1);
    soft_fault_count(context, false);
    soft_fault_clear(context);
}

static void after_a_fork(void)
{
    struct home home;

    home_open(&home);
    soft_fault_count(home.context, true);
    CHECK_EQ(soft_fault_verb(home.context, SOFT_VERB_query_device, FIRST(2), EIO), 0);
    CHECK_EQ(query(home.context), 0);
    in_child(in_the_child, &home);
    CHECK_EQ(query(home.context), EIO);
    CHECK_EQ(soft_fault_calls(home.context, SOFT_VERB_query_device), 2);
    home_close(&home);
}

CHECK_MAIN(CASE(names), CASE(each_verb), CASE(closing), CASE(first_every_times), CASE(all_verbs_together),
           CASE(several_rules), CASE(bad_arguments), CASE(at_random), CASE(counting), CASE(records),
           CASE(each_call_in_turn), CASE(lost), CASE(lost_with_work_under_way), CASE(lost_by_one), CASE(after_a_fork))
