/* Tests of the table of queue pair numbers and memory keys: when a freed number may be reused. */
#include "soft/base/id_table.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "support_check.h"

#define NUMBERS 1024u
#define USES 256u

/* Work like a program that registers and deregisters for ever, beside permanent regions. */
static void a_key_comes_again_late(unsigned int live)
{
    bool (*seen)[USES] = calloc(NUMBERS, sizeof(*seen));
    uint32_t number, kept, step;
    struct soft_table table;
    unsigned int i;
    uint8_t use;

    REQUIRE(seen != NULL);
    REQUIRE_EQ(soft_table_init(&table, 1, SOFT_CHUNKS * SOFT_CHUNK_SIZE), 0);
    for (i = 0; i < live; i++)
        REQUIRE_EQ(soft_table_reserve(&table, &kept, &use), 0);
    for (step = 0; step < SOFT_MIN_FREED * USES; step++) {
        REQUIRE_EQ(soft_table_reserve(&table, &number, &use), 0);
        REQUIRE(number < NUMBERS);
        REQUIRE(!seen[number][use]);
        seen[number][use] = true;
        soft_table_release(&table, number);
    }
    REQUIRE_EQ(soft_table_reserve(&table, &number, &use), 0);
    CHECK(seen[number][use]); /* 32 bits come again in the end: soft/base/id_table.h says when */
    soft_table_release(&table, number);
    soft_table_destroy(&table);
    free(seen);
}

static void a_key_comes_again_after_131072_others(void)
{
    a_key_comes_again_late(0);
}

static void a_key_comes_again_beside_permanent_regions(void)
{
    a_key_comes_again_late(100);
}

static void when_all_are_used_the_oldest_is_reused(void)
{
    struct soft_table table;
    uint32_t numbers[4], number, i;

    REQUIRE_EQ(soft_table_init(&table, 1, 5), 0);
    for (i = 0; i < 4; i++)
        REQUIRE_EQ(soft_table_reserve(&table, &numbers[i], NULL), 0);
    CHECK_EQ(soft_table_reserve(&table, &number, NULL), ENOMEM);
    soft_table_release(&table, numbers[2]);
    soft_table_release(&table, numbers[0]);
    REQUIRE_EQ(soft_table_reserve(&table, &number, NULL), 0);
    CHECK_EQ(number, numbers[2]);
    REQUIRE_EQ(soft_table_reserve(&table, &number, NULL), 0);
    CHECK_EQ(number, numbers[0]);
    soft_table_destroy(&table);
}

CHECK_MAIN(CASE(a_key_comes_again_after_131072_others), CASE(a_key_comes_again_beside_permanent_regions),
           CASE(when_all_are_used_the_oldest_is_reused))
