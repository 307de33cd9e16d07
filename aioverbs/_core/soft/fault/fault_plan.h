/* The fault plan from the inside: soft/fault/fault.c has its rules, soft/fault/held.c the completions that it holds,
 * soft/fault/frame_rules.c what happens to frames. */
#ifndef AIOVERBS_SOFT_FAULT_FAULT_PLAN_H
#define AIOVERBS_SOFT_FAULT_FAULT_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/lock_order.h"
#include "soft/fault/fault.h"
#include "soft/objects/qp.h"
#include "soft/objects/verbs.h"

#define SOFT_FAULT_RECORDS 4096u

#define SOFT_MILLION 1000000u

/* What a rule is about, and to whom it happened: an `enum soft_verb` or a queue pair's number, or `any`. */
enum soft_fault_subject {
    SOFT_SUBJECT_CALLS,
    SOFT_SUBJECT_REQUESTS,
    SOFT_SUBJECT_RECEIVES,
    SOFT_SUBJECT_LOSSES,
    SOFT_SUBJECT_FRAMES
};

struct soft_fault_rule {
    struct soft_fault_rule *next;
    enum soft_fault_subject subject;
    uint32_t which, any;
    struct soft_strike strike;
    uint64_t seen, struck;
    uint32_t value, vendor_err; /* errno, status or enum soft_mishap */

    unsigned int kinds; /* of frames, like the next three */
    bool has_gid;
    union ibv_gid gid;
    uint64_t delay_ns;
};

/* Counts one more of what the rule is about: whether it strikes. */
bool soft_fault_strikes(struct soft_fault_rule *rule);

/* It can strike no more. */
static inline bool soft_fault_is_spent(const struct soft_fault_rule *rule)
{
    return rule->struck && (!rule->strike.every || rule->struck == rule->strike.times);
}

/* Certain with a million, never with 0. */
static inline bool soft_fault_happens(uint64_t drawn, uint32_t per_million)
{
    return ((drawn >> 32) * SOFT_MILLION >> 32) < per_million;
}

struct soft_fault_hold;
struct soft_fault_queue;

/* All of it under `lock`, which is taken from executions: after each soft_lock but that of a completion queue. */
struct soft_faults {
    struct soft_mutex lock;
    bool active;           /* SOFT_SPECIAL_FAULTS is set */
    uint64_t seed, epoch;  /* how often there was a new seed */
    uint64_t first_serial; /* queue pairs are told apart by their distance from it, which repeats itself */

    struct soft_fault_rule *rules; /* oldest first */
    uint32_t verbs_per_million, loss_per_million;
    int verbs_error;
    uint64_t jitter_ns;
    uint64_t drawn[SOFT_VERB_COUNT]; /* calls that the chance was drawn for */

    bool counting;
    uint64_t calls[SOFT_VERB_COUNT];

    bool hold_all;
    struct soft_fault_hold *holds;
    struct soft_fault_queue *queues; /* those that completions are held of, none of them empty */
    uint64_t arrivals;               /* completions that were ever held */
    uint64_t releases;               /* draws of a queue */
    size_t held;

    /* All that follows under `frames`: the last of all locks, for frames come and go under any. What is above and it
     * reads, `seed`, `epoch` and `first_serial`, is written under both. */
    struct soft_mutex frames;
    bool has_frame_faults; /* it counts among fabric->disturbed */
    struct soft_fault_rule *frame_rules;
    uint32_t mishaps_per_million[SOFT_MISHAPS];
    uint64_t max_delay_ns;
    struct soft_fault_record *records; /* room for SOFT_FAULT_RECORDS, from the first rule on */
    uint64_t record_count;             /* of those that found no room, too */
};

enum soft_fault_chance {
    SOFT_CHANCE_VERB,
    SOFT_CHANCE_LOSS,
    SOFT_CHANCE_DELAY,
    SOFT_CHANCE_RELEASE,
    SOFT_CHANCE_FRAME,
    SOFT_CHANCE_FRAME_DELAY,
};

/* A number that is a function of the seed and of these, and of nothing else. */
uint64_t soft_fault_draw(const struct soft_faults *plan, enum soft_fault_chance chance, uint64_t which,
                         uint64_t ordinal);

/* A queue pair as chances know it. */
static inline uint64_t soft_fault_index(const struct soft_faults *plan, const struct soft_qp *qp)
{
    return qp->serial - plan->first_serial;
}

/* The plan of a context, locked; to be given back by soft_fault_leave, which has the device ask or not ask it. NULL
 * where the context is stale: another thread may have been inside at the moment of the fork. */
struct soft_faults *soft_fault_enter(struct soft_context *context);
void soft_fault_leave(struct soft_context *context);

/* Before anything is planned that will be recorded: 0 or ENOMEM. Not under `frames`, like the next one. */
int soft_fault_make_records(struct soft_faults *plan);
void soft_fault_note(struct soft_faults *plan, struct soft_fault_record what);

/* Under `frames`. */
void soft_fault_note_frame(struct soft_faults *plan, struct soft_fault_record what);

/* Under the lock and `frames`: no rule about frames is left. */
void soft_fault_drop_frame_rules(struct soft_context *context);

/* Under the lock: nothing is held from here on. */
void soft_fault_release_all(struct soft_context *context);

#endif
