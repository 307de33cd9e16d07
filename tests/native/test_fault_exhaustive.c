/* Tests that fail every call of every verb in a scene that calls them all: the caller gets the error at that call, and
 * nothing is left after it has freed its objects. */
#include "support.h"
#include "support_scene.h"

#define FIRST(n) ((struct soft_strike){.first = (n)})

/* Fault of a run: the `k`-th call of `verb` fails. No fault if `error` is 0. */
struct fault {
    enum soft_verb verb;
    uint64_t k;
    int error;
};

/* Check that the caller got the error at that call and at no other. */
static void check_told(struct scene *scene, const struct fault *fault, int error, int *told)
{
    if (!error)
        return;
    CHECK_EQ(error, fault->error);
    CHECK_EQ(soft_fault_calls(scene->context, fault->verb), fault->k);
    ++*told;
}

/* An object that a failed verb did not destroy still exists, and can be destroyed at the second attempt. */
static void give_back(struct scene *scene, const struct fault *fault, const struct scene_made *made, int *told)
{
    unsigned int live = scene->pieces_live;
    struct soft_counts before, after;
    int error;

    soft_get_counts(scene->context, &before);
    error = made->give_back(made->object);
    check_told(scene, fault, error, told);
    if (!error)
        return;
    soft_get_counts(scene->context, &after);
    CHECK(!memcmp(&before, &after, sizeof(before)));
    CHECK_EQ(scene->pieces_live, live);
    CHECK_EQ(made->give_back(made->object), 0);
}

/* Run the scene like a careful program: if a verb fails, it frees all it has, the last object first. Return the number
 * of failures. */
static int play(struct ibv_context *context, const struct fault *fault)
{
    struct scene *scene = calloc(1, sizeof(*scene));
    int told = 0, error;

    REQUIRE(scene != NULL);
    scene->context = context;
    error = scene_run(scene);
    check_told(scene, fault, error, &told);
    while (scene->made_count) {
        const struct scene_made *made = &scene->made[--scene->made_count];

        give_back(scene, fault, made, &told);
        scene->domain_gone = scene->domain_gone || made->object == scene->domain;
    }
    CHECK_EQ(scene->pieces_live, 0);
    CHECK(error || scene->piece_count >= 10);
    free(scene);
    return told;
}

static void check_empty(struct ibv_context *context)
{
    static const struct soft_counts nothing;
    struct soft_counts counts;

    soft_get_counts(context, &counts);
    CHECK(!memcmp(&counts, &nothing, sizeof(counts)));
    CHECK(!is_readable(context->async_fd));
}

static const struct fault none = {SOFT_ANY_VERB, 0, 0};

/* Count the calls of each verb: the same in each run, and at least one each, except the last verb. */
static void count_calls(struct ibv_context *context, uint64_t calls[SOFT_VERB_COUNT])
{
    unsigned int round, verb;

    for (round = 0; round < 3; round++) {
        soft_fault_count(context, true);
        CHECK_EQ(play(context, &none), 0);
        for (verb = 0; verb < SOFT_VERB_COUNT; verb++) {
            uint64_t counted = soft_fault_calls(context, (enum soft_verb)verb);

            if (!CHECK(counted >= 1 || verb == SOFT_VERB_close_device))
                printf("that is %s\n", soft_verb_name((enum soft_verb)verb));
            CHECK(!round || counted == calls[verb]);
            calls[verb] = counted;
        }
        check_empty(context);
    }
}

static void play_with(struct ibv_context *context, const struct fault *fault)
{
    size_t before = soft_fault_records(context, 0, NULL, 0);
    struct soft_fault_record record;

    soft_fault_count(context, true);
    REQUIRE_EQ(soft_fault_verb(context, fault->verb, FIRST(fault->k), fault->error), 0);
    if (!CHECK_EQ(play(context, fault), 1))
        printf("that is call %llu of %s\n", (unsigned long long)fault->k, soft_verb_name(fault->verb));
    CHECK_EQ(soft_fault_records(context, before, &record, 1), before + 1);
    CHECK_EQ(record.what, SOFT_RECORD_VERB);
    CHECK_EQ(record.which, fault->verb);
    CHECK_EQ(record.ordinal, fault->k);
    CHECK_EQ(record.value, fault->error);
    check_empty(context);
}

/* After each failure the device works: the next run is not affected, and after each verb's last call a run without
 * faults succeeds. */
static void every_call_of_every_verb(void)
{
    static const int errors[] = {ENOMEM, EBUSY, EIO};
    struct ibv_context *context = soft_open(&variant->options);
    uint64_t calls[SOFT_VERB_COUNT];
    struct fault fault;
    size_t i;

    REQUIRE(context != NULL);
    count_calls(context, calls);
    for (fault.verb = 0; fault.verb < SOFT_VERB_COUNT; fault.verb++) {
        for (fault.k = 1; fault.k <= calls[fault.verb]; fault.k++) {
            for (i = 0; i < COUNT_OF(errors); i++) {
                fault.error = errors[i];
                play_with(context, &fault);
            }
        }
        CHECK_EQ(play(context, &none), 0);
        check_empty(context);
    }
    CHECK_EQ(soft_verbs.close_device(context), 0);
}

/* The verb that no scene can call: if it fails, the device still works. */
static void closing_the_device(void)
{
    static const int errors[] = {ENOMEM, EBUSY, EIO};
    struct ibv_context *context = soft_open(&variant->options);
    size_t i;

    REQUIRE(context != NULL);
    for (i = 0; i < COUNT_OF(errors); i++) {
        REQUIRE_EQ(soft_fault_verb(context, SOFT_VERB_close_device, FIRST(1), errors[i]), 0);
        CHECK_EQ(soft_verbs.close_device(context), errors[i]);
        CHECK_EQ(play(context, &none), 0);
        check_empty(context);
    }
    CHECK_EQ(soft_verbs.close_device(context), 0);
}

CHECK_MAIN(CASE(every_call_of_every_verb), CASE(closing_the_device))
