/* The device: a port with its contexts, and the tables of its objects.
 *
 * Every field of an object that two threads can reach has its rule beside it, here and in the other headers:
 *
 *   const      set before the object is handed out, never again
 *   driver     the object's driver half: its caller, through soft_half_enter
 *   sq, rq, cq under that lock of the device half
 *   atomic     by itself; the comment says who writes and with which order
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

/* A port for all contexts that were opened by one address, or by none; a child of a fork gets a new one. */
struct soft_device {
    struct ibv_device device;
    const struct soft_hooks *hooks; /* const: what stands above */
    struct soft_device *next;       /* const: the one that was made before */
    struct soft_address address;    /* const */
    union ibv_gid gids[SOFT_GIDS];  /* const, and nobody else's */
    int reserved;                   /* const: a socket by whose name others know that the second one is taken, or -1 */
    struct soft_table qps;          /* struct soft_qp by number */
    struct soft_table keys;         /* struct soft_key by key >> 8: memory regions and windows */
    struct soft_table srqs;         /* struct soft_srq by number */
    atomic_bool port_down;          /* written under `lock` */
    atomic_ullong serial;           /* the next queue pair's */
    struct soft_mutex lock;         /* guards the lists */
    struct soft_context *first;     /* all contexts */
    struct soft_domain *shared;     /* protection domains that have a share key */
    struct soft_shared *files;      /* those of them that other processes have, too; under `lock` */
    struct soft_mutex xrcd_lock;    /* other processes may be waited for under it */
    struct soft_xrc_inode *xrcds;   /* XRC domains that have an inode; under xrcd_lock */
    uint32_t next_share;            /* the next identifier of a shared protection domain */
    struct soft_fabric *fabric;     /* const: the way to the devices of others */
    atomic_uint direct_parts;       /* parts of requests whose bytes a peer copies itself */
};

#endif
