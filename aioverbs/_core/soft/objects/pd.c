/* Protection, thread and parent domains, and the memory that a parent domain's allocator provides for queues. */
#define _GNU_SOURCE
#include "soft/objects/pd.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"
#include "soft/base/util.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/hooks.h"
#include "soft/objects/mw.h"
#include "soft/objects/pd_share.h"
#include "soft/objects/shared.h"
#include "soft/objects/shared_keys.h"

/* ---- Protection domains ---------------------------------------------------------------------------------- */

struct soft_pd *soft_pd_new(struct soft_context *context, struct soft_domain *shared)
{
    struct soft_pd *pd = calloc(1, sizeof(*pd));
    struct soft_domain *domain = shared ? shared : calloc(1, sizeof(*domain));
    int error = pd && domain ? soft_mutex_init(&pd->lock, SOFT_RANK_PD) : ENOMEM;

    if (error) {
        free(pd);
        if (!shared)
            free(domain);
        errno = error;
        return NULL;
    }
    pd->pd.context = &context->verbs.context;
    pd->pd.handle = atomic_fetch_add(&context->next_handle, 1);
    pd->base = pd;
    pd->domain = domain;
    atomic_fetch_add(&domain->instances, 1);
    atomic_fetch_add(&context->pds, 1);
    return pd;
}

struct ibv_pd *soft_alloc_pd(struct ibv_context *ibv_context)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_pd *pd;

    if (soft_stale(context)) {
        errno = ENODEV;
        return NULL;
    }
    pd = soft_pd_new(context, NULL);
    return pd ? &pd->pd : NULL;
}

static void free_pd(struct soft_pd *pd)
{
    soft_mutex_destroy(&pd->lock);
    free(pd);
}

void soft_pd_add_key(struct soft_pd *pd, struct soft_key *key)
{
    soft_mutex_take(&pd->lock);
    key->next = pd->keys;
    key->link = &pd->keys;
    if (pd->keys)
        pd->keys->link = &key->next;
    pd->keys = key;
    pd->key_count++;
    atomic_fetch_add(&pd->references, 1);
    soft_mutex_give(&pd->lock);
}

void soft_pd_restore_key(struct soft_pd *pd, struct soft_key *key)
{
    soft_mutex_take(&pd->lock);
    if (!atomic_load(&key->dead))
        soft_key_publish(to_soft_context(pd->pd.context)->device, key);
    soft_mutex_give(&pd->lock);
}

void soft_pd_remove_key(struct soft_pd *pd, struct soft_key *key)
{
    bool last;

    soft_mutex_take(&pd->lock);
    *key->link = key->next;
    if (key->next)
        key->next->link = key->link;
    pd->key_count--;
    atomic_fetch_sub(&pd->references, 1);
    last = pd->deallocated && !pd->keys;
    soft_mutex_give(&pd->lock);
    if (last)
        free_pd(pd);
}

/* Remove an instance from its domain, under device->lock. Return EBUSY where objects refer to the instance; regions and
 * windows of a shared domain do not count, but die with the instance: no key finds them any more. Set `*last` to the
 * domain if this was its last instance, and `*file` to a held reference of its file, for the caller to release
 * afterwards. */
static int leave_domain(struct soft_device *device, struct soft_pd *pd, struct soft_domain **last,
                        struct soft_shared **file)
{
    bool shared = pd->domain->share_id, busy;
    struct soft_key *key;

    assert_held(&device->lock);
    soft_mutex_take(&pd->lock); /* a thread that releases the last key has left by then */
    busy = atomic_load(&pd->references) != (shared ? pd->key_count : 0);
    for (key = busy ? NULL : pd->keys; key; key = key->next) {
        atomic_store(&key->dead, true);
        soft_key_withdraw(device, key);
    }
    soft_mutex_give(&pd->lock);
    if (busy)
        return EBUSY;
    *file = atomic_load(&pd->domain->file);
    if (*file)
        soft_shared_hold(*file);
    *last = atomic_fetch_sub(&pd->domain->instances, 1) == 1 ? pd->domain : NULL;
    if (*last)
        soft_domain_unlink(device, *last);
    return 0;
}

