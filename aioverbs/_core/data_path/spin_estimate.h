/* Whether, and for how long, to poll for completions before sleeping: an estimate from the recent waits on a completion
 * queue (message model DEFAULT), and the number of threads of this process that poll.
 *
 * The estimate compares the waits that polled with those that slept at once. Polling pays if it makes waits shorter,
 * and if most waits are short: a long wait is no shorter by polling, and if whatever is waited for needs this
 * processor, polling makes waits longer. Most waits do what has been better; one wait after a number of these is a
 * probe, which does the other:
 *
 *     sleeps -> polls    waits that polled were shorter by a sixteenth, and took less than SPIN_LIMIT_NS
 *     polls -> sleeps    waits that polled were longer, or took more than SPIN_LIMIT_NS by a quarter
 *
 * A sixteenth is little, since two ends of a connection that poll gain far more than the first of them alone, and each
 * decides for itself. The number of waits between two probes doubles with each probe that did not speak for a change,
 * and is halved by each that did. While waits sleep it grows up to SPIN_GAP: polling in vain costs SPIN_LIMIT_NS in
 * that many waits, in which other tasks run. While waits poll it grows up to SPIN_GAP_POLLING, since a change that
 * makes polling slower is seen without probes. */
#ifndef AIOVERBS_SPIN_ESTIMATE_H
#define AIOVERBS_SPIN_ESTIMATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define SPIN_LIMIT_NS 100000 /* longest polling: about what a peer that slept takes to wake up and answer */
#define SPIN_LEAST_NS 20000
#define SPIN_LONG_NS (2 * SPIN_LIMIT_NS) /* what a longer wait counts for: polling makes no difference to it */
#define SPIN_WEIGHT 8                    /* a mean moves by this fraction of the difference with each wait */
#define SPIN_GAP 128
#define SPIN_GAP_POLLING 1024

struct spin_estimate {
    int32_t mean_ns[2]; /* of recent waits that slept at once, and that polled */
    uint32_t gap;       /* number of waits between the last two probes */
    uint32_t left;      /* number of waits before the next probe */
    bool pays;          /* whether waits that are no probe poll */
};

/* Nothing is known yet: poll in the first waits, as the other end does if it begins at the same time. */
static inline void spin_estimate_begin(struct spin_estimate *estimate)
{
    *estimate = (struct spin_estimate){.mean_ns = {SPIN_LONG_NS, SPIN_LIMIT_NS / 2}, .gap = 1, .left = 1, .pays = true};
}

/* Return for how many nanoseconds a wait should poll that begins now; 0 to sleep at once. */
static inline uint32_t spin_budget(const struct spin_estimate *estimate)
{
    uint32_t budget = 4 * (uint32_t)estimate->mean_ns[true];

    if (estimate->pays != (estimate->left == 0)) {
        if (!estimate->pays || budget > SPIN_LIMIT_NS)
            return SPIN_LIMIT_NS;
        return budget > SPIN_LEAST_NS ? budget : SPIN_LEAST_NS;
    }
    return 0;
}

/* Note a wait that has ended: how long it took, and whether it polled. */
static inline void spin_note(struct spin_estimate *estimate, uint64_t waited_ns, bool polled)
{
    int32_t waited = waited_ns < SPIN_LONG_NS ? (int32_t)waited_ns : SPIN_LONG_NS;
    int32_t *mean = estimate->mean_ns, shorter;
    bool pays = estimate->pays;
    uint32_t most = pays ? SPIN_GAP_POLLING : SPIN_GAP;

    mean[polled] += (waited - mean[polled]) / SPIN_WEIGHT;
    shorter = mean[false] - mean[false] / 16;
    if (pays ? mean[true] > mean[false] || mean[true] > SPIN_LIMIT_NS / 4 * 5
             : mean[true] < shorter && mean[true] < SPIN_LIMIT_NS) {
        estimate->pays = !pays;
        estimate->gap = estimate->left = 1;
    } else if (polled == pays) {
        estimate->left -= estimate->left > 0;
    } else {
        if (pays ? waited < mean[true] : waited < shorter && waited < SPIN_LIMIT_NS)
            estimate->gap /= 2;
        else
            estimate->gap = estimate->gap < most / 2 ? 2 * estimate->gap + !estimate->gap : most;
        estimate->left = estimate->gap;
    }
}

/* ---- Threads that poll
 *
 * Threads whose message model has them poll without asking count, too. A thread counts as polling until the latest time
 * at which it stops, even if it stops earlier: nothing must be undone when an event loop, its thread or its queues end
 * while they poll. Threads that begin at the same moment may not see each other: for one wait, too many then poll. */

#define SPINNERS 64 /* further threads share places, and then count as one */

static struct {
    _Atomic uint64_t until[SPINNERS]; /* turn_clock() until which the thread polls */
    _Atomic uint32_t threads;         /* threads that ever polled */
} spinners;

static __attribute__((tls_model("initial-exec"))) _Thread_local uint32_t spinner_place; /* of this thread, from 1 */

/* Return the place of this thread. */
static inline _Atomic uint64_t *spinner_own(void)
{
    if (!spinner_place)
        spinner_place = atomic_fetch_add(&spinners.threads, 1) % SPINNERS + 1;
    return &spinners.until[spinner_place - 1];
}

/* Count this thread as polling until `until`. */
static inline void spinner_note(uint64_t until)
{
    _Atomic uint64_t *own = spinner_own();

    if (atomic_load(own) < until)
        atomic_store(own, until);
}

/* Have this thread poll from `now` until `until`, if it is one of at most `processors` threads that do, and there are
 * two processors or more: with a single one, polling keeps from running what is waited for. Return whether it may. */
static inline bool spinner_begin(uint64_t now, uint64_t until, uint32_t processors)
{
    uint32_t place, used, others = 0;
    _Atomic uint64_t *own;

    if (processors < 2)
        return false;
    own = spinner_own();
    used = atomic_load(&spinners.threads);
    for (place = 0; place < used && place < SPINNERS; place++)
        others += &spinners.until[place] != own && atomic_load(&spinners.until[place]) > now;
    if (others >= processors)
        return false;
    spinner_note(until);
    return true;
}

#endif
