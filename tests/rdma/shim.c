/* Installing the shim's ops in a context and removing them; the list of the shim's objects. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

pthread_mutex_t shim_lock = PTHREAD_MUTEX_INITIALIZER;
struct object *shim_objects;
uint32_t shim_alloc_calls, shim_free_calls;
int (*shim_original_dealloc_pd)(struct ibv_pd *);
struct ibv_cq_ex *(*shim_original_create_cq_ex)(struct ibv_context *, struct ibv_cq_init_attr_ex *);

static struct verbs_context *installed;
static int (**dealloc_pd_slot)(struct ibv_pd *);
static struct {
    struct ibv_td *(*alloc_td)(struct ibv_context *, struct ibv_td_init_attr *);
    int (*dealloc_td)(struct ibv_td *);
    struct ibv_pd *(*alloc_parent_domain)(struct ibv_context *, struct ibv_parent_domain_init_attr *);
    struct ibv_xrcd *(*open_xrcd)(struct ibv_context *, struct ibv_xrcd_init_attr *);
    int (*close_xrcd)(struct ibv_xrcd *);
} original;

struct object *shim_find(enum kind kind, const void *address)
{
    for (struct object *object = shim_objects; object; object = object->next) {
        if (object == address && object->kind == kind)
            return object;
    }
    return NULL;
}

struct object *shim_add(enum kind kind)
{
    struct object *object = calloc(1, sizeof(*object));

    if (!object)
        return NULL;
    object->kind = kind;
    object->next = shim_objects;
    shim_objects = object;
    return object;
}

void shim_drop(struct object *object)
{
    struct object **link = &shim_objects;

    while (*link != object)
        link = &(*link)->next;
    *link = object->next;
}

void *shim_refused(int error)
{
    errno = error;
    return NULL;
}

void shim_counts(struct shim_counts *counts)
{
    memset(counts, 0, sizeof(*counts));
    pthread_mutex_lock(&shim_lock);
    for (struct object *object = shim_objects; object; object = object->next) {
        counts->tds += object->kind == TD;
        counts->parents += object->kind == PARENT;
        counts->xrcds += object->kind == XRCD;
    }
    /* A domain is counted at the last of its openings in the list. */
    for (struct object *object = shim_objects; object; object = object->next) {
        bool later = false;

        for (struct object *other = object->next; other; other = other->next)
            later = later || (other->kind == XRCD && other->domain == object->domain);
        counts->xrc_domains += object->kind == XRCD && !later;
    }
    counts->alloc_calls = shim_alloc_calls;
    counts->free_calls = shim_free_calls;
    pthread_mutex_unlock(&shim_lock);
}

int shim_install(struct verbs_context *context, void **slot)
{
    int (**dealloc_pd)(struct ibv_pd *) = (int (**)(struct ibv_pd *))slot;
    int error = 0;

    pthread_mutex_lock(&shim_lock);
    if (installed)
        error = EBUSY;
    else if (!context || !slot || !*slot)
        error = EINVAL;
    else if (context->context.abi_compat != __VERBS_ABI_IS_EXTENDED ||
             context->sz < VERBS_OP_DISTANCE(alloc_parent_domain))
        error = EOPNOTSUPP;
    if (!error) {
        original.alloc_td = context->alloc_td;
        original.dealloc_td = context->dealloc_td;
        original.alloc_parent_domain = context->alloc_parent_domain;
        original.open_xrcd = context->open_xrcd;
        original.close_xrcd = context->close_xrcd;
        shim_original_dealloc_pd = *dealloc_pd;
        shim_original_create_cq_ex = context->create_cq_ex;
        context->alloc_td = shim_alloc_td;
        context->dealloc_td = shim_dealloc_td;
        context->alloc_parent_domain = shim_alloc_parent_domain;
        context->open_xrcd = shim_open_xrcd;
        context->close_xrcd = shim_close_xrcd;
        context->create_cq_ex = shim_create_cq_ex;
        *dealloc_pd = shim_dealloc_pd;
        installed = context;
        dealloc_pd_slot = dealloc_pd;
        shim_alloc_calls = shim_free_calls = 0;
    }
    pthread_mutex_unlock(&shim_lock);
    return error;
}

int shim_uninstall(void)
{
    int error = 0;

    pthread_mutex_lock(&shim_lock);
    if (!installed)
        error = EINVAL;
    else if (shim_objects)
        error = EBUSY;
    if (!error) {
        installed->alloc_td = original.alloc_td;
        installed->dealloc_td = original.dealloc_td;
        installed->alloc_parent_domain = original.alloc_parent_domain;
        installed->open_xrcd = original.open_xrcd;
        installed->close_xrcd = original.close_xrcd;
        installed->create_cq_ex = shim_original_create_cq_ex;
        *dealloc_pd_slot = shim_original_dealloc_pd;
        installed = NULL;
    }
    pthread_mutex_unlock(&shim_lock);
    return error;
}
