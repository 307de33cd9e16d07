/* Fault plan: rules, and their effect on calls and requests. */
#include "soft/fault/fault.h"

#include <stdlib.h>
#include <string.h>

#include "soft/base/lock_order.h"
#include "soft/base/settings.h"
#include "soft/fabric/read_cache.h"
#include "soft/fault/fault_plan.h"
#include "soft/fault/injection.h"
#include "soft/objects/context.h"
#include "soft/objects/fault_counts.h"
#include "soft/objects/qp.h"
#include "soft/objects/verbs.h"

/* ---- The plan -------------------------------------------------------------------------------------------- */

struct soft_faults *soft_faults_new(uint64_t first_serial)
{
    struct soft_faults *plan = calloc(1, sizeof(*plan));

    if (plan && soft_mutex_init(&plan->lock, SOFT_RANK_FAULTS)) {
        free(plan);
        return NULL;
    }
    if (plan && soft_mutex_init(&plan->frames, SOFT_RANK_FRAMES)) {
        soft_mutex_destroy(&plan->lock);
        free(plan);
        return NULL;
    }
    if (plan)
        plan->first_serial = first_serial;
    return plan;
}

static void drop_rules(struct soft_context *context)
{
    struct soft_faults *plan = context->faults;

    while (plan->rules) {
        struct soft_fault_rule *rule = plan->rules;

        plan->rules = rule->next;
        free(rule);
    }
    plan->verbs_per_million = plan->loss_per_million = 0;
    plan->jitter_ns = 0;
    soft_mutex_take(&plan->frames);
    soft_fault_drop_frame_rules(context);
    soft_mutex_give(&plan->frames);
}

/* Free the plan, when no queue is left in the context, and so no completion is held. */
void soft_faults_free(struct soft_context *context)
{
    struct soft_faults *plan = context->faults;

    drop_rules(context);
    soft_fault_release_all(context);
    free(plan->records);
    soft_mutex_destroy(&plan->frames);
    soft_mutex_destroy(&plan->lock);
    free(plan);
}

struct soft_faults *soft_fault_enter(struct soft_context *context)
{
    if (soft_stale(context))
        return NULL;
    soft_mutex_take(&context->faults->lock);
    return context->faults;
}

void soft_fault_leave(struct soft_context *context)
{
    struct soft_faults *plan = context->faults;
    bool active = plan->rules || plan->verbs_per_million || plan->loss_per_million || plan->jitter_ns ||
                  plan->counting || plan->hold_all || plan->holds || plan->held;

    if (active && !plan->active) {
        atomic_fetch_or(&context->special, SOFT_SPECIAL_FAULTS);
        soft_read_cache_invalidate_all(context->device);
    } else if (!active && plan->active) {
        atomic_fetch_and(&context->special, ~(unsigned int)SOFT_SPECIAL_FAULTS);
    }
    plan->active = active;
    soft_mutex_give(&plan->lock);
}

/* ---- Chances --------------------------------------------------------------------------------------------- */

/* The output function of splitmix64. */
static uint64_t mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}

uint64_t soft_fault_draw(const struct soft_faults *plan, enum soft_fault_chance chance, uint64_t which,
                         uint64_t ordinal)
{
    return mix(mix(mix(mix(plan->seed) ^ chance) ^ which) ^ ordinal);
}

/* Return the counts of draws for a queue pair since the last seed. */
static struct soft_fault_counts *counts_of(const struct soft_faults *plan, struct soft_qp *qp)
{
    if (qp->fault_counts.epoch != plan->epoch)
        qp->fault_counts = (struct soft_fault_counts){.epoch = plan->epoch};
    return &qp->fault_counts;
}

/* ---- Rules ----------------------------------------------------------------------------------------------- */

/* A rule without `every` is removed after its first strike, and not consulted again. */
bool soft_fault_strikes(struct soft_fault_rule *rule)
{
    const struct soft_strike *strike = &rule->strike;
    uint64_t ordinal = ++rule->seen;

    if (ordinal < strike->first)
        return false;
    if (ordinal != strike->first && (ordinal - strike->first) % strike->every)
        return false;
    rule->struck++;
    return true;
}

