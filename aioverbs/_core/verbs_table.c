#include "verbs_table.h"

#include <dlfcn.h>

const char *verbs_table_load(struct verbs_table *table, const char *library)
{
    /* Kept open for the process: contexts, and pyverbs beside us, live in the same library. */
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);

    if (!handle)
        return dlerror();
#define X(result, name, parameters)                       \
    *(void **)&table->name = dlsym(handle, "ibv_" #name); \
    if (!table->name)                                     \
        goto missing;
    VERBS_EXPORTED(X)
#undef X
    return NULL;
missing:
    return dlerror(); /* which closing the library would free; it stays, as it does when it fits */
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
