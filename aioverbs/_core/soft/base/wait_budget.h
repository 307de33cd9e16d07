/* For how long one that is not trusted was waited for, all in all.
 *
 * A limit for each wait alone is none: one that keeps others waiting, goes just before the limit, and comes again,
 * costs as much each time. So waits add up. What is shorter than SOFT_WAITED_FREE_NS is not counted, nor that much of a
 * longer one: on a busy machine an honest one loses its processor for as long. And the sum shrinks between waits, so
 * that they count together only where they take more than a fifth of the time. */
#ifndef AIOVERBS_SOFT_WAITED_H
#define AIOVERBS_SOFT_WAITED_H

#include <stdbool.h>
#include <stdint.h>

#define SOFT_WAITED_FREE_NS 50000000u
#define SOFT_WAITED_SHRINKS 4u /* a second less after so many seconds */

/* Zero: of one that was never waited for. Who has it sees to it that one thread at a time is in it. */
struct soft_waited {
    uint64_t counted; /* up to this time */
    uint64_t sum;     /* then */
};

/* A wait that began then goes on now. What several waits have in common counts once. False: that makes `limit` in all,
 * with what is free of this wait. Call it while the other one is seen to be there: what passes between the last look
 * and the end of the wait may be the caller's own doing, which was stopped meanwhile. */
static inline bool soft_waited_more(struct soft_waited *waited, uint64_t begin, uint64_t now, uint64_t limit)
{
    uint64_t from = begin + SOFT_WAITED_FREE_NS, shrunk;

    if (now <= from)
        return true;
    if (from < waited->counted)
        from = waited->counted;
    if (now > from) {
        shrunk = (from - waited->counted) / SOFT_WAITED_SHRINKS;
        waited->sum -= shrunk < waited->sum ? shrunk : waited->sum;
        waited->sum += now - from;
        waited->counted = now;
    }
    return waited->sum < limit - SOFT_WAITED_FREE_NS;
}

#endif
