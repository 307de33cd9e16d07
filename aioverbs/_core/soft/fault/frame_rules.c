/* Faults of frames, by rules and by chance. */
#include <stdlib.h>
#include <string.h>

#include "soft/base/lock_order.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame_faults.h"
#include "soft/fabric/read_cache.h"
#include "soft/fabric/stream.h"
#include "soft/fault/fault.h"
#include "soft/fault/fault_plan.h"
#include "soft/fault/injection.h"
#include "soft/objects/context.h"
#include "soft/objects/fault_counts.h"
#include "soft/objects/qp.h"

static bool has_chances(const struct soft_faults *plan)
{
    unsigned int i;

    for (i = 0; i < SOFT_FRAME_FAULT_KINDS; i++)
        if (plan->mishaps_per_million[i])
            return true;
    return false;
}

/* Update whether the device consults the plan for frames, after a change. Under `frames`. */
static void update_frame_faults(struct soft_context *context)
{
    struct soft_faults *plan = context->faults;
    bool has_frame_faults = plan->frame_rules || has_chances(plan);

    assert_held(&plan->frames);
    if (has_frame_faults && !plan->has_frame_faults) {
        atomic_fetch_add(&context->device->fabric->frame_fault_plans, 1);
        soft_read_cache_invalidate_all(context->device);
    } else if (!has_frame_faults && plan->has_frame_faults) {
        atomic_fetch_sub(&context->device->fabric->frame_fault_plans, 1);
    }
    plan->has_frame_faults = has_frame_faults;
}

void soft_fault_drop_frame_rules(struct soft_context *context)
{
    struct soft_faults *plan = context->faults;

    while (plan->frame_rules) {
        struct soft_fault_rule *rule = plan->frame_rules;

        plan->frame_rules = rule->next;
        free(rule);
    }
    memset(plan->mishaps_per_million, 0, sizeof(plan->mishaps_per_million));
    update_frame_faults(context);
}

/* ---- Public functions ------------------------------------------------------------------------------------ */

int soft_fault_frames(struct ibv_context *ibv_context, const struct soft_frame_fault *fault)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_fault_rule *rule, **link;
    struct soft_faults *plan;

    if (!fault->strike.first || fault->mishap >= SOFT_FRAME_FAULT_KINDS || !fault->kinds ||
        fault->kinds >= 1u << SOFT_FRAME_KINDS || fault->delay_ns > INT64_MAX)
        return EINVAL;
    plan = soft_fault_enter(context);
    if (!plan)
        return ENODEV;
    rule = soft_fault_make_records(plan) ? NULL : calloc(1, sizeof(*rule));
    if (rule) {
        rule->subject = SOFT_SUBJECT_FRAMES;
        rule->which = fault->qp_num;
        rule->strike = fault->strike;
        rule->value = fault->mishap;
        rule->kinds = fault->kinds;
        rule->delay_ns = fault->delay_ns;
        rule->has_gid = fault->gid;
        if (fault->gid)
            memcpy(&rule->gid, fault->gid, sizeof(rule->gid));
        soft_mutex_take(&plan->frames);
        for (link = &plan->frame_rules; *link; link = &(*link)->next)
            ;
        *link = rule;
        update_frame_faults(context);
        soft_mutex_give(&plan->frames);
    }
    soft_fault_leave(context);
    return rule ? 0 : ENOMEM;
}

int soft_fault_frames_at_random(struct ibv_context *ibv_context, const uint32_t per_million[SOFT_FRAME_FAULT_KINDS],
                                uint64_t max_delay_ns)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan;
    uint64_t sum = 0;
    unsigned int i;
    int error;

    for (i = 0; i < SOFT_FRAME_FAULT_KINDS; i++)
        sum += per_million[i];
    if (sum > SOFT_MILLION || max_delay_ns > INT64_MAX)
        return EINVAL;
    plan = soft_fault_enter(context);
    if (!plan)
        return ENODEV;
    error = soft_fault_make_records(plan);
    if (!error) {
        soft_mutex_take(&plan->frames);
        memcpy(plan->mishaps_per_million, per_million, sizeof(plan->mishaps_per_million));
        plan->max_delay_ns = max_delay_ns;
        update_frame_faults(context);
        soft_mutex_give(&plan->frames);
    }
    soft_fault_leave(context);
    return error;
}

