/* Counts what goes on with a handle, so that destroying it can neither pull the object out from under a call nor
 * from under what was made from it: a call under way and an open child each hold the gate.
 *
 * With a GIL the counter changes only while it is held. Without one, the changes are atomic. */
#ifndef AIOVERBS_HANDLE_GATE_H
#define AIOVERBS_HANDLE_GATE_H

#include <stdbool.h>

/* Python.h, which says whether there is a GIL, comes before: every file that Cython makes begins with it. */

#define GATE_CLOSED (-1)
#define GATE_SUSPENDED (-(1 << 30)) /* beside the count of holders, of whom there are always fewer */

#ifdef Py_GIL_DISABLED

/* False: closed, or about to be. */
static inline bool gate_enter(int *gate)
{
    int holders = __atomic_load_n(gate, __ATOMIC_RELAXED);

    while (holders >= 0)
        if (__atomic_compare_exchange_n(gate, &holders, holders + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return true;
    return false;
}

static inline void gate_leave(int *gate)
{
    __atomic_fetch_sub(gate, 1, __ATOMIC_RELEASE);
}

/* As gate_enter, and also where the gate is suspended: for who calls no verb, and only keeps the object. */
static inline bool gate_hold(int *gate)
{
    int holders = __atomic_load_n(gate, __ATOMIC_RELAXED);

    while (holders != GATE_CLOSED)
        if (__atomic_compare_exchange_n(gate, &holders, holders + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return true;
    return false;
}

/* True: nobody holds the gate, and nobody gets in any more. */
static inline bool gate_close(int *gate)
{
    int expected = 0;

    return __atomic_compare_exchange_n(gate, &expected, GATE_CLOSED, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

/* Gives back what `count` entries took; false, and nothing, where there were fewer. For counters that are no gates. */
static inline bool gate_leave_many(int *gate, int count)
{
    int holders = __atomic_load_n(gate, __ATOMIC_RELAXED);

    while (holders >= count)
        if (__atomic_compare_exchange_n(gate, &holders, holders - count, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
            return true;
    return false;
}

static inline void gate_reopen(int *gate)
{
    __atomic_store_n(gate, 0, __ATOMIC_RELEASE);
}

static inline int gate_holders(const int *gate)
{
    return __atomic_load_n(gate, __ATOMIC_ACQUIRE);
}

/* Of an open gate: nobody gets in or closes it until gate_resume; who is inside may leave. */
static inline void gate_suspend(int *gate)
{
    __atomic_fetch_add(gate, GATE_SUSPENDED, __ATOMIC_ACQUIRE);
}

static inline void gate_resume(int *gate)
{
    __atomic_fetch_sub(gate, GATE_SUSPENDED, __ATOMIC_RELEASE);
}

#else

static inline bool gate_enter(int *gate)
{
    if (*gate < 0)
        return false;
    ++*gate;
    return true;
}

static inline void gate_leave(int *gate)
{
    --*gate;
}

static inline bool gate_hold(int *gate)
{
    if (*gate == GATE_CLOSED)
        return false;
    ++*gate;
    return true;
}

static inline bool gate_close(int *gate)
{
    if (*gate)
        return false;
    *gate = GATE_CLOSED;
    return true;
}

static inline bool gate_leave_many(int *gate, int count)
{
    if (*gate < count)
        return false;
    *gate -= count;
    return true;
}

static inline void gate_reopen(int *gate)
{
    *gate = 0;
}

static inline int gate_holders(const int *gate)
{
    return *gate;
}

static inline void gate_suspend(int *gate)
{
    *gate += GATE_SUSPENDED;
}

static inline void gate_resume(int *gate)
{
    *gate -= GATE_SUSPENDED;
}

#endif

#endif
