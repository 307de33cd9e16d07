/* The device half of completion queues. */
#ifndef AIOVERBS_SOFT_OBJECTS_CQ_PUSH_H
#define AIOVERBS_SOFT_OBJECTS_CQ_PUSH_H

#include <stdbool.h>

#include "abi/libibverbs.h"

struct soft_cq;
struct soft_cqe;

int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);

/* From the device half of any queue pair. False: the queue overran, the completion is lost. */
bool soft_cq_push(struct soft_cq *cq, const struct soft_cqe *cqe);

/* In a grace section: the moderation period is over. */
void soft_cq_moderation_expired(struct soft_cq *cq);

/* The queue breaks, as by an overrun. In a grace section, no lock held that comes after cq->lock. */
void soft_cq_break(struct soft_cq *cq);

#endif
