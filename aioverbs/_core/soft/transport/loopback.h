/* Requests to queue pairs of the same device. */
#ifndef AIOVERBS_SOFT_TRANSPORT_LOOPBACK_H
#define AIOVERBS_SOFT_TRANSPORT_LOOPBACK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/qp.h"

struct soft_reply;
struct soft_request;

/* Find the peer of `request->from`, and execute the request there. If no peer accepts the request, the reply is not
 * changed. In a grace section. */
void soft_loopback_deliver(const struct soft_request *request, struct soft_reply *reply);

/* Return whether the queue pair's device and port work. In a grace section. Both loads are sequentially consistent:
 * soft_set_port() and soft_lose() rely on that. */
static inline bool soft_port_works(const struct soft_qp *qp)
{
    return !atomic_load(&qp->context->device->port_down) && !(atomic_load(&qp->context->special) & SOFT_SPECIAL_LOST);
}

/* Return whether the state of a queue pair lets it receive. */
bool soft_can_receive(const struct soft_qp *peer);

#endif
