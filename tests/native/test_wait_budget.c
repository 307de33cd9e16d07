/* Tests of the limit of all waits for a peer. The times are arguments, so the tests do not wait. */
#include "soft/base/wait_budget.h"

#include "support_check.h"

#define MS 1000000ull
#define LIMIT (2000 * MS)
#define BEGIN (1000000 * MS)

/* Simulate a wait for a peer that stays so many ms, checked every 10 ms. Return for how many ms it was waited for. */
static unsigned int wait_ms(struct soft_wait_budget *waited, uint64_t begin, unsigned int stays)
{
    unsigned int at;

    for (at = 0; at < stays; at += 10)
        if (!soft_wait_budget_spend(waited, begin, begin + at * MS, LIMIT))
            break;
    return at;
}

static void a_wait_ends_at_the_limit(void)
{
    struct soft_wait_budget waited = {0};

    CHECK_EQ(wait_ms(&waited, BEGIN, 10000), 2000);
    CHECK(wait_ms(&waited, BEGIN + 2100 * MS, 10000) < 100); /* and after that for what is free */
}

static void waits_add_up_to_the_limit(void)
{
    struct soft_wait_budget waited = {0};
    uint64_t now = BEGIN, rounds;

    for (rounds = 0; rounds < 100; rounds++)
        now += (wait_ms(&waited, now, 1900) + 10) * MS;
    CHECK(now - BEGIN < 100 * 90 * MS + LIMIT);
    waited = (struct soft_wait_budget){0};
    CHECK_EQ(wait_ms(&waited, BEGIN, 1900), 1900);
    CHECK(wait_ms(&waited, BEGIN + 1920 * MS, 1900) <= 220);
}

static void short_waits_are_not_counted(void)
{
    struct soft_wait_budget waited = {0};
    uint64_t now = BEGIN, end = BEGIN + 1000 * LIMIT;

    for (; now < end; now += 50 * MS)
        CHECK_EQ(wait_ms(&waited, now, 50), 50);
    CHECK_EQ(wait_ms(&waited, now, 10000), 2000);
}

static void the_sum_shrinks_with_time(void)
{
    struct soft_wait_budget waited = {0};
    uint64_t now = BEGIN;
    unsigned int i;

    for (i = 0; i < 100; i++, now += 1250 * MS) /* a fifth of the time */
        CHECK_EQ(wait_ms(&waited, now, 250), 250);
    CHECK_EQ(wait_ms(&waited, now + 4 * LIMIT, 10000), 2000);
}

/* Threads that wait for the same peer at the same time count once. */
static void concurrent_waits_count_once(void)
{
    struct soft_wait_budget waited = {0};
    uint64_t at;

    for (at = 0; at < 1900 * MS; at += 10 * MS) {
        CHECK(soft_wait_budget_spend(&waited, BEGIN, BEGIN + at, LIMIT));
        CHECK(soft_wait_budget_spend(&waited, BEGIN, BEGIN + at, LIMIT));
        if (at > 1000 * MS)
            CHECK(soft_wait_budget_spend(&waited, BEGIN + 1000 * MS, BEGIN + at - MS, LIMIT));
    }
}

/* Time after the last check does not count: the waiting thread may have been stopped. */
static void only_observed_time_counts(void)
{
    struct soft_wait_budget waited = {0};

    CHECK(soft_wait_budget_spend(&waited, BEGIN, BEGIN, LIMIT));
    CHECK_EQ(wait_ms(&waited, BEGIN + 10 * LIMIT, 10000), 2000);
}

CHECK_MAIN_ONCE(CASE(a_wait_ends_at_the_limit), CASE(waits_add_up_to_the_limit), CASE(short_waits_are_not_counted),
                CASE(the_sum_shrinks_with_time), CASE(concurrent_waits_count_once), CASE(only_observed_time_counts))
