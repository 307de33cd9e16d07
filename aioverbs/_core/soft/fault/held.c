/* Completions that the fault plan holds, and the order in which it releases them. */
#include <stdlib.h>

#include "soft/base/lock_order.h"
#include "soft/fault/fault.h"
#include "soft/fault/fault_plan.h"
#include "soft/fault/injection.h"
#include "soft/objects/context.h"
#include "soft/objects/cq.h"
#include "soft/objects/cq_push.h"
#include "soft/objects/qp.h"
#include "soft/objects/srq.h"

/* A queue pair whose completions are held, unless all are. */
struct soft_fault_hold {
    struct soft_fault_hold *next;
    uint32_t qp_num;
};

struct held {
    struct held *next;
    uint64_t arrival;
    struct soft_cq *cq; /* valid while this is in the list: destroying an object that it refers to purges first */
    struct soft_cqe cqe;
};

/* Held completions of a send or receive queue, in their order. The list of queues is in the order in which the queue
 * pairs were created, so that the same draws hit the same queues. */
struct soft_fault_queue {
    struct soft_fault_queue *next;
    uint32_t qp_num;
    bool is_send;
    /* Index of the queue pair; for completions of an XRC shared receive queue, the queue pair's number. */
    uint64_t index;
    struct held *first, *last;
};

/* All functions run under the plan's lock. A completion is pushed to its completion queue under that lock: so none
 * overtakes those that were held before it, and none comes late for a queue that is being destroyed. */

static bool is_held(const struct soft_faults *plan, uint32_t qp_num)
{
    const struct soft_fault_hold *hold;

    for (hold = plan->holds; hold && hold->qp_num != qp_num; hold = hold->next)
        ;
    return plan->hold_all || hold;
}

/* ---- Holding --------------------------------------------------------------------------------------------- */

static struct soft_fault_queue *held_queue_find(const struct soft_faults *plan, const struct soft_cqe *cqe)
{
    struct soft_fault_queue *queue;

    assert_held(&plan->lock);
    for (queue = plan->queues; queue; queue = queue->next)
        if (queue->qp_num == cqe->qp_num && queue->is_send == cqe->is_send)
            break;
    return queue;
}

static struct soft_fault_queue *held_queue_make(struct soft_faults *plan, const struct soft_cqe *cqe)
{
    struct soft_fault_queue *queue = calloc(1, sizeof(*queue)), **link = &plan->queues;

    assert_held(&plan->lock);
    if (!queue)
        return NULL;
    queue->qp_num = cqe->qp_num;
    queue->is_send = cqe->is_send;
    queue->index = cqe->qp ? soft_fault_index(plan, cqe->qp) : cqe->qp_num;
    while (*link && ((*link)->index < queue->index || ((*link)->index == queue->index && (*link)->is_send)))
        link = &(*link)->next;
    queue->next = *link;
    *link = queue;
    return queue;
}

/* Hold a completion. Return false if there is no memory for it; then nothing has changed. */
static bool hold_completion(struct soft_faults *plan, struct soft_cq *cq, const struct soft_cqe *cqe)
{
    struct held *held = malloc(sizeof(*held));
    struct soft_fault_queue *queue;

    assert_held(&plan->lock);
    if (!held)
        return false;
    queue = held_queue_find(plan, cqe);
    if (!queue && !(queue = held_queue_make(plan, cqe))) {
        free(held);
        return false;
    }
    *held = (struct held){.arrival = plan->arrivals++, .cq = cq, .cqe = *cqe};
    if (queue->last)
        queue->last->next = held;
    else
        queue->first = held;
    queue->last = held;
    plan->held++;
    return true;
}

/* ---- Releasing ------------------------------------------------------------------------------------------- */

static void remove_queue(struct soft_faults *plan, struct soft_fault_queue *queue)
{
    struct soft_fault_queue **link = &plan->queues;

    while (*link != queue)
        link = &(*link)->next;
    *link = queue->next;
    free(queue);
}

/* Release the first completion of a queue; an empty queue is freed. If the completion queue is full, it reports that,
 * and the queue pair learns of it with its next completion. A lost device delivers no completion. */
static void release_oldest_of(struct soft_context *context, struct soft_fault_queue *queue)
{
    struct held *held = queue->first;

    queue->first = held->next;
    if (!queue->first)
        remove_queue(context->faults, queue);
    context->faults->held--;
    if (!(atomic_load(&context->special) & SOFT_SPECIAL_LOST))
        soft_cq_push(held->cq, &held->cqe);
    else if (held->cqe.srq)
        soft_srq_credit(held->cqe.srq, 1);
    free(held);
}

