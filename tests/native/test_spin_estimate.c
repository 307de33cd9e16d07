/* Tests of the estimate whether polling before sleeping pays, and of the number of threads that poll. */
#define _GNU_SOURCE
#include "data_path/spin_estimate.h"

#include <pthread.h>

#include "support_check.h"

enum { US = 1000 };

/* Note a wait that takes `polled_ns` if it polls, and else `asleep_ns`, in which the thread sleeps if `idle`; return
 * whether it polled. */
static bool wait_once(struct spin_estimate *estimate, uint64_t polled_ns, uint64_t asleep_ns, bool idle)
{
    bool polls = spin_budget(estimate) > 0;

    if (polls)
        spin_note_polled(estimate, polled_ns);
    else
        spin_note_asleep(estimate, asleep_ns, idle);
    return polls;
}

/* Note `count` waits of a loop that has nothing else to do; return how many polled. */
static int wait_often(struct spin_estimate *estimate, int count, uint64_t polled_ns, uint64_t asleep_ns)
{
    int polls = 0, i;

    for (i = 0; i < count; i++)
        polls += wait_once(estimate, polled_ns, asleep_ns, true);
    return polls;
}

/* Note `count` waits of a loop that always has other tasks to run; return how many polled. */
static int wait_beside_others(struct spin_estimate *estimate, int count, uint64_t polled_ns, uint64_t asleep_ns)
{
    int polls = 0, i;

    for (i = 0; i < count; i++)
        polls += wait_once(estimate, polled_ns, asleep_ns, false);
    return polls;
}

static void waits_that_are_short_when_they_poll_soon_poll(void)
{
    struct spin_estimate estimate;

    spin_estimate_begin(&estimate);
    CHECK_EQ(wait_often(&estimate, 1, 5 * US, 60 * US), 1);
    CHECK(wait_often(&estimate, 10 * SPIN_GAP_POLLING, 5 * US, 60 * US) >= 10 * SPIN_GAP_POLLING - 11);
    CHECK(estimate.pays);
}

static void long_waits_poll_only_as_probes(void)
{
    struct spin_estimate estimate;
    int waits = 0, i;

    spin_estimate_begin(&estimate);
    while (estimate.pays && waits < 20)
        waits += wait_often(&estimate, 1, UINT64_MAX, UINT64_MAX);
    CHECK(waits <= 12);
    for (i = 0; i < SPIN_GAP; i++) {
        CHECK_EQ(spin_budget(&estimate), 0);
        spin_note_asleep(&estimate, UINT64_MAX, true);
    }
    CHECK_EQ(spin_budget(&estimate), SPIN_LONG_NS);
    CHECK_EQ(wait_often(&estimate, 100 * (SPIN_GAP + 1), UINT64_MAX, UINT64_MAX), 100);
    CHECK(!estimate.pays);
}

static void waits_beyond_the_limit_do_not_poll_even_if_that_is_a_bit_faster(void)
{
    struct spin_estimate estimate;

    spin_estimate_begin(&estimate);
    CHECK(wait_often(&estimate, 10 * SPIN_GAP, 140 * US, 180 * US) <= 40);
    CHECK(!estimate.pays);
}

/* As if the peer needed this processor. */
static void polling_that_makes_waits_longer_ends(void)
{
    struct spin_estimate estimate;

    spin_estimate_begin(&estimate);
    wait_often(&estimate, 50, 10 * US, 60 * US);
    CHECK(estimate.pays);
    CHECK(wait_often(&estimate, 10 * SPIN_GAP, 90 * US, 60 * US) <= 2 * SPIN_GAP);
    CHECK(!estimate.pays);
}

static void polling_ends_when_waits_become_long_and_begins_again(void)
{
    struct spin_estimate estimate;

    spin_estimate_begin(&estimate);
    wait_often(&estimate, 1000, 5 * US, 60 * US);
    CHECK(wait_often(&estimate, 10 * SPIN_GAP, 1000 * US, 1000 * US) <= 30);
    CHECK(!estimate.pays);
    wait_often(&estimate, 6 * SPIN_GAP, 5 * US, 60 * US);
    CHECK(estimate.pays);
}

static void a_few_long_waits_among_short_ones_change_nothing(void)
{
    struct spin_estimate estimate;
    int wait;

    spin_estimate_begin(&estimate);
    wait_often(&estimate, 50, 5 * US, 60 * US);
    for (wait = 0; wait < 1000; wait++) {
        spin_note_polled(&estimate, wait % 10 ? 5 * US : UINT64_MAX);
        CHECK(estimate.pays);
    }
}

static void waits_sleep_at_a_tie(void)
{
    struct spin_estimate estimate;

    spin_estimate_begin(&estimate);
    CHECK(wait_often(&estimate, 10 * SPIN_GAP, 50 * US, 50 * US) <= 20);
}

