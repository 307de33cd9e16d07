/* Verbs that the device does not have. */
#ifndef AIOVERBS_SOFT_API_UNSUPPORTED_H
#define AIOVERBS_SOFT_API_UNSUPPORTED_H

#include <stdint.h>

#include "abi/libibverbs.h"

/* Set the verbs of a context that fail with EOPNOTSUPP. */
void soft_unsupported_fill(struct verbs_context *verbs);
struct ibv_context *soft_import_device(int cmd_fd);
struct ibv_pd *soft_import_pd(struct ibv_context *context, uint32_t handle);
void soft_unimport_pd(struct ibv_pd *pd);
int soft_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int soft_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);

#endif
