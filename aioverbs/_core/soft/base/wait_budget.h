/* For how long one that is not trusted was waited for, all in all.
 *
 * A limit for each wait alone is none: one that keeps others waiting, goes just before the limit, and comes again,
 * costs as much each time. So waits add up. What is shorter than SOFT_WAIT_FREE_NS is not counted, nor that much of a
 * longer one: on a busy machine an honest one loses its processor for as long. And the sum shrinks between waits, so
 * that they count together only where they take more than a fifth of the time. */
#ifndef AIOVERBS_SOFT_BASE_WAIT_BUDGET_H
#define AIOVERBS_SOFT_BASE_WAIT_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#define SOFT_WAIT_FREE_NS 50000000u
#define SOFT_WAIT_SHRINKS 4u /* a second less after so many seconds */

/* Zero: of one that was never waited for. Who has it sees to it that one thread at a time is in it. */
struct soft_wait_budget {
    uint64_t counted_until; /* up to this time */
    uint64_t sum;           /* then */
};

/* A wait that began then goes on now. What several waits have in common counts once. False: that makes `limit` in all,
 * with what is free of this wait. Call it while the other one is seen to be there: what passes between the last look
 * and the end of the wait may be the caller's own doing, which was stopped meanwhile. */
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
