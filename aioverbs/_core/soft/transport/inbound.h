/* Callbacks of the fabric: requests and responses of remote peers. */
#ifndef AIOVERBS_SOFT_TRANSPORT_INBOUND_H
#define AIOVERBS_SOFT_TRANSPORT_INBOUND_H

#include "soft/fabric/fabric.h"

extern const struct soft_fabric_user soft_remote_user;

#endif
