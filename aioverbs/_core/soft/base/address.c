#include "soft/base/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "abi/libibverbs.h"
#include "soft/base/settings.h"

void soft_gid_name(const union ibv_gid *gid, char name[SOFT_GID_NAME])
{
    unsigned int i;

    for (i = 0; i < sizeof(gid->raw); i++)
        snprintf(name + 2 * i, 3, "%02x", gid->raw[i]);
}

static bool is_ipv4(const uint8_t *raw)
{
    static const uint8_t nothing[8];

    return !memcmp(raw, nothing, sizeof(nothing)) && raw[10] == 0xff && raw[11] == 0xff;
}

static socklen_t ipv4_address(const uint8_t *raw, struct sockaddr_storage *address)
{
    struct sockaddr_in *to = (struct sockaddr_in *)address;
    uint16_t port = (uint16_t)(raw[8] << 8 | raw[9]);

    if (!raw[12] || raw[12] >= 224 || (raw[12] == 127 && !port))
        return 0;
    to->sin_family = AF_INET;
    to->sin_port = htons(port ? port : SOFT_PORT);
    memcpy(&to->sin_addr, raw + 12, 4);
    return sizeof(*to);
}

static socklen_t ipv6_address(const uint8_t *raw, uint16_t port, struct sockaddr_storage *address)
{
    struct sockaddr_in6 *to = (struct sockaddr_in6 *)address;
    static const uint8_t unspecified[16];

    if (raw[0] == 0xff || (raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80) || !memcmp(raw, unspecified, 16))
        return 0;
    to->sin6_family = AF_INET6;
    to->sin6_port = htons(port);
    memcpy(&to->sin6_addr, raw, 16);
    return sizeof(*to);
}

socklen_t soft_gid_address(const union ibv_gid *gid, uint16_t port, struct sockaddr_storage *address)
{
    memset(address, 0, sizeof(*address));
    return is_ipv4(gid->raw) ? ipv4_address(gid->raw, address) : ipv6_address(gid->raw, port, address);
}
