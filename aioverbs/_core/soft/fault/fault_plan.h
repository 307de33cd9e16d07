/* Structures of the fault plan: soft/fault/fault.c has its rules, soft/fault/held.c the completions that it holds,
 * soft/fault/frame_rules.c the faults of frames. */
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

/* Subject of a rule. `which` is an `enum soft_verb` or the number of a queue pair; the rule's value `any` matches
 * all. */
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
    uint32_t value, vendor_err; /* errno, status or enum soft_frame_fault_kind */

    unsigned int kinds; /* frames, like the next three */
    bool has_gid;
    union ibv_gid gid;
    uint64_t delay_ns;
};

/* Count one more subject of the rule. Return whether the rule strikes. */
bool soft_fault_strikes(struct soft_fault_rule *rule);

/* Return whether the rule can strike no more. */
static inline bool soft_fault_is_spent(const struct soft_fault_rule *rule)
{
    return rule->struck && (!rule->strike.every || rule->struck == rule->strike.times);
}

/* Return whether a drawn number means a fault: always with a million, never with 0. */
static inline bool soft_fault_happens(uint64_t drawn, uint32_t per_million)
{
    return ((drawn >> 32) * SOFT_MILLION >> 32) < per_million;
}

struct soft_fault_hold;
struct soft_fault_queue;

/* Fault plan of a context. Under `lock`, which is taken while requests are executed: after each soft_lock but that of a
 * completion queue. */
struct soft_faults {
    struct soft_mutex lock;
    bool active;          /* SOFT_SPECIAL_FAULTS is set */
    uint64_t seed, epoch; /* number of seeds that were set */
    /* Queue pairs are identified by their distance from this serial number, which is the same in each run. */
    uint64_t first_serial;

    struct soft_fault_rule *rules; /* oldest first */
    uint32_t verbs_per_million, loss_per_million;
    int verbs_error;
    uint64_t jitter_ns;
    uint64_t drawn[SOFT_VERB_COUNT]; /* calls that a chance was drawn for */

    bool counting;
    uint64_t calls[SOFT_VERB_COUNT];

    bool hold_all;
    struct soft_fault_hold *holds;
    struct soft_fault_queue *queues; /* queues with held completions, none of them empty */
    uint64_t arrivals;               /* completions held so far */
    uint64_t releases;               /* draws of a queue so far */
    size_t held;

    /* All that follows is under `frames`, the last of all locks, since frames come and go under any lock. `seed`,
     * `epoch` and `first_serial`, which frames also need, are written under both locks. */
    struct soft_mutex frames;
    bool has_frame_faults; /* the plan is counted in fabric->frame_fault_plans */
    struct soft_fault_rule *frame_rules;
    uint32_t mishaps_per_million[SOFT_FRAME_FAULT_KINDS];
    uint64_t max_delay_ns;
    struct soft_fault_record *records; /* array of SOFT_FAULT_RECORDS, allocated with the first rule */
    uint64_t record_count;             /* including records that found no room */
};

enum soft_fault_chance {
    SOFT_CHANCE_VERB,
    SOFT_CHANCE_LOSS,
    SOFT_CHANCE_DELAY,
    SOFT_CHANCE_RELEASE,
    SOFT_CHANCE_FRAME,
    SOFT_CHANCE_FRAME_DELAY,
};

/* Return a pseudo-random number, a function of the seed and of the arguments only. */
uint64_t soft_fault_draw(const struct soft_faults *plan, enum soft_fault_chance chance, uint64_t which,
                         uint64_t ordinal);

/* Return the index of a queue pair, for draws. */
static inline uint64_t soft_fault_index(const struct soft_faults *plan, const struct soft_qp *qp)
{
    return qp->serial - plan->first_serial;
}

/* Lock the plan of a context; soft_fault_leave() unlocks it, and has the device consult it or not. Return NULL if the
 * context is stale: another thread may have held the lock at the moment of the fork. */
struct soft_faults *soft_fault_enter(struct soft_context *context);
void soft_fault_leave(struct soft_context *context);

/* Allocate the records, before any rule that needs them. Return 0 or ENOMEM. Not under `frames`, like the next one. */
int soft_fault_make_records(struct soft_faults *plan);
void soft_fault_note(struct soft_faults *plan, struct soft_fault_record what);

/* The same, under `frames`. */
void soft_fault_note_frame(struct soft_faults *plan, struct soft_fault_record what);

/* Remove all rules of frames. Under the lock and `frames`. */
void soft_fault_drop_frame_rules(struct soft_context *context);

/* Release all held completions, and hold no further ones. Under the lock. */
void soft_fault_release_all(struct soft_context *context);

#endif
