/* Protection domains that contexts of the device share: one domain, an instance of it for each who asked. */
#define _GNU_SOURCE
#include "soft.h"

#include <stdlib.h>

/* Under device->lock. */
static struct soft_domain *find(const struct soft_device *device, uint32_t share)
{
    struct soft_domain *domain = device->shared;

    while (domain && domain->share != share)
        domain = domain->next;
    return domain;
}

/* Under device->lock. It comes again when all others were given: an old one meets nothing rather than a stranger. */
static uint32_t next_share(struct soft_device *device)
{
    do
        device->next_share++;
    while (!device->next_share || find(device, device->next_share));
    return device->next_share;
}

int soft_alloc_shpd(struct ibv_pd *ibv_pd, uint64_t share_key, uint32_t *share)
{
    struct soft_context *context = to_soft_context(ibv_pd->context);
    struct soft_pd *pd = to_soft_pd(ibv_pd);
    struct soft_device *device = context->device;
    struct soft_domain *domain = pd->domain;
    int error = soft_stale(context) ? ENODEV : soft_refusal(context, SOFT_VERB_alloc_shpd);

    if (error)
        return error;
    if (pd->base != pd)
        return EINVAL;
    pthread_mutex_lock(&device->lock);
    if (domain->share) {
        error = EEXIST;
    } else {
        *share = domain->share = next_share(device);
        domain->share_key = share_key;
        domain->next = device->shared;
        device->shared = domain;
    }
    pthread_mutex_unlock(&device->lock);
    return error;
}

struct ibv_pd *soft_share_pd(struct ibv_context *ibv_context, uint32_t share, uint64_t share_key)
{
    struct soft_context *context = to_soft_context(ibv_context);
    struct soft_device *device = context->device;
    int error = soft_stale(context) ? ENODEV : soft_refusal(context, SOFT_VERB_share_pd);
    struct soft_domain *domain;
    struct soft_pd *pd = NULL;

    if (!error) {
        pthread_mutex_lock(&device->lock);
        domain = share ? find(device, share) : NULL;
        if (!domain)
            error = ENOENT;
        else if (domain->share_key != share_key)
            error = EACCES;
        else if (!(pd = soft_pd_new(context, domain)))
            error = errno;
        pthread_mutex_unlock(&device->lock);
    }
    if (error) {
        errno = error;
        return NULL;
    }
    return &pd->pd;
}

void soft_domain_free(struct soft_device *device, struct soft_domain *domain)
{
    struct soft_domain **link = &device->shared;

    while (domain->share && *link != domain)
        link = &(*link)->next;
    if (domain->share)
        *link = domain->next;
    free(domain);
}
