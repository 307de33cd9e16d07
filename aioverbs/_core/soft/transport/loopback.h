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

/* In a grace section. Finds the peer of `request->from` and executes the request there; where there is none that takes
 * it, the reply stays as it is. */
void soft_loopback_deliver(const struct soft_request *request, struct soft_reply *reply);

/* In a grace section. Whether the queue pair's device and its port work. Both loads are sequentially consistent, for
 * soft_set_port and soft_lose: see there. */
static inline bool soft_port_works(const struct soft_qp *qp)
{
    return !atomic_load(&qp->context->device->port_down) && !(atomic_load(&qp->context->special) & SOFT_SPECIAL_LOST);
}

/* Whether it receives at all. */
bool soft_can_receive(const struct soft_qp *peer);

#endif
