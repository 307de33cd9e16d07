/* Requests to queue pairs of the same device. */
#ifndef AIOVERBS_SOFT_TRANSPORT_LOOPBACK_H
#define AIOVERBS_SOFT_TRANSPORT_LOOPBACK_H

#include <stdbool.h>

struct soft_qp;
struct soft_reply;
struct soft_request;

/* In a grace section. Finds the peer of `request->from` and executes the request there. */
void soft_link_deliver(const struct soft_request *request, struct soft_reply *reply);

/* Whether the queue pair's device and its port work; and whether it receives at all. */
bool soft_is_up(const struct soft_qp *qp);
bool soft_listens(const struct soft_qp *peer);

#endif
