/* Functions of librdmacm, loaded when an event channel is first opened: nothing is linked to the library. */
#ifndef AIOVERBS_CM_OPS_H
#define AIOVERBS_CM_OPS_H

#include <stdbool.h>

#include "abi/librdmacm.h"

/* X(result, name, parameters): the exported function rdma_<name>. Functions that return int return -1 and set errno. */
#define RDMA_CM_EXPORTED(X)                                                                                     \
    X(struct rdma_event_channel *, create_event_channel, (void))                                                \
    X(void, destroy_event_channel, (struct rdma_event_channel *))                                               \
    X(int, get_cm_event, (struct rdma_event_channel *, struct rdma_cm_event **))                                \
    X(int, ack_cm_event, (struct rdma_cm_event *))                                                              \
    X(int, create_id, (struct rdma_event_channel *, struct rdma_cm_id **, void *context, enum rdma_port_space)) \
    X(int, destroy_id, (struct rdma_cm_id *))                                                                   \
    X(int, bind_addr, (struct rdma_cm_id *, struct sockaddr *))                                                 \
    X(int, listen, (struct rdma_cm_id *, int backlog))                                                          \
    X(int, resolve_addr, (struct rdma_cm_id *, struct sockaddr * from, struct sockaddr * to, int timeout_ms))   \
    X(int, resolve_route, (struct rdma_cm_id *, int timeout_ms))                                                \
    X(int, init_qp_attr, (struct rdma_cm_id *, struct ibv_qp_attr *, int *mask))                                \
    X(int, connect, (struct rdma_cm_id *, struct rdma_conn_param *))                                            \
    X(int, establish, (struct rdma_cm_id *))                                                                    \
    X(int, accept, (struct rdma_cm_id *, struct rdma_conn_param *))                                             \
    X(int, reject, (struct rdma_cm_id *, const void *private_data, uint8_t length))                             \
    X(int, disconnect, (struct rdma_cm_id *))

struct rdma_cm_table {
#define X(result, name, parameters) result(*name) parameters;
    RDMA_CM_EXPORTED(X)
#undef X
};

/* Fill `table` from a shared library: "librdmacm.so.1", except in tests. Return NULL, or the reason of the failure:
 * text of the dynamic linker, valid until the thread's next call to it. errno is then ENOENT if the library cannot be
 * loaded, or ENOSYS if it lacks a function. */
const char *rdma_cm_table_load(struct rdma_cm_table *table, const char *library);

/* Return whether user space modifies queue pairs on the device of a bound identifier; over iWARP the kernel does. */
static inline bool rdma_cm_moves_queue_pairs(const struct rdma_cm_id *id)
{
    return id->verbs->device->transport_type == IBV_TRANSPORT_IB;
}

#endif
