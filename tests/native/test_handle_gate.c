/* Tests of the gate of a Python handle, as it works without the GIL. */
#define Py_GIL_DISABLED 1
#include "handles/handle_gate.h"

#include "support.h"

#include <pthread.h>
#include <stdatomic.h>

static void counts(void)
{
    int gate = GATE_CLOSED;

    CHECK(!gate_enter(&gate));
    CHECK(!gate_close(&gate));
    gate_reopen(&gate);
    CHECK(gate_enter(&gate));
    CHECK(gate_enter(&gate));
    CHECK_EQ(gate_holders(&gate), 2);
    CHECK(!gate_close(&gate));
    gate_leave(&gate);
    gate_leave(&gate);
    CHECK(gate_close(&gate));
    CHECK(!gate_close(&gate));
    CHECK(!gate_enter(&gate));
    CHECK_EQ(gate_holders(&gate), GATE_CLOSED);
}

#define USERS 3
#define ROUNDS 40

static struct {
    int gate;
    int *object; /* freed by the thread that closes the gate: no thread may be inside then, and none can enter */
    atomic_int ready;
} shared;

static void *use(void *argument)
{
    long uses = 0;

    atomic_fetch_add(&shared.ready, 1);
    while (gate_enter(&shared.gate)) {
        uses += __atomic_load_n(shared.object, __ATOMIC_RELAXED);
        gate_leave(&shared.gate);
        sched_yield(); /* otherwise there may always be a thread inside */
    }
    return uses >= 0 ? argument : NULL;
}

static void closing_does_not_wait_and_refuses_entry(void)
{
    pthread_t users[USERS];
    int round, i;

    for (round = 0; round < ROUNDS; round++) {
        shared.gate = 0;
        shared.object = calloc(1, sizeof(*shared.object));
        REQUIRE(shared.object != NULL);
        *shared.object = 1;
        atomic_store(&shared.ready, 0);
        for (i = 0; i < USERS; i++)
            REQUIRE_EQ(pthread_create(&users[i], NULL, use, &shared), 0);
        while (atomic_load(&shared.ready) < USERS)
            sched_yield();
        while (!gate_close(&shared.gate))
            sched_yield();
        free(shared.object);
        for (i = 0; i < USERS; i++)
            CHECK_EQ(pthread_join(users[i], NULL), 0);
    }
}

static void a_suspended_gate_allows_leaving_only(void)
{
    int gate = 0;

    CHECK(gate_enter(&gate));
    CHECK(gate_enter(&gate));
    gate_suspend(&gate);
    CHECK(!gate_enter(&gate));
    CHECK(gate_hold(&gate));
    gate_leave(&gate);
    gate_leave(&gate);
    gate_leave(&gate);
    CHECK(!gate_close(&gate));
    CHECK(gate_holders(&gate) < 0 && gate_holders(&gate) != GATE_CLOSED);
    gate_resume(&gate);
    CHECK_EQ(gate_holders(&gate), 0);
    CHECK(gate_enter(&gate));
    gate_leave(&gate);
    CHECK(gate_close(&gate));
    CHECK(!gate_hold(&gate));
}

CHECK_MAIN(CASE(counts), CASE(a_suspended_gate_allows_leaving_only), CASE(closing_does_not_wait_and_refuses_entry))
