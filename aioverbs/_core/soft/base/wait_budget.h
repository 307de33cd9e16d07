/* Budget of time for waiting on an untrusted process.
 *
 * A limit for each wait alone is not enough: a process that keeps others waiting, stops just before the limit, and
 * starts again costs as much each time. So waits add up. The first SOFT_WAIT_FREE_NS of each wait are not counted: on a
 * busy machine an honest process loses its processor for as long. The sum shrinks between waits, so waits add up only
 * where they take more than a fifth of the time. */
#ifndef AIOVERBS_SOFT_BASE_WAIT_BUDGET_H
#define AIOVERBS_SOFT_BASE_WAIT_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#define SOFT_WAIT_FREE_NS 50000000u
#define SOFT_WAIT_SHRINKS 4u /* the sum shrinks by a second in so many seconds */

/* Time waited so far; all zero for a process that was never waited for. The owner serialises the calls. */
struct soft_wait_budget {
    uint64_t counted_until; /* waits are counted up to this time */
    uint64_t sum;           /* sum of waits, in nanoseconds, at that time */
};

/* Count a wait that began at `begin` and goes on at `now`. Overlapping waits count once. Return false where the waits
 * reach `limit` in total, including the free part of this wait. Call while the other process is known to be alive: the
 * time between the last check and the end of the wait may be due to the caller, which may have been stopped. */
static inline bool soft_wait_budget_spend(struct soft_wait_budget *budget, uint64_t begin, uint64_t now, uint64_t limit)
{
    uint64_t from = begin + SOFT_WAIT_FREE_NS, shrunk;

    if (now <= from)
        return true;
    if (from < budget->counted_until)
        from = budget->counted_until;
    if (now > from) {
        shrunk = (from - budget->counted_until) / SOFT_WAIT_SHRINKS;
        budget->sum -= shrunk < budget->sum ? shrunk : budget->sum;
        budget->sum += now - from;
        budget->counted_until = now;
    }
    return budget->sum < limit - SOFT_WAIT_FREE_NS;
}

#endif
