/* Queries of the device, its port, GIDs and P_Keys. */
#ifndef AIOVERBS_SOFT_API_QUERY_H
#define AIOVERBS_SOFT_API_QUERY_H

#include <stddef.h>
#include <stdint.h>

#include "abi/libibverbs.h"

int soft_query_device(struct ibv_context *context, struct ibv_device_attr *attr);
int soft_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                         struct ibv_device_attr_ex *attr, size_t size);
int soft_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values);
int soft_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out, size_t size);
int soft_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
int soft_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey);

#endif
