/* Protection domains that contexts and processes share. */
#ifndef AIOVERBS_SOFT_OBJECTS_PD_SHARE_H
#define AIOVERBS_SOFT_OBJECTS_PD_SHARE_H

#include <stdint.h>

#include "abi/libibverbs.h"

struct soft_device;
struct soft_domain;

/* End a domain with its last instance: first, under device->lock, no caller finds it any more; then no thread uses it,
 * and it is freed. */
void soft_domain_unlink(struct soft_device *device, struct soft_domain *domain);
void soft_domain_free(struct soft_domain *domain);

/* Share a protection domain within a device, as ibv_alloc_shpd and ibv_share_pd of Solaris do: give the domain a share
 * key, and create a further instance in any context of the device. ibv_dealloc_pd ends an instance: regions and windows
 * created with the instance die with it (dereg_mr and dealloc_mw are still to be called for them), any other object
 * makes the call fail with EBUSY. The domain ends with its last instance.
 *
 * Set `*share` to the domain's identifier. Return 0; EINVAL for a parent domain; EEXIST if the domain is shared
 * already. */
int soft_alloc_shpd(struct ibv_pd *pd, uint64_t share_key, uint32_t *share);

/* Create an instance of a shared domain. Return NULL and errno on failure: ENOENT (no such identifier), EACCES (another
 * share key), ENOMEM. */
struct ibv_pd *soft_share_pd(struct ibv_context *context, uint32_t share, uint64_t share_key);

/* Export a shared domain to another process, as a descriptor of the file that its processes share
 * (soft/objects/shared.h); the caller closes it. The other process creates an instance with it as long as another
 * instance exists. Queue pairs of one process may use regions of another where their memory is that of
 * soft_shared_area; windows are valid in their own process only. When a process dies, its instances and its objects
 * end.
 *
 * Return 0; EINVAL where the domain has no share key; the errno of memfd_create or mmap. */
int soft_export_shpd(struct ibv_pd *pd, int *fd);

/* Create an instance of another process's domain. `share_key`: for further instances in this process by soft_share_pd.
 * Return NULL and errno on failure: ENOENT (the last instance has ended), EPROTO (not such a descriptor), EMFILE (too
 * many processes share it), ENOMEM. */
struct ibv_pd *soft_import_shpd(struct ibv_context *context, int fd, uint64_t share_key);

/* Return the memory of a domain that has a share key, with a reference that the caller drops; NULL and errno as above.
 */
struct alloc_area;
const struct alloc_area *soft_shared_area(struct ibv_pd *pd);

#endif
