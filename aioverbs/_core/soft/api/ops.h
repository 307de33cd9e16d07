/* The wrappers of verbs: where they are refused, and the tables by which they come in. */
#ifndef AIOVERBS_SOFT_API_OPS_H
#define AIOVERBS_SOFT_API_OPS_H

#include "abi/libibverbs.h"

void soft_ops_fill(struct verbs_context *verbs);

#endif
