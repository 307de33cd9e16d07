/* What a GID tells of where its device is. Pure. */
#ifndef AIOVERBS_SOFT_BASE_ADDRESS_H
#define AIOVERBS_SOFT_BASE_ADDRESS_H

#include <stdint.h>
#include <sys/socket.h>

union ibv_gid;

enum { SOFT_GID_NAME = 33 };

/* Its socket's name in the directory: 32 hexadecimal digits. */
void soft_gid_name(const union ibv_gid *gid, char name[SOFT_GID_NAME]);

/* Its address for TCP, with this port where the GID does not tell one; 0 where it has none that leads anywhere: it is
 * link-local, or of the loopback network and of no port. */
socklen_t soft_gid_address(const union ibv_gid *gid, uint16_t port, struct sockaddr_storage *address);

#endif
