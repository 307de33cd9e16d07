#include "abi/cm_ops.h"

#include "abi/dlsym_table.h"

const char *rdma_cm_table_load(struct rdma_cm_table *table, const char *library)
{
#define X(result, name, parameters) "rdma_" #name,
    static const char *const names[] = {RDMA_CM_EXPORTED(X)};
#undef X
    _Static_assert(sizeof(*table) == sizeof(names), "the table has nothing but what is exported");
    *table = (struct rdma_cm_table){0};
    return exports_load((void **)table, names, sizeof(names) / sizeof(names[0]), library);
}
