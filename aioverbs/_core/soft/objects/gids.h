/* Addresses of devices, and the GIDs and the name made from them. */
#ifndef AIOVERBS_SOFT_OBJECTS_GIDS_H
#define AIOVERBS_SOFT_OBJECTS_GIDS_H

#include <stdbool.h>
#include <stddef.h>

#include "abi/libibverbs.h"
#include "soft/base/settings.h"

struct soft_device;

/* Return whether a device can have this address, which has a family. Port 0 stands for one that the system chooses. */
bool soft_address_is_usable(const struct soft_address *address);
/* Return whether two addresses name the same device; two without a family do. */
bool soft_address_is_same(const struct soft_address *one, const struct soft_address *other);
/* Write the device's name: "soft0", with "@ADDRESS:PORT" if it has an address. */
void soft_device_name(const struct soft_address *address, char *name, size_t size);

/* Set the GIDs of a device whose address is set: return 0 or an errno. */
int soft_gids_init(struct soft_device *device);

/* Reserve a GID on this host: return an owned socket, or -1 and errno. As long as the socket is open, other calls fail
 * with EADDRINUSE. */
int soft_gid_reserve(const union ibv_gid *gid);
bool soft_gid_is_local(const struct soft_device *device, const union ibv_gid *gid);

/* Return whether a GID is made from an IPv4 address, which its last four bytes are; bytes 8 and 9 may be a port. */
bool soft_gid_is_ipv4(const union ibv_gid *gid);

#endif
