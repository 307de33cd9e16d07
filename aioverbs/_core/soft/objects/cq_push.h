/* The device half of completion queues. */
#ifndef AIOVERBS_SOFT_OBJECTS_CQ_PUSH_H
#define AIOVERBS_SOFT_OBJECTS_CQ_PUSH_H

#include <stdbool.h>

#include "abi/libibverbs.h"

struct soft_cq;
struct soft_cqe;

int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);

/* Add a completion, from the device half of any queue pair. Return false where the queue has overrun and the completion
 * is lost. */
bool soft_cq_push(struct soft_cq *cq, const struct soft_cqe *cqe);

/* Handle the end of the moderation period. Call in a grace section. */
void soft_cq_moderation_expired(struct soft_cq *cq);

/* Break the queue, as an overrun does. Call in a grace section, with no lock held that ranks after cq->lock. */
void soft_cq_break(struct soft_cq *cq);

#endif
