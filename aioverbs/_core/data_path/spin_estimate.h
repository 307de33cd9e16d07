/* Whether, and for how long, to poll for completions before sleeping: an estimate from the recent waits on a completion
 * queue (message model DEFAULT), and the number of threads of this process that poll.
 *
 * The estimate compares the waits that polled with those that slept at once. Polling pays if it makes waits shorter,
 * and if most waits are short: a long wait is no shorter by polling, and if whatever is waited for needs this
 * processor, polling makes waits longer. Most waits do what has been better; one wait after a number of these is a
 * probe, which does the other:
 *
 *     sleeps -> polls    waits that polled were shorter by a sixteenth, and took less than SPIN_LIMIT_NS
 *     polls -> sleeps    waits that polled were not, or took more than SPIN_LIMIT_NS by a quarter
 *
 * A sixteenth is little, since two ends of a connection that poll gain far more than the first of them alone, and each
 * decides for itself. A probe counts for more than another wait, so that a few of them show that something has changed.
 *
 * If a loop has other tasks that are ready, polling takes time from them and shortens no wait: the loop does not sleep,
 * and finds the event of the completion in its next turn. Waits thus sleep if the loop's thread did not sleep in the
 * last of them that did not poll, or, while waits poll, in the last two probes. Short waits do not count: the thread
 * may not have come to sleep, and the event is a large part of them. */
#ifndef AIOVERBS_SPIN_ESTIMATE_H
#define AIOVERBS_SPIN_ESTIMATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h> /* RUSAGE_THREAD, with _GNU_SOURCE */

#define SPIN_LIMIT_NS 100000 /* longest mean at which polling begins: about what a peer that slept takes to answer */
#define SPIN_BUSY_NS 20000   /* shorter waits do not tell whether the thread would have slept */
#define SPIN_LONG_NS (2 * SPIN_LIMIT_NS) /* longest polling: two ends that poll do not sleep as one of them probes */
#define SPIN_WEIGHT 16                   /* a mean moves by this fraction of the difference with each wait */
#define SPIN_PROBE_WEIGHT 4              /* the same with each probe */
#define SPIN_GAP 64                      /* number of waits that sleep between two probes */
#define SPIN_GAP_POLLING 512             /* number of waits that poll between two probes */

struct spin_estimate {
    int32_t mean_ns[2]; /* of recent waits that slept at once, and that polled; 0 if there was none */
    uint32_t left;      /* number of waits before the next probe */
    bool pays;          /* whether waits that are no probe poll */
    bool idle;          /* whether the thread slept in the last wait that did not poll, as nothing else was to do */
    bool busy;          /* whether it did not, although that wait was long */
};

/* Nothing is known yet: poll in the first waits, as the other end does if it begins at the same time. */
static inline void spin_estimate_begin(struct spin_estimate *estimate)
{
    *estimate = (struct spin_estimate){.mean_ns = {0, SPIN_LIMIT_NS / 2}, .left = 1, .pays = true};
}

/* Return for how many nanoseconds a wait should poll that begins now; 0 to sleep at once. */
static inline uint32_t spin_budget(const struct spin_estimate *estimate)
{
    return estimate->pays != (estimate->left == 0) ? SPIN_LONG_NS : 0;
}

/* Note a wait that has ended: how long it took, and whether it polled. If `beside`, polling does not pay anyway. */
static inline void spin_note(struct spin_estimate *estimate, uint64_t waited_ns, bool polled, bool beside)
{
    int32_t waited = waited_ns < SPIN_LONG_NS ? (int32_t)waited_ns : SPIN_LONG_NS;
    int32_t *mean = estimate->mean_ns, shorter;
    bool probe = polled != estimate->pays, changes;

    if (mean[polled])
        mean[polled] += (waited - mean[polled]) / (probe ? SPIN_PROBE_WEIGHT : SPIN_WEIGHT);
    else
        mean[polled] = waited;
    shorter = mean[false] - mean[false] / 16;
    if (estimate->pays)
        changes = beside || (mean[false] && mean[true] >= shorter) || mean[true] > SPIN_LIMIT_NS / 4 * 5;
    else
        changes = !estimate->busy && mean[true] < shorter && mean[true] < SPIN_LIMIT_NS;
    estimate->pays ^= changes;
    if (probe || changes)
        estimate->left = !estimate->pays ? SPIN_GAP : estimate->busy ? 1 : SPIN_GAP_POLLING;
    else
        estimate->left -= estimate->left > 0;
}

/* Note a wait that polled: how long it took. */
static inline void spin_note_polled(struct spin_estimate *estimate, uint64_t waited_ns)
{
    spin_note(estimate, waited_ns, true, false);
}

/* Note a wait that did not poll: how long it took, and whether the thread slept meanwhile. */
static inline void spin_note_asleep(struct spin_estimate *estimate, uint64_t waited_ns, bool slept)
{
    bool busy = !slept && waited_ns >= SPIN_BUSY_NS, twice = busy && estimate->busy;

    estimate->idle = slept;
    estimate->busy = busy;
    spin_note(estimate, waited_ns, false, twice);
}

#define SLEEPS_UNKNOWN UINT64_MAX

/* Return how often this thread has slept so far; SLEEPS_UNKNOWN if the kernel counts no context switches at all. */
static inline uint64_t thread_sleeps(void)
{
    struct rusage usage;

    if (getrusage(RUSAGE_THREAD, &usage) || !(usage.ru_nvcsw | usage.ru_nivcsw))
        return SLEEPS_UNKNOWN;
    return (uint64_t)usage.ru_nvcsw;
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
