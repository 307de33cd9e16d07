/* Thread domains and parent domains that check lifetimes and do nothing else. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define PAGE_SIZE 4096
/* Like providers do: the driver's number in the upper half, its own resource type in the lower. */
#define CONTROL_PAGE (1ull << 32 | 1)

/* Number of parent domains that refer to a thread domain or a base PD. */
static unsigned int references(const void *address)
{
    unsigned int count = 0;

    for (struct object *object = shim_objects; object; object = object->next) {
        if (object->kind == PARENT)
            count += object->thread_domain == address || object->base == address;
    }
    return count;
}

/* -- Thread domains ---------------------------------------------------------------------------- */

struct ibv_td *shim_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
    struct object *td;

    if (attr->comp_mask)
        return shim_refused(EINVAL);
    pthread_mutex_lock(&shim_lock);
    td = shim_add(TD);
    if (td)
        td->td.context = context;
    pthread_mutex_unlock(&shim_lock);
    return td ? &td->td : shim_refused(ENOMEM);
}

int shim_dealloc_td(struct ibv_td *address)
{
    struct object *td;
    int error = 0;

    pthread_mutex_lock(&shim_lock);
    td = shim_find(TD, address);
    if (!td)
        error = EINVAL;
    else if (references(td))
        error = EBUSY;
    else
        shim_drop(td);
    pthread_mutex_unlock(&shim_lock);
    if (!error)
        free(td);
    return error;
}

/* -- Parent domains ---------------------------------------------------------------------------- */

static int check_parent(struct ibv_context *context, const struct ibv_parent_domain_init_attr *attr)
{
    const uint32_t known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;

    if (attr->comp_mask & ~known)
        return EINVAL;
    if ((attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) && (!attr->alloc || !attr->free))
        return EINVAL;
    if (!attr->pd || shim_find(PARENT, attr->pd) || attr->pd->context != context)
        return EINVAL;
    if (attr->td && (!shim_find(TD, attr->td) || attr->td->context != context))
        return EINVAL;
    return 0;
}

/* Requirements of the document for memory from a caller's allocator: the requested alignment, and zeros. */
static bool fit_for_use(const unsigned char *page)
{
    return (uintptr_t)page % PAGE_SIZE == 0 && !page[0] && !memcmp(page, page + 1, PAGE_SIZE - 1);
}

static int give_control_page(struct object *parent)
{
    void *page = IBV_ALLOCATOR_USE_DEFAULT;

    if (parent->alloc) {
        errno = 0;
        page = parent->alloc(&parent->pd, parent->pd_context, PAGE_SIZE, PAGE_SIZE, CONTROL_PAGE);
        if (!page)
            return errno ? errno : ENOMEM;
    }
    if (page == IBV_ALLOCATOR_USE_DEFAULT) {
        page = aligned_alloc(PAGE_SIZE, PAGE_SIZE);
        if (!page)
            return ENOMEM;
        memset(page, 0, PAGE_SIZE);
        parent->page_is_ours = true;
    }
    parent->control_page = page;
    return fit_for_use(page) ? 0 : EINVAL;
}

/* The parent was removed from the list already: the caller's `free` runs without the lock. */
static void destroy_parent(struct object *parent)
{
    if (parent->page_is_ours)
        free(parent->control_page);
    else if (parent->control_page)
        parent->free(&parent->pd, parent->pd_context, parent->control_page, CONTROL_PAGE);
    free(parent);
}

static void drop_parent(struct object *parent)
{
    shim_drop(parent);
    shim_free_calls += parent->control_page && !parent->page_is_ours;
}

struct ibv_pd *shim_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr)
{
    struct object *parent = NULL;
    int error;

    pthread_mutex_lock(&shim_lock);
    error = check_parent(context, attr);
    if (!error && !(parent = shim_add(PARENT)))
        error = ENOMEM;
    if (!error) {
        parent->pd.context = attr->pd->context;
        parent->pd.handle = attr->pd->handle;
        parent->base = attr->pd;
        parent->thread_domain = attr->td;
        if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
            parent->alloc = attr->alloc;
            parent->free = attr->free;
            shim_alloc_calls++;
        }
        if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
            parent->pd_context = attr->pd_context;
    }
    pthread_mutex_unlock(&shim_lock);
    if (error)
        return shim_refused(error);

    error = give_control_page(parent);
    if (error) {
        pthread_mutex_lock(&shim_lock);
        drop_parent(parent);
        pthread_mutex_unlock(&shim_lock);
        destroy_parent(parent);
        return shim_refused(error);
    }
    return &parent->pd;
}

/* Replaces ibv_dealloc_pd: a parent domain does not exist in the kernel, and has the handle of its base PD, which
 * must stay alive. */
int shim_dealloc_pd(struct ibv_pd *pd)
{
    int (*dealloc_pd)(struct ibv_pd *);
    struct object *parent;
    bool busy;

    pthread_mutex_lock(&shim_lock);
    parent = shim_find(PARENT, pd);
    if (parent)
        drop_parent(parent);
    busy = references(pd) > 0;
    dealloc_pd = shim_original_dealloc_pd;
    pthread_mutex_unlock(&shim_lock);
    if (parent) {
        destroy_parent(parent);
        return 0;
    }
    return busy ? EBUSY : dealloc_pd(pd);
}