/* End an instance whose keys find nothing any more. The instance stays until its last key is released. */
static void end_instance(struct soft_pd *pd, struct soft_shared *file)
{
    struct soft_device *device = to_soft_context(pd->pd.context)->device;
    struct soft_key *key;
    bool last;

    grace_wait(); /* no thread accesses its memory */
    device->hooks->invalidate_all(device);
    if (file)
        soft_shared_wait(file); /* nor does another process */
    soft_mutex_take(&pd->lock);
    for (key = pd->keys; key; key = key->next)
        if (key->is_window)
            soft_mw_unbind(container_of(key, struct soft_mw, key));
    pd->deallocated = true;
    last = !pd->keys;
    soft_mutex_give(&pd->lock);
    if (last)
        free_pd(pd);
}

static int dealloc_base(struct soft_context *context, struct soft_pd *pd)
{
    struct soft_device *device = context->device;
    struct soft_domain *last;
    struct soft_shared *file;
    int error;

    soft_mutex_take(&device->lock);
    error = leave_domain(device, pd, &last, &file);
    soft_mutex_give(&device->lock);
    if (error)
        return error;
    end_instance(pd, file);
    if (last)
        soft_domain_free(last);
    if (file)
        soft_shared_drop(file);
    atomic_fetch_sub(&context->pds, 1);
    return 0;
}

static int dealloc_parent(struct soft_context *context, struct soft_pd *pd)
{
    bool busy;

    soft_mutex_take(&pd->lock);
    busy = atomic_load(&pd->references) != 0;
    soft_mutex_give(&pd->lock);
    if (busy)
        return EBUSY;
    atomic_fetch_sub(&pd->base->references, 1);
    if (pd->td)
        atomic_fetch_sub(&pd->td->references, 1);
    atomic_fetch_sub(&context->parent_domains, 1);
    free_pd(pd);
    return 0;
}

int soft_dealloc_pd(struct ibv_pd *ibv_pd)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    struct soft_pd *pd = to_soft_pd(ibv_pd);

    if (soft_stale(context))
        return ENODEV;
    return pd->base == pd ? dealloc_base(context, pd) : dealloc_parent(context, pd);
}

/* ---- Thread domains -------------------------------------------------------------------------------------- */

struct ibv_td *soft_alloc_td(struct ibv_context *ibv_context, struct ibv_td_init_attr *attr)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_td *td;

    if (soft_stale(context) || attr->comp_mask) {
        errno = soft_stale(context) ? ENODEV : EINVAL;
        return NULL;
    }
    td = calloc(1, sizeof(*td));
    if (!td) {
        errno = ENOMEM;
        return NULL;
    }
    td->td.context = ibv_context;
    atomic_fetch_add(&context->thread_domains, 1);
    return &td->td;
}

int soft_dealloc_td(struct ibv_td *ibv_td)
{
    struct soft_td *td = container_of(ibv_td, struct soft_td, td);
    struct soft_context *context = to_soft_context(ibv_td->context);

    if (soft_stale(context))
        return ENODEV;
    if (atomic_load(&td->references))
        return EBUSY;
    atomic_fetch_sub(&context->thread_domains, 1);
    free(td);
    return 0;
}

/* ---- Parent domains -------------------------------------------------------------------------------------- */

static int check_parent_attr(struct ibv_context *context, const struct ibv_parent_domain_init_attr *attr)
{
    const uint32_t known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;

    if (soft_stale(to_soft_context(context)))
        return ENODEV;
    if ((attr->comp_mask & ~known) || !attr->pd || attr->pd->context != context)
        return EINVAL;
    if (attr->td && attr->td->context != context)
        return EINVAL;
    if ((attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) && (!attr->alloc || !attr->free))
        return EINVAL;
    return 0;
}

