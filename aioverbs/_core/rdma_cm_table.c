#include "rdma_cm_table.h"

#include <dlfcn.h>

const char *rdma_cm_table_load(struct rdma_cm_table *table, const char *library)
{
    /* Kept open for the process: it keeps the contexts that it opened until then, too. */
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);

    if (!handle)
        return dlerror();
#define X(result, name, parameters)                        \
    *(void **)&table->name = dlsym(handle, "rdma_" #name); \
    if (!table->name)                                      \
        goto missing;
    RDMA_CM_EXPORTED(X)
#undef X
    return NULL;
missing:
    return dlerror(); /* which closing the library would free; it stays, as it does when it fits */
}
