/* Memory that idle queue pairs give back. */
#ifndef AIOVERBS_SOFT_API_GIVE_BACK_H
#define AIOVERBS_SOFT_API_GIVE_BACK_H

#include <stddef.h>

#include "abi/libibverbs.h"

/* Give pages back to the kernel, which provides new ones when they are used again: those of the receives that are
 * posted to a queue pair, whose contents are lost, those of the rings to its peer, and those that unused bytes fill. */
void soft_give_back(struct ibv_qp *qp, void *unused, size_t length);

#endif
