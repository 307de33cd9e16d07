/* Count the holders of a handle, so that destroying it pulls the object out from under neither a call nor a child
 * object: each call in flight and each open child holds the gate.
 *
 * With a GIL the counter changes only while the GIL is held. Without a GIL the changes are atomic. */
#ifndef AIOVERBS_HANDLE_GATE_H
#define AIOVERBS_HANDLE_GATE_H

#include <stdbool.h>

/* Python.h, which defines whether there is a GIL, is included before: every file that Cython generates
 * begins with it. */

#define GATE_CLOSED (-1)
#define GATE_SUSPENDED (-(1 << 30)) /* added to the number of holders, which is always smaller */

#ifdef Py_GIL_DISABLED

/* Enter the gate; return false where it is closed or suspended. */
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

/* Enter the gate even where it is suspended: for callers that call no verb and only keep the object alive. */
static inline bool gate_hold(int *gate)
{
    int holders = __atomic_load_n(gate, __ATOMIC_RELAXED);

    while (holders != GATE_CLOSED)
        if (__atomic_compare_exchange_n(gate, &holders, holders + 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return true;
    return false;
}

/* Close the gate, so that no caller can enter any more; return false, and do nothing, where it has holders. */
static inline bool gate_close(int *gate)
{
    int expected = 0;

    return __atomic_compare_exchange_n(gate, &expected, GATE_CLOSED, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

/* Undo `count` entries; return false, and do nothing, where there were fewer. For counters that are no gates. */
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

/* Suspend an open gate: until gate_resume no caller can enter or close it; callers inside may leave. */
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