struct verdict {
    bool struck;
    uint32_t value, vendor_err;
    uint64_t ordinal;
};

/* Consult the rules: all rules of this subject count it; the oldest of those that strike decides. */
static struct verdict fault_rules_consult(struct soft_faults *plan, enum soft_fault_subject subject, uint32_t which)
{
    struct soft_fault_rule **link = &plan->rules, *rule;
    struct verdict verdict = {0};

    while ((rule = *link)) {
        if (rule->subject == subject && (rule->which == which || rule->which == rule->any) &&
            soft_fault_strikes(rule) && !verdict.struck)
            verdict = (struct verdict){true, rule->value, rule->vendor_err, rule->seen};
        if (soft_fault_is_spent(rule)) {
            *link = rule->next;
            free(rule);
        } else {
            link = &rule->next;
        }
    }
    return verdict;
}

void soft_fault_note_frame(struct soft_faults *plan, struct soft_fault_record what)
{
    if (plan->record_count < SOFT_FAULT_RECORDS)
        plan->records[plan->record_count] = what;
    plan->record_count++;
}

void soft_fault_note(struct soft_faults *plan, struct soft_fault_record what)
{
    soft_mutex_take(&plan->frames);
    soft_fault_note_frame(plan, what);
    soft_mutex_give(&plan->frames);
}

int soft_fault_make_records(struct soft_faults *plan)
{
    bool made;

    soft_mutex_take(&plan->frames);
    if (!plan->records)
        plan->records = calloc(SOFT_FAULT_RECORDS, sizeof(*plan->records));
    made = plan->records;
    soft_mutex_give(&plan->frames);
    return made ? 0 : ENOMEM;
}

static int add_rule(struct ibv_context *ibv_context, const struct soft_fault_rule *like)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_fault_rule *rule, **link;
    struct soft_faults *plan;
    int error;

    if (!like->strike.first)
        return EINVAL;
    plan = soft_fault_enter(context);
    if (!plan)
        return ENODEV;
    error = soft_fault_make_records(plan);
    rule = error ? NULL : malloc(sizeof(*rule));
    if (rule) {
        *rule = *like;
        for (link = &plan->rules; *link; link = &(*link)->next)
            ;
        *link = rule;
    }
    soft_fault_leave(context);
    return rule ? 0 : ENOMEM;
}

int soft_fault_verb(struct ibv_context *context, enum soft_verb verb, struct soft_strike strike, int error)
{
    struct soft_fault_rule rule = {
        .subject = SOFT_SUBJECT_CALLS, .which = verb, .any = SOFT_ANY_VERB, .strike = strike};

    if (verb > SOFT_ANY_VERB || error <= 0)
        return EINVAL;
    rule.value = (uint32_t)error;
    return add_rule(context, &rule);
}

int soft_fault_request(struct ibv_context *context, uint32_t qp_num, bool receives, struct soft_strike strike,
                       enum ibv_wc_status status, uint32_t vendor_err)
{
    struct soft_fault_rule rule = {
        .subject = receives ? SOFT_SUBJECT_RECEIVES : SOFT_SUBJECT_REQUESTS,
        .which = qp_num,
        .strike = strike,
        .value = status,
        .vendor_err = vendor_err,
    };

    if (status == IBV_WC_SUCCESS || status > IBV_WC_TM_RNDV_INCOMPLETE)
        return EINVAL;
    return add_rule(context, &rule);
}

int soft_fault_loss(struct ibv_context *context, uint32_t qp_num, struct soft_strike strike)
{
    struct soft_fault_rule rule = {.subject = SOFT_SUBJECT_LOSSES, .which = qp_num, .strike = strike};

    return add_rule(context, &rule);
}

/* ---- Rules of chance ------------------------------------------------------------------------------------- */

