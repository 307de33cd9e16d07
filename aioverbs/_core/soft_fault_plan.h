/* The fault plan from the inside: soft_fault.c has its rules, soft_fault_held.c the completions that it holds. */
#ifndef AIOVERBS_SOFT_FAULT_PLAN_H
#define AIOVERBS_SOFT_FAULT_PLAN_H

#include "soft.h"

#define SOFT_FAULT_RECORDS 4096u

struct soft_fault_rule;
struct soft_fault_hold;
struct soft_fault_queue;

/* All of it under `lock`, which is taken from executions: after each soft_lock but that of a completion queue. */
struct soft_faults {
    pthread_mutex_t lock;
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

    struct soft_fault_record *records; /* room for SOFT_FAULT_RECORDS, from the first rule on */
    uint64_t record_count;             /* of those that found no room, too */

    bool hold_all;
    struct soft_fault_hold *holds;
    struct soft_fault_queue *queues; /* those that completions are held of, none of them empty */
    uint64_t arrivals;               /* completions that were ever held */
    uint64_t releases;               /* draws of a queue */
    size_t held;
};

enum soft_fault_chance { SOFT_CHANCE_VERB, SOFT_CHANCE_LOSS, SOFT_CHANCE_DELAY, SOFT_CHANCE_RELEASE };

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

/* Under the lock: nothing is held from here on. */
void soft_fault_let_go(struct soft_context *context);

#endif
