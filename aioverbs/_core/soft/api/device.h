/* Interface of the software device: a verbs provider in this process that needs no kernel, no rdma-core and no root. It
 * opens an ordinary `struct ibv_context` inside of a `struct verbs_context`; the verbs that libibverbs exports are in
 * its `verbs_table`. */
#ifndef AIOVERBS_SOFT_API_DEVICE_H
#define AIOVERBS_SOFT_API_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/verbs_ops.h"
#include "soft/base/settings.h"

struct soft_options {
    enum soft_mode mode;
    uint64_t delay_ns; /* thread mode: delay of requests, in nanoseconds */
    /* device of this process: "soft0", or another device for each address. Port 0, for IPv4: a device whose port the
     * system chooses, the same one for each address as long as the process exists */
    struct soft_address address;
    /* settings of the fabric; they apply if no other context has the device open. NULL: soft_settings_default */
    const struct soft_settings *settings;
    /* NULL, or SOFT_ERROR_TEXT characters for details of a failure that errno does not tell; "" where it does */
    char *error_text;
};

enum { SOFT_ERROR_TEXT = 256 };

/* Number of live objects in a context. */
struct soft_counts {
    uint32_t pds, parent_domains, thread_domains, xrcds, mrs, mws, ahs, channels, cqs, srqs, qps;
    uint32_t overlaps; /* calls refused because another call was inside of the same unlocked driver half */
};

extern const struct verbs_table soft_verbs;

/* Open a device. Return NULL and errno on failure: EINVAL (mode; a delay in inline mode; an address that no host has
 * for its own, or that belongs to one network interface only), ENOMEM, EMFILE; with an address, the error of listening
 * there, such as EADDRINUSE and EADDRNOTAVAIL. */
struct ibv_context *soft_open(const struct soft_options *options);
int soft_close_device(struct ibv_context *context);

/* Let children of forks start anew from here on; soft_open calls this itself. Return 0 or an errno. */
int soft_watch_forks(void);

/* Return whether the context was opened before a fork that made this process: each verb on it fails with ENODEV. */
bool soft_is_stale(const struct ibv_context *context);

void soft_get_counts(struct ibv_context *context, struct soft_counts *counts);

/* Change the delay of requests that are posted from here on, for measurements and tests. Return EINVAL in inline mode.
 */
int soft_set_delay(struct ibv_context *context, uint64_t delay_ns);

/* ---- Peers of other processes ------------------------------------------------------------------------------ */

struct soft_fabric_stats;
struct soft_stream_stats;

/* Get the statistics of the fabric, for all contexts of the device; and of its streams: return their number, and write
 * the first `room` of them. */
void soft_get_fabric_stats(struct ibv_context *context, struct soft_fabric_stats *stats);
size_t soft_get_stream_stats(struct ibv_context *context, struct soft_stream_stats *streams, size_t room);

/* Write why peers cannot find the device, SOFT_ERROR_TEXT characters; "" if they can. */
void soft_get_fabric_error(struct ibv_context *context, char *why);

/* Return whether there may be peers: from the first queue pair with a remote peer until the last context is closed. */
bool soft_has_fabric(const struct ibv_context *context);

/* ---- Faults of the device ---------------------------------------------------------------------------------- */

/* Set the device's port down or up for all contexts, with an event in each. While the port is down, the device does not
 * respond. */
int soft_set_port(struct ibv_context *context, bool up);

/* Lose the device, for this context: verbs fail with EIO, except those that destroy objects or fetch completions and
 * events; nothing completes any more. DEVICE_FATAL is raised when no memory of requests in flight is accessed any more:
 * a copy by a peer in progress is waited for, at most SOFT_COPY_TIMEOUT_NS. */
int soft_lose(struct ibv_context *context);

/* Break an object, as a hardware fault does: the queue pair enters ERR and raises QP_FATAL; CQ_ERR; SRQ_ERR. Return 0
 * or an errno. */
int soft_break_qp(struct ibv_qp *qp);
int soft_break_cq(struct ibv_cq *cq);
int soft_break_srq(struct ibv_srq *srq);

/* Stop the context's worker thread and the device's fabric for good, before memory that requests refer to is freed at
 * the end of the process. */
void soft_halt(struct ibv_context *context);

#endif
