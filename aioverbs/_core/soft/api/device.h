/* The software device, as its users see it: a verbs provider in this process that needs no kernel, no rdma-core
 * and no root. What it opens is an ordinary `struct ibv_context` inside of a `struct verbs_context`; the verbs
 * that libibverbs exports are in its `verbs_table`. */
#ifndef AIOVERBS_SOFT_DEVICE_H
#define AIOVERBS_SOFT_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "soft/fault/fault.h"
#include "abi/verbs_ops.h"

enum soft_mode {
    SOFT_INLINE, /* a request is executed in the call that posts it */
    SOFT_ENGINE, /* a C thread of the context executes it, not before `delay_ns` after it was posted */
};

#define SOFT_PORT 7470u /* of TCP, where no other one is said */

/* Where other hosts find a device. */
struct soft_address {
    int family; /* AF_INET or AF_INET6; 0: nowhere */
    uint16_t port;
    uint8_t bytes[16]; /* of IPv4 the first 4; network byte order */
};

struct soft_settings;

struct soft_options {
    enum soft_mode mode;
    uint64_t delay_ns;           /* engine mode only */
    struct soft_address address; /* which device of this process: "soft0", or for each address one more */
    /* Of the fabric, taken over by who opens the device while nobody else has it open; NULL: soft_settings_default. */
    const struct soft_settings *settings;
    char *why; /* NULL, or SOFT_WHY characters for what errno does not tell where opening fails; "" where it does */
};

enum { SOFT_WHY = 256 };

/* What is alive in a context. */
struct soft_counts {
    uint32_t pds, parent_domains, thread_domains, xrcds, mrs, mws, ahs, channels, cqs, srqs, qps;
    uint32_t overlaps; /* calls that were refused because another was inside of the same unlocked half */
};

extern const struct verbs_table soft_verbs;

/* NULL and errno: EINVAL (mode; a delay in inline mode; an address that no host has for its own, or that is that of one
 * network interface only), ENOMEM, EMFILE; with an address, why nobody can be let in there,
 * such as EADDRINUSE and EADDRNOTAVAIL. */
struct ibv_context *soft_open(const struct soft_options *options);

/* Counts forks from here on (soft_open does it by itself): how many lie between the first process that asked and
 * this one. 0 or an errno. */
int soft_watch_forks(void);
extern uint32_t soft_generation;

static inline uint32_t soft_fork_count(void)
{
    return soft_generation;
}

/* True where the context was opened before a fork that made this process: each verb on it answers ENODEV. */
bool soft_is_stale(const struct ibv_context *context);

void soft_count(struct ibv_context *context, struct soft_counts *counts);

/* For measurements and tests: changes the delay of requests posted from here on. EINVAL in inline mode. */
int soft_set_delay(struct ibv_context *context, uint64_t delay_ns);

/* ---- Peers of other processes ------------------------------------------------------------------------------ */

struct soft_fabric_stats;
struct soft_stream_stats;

/* For all contexts of the device at once. Streams: how many there are, of which the first `room` are told. */
void soft_tell_fabric(struct ibv_context *context, struct soft_fabric_stats *stats);
size_t soft_tell_streams(struct ibv_context *context, struct soft_stream_stats *streams, size_t room);

/* Why peers do not find the device, "" where nothing is wrong with that: SOFT_WHY characters. */
void soft_tell_problem(struct ibv_context *context, char *why);

/* Whether there may be peers: from the first queue pair that has one, until the last context is closed. */
bool soft_has_fabric(const struct ibv_context *context);

/* ---- Shared protection domains ---------------------------------------------------------------------------- */

/* As ibv_alloc_shpd and ibv_share_pd of Solaris: gives a protection domain a share key, and opens a further instance
 * of it in any context of the device. An instance goes by ibv_dealloc_pd: regions and windows made with it die with
 * it (what is left of them is to be given back to dereg_mr and dealloc_mw), anything else makes it EBUSY. The domain
 * itself goes with its last instance.
 *
 * EINVAL: it is a parent domain; EEXIST: it is shared already. `*share` is its identifier. */
int soft_alloc_shpd(struct ibv_pd *pd, uint64_t share_key, uint32_t *share);

/* NULL and errno: ENOENT (no such identifier), EACCES (not its key), ENOMEM. */
struct ibv_pd *soft_share_pd(struct ibv_context *context, uint32_t share, uint64_t share_key);

/* Between processes: a descriptor of what they have in common (soft/objects/shared.h), for who is to have an instance, too; it
 * is the caller's to close. The other process makes an instance of it, for as long as there is another one. Regions of
 * one process may be used by queue pairs of another one where their memory is that of soft_shared_area; windows serve
 * in their own process. A process that dies is none any more, and takes its own with it.
 *
 * 0, or EINVAL: it has no share key; what memfd_create and mmap answer. */
int soft_export_shpd(struct ibv_pd *pd, int *fd);

/* NULL and errno: ENOENT (the last instance went), EPROTO (it is no such descriptor), EMFILE (too many processes have
 * it), ENOMEM. `share_key`: for further instances in this process, by soft_share_pd. */
struct ibv_pd *soft_import_shpd(struct ibv_context *context, int fd, uint64_t share_key);

/* The memory of a domain that has a share key, held once for the caller, who drops it; NULL and errno, as above. */
struct alloc_area;
const struct alloc_area *soft_shared_area(struct ibv_pd *pd);

/* A region of the domain by its key, which another process registered: for scatter/gather entries, its address is what
 * that process knows it by, and `*here` where it is in this one. It can be used until that process gives it back; it is
 * given back itself by soft_unimport_mr, before the domain. NULL and errno: ENOENT (no region has this key), EFAULT
 * (its memory is that process' alone), ENOMEM. */
struct ibv_mr *soft_import_mr(struct ibv_pd *pd, uint32_t key, void **here, int *access);
int soft_unimport_mr(struct ibv_mr *mr);

/* ---- What happens to a device ------------------------------------------------------------------------------ */

/* The device's port goes down or up, for all contexts, with an event in each. While it is down nobody answers. */
int soft_set_port(struct ibv_context *context, bool up);

/* The device is gone as far as this context goes: verbs answer EIO, but for those that destroy or take what is there;
 * nothing completes any more. DEVICE_FATAL comes when no memory of what was under way is touched any more: a peer that
 * is just at it is waited for, SOFT_LEASE_NS at most. */
int soft_lose(struct ibv_context *context);

/* An object breaks, as by a fault of the hardware: ERR and QP_FATAL; CQ_ERR; SRQ_ERR. 0 or an errno. */
int soft_break_qp(struct ibv_qp *qp);
int soft_break_cq(struct ibv_cq *cq);
int soft_break_srq(struct ibv_srq *srq);

/* Stops the context's C thread for good, and the device's fabric, before memory that requests refer to goes away (end of the process). */
void soft_halt(struct ibv_context *context);

#endif
