/* Devices: a port with its contexts, and the tables of its objects.
 *
 * Every field of an object that two threads can reach has its rule beside it, here and in the other headers:
 *
 *   const      set before the object is returned to a caller, never changed
 *   driver     guarded by the object's driver half, which its caller enters by soft_half_enter
 *   sq, rq, cq guarded by that lock of the device half
 *   atomic     accessed atomically; the comment says which thread writes, and with which memory order
 */
#ifndef AIOVERBS_SOFT_OBJECTS_DEVICE_H
#define AIOVERBS_SOFT_OBJECTS_DEVICE_H

#include <stdatomic.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/settings.h"
#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"

struct soft_context;
struct soft_domain;
struct soft_fabric;
struct soft_hooks;
struct soft_shared;
struct soft_xrc_inode;

#define SOFT_GIDS 2u

/* Device for all contexts with the same address, or without an address. The child of a fork gets a new one. */
struct soft_device {
    struct ibv_device device;
    const struct soft_hooks *hooks;     /* const: calls to the layers above */
    struct soft_device *next;           /* const: the device that was created before */
    struct soft_address address;        /* const */
    union ibv_gid gids[SOFT_GIDS];      /* const, unique to this device */
    int gid_socket;                     /* const: socket whose name reserves the second GID, or -1 */
    int port_socket;                    /* const: socket that reserves the port that the system chose, or -1 */
    struct soft_table qps;              /* struct soft_qp by queue pair number */
    struct soft_table keys;             /* struct soft_key by key >> 8: memory regions and windows */
    struct soft_table srqs;             /* struct soft_srq by number */
    atomic_bool port_down;              /* written under `lock` */
    atomic_ullong serial;               /* serial number of the next queue pair */
    struct soft_mutex lock;             /* guards the lists below */
    struct soft_context *contexts;      /* all contexts */
    struct soft_domain *shared_domains; /* protection domains that have a share key */
    struct soft_shared *shared_files;   /* files of the domains that other processes share; under `lock` */
    struct soft_mutex xrcd_lock;        /* held while waiting for other processes */
    struct soft_xrc_inode *xrcds;       /* XRC domains that have an inode; under xrcd_lock */
    uint32_t next_share;                /* next identifier of a shared protection domain */
    struct soft_fabric *fabric;         /* const: connections to the devices of other processes */
    atomic_uint direct_parts;           /* parts of requests whose bytes a peer copies itself */
};

#endif
