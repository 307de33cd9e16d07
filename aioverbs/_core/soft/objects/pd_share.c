/* Protection domains that several contexts of a device, or several processes, share: one domain with several instances.
 */
#define _GNU_SOURCE
#include "soft/objects/pd_share.h"

#include <errno.h>
#include <stdlib.h>

#include "soft/base/lock_order.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/pd.h"
#include "soft/objects/shared.h"
#include "soft/objects/verbs.h"

/* Return the domain with an identifier, or NULL. Call under device->lock. */
static struct soft_domain *domain_find(const struct soft_device *device, uint32_t share)
{
    struct soft_domain *domain = device->shared_domains;

    assert_held(&device->lock);
    while (domain && domain->share_id != share)
        domain = domain->next;
    return domain;
}

/* Return the next unused identifier, under device->lock. An identifier is reused after all others, so that a stale one
 * finds nothing. */
static uint32_t next_share(struct soft_device *device)
{
    do
        device->next_share++;
    while (!device->next_share || domain_find(device, device->next_share));
    return device->next_share;
}

int soft_alloc_shpd(struct ibv_pd *ibv_pd, uint64_t share_key, uint32_t *share)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    struct soft_device *device = context->device;
    struct soft_domain *domain = to_soft_pd(ibv_pd)->domain;
    int error = soft_stale(context) ? ENODEV : soft_verb_error(context, SOFT_VERB_alloc_shpd);

    if (error)
        return error;
    soft_mutex_take(&device->lock);
    if (domain->share_id) {
        error = EEXIST;
    } else {
        *share = domain->share_id = next_share(device);
        domain->share_key = share_key;
        domain->next = device->shared_domains;
        device->shared_domains = domain;
    }
    soft_mutex_give(&device->lock);
    return error;
}

struct ibv_pd *soft_share_pd(struct ibv_context *ibv_context, uint32_t share, uint64_t share_key)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_device *device = context->device;
    int error = soft_stale(context) ? ENODEV : soft_verb_error(context, SOFT_VERB_share_pd);
    struct soft_domain *domain;
    struct soft_pd *pd = NULL;

    if (!error) {
        soft_mutex_take(&device->lock);
        domain = share ? domain_find(device, share) : NULL;
        if (!domain)
            error = ENOENT;
        else if (domain->share_key != share_key)
            error = EACCES;
        else if (!(pd = soft_pd_new(context, domain)))
            error = errno;
        soft_mutex_give(&device->lock);
    }
    if (error) {
        errno = error;
        return NULL;
    }
    return &pd->pd;
}

void soft_domain_unlink(struct soft_device *device, struct soft_domain *domain)
{
    struct soft_shared *file = atomic_load(&domain->file);
    struct soft_domain **link = &device->shared_domains;

    while (domain->share_id && *link != domain)
        link = &(*link)->next;
    if (domain->share_id)
        *link = domain->next;
    if (file)
        soft_shared_leave(file);
}

void soft_domain_free(struct soft_domain *domain)
{
    struct soft_shared *file = atomic_load(&domain->file);

    if (file)
        soft_shared_drop(file);
    free(domain);
}

/* ---- Other processes ------------------------------------------------------------------------------------------- */

/* Return the file of a domain, created on first use, or NULL and errno. Call under device->lock. */
static struct soft_shared *domain_file(struct soft_device *device, struct soft_domain *domain)
{
    struct soft_shared *file = atomic_load(&domain->file);

    assert_held(&device->lock);
    if (file)
        return file;
    if (!domain->share_id) {
        errno = EINVAL;
        return NULL;
    }
    file = soft_shared_create(device);
    if (file && (errno = soft_shared_join(file, true))) {
        int error = errno;

        soft_mutex_give(&device->lock);
        soft_shared_drop(file);
        soft_mutex_take(&device->lock);
        errno = error;
        return NULL;
    }
    if (file)
        atomic_store(&domain->file, file);
    return file;
}

static struct soft_shared *file_of_pd(struct ibv_pd *ibv_pd)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    struct soft_shared *file;

    if (soft_stale(context)) {
        errno = ENODEV;
        return NULL;
    }
    soft_mutex_take(&context->device->lock);
    file = domain_file(context->device, to_soft_pd(ibv_pd)->domain);
    soft_mutex_give(&context->device->lock);
    return file;
}

int soft_export_shpd(struct ibv_pd *pd, int *fd)
{
    struct soft_shared *file = file_of_pd(pd);

    if (!file)
        return errno;
    soft_shared_reap(file);
    *fd = soft_shared_export(file);
    return *fd < 0 ? errno : 0;
}

const struct alloc_area *soft_shared_area(struct ibv_pd *pd)
{
    struct soft_shared *file = file_of_pd(pd);

    if (!file)
        return NULL;
    soft_shared_hold(file);
    return &file->area;
}

/* Return the domain of a file that has an instance in this process, or NULL. Call under device->lock. */
static struct soft_domain *domain_of(const struct soft_device *device, const struct soft_shared *file)
{
    struct soft_domain *domain = device->shared_domains;

    assert_held(&device->lock);
    while (domain && atomic_load(&domain->file) != file)
        domain = domain->next;
    return domain;
}

/* Create this process's first instance of a domain, which then holds the file. Call under device->lock. */
static struct soft_pd *first_instance(struct soft_context *context, struct soft_shared *file, uint64_t share_key)
{
    struct soft_device *device = context->device;
    struct soft_pd *pd;

    errno = soft_shared_join(file, false);
    if (errno)
        return NULL;
    pd = soft_pd_new(context, NULL);
    if (!pd) {
        int error = errno;

        soft_shared_leave(file);
        errno = error;
        return NULL;
    }
    soft_shared_hold(file);
    pd->domain->share_id = next_share(device);
    pd->domain->share_key = share_key;
    pd->domain->next = device->shared_domains;
    atomic_store(&pd->domain->file, file);
    device->shared_domains = pd->domain;
    return pd;
}

struct ibv_pd *soft_import_shpd(struct ibv_context *ibv_context, int fd, uint64_t share_key)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_device *device = context->device;
    int error = soft_stale(context) ? ENODEV : soft_verb_error(context, SOFT_VERB_share_pd);
    struct soft_shared *file = NULL;
    struct soft_pd *pd = NULL;

    if (!error && !(file = soft_shared_import(device, fd)))
        error = errno;
    if (file) {
        struct soft_domain *domain;

        soft_mutex_take(&device->lock);
        domain = domain_of(device, file);
        pd = domain ? soft_pd_new(context, domain) : first_instance(context, file, share_key);
        if (!pd)
            error = errno;
        soft_mutex_give(&device->lock);
        soft_shared_drop(file);
    }
    errno = error;
    return pd ? &pd->pd : NULL;
}
