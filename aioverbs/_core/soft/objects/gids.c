/* GIDs of a device, its name, and the check of addresses. */
#define _GNU_SOURCE
#include "soft/objects/gids.h"

#include <arpa/inet.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "soft/base/address.h"
#include "soft/base/fork_fds.h"
#include "soft/objects/device.h"

/* ---- Addresses ------------------------------------------------------------------------------------------- */

static bool is_zero(const uint8_t *bytes, size_t count)
{
    while (count && !*bytes) {
        bytes++;
        count--;
    }
    return !count;
}

/* The address alone identifies an interface by its GID, but each interface has link-local addresses. IPv6 addresses
 * that contain an IPv4 address have the GID of the IPv4 address. */
bool soft_address_is_usable(const struct soft_address *address)
{
    const uint8_t *bytes = address->bytes;

    if (!address->port && address->family != AF_INET) /* only IPv4 GIDs tell the port to peers */
        return false;
    switch (address->family) {
    case AF_INET:
        return bytes[0] && bytes[0] < 224 && !(bytes[0] == 169 && bytes[1] == 254);
    case AF_INET6:
        if (is_zero(bytes, 8) && bytes[10] == 0xff && bytes[11] == 0xff)
            return false;
        if (is_zero(bytes, 12))
            return is_zero(bytes, 15) && bytes[15] == 1;
        return bytes[0] != 0xff && !(bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80);
    default:
        return false;
    }
}

bool soft_address_is_same(const struct soft_address *one, const struct soft_address *other)
{
    size_t size = one->family == AF_INET ? 4 : 16;

    if (one->family != other->family || !one->family)
        return one->family == other->family;
    return one->port == other->port && !memcmp(one->bytes, other->bytes, size);
}

void soft_device_name(const struct soft_address *address, char *name, size_t size)
{
    char text[INET6_ADDRSTRLEN] = "";

    if (!address->family) {
        snprintf(name, size, "soft0");
        return;
    }
    inet_ntop(address->family, address->bytes, text, sizeof(text));
    snprintf(name, size, address->family == AF_INET ? "soft0@%s:%u" : "soft0@[%s]:%u", text,
             (unsigned int)address->port);
}

/* ---- GIDs ------------------------------------------------------------------------------------------------ */

static void map_ipv4(union ibv_gid *gid, const uint8_t bytes[4])
{
    gid->raw[10] = gid->raw[11] = 0xff;
    memcpy(gid->raw + 12, bytes, 4);
}

static void from_address(union ibv_gid *gid, const struct soft_address *address)
{
    if (address->family == AF_INET6) {
        memcpy(gid->raw, address->bytes, sizeof(gid->raw));
        return;
    }
    map_ipv4(gid, address->bytes);
    /* Without a port, GIDs of the loopback network belong to devices that have no address. */
    if (address->port != SOFT_PORT || address->bytes[0] == 127) {
        gid->raw[8] = (uint8_t)(address->port >> 8);
        gid->raw[9] = (uint8_t)address->port;
    }
}

int soft_gid_reserve(const union ibv_gid *gid)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fd, error = 0;

    /* An abstract name leaves no file behind, and belongs to this process alone while the socket is open. */
    memcpy(name.sun_path + 1, "aioverbs-", 9);
    soft_gid_name(gid, name.sun_path + 10);
    soft_descriptors_hold();
    fd = soft_descriptor_own(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    soft_descriptors_release();
    if (fd < 0)
        return -1;
    if (bind(fd, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 10 + 32)))
        error = errno;
    if (!error)
        return fd;
    soft_descriptor_close(fd);
    errno = error;
    return -1;
}

/* Choose a GID of the loopback network for a device without an address, except 127.0.0.1, which every host uses. With
 * so few bits, two of some thousand devices of a host would collide, so the GID is reserved before any peer learns it.
 * Where abstract sockets do not exist, reserving fails, but peers cannot connect to this device either. */
static int choose_loopback_gid(struct soft_device *device)
{
    union ibv_gid *gid = &device->gids[1];
    uint8_t random[3];
    int attempts;

    for (attempts = 0; attempts < 64; attempts++) {
        if (getentropy(random, sizeof(random)))
            return errno;
        map_ipv4(gid, (uint8_t[4]){127, random[0] ? random[0] : 1, random[1], random[2]});
        device->gid_socket = soft_gid_reserve(gid);
        if (device->gid_socket >= 0 || errno != EADDRINUSE)
            return 0;
    }
    return EADDRINUSE;
}

/* GID 0 is the link-local address made from the GUID; GID 1, as with RoCE v2 on NICs, is made from the device's
 * address. A device without an address has no path to other hosts. */
int soft_gids_init(struct soft_device *device)
{
    uint8_t *own = device->gids[0].raw, random[8];
    int error = getentropy(random, sizeof(random)) ? errno : 0;

    if (!error)
        error = soft_descriptors_watch_forks();
    if (error)
        return error;
    memset(device->gids, 0, sizeof(device->gids));
    device->gid_socket = -1;
    own[0] = 0xfe;
    own[1] = 0x80;
    memcpy(own + 8, random, sizeof(random));
    own[8] = (uint8_t)((own[8] & 0xfc) | 2); /* locally administered, unicast */
    if (!device->address.family)
        return choose_loopback_gid(device);
    from_address(&device->gids[1], &device->address);
    return 0;
}

bool soft_gid_is_local(const struct soft_device *device, const union ibv_gid *gid)
{
    unsigned int i;

    for (i = 0; i < SOFT_GIDS; i++)
        if (!memcmp(gid->raw, device->gids[i].raw, sizeof(gid->raw)))
            return true;
    return false;
}

bool soft_gid_is_ipv4(const union ibv_gid *gid)
{
    return is_zero(gid->raw, 8) && gid->raw[10] == 0xff && gid->raw[11] == 0xff;
}
