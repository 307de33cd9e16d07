/* Tests of the table by which completions find their work. */
#include "data_path/wr_id_table.h"

#include "support_check.h"

static int works[64];

static void a_number_finds_its_work(void)
{
    struct slots slots;
    uint64_t numbers[40];
    int i;

    slots_begin(&slots);
    CHECK(slots_find(&slots, 0) == NULL);
    CHECK(slots_find(&slots, UINT64_MAX) == NULL);
    for (i = 0; i < 40; i++) { /* it grows twice meanwhile */
        numbers[i] = slots_take(&slots, &works[i], 0);
        CHECK(numbers[i] != 0);
        CHECK_EQ(numbers[i] >> 62, 0);
        CHECK_EQ(slots_element(numbers[i]), 0);
    }
    CHECK_EQ(slots.size, 64);
    for (i = 0; i < 40; i++) {
        CHECK(slots_find(&slots, numbers[i]) == &works[i]);
        slots_give(&slots, numbers[i]);
        CHECK(slots_find(&slots, numbers[i]) == NULL);
    }
    slots_end(&slots);
    CHECK_EQ(slots.size, 0);
    CHECK(slots_find(&slots, numbers[0]) == NULL);
}

static void a_slot_that_is_used_again_has_another_number(void)
{
    struct slots slots;
    uint64_t first, second;

    slots_begin(&slots);
    first = slots_take(&slots, &works[0], 0);
    slots_give(&slots, first);
    second = slots_take(&slots, &works[1], 0);
    CHECK_EQ((uint32_t)first, (uint32_t)second);
    CHECK(first != second);
    CHECK(slots_find(&slots, first) == NULL);
    CHECK(slots_find(&slots, second) == &works[1]);
    CHECK_EQ(slots.size, 16);
    slots_end(&slots);
}

static void the_slot_freed_last_is_reused_first(void)
{
    struct slots slots;
    uint64_t numbers[16], again;
    int i;

    slots_begin(&slots);
    for (i = 0; i < 16; i++)
        numbers[i] = slots_take(&slots, &works[i], 0);
    slots_give(&slots, numbers[3]);
    slots_give(&slots, numbers[11]);
    again = slots_take(&slots, &works[40], 0);
    CHECK_EQ((uint32_t)again, (uint32_t)numbers[11]);
    again = slots_take(&slots, &works[41], 0);
    CHECK_EQ((uint32_t)again, (uint32_t)numbers[3]);
    CHECK_EQ(slots.size, 16); /* full, and not grown */
    again = slots_take(&slots, &works[42], 0);
    CHECK_EQ(slots.size, 32);
    CHECK(slots_find(&slots, again) == &works[42]);
    CHECK(slots_find(&slots, numbers[0]) == &works[0]);
    slots_end(&slots);
}

static void the_kind_and_the_element_do_not_change_what_is_found(void)
{
    const uint64_t kinds[] = {0, SLOTS_RECEIVE, SLOTS_SHARED, SLOTS_RECEIVE | SLOTS_SHARED};
    struct slots slots;
    uint64_t number, part;
    size_t i;

    slots_begin(&slots);
    for (i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        number = slots_take(&slots, &works[i], kinds[i]);
        CHECK_EQ(number & (SLOTS_RECEIVE | SLOTS_SHARED), kinds[i]);
        part = slots_with_element(number, SLOTS_ELEMENTS - 1);
        CHECK_EQ(slots_element(part), SLOTS_ELEMENTS - 1);
        CHECK_EQ(part & (SLOTS_RECEIVE | SLOTS_SHARED), kinds[i]);
        CHECK(slots_find(&slots, part) == &works[i]);
        slots_give(&slots, part);
        CHECK(slots_find(&slots, number) == NULL);
        CHECK(slots_find(&slots, part) == NULL);
    }
    slots_end(&slots);
}

static void generations_begin_anew_and_are_never_zero(void)
{
    struct slots slots;
    uint64_t number;

    slots_begin(&slots);
    number = slots_take(&slots, &works[0], SLOTS_RECEIVE);
    slots_at(&slots, number)->generation = SLOTS_GENERATIONS - 1;
    slots_give(&slots, number);
    number = slots_take(&slots, &works[1], SLOTS_RECEIVE);
    CHECK_EQ((uint32_t)(number >> 32) % SLOTS_GENERATIONS, 1);
    CHECK_EQ(number & SLOTS_SHARED, 0); /* it did not run over */
    CHECK(slots_find(&slots, number) == &works[1]);
    slots_end(&slots);
}

static void foreign_numbers_find_nothing(void)
{
    struct slots slots;
    uint64_t number;
    uint32_t i;

    slots_begin(&slots);
    number = slots_take(&slots, &works[0], 0);
    for (i = 0; i < 1000; i++) /* like wr_ids of a program that counts */
        CHECK(slots_find(&slots, i) == NULL);
    CHECK(slots_find(&slots, number + slots.size) == NULL);
    CHECK(slots_find(&slots, number + ((uint64_t)1 << 32)) == NULL);
    CHECK(slots_find(&slots, number | (SLOTS_MOST - 1)) == NULL);
    slots_end(&slots);
}

static void growth_is_limited(void)
{
    struct slots slots;
    uint64_t number, last = 0;
    uint32_t taken = 0;

    slots_begin(&slots);
    while ((number = slots_take(&slots, &works[taken % 64], 0))) {
        last = number;
        taken++;
    }
    CHECK_EQ(taken, SLOTS_MOST);
    CHECK_EQ(slots_element(last), 0);
    CHECK(slots_find(&slots, last) == &works[(taken - 1) % 64]);
    slots_give(&slots, last);
    CHECK(slots_take(&slots, &works[0], 0) != 0);
    CHECK_EQ(slots_take(&slots, &works[0], 0), 0);
    slots_end(&slots);
}

CHECK_MAIN(CASE(a_number_finds_its_work), CASE(a_slot_that_is_used_again_has_another_number),
           CASE(the_slot_freed_last_is_reused_first), CASE(the_kind_and_the_element_do_not_change_what_is_found),
           CASE(generations_begin_anew_and_are_never_zero), CASE(foreign_numbers_find_nothing), CASE(growth_is_limited))
