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

const char *verbs_devices_load(struct verbs_devices *devices, const char *library)
{
#define X(result, name, parameters) "ibv_" #name,
    static const char *const required[] = {VERBS_DEVICES(X)};
#undef X
    static const char *const optional[] = {"_ibv_query_gid_table"};
    const char *problem;

    _Static_assert(sizeof(*devices) == sizeof(required) + sizeof(optional), "the table has nothing but functions");
    problem = exports_load((void **)devices, required, sizeof(required) / sizeof(required[0]), library);
    if (!problem)
        exports_load((void **)&devices->query_gid_table, optional, 1, library);
    return problem;
}

void **verbs_devices_slot(struct verbs_devices *devices, const char *name)
{
#define X(result, verb, parameters) \
    if (!strcmp(name, #verb))       \
        return (void **)&devices->verb;
    VERBS_DEVICES(X)
#undef X
    return strcmp(name, "query_gid_table") ? NULL : (void **)&devices->query_gid_table;
}
