/* The turn of a thread's event loop: how much was done in it without going round the loop.
 *
 * An await that is done at once does not let others run. After so much of that, a queue's awaits have to: what it may do
 * in a turn is its share, which is the smaller the more queues were at it in the turn before. It is counted in units of
 * about a quarter of a microsecond: an operation is one, and one more for every so many bytes.
 *
 * Whoever lets the loop go round notes the number of the turn, and the first of them who is called again in a later one
 * begins that: a turn begins once, however many wait for it.
 *
 * What else is done at once, by Python code above the queues, has one share of the turn, as if it were a queue. */
#ifndef AIOVERBS_TURN_H
#define AIOVERBS_TURN_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define TURN_UNITS 512
#define TURN_LARGEST_SHARE 64 /* of one queue alone: going round the loop costs as much as a few awaits */
#define TURN_SMALLEST_SHARE 24
#define TURN_SHARE_BESIDE_SLEEPERS 2 /* where others sleep */
#define TURN_UNIT_BYTES 8192

/* What a queue did in a turn. */
struct turn_share {
    uint64_t number; /* of the turn */
    uint64_t units;
};

static __attribute__((tls_model("initial-exec"))) _Thread_local struct {
    uint64_t number;
    uint64_t spun; /* nanoseconds */
    uint32_t share;
    uint32_t queues; /* that had a part in it */
    bool slept;      /* an await had to */
} turn_now = {.number = 1, .share = TURN_LARGEST_SHARE};

static inline uint64_t turn_clock(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The loop went round since the turn of that number. */
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

/* An await of a queue begins. Those that will sleep count, too: a device that works beside this thread is done at once
 * for some, and who has such luck is not to have much more of the turn than the others. */
static inline void turn_join(struct turn_share *share)
{
    if (share->number == turn_now.number)
        return;
    share->number = turn_now.number;
    share->units = 0;
    turn_now.queues++;
}

/* Something else was done at once that took so many units. The turn's number where others are to run before the next is
 * done, else 0. */
static inline uint64_t turn_spend(uint32_t units)
{
    static __attribute__((tls_model("initial-exec"))) _Thread_local struct turn_share others;

    turn_join(&others);
    others.units += units;
    return others.units > turn_now.share ? turn_now.number : 0;
}

/* An await sleeps. */
static inline void turn_note_sleep(void)
{
    turn_now.slept = true;
}

/* Whether others are to run before an await of a queue is done that could be done at once. It took part. */
static inline bool turn_is_over(struct turn_share *share, uint64_t bytes)
{
    share->units += 1 + bytes / TURN_UNIT_BYTES;
    return share->units > turn_now.share;
}

#endif