static void waits_mostly_sleep_at_a_tie_of_varying_times(void)
{
    struct spin_estimate estimate;
    uint32_t random = 1;
    int polls = 0, i;

    spin_estimate_begin(&estimate);
    for (i = 0; i < 200 * SPIN_GAP; i++) {
        uint64_t waited;

        random = random * 1664525u + 1013904223u;
        waited = 40 * US + (random >> 8) % (20 * US);
        polls += wait_once(&estimate, waited, waited, true);
    }
    CHECK(polls <= 20 * SPIN_GAP);
}

static void waits_beside_ready_tasks_sleep(void)
{
    struct spin_estimate estimate;

    spin_estimate_begin(&estimate);
    CHECK(wait_beside_others(&estimate, 20 * SPIN_GAP, 60 * US, 80 * US) <= 25);
    CHECK(!estimate.pays && !estimate.idle);
    wait_often(&estimate, 3 * SPIN_GAP, 5 * US, 60 * US); /* the other tasks have ended */
    CHECK(estimate.pays);
    wait_often(&estimate, 2 * SPIN_GAP_POLLING, 5 * US, 60 * US);
    CHECK(estimate.pays && estimate.idle);
    wait_beside_others(&estimate, 2 * SPIN_GAP_POLLING, 60 * US, 80 * US);
    CHECK(!estimate.pays && !estimate.idle);
}

static void short_waits_beside_ready_tasks_poll_if_that_is_faster(void)
{
    struct spin_estimate estimate;

    spin_estimate_begin(&estimate);
    wait_beside_others(&estimate, 10 * SPIN_GAP, 8 * US, 15 * US);
    CHECK(wait_beside_others(&estimate, 10 * SPIN_GAP, 8 * US, 15 * US) >= 10 * SPIN_GAP - 10);
    CHECK(estimate.pays && !estimate.idle);
}

/* ---- Threads that poll */

struct attempt {
    uint64_t now, until;
    uint32_t processors;
    bool begun;
};

static void *begin_in_thread(void *argument)
{
    struct attempt *attempt = argument;

    attempt->begun = spinner_begin(attempt->now, attempt->until, attempt->processors);
    return NULL;
}

static bool another_thread_begins(uint64_t now, uint64_t until, uint32_t processors)
{
    struct attempt attempt = {now, until, processors, false};
    pthread_t thread;

    REQUIRE(!pthread_create(&thread, NULL, begin_in_thread, &attempt));
    pthread_join(thread, NULL);
    return attempt.begun;
}

static void threads_poll_while_there_are_processors(void)
{
    uint64_t now = 1000000;

    CHECK(spinner_begin(now, now + 100, 2));
    CHECK(spinner_begin(now, now + 50, 2)); /* the same thread, for another queue */
    CHECK(another_thread_begins(now, now + 100, 2));
    CHECK(!another_thread_begins(now, now + 100, 2));
    CHECK(another_thread_begins(now, now + 100, 3));
    CHECK(spinner_begin(now + 99, now + 100, 3));
    CHECK(!spinner_begin(now + 99, now + 100, 2));
    CHECK(another_thread_begins(now + 100, now + 200, 2)); /* when the others must have ended */
}

static void *poll_in_thread(void *argument)
{
    spinner_note(*(uint64_t *)argument);
    return NULL;
}

static void threads_that_poll_without_asking_count(void)
{
    uint64_t now = 3000000, until = now + 100;
    pthread_t thread;

    CHECK(spinner_begin(now, until, 2));
    REQUIRE(!pthread_create(&thread, NULL, poll_in_thread, &until));
    pthread_join(thread, NULL);
    CHECK(!another_thread_begins(now, until, 2));
    CHECK(another_thread_begins(now, until, 3));
    spinner_note(now + 10); /* no sooner than before */
    CHECK(!another_thread_begins(now + 50, until, 3));
}

static void a_single_processor_is_left_to_others(void)
{
    CHECK(!spinner_begin(5000000, 5000100, 1));
    CHECK(!spinner_begin(5000000, 5000100, 0));
    CHECK(spinner_begin(5000000, 5000100, 2));
}

static void more_threads_than_places_share_them(void)
{
    uint64_t now = 9000000;
    int thread;

    for (thread = 0; thread < 3 * SPINNERS; thread++)
        CHECK(another_thread_begins(now, now + 100, SPINNERS));
    CHECK(!another_thread_begins(now, now + 100, SPINNERS - 1));
}

CHECK_MAIN_ONCE(CASE(waits_that_are_short_when_they_poll_soon_poll), CASE(long_waits_poll_only_as_probes),
                CASE(waits_beyond_the_limit_do_not_poll_even_if_that_is_a_bit_faster),
                CASE(polling_that_makes_waits_longer_ends), CASE(polling_ends_when_waits_become_long_and_begins_again),
                CASE(a_few_long_waits_among_short_ones_change_nothing), CASE(waits_sleep_at_a_tie),
                CASE(waits_mostly_sleep_at_a_tie_of_varying_times), CASE(waits_beside_ready_tasks_sleep),
                CASE(short_waits_beside_ready_tasks_poll_if_that_is_faster),
                CASE(threads_poll_while_there_are_processors), CASE(threads_that_poll_without_asking_count),
                CASE(a_single_processor_is_left_to_others), CASE(more_threads_than_places_share_them))