int soft_fault_cut(struct ibv_context *ibv_context, const uint8_t *gid, unsigned int *count)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (soft_stale(context))
        return ENODEV;
    *count = soft_fabric_cut(context->device, (const union ibv_gid *)gid);
    return 0;
}

int soft_fault_stall(struct ibv_context *ibv_context, const uint8_t *gid, bool stall, unsigned int *count)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (soft_stale(context))
        return ENODEV;
    *count = soft_fabric_stall(context->device, (const union ibv_gid *)gid, stall);
    return 0;
}

/* ---- Queries of the device, under `frames` ----------------------------------------------------------------- */

struct verdict {
    enum soft_frame_fault_kind mishap;
    uint64_t ordinal, delay_ns;
};

/* Consult the rules: all rules that match the frame count it; the oldest of those that strike decides. */
static struct verdict frame_rules_consult(struct soft_faults *plan, const struct soft_qp *qp, enum soft_frame_kind kind,
                                          const struct soft_stream *stream)
{
    struct soft_fault_rule **link = &plan->frame_rules, *rule;
    struct verdict verdict = {SOFT_FRAME_FAULT_KINDS, 0, 0};

    while ((rule = *link)) {
        if (rule->kinds >> kind & 1 && (!rule->which || rule->which == qp->qp.qp_num) &&
            (!rule->has_gid || soft_stream_matches_gid(stream, &rule->gid)) && soft_fault_strikes(rule) &&
            verdict.mishap == SOFT_FRAME_FAULT_KINDS)
            verdict = (struct verdict){(enum soft_frame_fault_kind)rule->value, rule->seen, rule->delay_ns};
        if (soft_fault_is_spent(rule)) {
            *link = rule->next;
            free(rule);
        } else {
            link = &rule->next;
        }
    }
    return verdict;
}

/* Draw a random fault: one number decides between all faults. */
static struct verdict draw(struct soft_faults *plan, struct soft_qp *qp, enum soft_frame_kind kind)
{
    struct soft_frame_counts *counts = &qp->frame_counts;
    uint64_t drawn, queue_id = soft_fault_index(plan, qp) * SOFT_FRAME_KINDS + kind;
    struct verdict verdict = {SOFT_FRAME_FAULT_KINDS, 0, 0};
    uint32_t most = 0;

    if (counts->epoch != plan->epoch)
        *counts = (struct soft_frame_counts){.epoch = plan->epoch};
    verdict.ordinal = ++counts->frames[kind];
    drawn = soft_fault_draw(plan, SOFT_CHANCE_FRAME, queue_id, verdict.ordinal);
    for (verdict.mishap = 0; verdict.mishap < SOFT_FRAME_FAULT_KINDS; verdict.mishap++) {
        most += plan->mishaps_per_million[verdict.mishap];
        if (soft_fault_happens(drawn, most))
            break;
    }
    verdict.delay_ns =
        soft_fault_draw(plan, SOFT_CHANCE_FRAME_DELAY, queue_id, verdict.ordinal) % (plan->max_delay_ns + 1);
    return verdict;
}

enum soft_frame_fault_kind soft_fault_frame(struct soft_qp *qp, enum soft_frame_kind kind,
                                            const struct soft_stream *stream, uint64_t *delay_ns)
{
    struct soft_faults *plan = qp->context->faults;
    struct verdict verdict, drawn;

    soft_mutex_take(&plan->frames);
    verdict = frame_rules_consult(plan, qp, kind, stream);
    if (has_chances(plan)) {
        drawn = draw(plan, qp, kind);
        if (verdict.mishap == SOFT_FRAME_FAULT_KINDS)
            verdict = drawn;
    }
    if (verdict.mishap != SOFT_FRAME_FAULT_KINDS)
        soft_fault_note_frame(
            plan, (struct soft_fault_record){SOFT_RECORD_DROP + verdict.mishap, qp->qp.qp_num, verdict.ordinal, kind});
    update_frame_faults(qp->context);
    soft_mutex_give(&plan->frames);
    *delay_ns = verdict.delay_ns;
    return verdict.mishap;
}
