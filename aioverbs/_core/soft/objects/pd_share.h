/* Protection domains that contexts and processes share. */
#ifndef AIOVERBS_SOFT_OBJECTS_PD_SHARE_H
#define AIOVERBS_SOFT_OBJECTS_PD_SHARE_H

#include <stdint.h>

#include "abi/libibverbs.h"

struct soft_device;
struct soft_domain;

/* Its last instance goes: nobody finds it any more, under device->lock; and then nobody uses it. */
void soft_domain_unlink(struct soft_device *device, struct soft_domain *domain);
void soft_domain_free(struct soft_domain *domain);

/* As ibv_alloc_shpd and ibv_share_pd of Solaris: gives a protection domain a share key, and opens a further instance
 * of it in any context of the device. An instance goes by ibv_dealloc_pd: regions and windows made with it die with
 * it (what is left of them is to be given back to dereg_mr and dealloc_mw), anything else makes it EBUSY. The domain
 * itself goes with its last instance.
 *
 * EINVAL: it is a parent domain; EEXIST: it is shared already. `*share` is its identifier. */
int soft_alloc_shpd(struct ibv_pd *pd, uint64_t share_key, uint32_t *share);

/* NULL and errno: ENOENT (no such identifier), EACCES (not its key), ENOMEM. */
struct ibv_pd *soft_share_pd(struct ibv_context *context, uint32_t share, uint64_t share_key);

/* Between processes: a descriptor of what they have in common (soft/objects/shared.h), for who is to have an instance, too; it
 * is the caller's to close. The other process makes an instance of it, for as long as there is another one. Regions of
 * one process may be used by queue pairs of another one where their memory is that of soft_shared_area; windows serve
 * in their own process. A process that dies is none any more, and takes its own with it.
 *
 * 0, or EINVAL: it has no share key; what memfd_create and mmap answer. */
int soft_export_shpd(struct ibv_pd *pd, int *fd);

/* NULL and errno: ENOENT (the last instance went), EPROTO (it is no such descriptor), EMFILE (too many processes have
 * it), ENOMEM. `share_key`: for further instances in this process, by soft_share_pd. */
struct ibv_pd *soft_import_shpd(struct ibv_context *context, int fd, uint64_t share_key);

/* The memory of a domain that has a share key, held once for the caller, who drops it; NULL and errno, as above. */
struct alloc_area;
const struct alloc_area *soft_shared_area(struct ibv_pd *pd);

#endif