int soft_fault_verbs_at_random(struct ibv_context *ibv_context, uint32_t per_million, int error)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan;
    int failed;

    if (per_million > SOFT_MILLION || (per_million && error <= 0))
        return EINVAL;
    plan = soft_fault_enter(context);
    if (!plan)
        return ENODEV;
    failed = soft_fault_make_records(plan);
    if (!failed) {
        plan->verbs_per_million = per_million;
        plan->verbs_error = error;
    }
    soft_fault_leave(context);
    return failed;
}

int soft_fault_loss_at_random(struct ibv_context *ibv_context, uint32_t per_million)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan;
    int failed;

    if (per_million > SOFT_MILLION)
        return EINVAL;
    plan = soft_fault_enter(context);
    if (!plan)
        return ENODEV;
    failed = soft_fault_make_records(plan);
    if (!failed)
        plan->loss_per_million = per_million;
    soft_fault_leave(context);
    return failed;
}

int soft_fault_jitter(struct ibv_context *ibv_context, uint64_t max_ns)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan;

    if (context->mode != SOFT_THREAD || max_ns > INT64_MAX)
        return EINVAL;
    plan = soft_fault_enter(context);
    if (!plan)
        return ENODEV;
    plan->jitter_ns = max_ns;
    soft_fault_leave(context);
    return 0;
}

void soft_fault_seed(struct ibv_context *ibv_context, uint64_t seed)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);

    if (!plan)
        return;
    soft_mutex_take(&plan->frames);
    plan->seed = seed;
    plan->epoch++;
    plan->first_serial = atomic_load(&context->device->serial);
    soft_mutex_give(&plan->frames);
    plan->releases = 0;
    memset(plan->drawn, 0, sizeof(plan->drawn));
    soft_fault_leave(context);
}

void soft_fault_clear(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);

    if (!plan)
        return;
    drop_rules(context);
    soft_fault_release_all(context);
    soft_fault_leave(context);
}

/* ---- Counting and records -------------------------------------------------------------------------------- */

const char *soft_verb_name(enum soft_verb verb)
{
    static const char *const names[] = {
#define X(name) #name,
        SOFT_VERBS(X)
#undef X
    };

    return verb < SOFT_VERB_COUNT ? names[verb] : NULL;
}

void soft_fault_count(struct ibv_context *ibv_context, bool on)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);

    if (!plan)
        return;
    if (on)
        memset(plan->calls, 0, sizeof(plan->calls));
    plan->counting = on;
    soft_fault_leave(context);
}

uint64_t soft_fault_calls(struct ibv_context *ibv_context, enum soft_verb verb)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);
    uint64_t calls = 0;
    unsigned int i;

    if (!plan)
        return 0;
    for (i = 0; i < SOFT_VERB_COUNT; i++)
        if (i == verb || verb == SOFT_ANY_VERB)
            calls += plan->calls[i];
    soft_fault_leave(context);
    return calls;
}

size_t soft_fault_records(struct ibv_context *ibv_context, size_t from, struct soft_fault_record *records, size_t room)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);
    size_t count, kept_count;

    if (!plan)
        return 0;
    soft_mutex_take(&plan->frames);
    count = plan->record_count;
    kept_count = count < SOFT_FAULT_RECORDS ? count : SOFT_FAULT_RECORDS;
    if (from < kept_count && room)
        memcpy(records, &plan->records[from], (room < kept_count - from ? room : kept_count - from) * sizeof(*records));
    soft_mutex_give(&plan->frames);
    soft_fault_leave(context);
    return count;
}

/* ---- Queries of the device ------------------------------------------------------------------------------- */

