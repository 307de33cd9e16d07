#include "abi/verbs_ops.h"

#include "abi/dlsym_table.h"

/* ---- In place of verbs that older releases of libibverbs lack ---------------------------------------------- */

static struct ibv_context *absent_import_device(int cmd_fd)
{
    (void)cmd_fd;
    errno = EOPNOTSUPP;
    return NULL;
}

static struct ibv_pd *absent_import_pd(struct ibv_context *context, uint32_t handle)
{
    (void)context;
    (void)handle;
    errno = EOPNOTSUPP;
    return NULL;
}

/* Is never called, because nothing was imported. */
static void absent_unimport_pd(struct ibv_pd *pd)
{
    (void)pd;
}

static ssize_t absent_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max_entries,
                                      uint32_t flags, size_t entry_size)
{
    (void)context;
    (void)entries;
    (void)max_entries;
    (void)flags;
    (void)entry_size;
    return -EOPNOTSUPP;
}

/* ------------------------------------------------------------------------------------------------------------- */

#define EXPORTED_NAME(result, verb, parameters) "ibv_" #verb,

/* Return the address of the pointer to `verb` from the calling function, if that is the verb `name`. */
#define RETURN_SLOT(result, verb, parameters) \
    if (!strcmp(name, #verb))                 \
        return (void **)&table->verb;

const char *verbs_table_load(struct verbs_table *table, const char *library)
{
    static const char *const names[] = {VERBS_EXPORTED(EXPORTED_NAME)};

    _Static_assert(sizeof(*table) == sizeof(names), "the table has nothing but what is exported");
    *table = (struct verbs_table){
        .import_device = absent_import_device,
        .import_pd = absent_import_pd,
        .unimport_pd = absent_unimport_pd,
    };
    return exports_load((void **)table, names, sizeof(names) / sizeof(names[0]), library);
}

void **verbs_table_slot(struct verbs_table *table, const char *name)
{
    VERBS_EXPORTED(RETURN_SLOT)
    return NULL;
}

const char *verbs_devices_load(struct verbs_devices *table, const char *library)
{
    static const char *const names[] = {VERBS_DEVICES(EXPORTED_NAME) "_ibv_query_gid_table"};

    _Static_assert(sizeof(*table) == sizeof(names), "the table has nothing but what is exported");
    *table = (struct verbs_devices){.query_gid_table = absent_query_gid_table};
    return exports_load((void **)table, names, sizeof(names) / sizeof(names[0]), library);
}

void **verbs_devices_slot(struct verbs_devices *table, const char *name)
{
    VERBS_DEVICES(RETURN_SLOT)
    return strcmp(name, "query_gid_table") ? NULL : (void **)&table->query_gid_table;
}
