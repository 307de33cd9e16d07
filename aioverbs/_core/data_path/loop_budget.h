/* Budget of a turn of a thread's event loop: how much may be done without returning to the loop.
 *
 * An await that is done at once does not let other tasks run. A queue's awaits may therefore use only a share of each
 * turn and then yield; the more queues were active in the turn before, the smaller is the share. The unit is about a
 * quarter of a microsecond: an operation costs one, and one more for each TURN_UNIT_BYTES bytes.
 *
 * A task that yields remembers the number of the turn. The first of them to run in a later turn advances the number: a
 * turn begins once, however many tasks wait for it.
 *
 * Other work that Python code does at once, in the layers above, has one share of the turn, as if it were a queue. */
#ifndef AIOVERBS_LOOP_BUDGET_H
#define AIOVERBS_LOOP_BUDGET_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define TURN_UNITS 512
#define TURN_LARGEST_SHARE 64 /* of a single queue: going round the loop costs as much as a few awaits */
#define TURN_SMALLEST_SHARE 24
#define TURN_SHARE_BESIDE_SLEEPERS 2 /* the smallest after a turn in which an await slept */
#define TURN_UNIT_BYTES 8192

/* Budget that a queue has used in a turn. */
struct turn_share {
    uint64_t number; /* of the turn */
    uint64_t units;
};

static __attribute__((tls_model("initial-exec"))) _Thread_local struct {
    uint64_t number;
    uint64_t spun; /* spent spinning in this turn, in nanoseconds */
    uint32_t share;
    uint32_t queues; /* number of queues active in this turn */
    bool slept;      /* whether an await of this turn had to sleep */
} turn_now = {.number = 1, .share = TURN_LARGEST_SHARE};

static inline uint64_t turn_clock(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Begin a new turn, if `number` is still the current one: the loop went round since. */
static inline void turn_advance(uint64_t number)
{
    uint32_t share, least = turn_now.slept ? TURN_SHARE_BESIDE_SLEEPERS : TURN_SMALLEST_SHARE;

    if (number != turn_now.number)
        return;
    share = TURN_UNITS / (turn_now.queues ? turn_now.queues : 1);
    share = share < TURN_LARGEST_SHARE ? share : TURN_LARGEST_SHARE;
    turn_now.share = share > least ? share : least;
    turn_now.slept = false;
    turn_now.number++;
    turn_now.queues = 0;
    turn_now.spun = 0;
}

/* Count a queue as active in this turn as its await begins. Awaits that will sleep count, too: a device that works
 * beside this thread completes some at once, and these must not get much more of the turn than the others. */
static inline void turn_join(struct turn_share *share)
{
    if (share->number == turn_now.number)
        return;
    share->number = turn_now.number;
    share->units = 0;
    turn_now.queues++;
}

/* Charge `units` of other work to the turn. Return the turn's number where other tasks should run before the next such
 * work, else 0. */
static inline uint64_t turn_spend(uint32_t units)
{
    static __attribute__((tls_model("initial-exec"))) _Thread_local struct turn_share others;

    turn_join(&others);
    others.units += units;
    return others.units > turn_now.share ? turn_now.number : 0;
}

/* Note that an await sleeps. */
static inline void turn_note_sleep(void)
{
    turn_now.slept = true;
}

/* Charge an await of `units` and `bytes` that could be done at once; turn_join comes before. Return whether other tasks
 * should run first. */
static inline bool turn_is_over(struct turn_share *share, uint32_t units, uint64_t bytes)
{
    share->units += units + bytes / TURN_UNIT_BYTES;
    return share->units > turn_now.share;
}

/* Return the turn's number if a share of it is used up, else 0. */
static inline uint64_t turn_used_up(const struct turn_share *share)
{
    return share->number == turn_now.number && share->units > turn_now.share ? turn_now.number : 0;
}

#endif
