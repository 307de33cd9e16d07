/* The states of queue pairs. Pure. */
#ifndef AIOVERBS_SOFT_OBJECTS_QP_STATE_H
#define AIOVERBS_SOFT_OBJECTS_QP_STATE_H

#include "abi/libibverbs.h"

/* 0 where `mask` may take a queue pair of this type from one state to the other, else EINVAL. */
int soft_state_check(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask);

#endif
