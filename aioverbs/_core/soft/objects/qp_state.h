/* State machine of queue pairs. Pure: no I/O, no locks. */
#ifndef AIOVERBS_SOFT_OBJECTS_QP_STATE_H
#define AIOVERBS_SOFT_OBJECTS_QP_STATE_H

#include "abi/libibverbs.h"

/* Check a transition with the attributes of `mask`: return 0 or EINVAL. */
int soft_state_check(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask);

#endif
