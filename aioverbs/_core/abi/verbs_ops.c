#include "abi/verbs_ops.h"

#include "abi/dlsym_table.h"

#define EXPORTED_NAME(result, verb, parameters) "ibv_" #verb,

/* Return the address of the pointer to `verb` from the calling function, if that is the verb `name`. */
#define RETURN_SLOT(result, verb, parameters) \
    if (!strcmp(name, #verb))                 \
        return (void **)&table->verb;

const char *verbs_table_load(struct verbs_table *table, const char *library)
{
    static const char *const names[] = {VERBS_EXPORTED(EXPORTED_NAME)};

    _Static_assert(sizeof(*table) == sizeof(names), "the table has nothing but what is exported");
    return exports_load((void **)table, names, sizeof(names) / sizeof(names[0]), library);
}

void **verbs_table_slot(struct verbs_table *table, const char *name)
{
    VERBS_EXPORTED(RETURN_SLOT)
    return NULL;
}

const char *verbs_devices_load(struct verbs_devices *table, const char *library)
{
    static const char *const required[] = {VERBS_DEVICES(EXPORTED_NAME)};
    static const char *const optional[] = {"_ibv_query_gid_table"};
    const char *problem;

    _Static_assert(sizeof(*table) == sizeof(required) + sizeof(optional), "the table has nothing but functions");
    problem = exports_load((void **)table, required, sizeof(required) / sizeof(required[0]), library);
    if (!problem)
        exports_load((void **)&table->query_gid_table, optional, 1, library);
    return problem;
}

void **verbs_devices_slot(struct verbs_devices *table, const char *name)
{
    VERBS_DEVICES(RETURN_SLOT)
    return strcmp(name, "query_gid_table") ? NULL : (void **)&table->query_gid_table;
}
