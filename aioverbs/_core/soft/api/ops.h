/* Wrappers of the verbs, which check for injected failures; and the tables of verbs with them. */
#ifndef AIOVERBS_SOFT_API_OPS_H
#define AIOVERBS_SOFT_API_OPS_H

#include "abi/libibverbs.h"

/* Set all verbs of a context. */
void soft_ops_fill(struct verbs_context *verbs);

#endif