static struct soft_fault_queue *oldest_queue(const struct soft_faults *plan)
{
    struct soft_fault_queue *queue, *found = plan->queues;

    for (queue = plan->queues; queue; queue = queue->next)
        if (queue->first->arrival < found->first->arrival)
            found = queue;
    return found;
}

static struct soft_fault_queue *drawn_queue(struct soft_faults *plan)
{
    struct soft_fault_queue *queue;
    uint64_t count = 0;

    for (queue = plan->queues; queue; queue = queue->next)
        count++;
    count = soft_fault_draw(plan, SOFT_CHANCE_RELEASE, 0, ++plan->releases) % count;
    for (queue = plan->queues; count; queue = queue->next)
        count--;
    return queue;
}

void soft_fault_release_all(struct soft_context *context)
{
    struct soft_faults *plan = context->faults;

    plan->hold_all = false;
    while (plan->holds) {
        struct soft_fault_hold *hold = plan->holds;

        plan->holds = hold->next;
        free(hold);
    }
    while (plan->queues)
        release_oldest_of(context, oldest_queue(plan));
}

/* ---- Public functions ------------------------------------------------------------------------------------ */

int soft_fault_hold(struct ibv_context *ibv_context, uint32_t qp_num)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);
    struct soft_fault_hold *hold;
    int error = 0;

    if (!plan)
        return ENODEV;
    if (!qp_num) {
        plan->hold_all = true;
    } else if (!is_held(plan, qp_num)) {
        hold = malloc(sizeof(*hold));
        if (hold) {
            *hold = (struct soft_fault_hold){plan->holds, qp_num};
            plan->holds = hold;
        } else {
            error = ENOMEM;
        }
    }
    soft_fault_leave(context);
    return error;
}

size_t soft_fault_held(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);
    size_t held;

    if (!plan)
        return 0;
    held = plan->held;
    soft_fault_leave(context);
    return held;
}

size_t soft_fault_release(struct ibv_context *ibv_context, size_t count, bool shuffled)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_faults *plan = soft_fault_enter(context);
    size_t released = 0;

    if (!plan)
        return 0;
    for (; plan->queues && (!count || released < count); released++)
        release_oldest_of(context, shuffled ? drawn_queue(plan) : oldest_queue(plan));
    soft_fault_leave(context);
    return released;
}

void soft_fault_unhold(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);

    if (!soft_fault_enter(context))
        return;
    soft_fault_release_all(context);
    soft_fault_leave(context);
}

bool soft_fault_complete(struct soft_context *context, struct soft_cq *cq, const struct soft_cqe *cqe)
{
    struct soft_faults *plan = soft_fault_enter(context);
    struct soft_fault_queue *queue;
    bool held = is_held(plan, cqe->qp_num);

    if (held && !hold_completion(plan, cq, cqe)) {
        /* Without memory, release it now, behind those that it must not overtake. */
        while ((queue = held_queue_find(plan, cqe)))
            release_oldest_of(context, queue);
        held = false;
    }
    soft_fault_leave(context);
    return held || soft_cq_push(cq, cqe);
}

/* Drop matching completions of a queue; an empty queue is freed. */
static void purge_queue(struct soft_faults *plan, struct soft_fault_queue *queue, const struct soft_cq *cq,
                        const struct soft_qp *qp, const struct soft_srq *srq)
{
    struct held **link = &queue->first, *held;

    queue->last = NULL;
    while ((held = *link)) {
        if (held->cq != cq || ((!qp || held->cqe.qp != qp) && (!srq || held->cqe.srq != srq))) {
            queue->last = held;
            link = &held->next;
            continue;
        }
        *link = held->next;
        if (held->cqe.srq)
            soft_srq_credit(held->cqe.srq, 1);
        free(held);
        plan->held--;
    }
    if (!queue->first)
        remove_queue(plan, queue);
}

void soft_fault_purge(struct soft_context *context, const struct soft_cq *cq, const struct soft_qp *qp,
                      const struct soft_srq *srq)
{
    struct soft_faults *plan = soft_fault_enter(context);
    struct soft_fault_queue *queue, *next;

    for (queue = plan->queues; queue; queue = next) {
        next = queue->next;
        purge_queue(plan, queue, cq, qp, srq);
    }
    soft_fault_leave(context);
}