/* Return whether a verb works on a lost device: verbs that release objects, or return what came before the loss. */
static bool works_on_lost_device(enum soft_verb verb)
{
    switch (verb) {
    case SOFT_VERB_close_device:
    case SOFT_VERB_get_async_event:
    case SOFT_VERB_dealloc_pd:
    case SOFT_VERB_dealloc_td:
    case SOFT_VERB_close_xrcd:
    case SOFT_VERB_dereg_mr:
    case SOFT_VERB_dealloc_mw:
    case SOFT_VERB_destroy_comp_channel:
    case SOFT_VERB_get_cq_event:
    case SOFT_VERB_destroy_cq:
    case SOFT_VERB_poll_cq:
    case SOFT_VERB_start_poll:
    case SOFT_VERB_destroy_srq:
    case SOFT_VERB_destroy_qp:
    case SOFT_VERB_destroy_ah:
        return true;
    default:
        return false;
    }
}

int soft_fault_verb_error(struct soft_context *context, enum soft_verb verb)
{
    struct soft_faults *plan;
    struct verdict verdict;

    if (soft_stale(context)) /* the verb itself reports that */
        return 0;
    if ((atomic_load(&context->special) & SOFT_SPECIAL_LOST) && !works_on_lost_device(verb))
        return EIO;
    plan = soft_fault_enter(context);
    if (plan->counting)
        plan->calls[verb]++;
    verdict = fault_rules_consult(plan, SOFT_SUBJECT_CALLS, verb);
    if (plan->verbs_per_million) {
        uint64_t ordinal = ++plan->drawn[verb];

        if (!verdict.struck &&
            soft_fault_happens(soft_fault_draw(plan, SOFT_CHANCE_VERB, verb, ordinal), plan->verbs_per_million))
            verdict = (struct verdict){true, (uint32_t)plan->verbs_error, 0, ordinal};
    }
    if (verdict.struck)
        soft_fault_note(plan, (struct soft_fault_record){SOFT_RECORD_VERB, verb, verdict.ordinal, verdict.value});
    soft_fault_leave(context);
    return (int)verdict.value;
}

enum ibv_wc_status soft_fault_status(struct soft_qp *qp, bool receive, uint32_t *vendor_err)
{
    struct soft_faults *plan = soft_fault_enter(qp->context);
    struct verdict verdict =
        fault_rules_consult(plan, receive ? SOFT_SUBJECT_RECEIVES : SOFT_SUBJECT_REQUESTS, qp->qp.qp_num);

    if (verdict.struck)
        soft_fault_note(plan, (struct soft_fault_record){receive ? SOFT_RECORD_RECEIVE : SOFT_RECORD_REQUEST,
                                                         qp->qp.qp_num, verdict.ordinal, verdict.value});
    soft_fault_leave(qp->context);
    *vendor_err = verdict.vendor_err;
    return (enum ibv_wc_status)verdict.value;
}

bool soft_fault_loses(struct soft_qp *qp)
{
    struct soft_faults *plan = soft_fault_enter(qp->context);
    struct verdict verdict = fault_rules_consult(plan, SOFT_SUBJECT_LOSSES, qp->qp.qp_num);

    if (plan->loss_per_million) {
        uint64_t ordinal = ++counts_of(plan, qp)->attempts;
        uint64_t drawn = soft_fault_draw(plan, SOFT_CHANCE_LOSS, soft_fault_index(plan, qp), ordinal);

        if (!verdict.struck && soft_fault_happens(drawn, plan->loss_per_million))
            verdict = (struct verdict){true, 0, 0, ordinal};
    }
    if (verdict.struck)
        soft_fault_note(plan, (struct soft_fault_record){SOFT_RECORD_LOSS, qp->qp.qp_num, verdict.ordinal, 0});
    soft_fault_leave(qp->context);
    return verdict.struck;
}

uint64_t soft_fault_delay(struct soft_qp *qp)
{
    struct soft_faults *plan = soft_fault_enter(qp->context);
    uint64_t delay = 0;

    if (plan->jitter_ns) {
        uint64_t ordinal = ++counts_of(plan, qp)->delays;

        delay = soft_fault_draw(plan, SOFT_CHANCE_DELAY, soft_fault_index(plan, qp), ordinal) % (plan->jitter_ns + 1);
    }
    soft_fault_leave(qp->context);
    return delay;
}
