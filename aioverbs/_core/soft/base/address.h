/* Names and addresses of devices, from their GIDs. Pure: no I/O, no locks. */
#ifndef AIOVERBS_SOFT_BASE_ADDRESS_H
#define AIOVERBS_SOFT_BASE_ADDRESS_H

#include <stdint.h>
#include <sys/socket.h>

union ibv_gid;

enum { SOFT_GID_NAME = 33 };

/* Write the name of the device's socket in the directory: 32 hexadecimal digits. */
void soft_gid_name(const union ibv_gid *gid, char name[SOFT_GID_NAME]);

/* Write the TCP address of the device; `port` applies where the GID contains none. Return the length of the address; 0
 * where the GID has no address to connect to: it is link-local, or of the loopback network without a port. */
socklen_t soft_gid_address(const union ibv_gid *gid, uint16_t port, struct sockaddr_storage *address);

#endif
