#include "abi/verbs_ops.h"

#include "abi/dlsym_table.h"

const char *verbs_table_load(struct verbs_table *table, const char *library)
{
#define X(result, name, parameters) "ibv_" #name,
    static const char *const names[] = {VERBS_EXPORTED(X)};
#undef X
    _Static_assert(sizeof(*table) == sizeof(names), "the table has nothing but what is exported");

    return exports_load((void **)table, names, sizeof(names) / sizeof(names[0]), library);
}

void **verbs_table_slot(struct verbs_table *table, const char *name)
{
#define X(result, verb, parameters) \
    if (!strcmp(name, #verb))       \
        return (void **)&table->verb;
    VERBS_EXPORTED(X)
#undef X
    return NULL;
}