struct ibv_pd *soft_alloc_parent_domain(struct ibv_context *ibv_context, struct ibv_parent_domain_init_attr *attr)
{
    struct soft_context *context = to_soft_context(ibv_context);
    int error = check_parent_attr(ibv_context, attr);
    struct soft_pd *parent = NULL;

    if (!error && !(parent = calloc(1, sizeof(*parent))))
        error = ENOMEM;
    if (!error)
        error = soft_mutex_init(&parent->lock, SOFT_RANK_PD);
    if (error) {
        free(parent);
        errno = error;
        return NULL;
    }
    parent->base = to_soft_pd(attr->pd)->base; /* the base of a parent domain is a protection domain here, too */
    parent->domain = parent->base->domain;
    parent->pd = parent->base->pd; /* the same handle: objects of both can be mixed */
    atomic_fetch_add(&parent->base->references, 1);
    if (attr->td) {
        parent->td = container_of(attr->td, struct soft_td, td);
        atomic_fetch_add(&parent->td->references, 1);
    }
    if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
        parent->alloc = attr->alloc;
        parent->free = attr->free;
    }
    if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
        parent->pd_context = attr->pd_context;
    atomic_fetch_add(&context->parent_domains, 1);
    return &parent->pd;
}

/* ---- Memory of queues ------------------------------------------------------------------------------------ */

/* Check what ibv_alloc_parent_domain(3) requires of an allocator: memory that is aligned as requested, and zero. */
static bool is_valid_memory(const uint8_t *memory, size_t size, size_t alignment)
{
    if ((uintptr_t)memory % alignment)
        return false;
    return memory[0] == 0 && !memcmp(memory, memory + 1, size - 1);
}

/* Size from which memory is mapped, so that it has no pages before they are used: that of a completion queue which many
 * idle queue pairs share. */
enum { MAPPED_BYTES = 64 << 10 };

static int get_default(struct soft_memory *memory, size_t size, size_t alignment)
{
    memory->owner = NULL;
    if (size >= MAPPED_BYTES && alignment <= soft_page()) {
        memory->address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory->is_mapped = memory->address != MAP_FAILED;
        if (!memory->is_mapped)
            memory->address = NULL;
        return memory->is_mapped ? 0 : ENOMEM;
    }
    memory->is_mapped = false;
    if (alignment < sizeof(void *))
        alignment = sizeof(void *);
    if (posix_memalign(&memory->address, alignment, size))
        return ENOMEM;
    memset(memory->address, 0, size);
    return 0;
}

/* Allocate memory for a queue. The user's allocator may do anything, so no lock is held here. */
int soft_memory_get(struct soft_memory *memory, struct soft_pd *pd, size_t size, size_t alignment, uint32_t kind)
{
    memory->size = size;
    memory->resource_type = SOFT_RESOURCE(kind);
    memory->owner = pd;
    if (!pd || !pd->alloc)
        return get_default(memory, size, alignment);
    errno = 0;
    memory->address = pd->alloc(&pd->pd, pd->pd_context, size, alignment, memory->resource_type);
    if (memory->address == IBV_ALLOCATOR_USE_DEFAULT)
        return get_default(memory, size, alignment);
    if (!memory->address)
        return errno ? errno : ENOMEM;
    if (!is_valid_memory(memory->address, size, alignment)) {
        soft_memory_put(memory);
        return EINVAL;
    }
    return 0;
}

void soft_memory_put(struct soft_memory *memory)
{
    struct soft_pd *owner = memory->owner;

    if (!memory->address)
        return;
    if (owner)
        owner->free(&owner->pd, owner->pd_context, memory->address, memory->resource_type);
    else if (memory->is_mapped)
        munmap(memory->address, memory->size);
    else
        free(memory->address);
    memory->address = NULL;
}
