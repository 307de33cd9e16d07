/* The software device, as its users see it: a verbs provider in this process that needs no kernel, no rdma-core
 * and no root. What it opens is an ordinary `struct ibv_context` inside of a `struct verbs_context`; the verbs
 * that libibverbs exports are in its `verbs_table`. */
#ifndef AIOVERBS_SOFT_API_DEVICE_H
#define AIOVERBS_SOFT_API_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/verbs_ops.h"
#include "soft/base/settings.h"

struct soft_options {
    enum soft_mode mode;
    uint64_t delay_ns;           /* thread mode only */
    struct soft_address address; /* which device of this process: "soft0", or for each address one more */
    /* Of the fabric, taken over by who opens the device while nobody else has it open; NULL: soft_settings_default. */
    const struct soft_settings *settings;
    char *error_text; /* NULL, or SOFT_ERROR_TEXT characters */
};

enum { SOFT_ERROR_TEXT = 256 };

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
int soft_close_device(struct ibv_context *context);

/* Has children of forks begin anew from here on; soft_open does it by itself. 0 or an errno. */
int soft_watch_forks(void);

/* True where the context was opened before a fork that made this process: each verb on it answers ENODEV. */
bool soft_is_stale(const struct ibv_context *context);

void soft_get_counts(struct ibv_context *context, struct soft_counts *counts);

/* For measurements and tests: changes the delay of requests posted from here on. EINVAL in inline mode. */
int soft_set_delay(struct ibv_context *context, uint64_t delay_ns);

/* ---- Peers of other processes ------------------------------------------------------------------------------ */

struct soft_fabric_stats;
struct soft_stream_stats;

/* For all contexts of the device at once. Streams: how many there are, of which the first `room` are told. */
void soft_get_fabric_stats(struct ibv_context *context, struct soft_fabric_stats *stats);
size_t soft_get_stream_stats(struct ibv_context *context, struct soft_stream_stats *streams, size_t room);

/* Why peers do not find the device, "" where nothing is wrong with that: SOFT_ERROR_TEXT characters. */
void soft_get_fabric_error(struct ibv_context *context, char *why);

/* Whether there may be peers: from the first queue pair that has one, until the last context is closed. */
bool soft_has_fabric(const struct ibv_context *context);

/* ---- What happens to a device ------------------------------------------------------------------------------ */

/* The device's port goes down or up, for all contexts, with an event in each. While it is down nobody answers. */
int soft_set_port(struct ibv_context *context, bool up);

/* The device is gone as far as this context goes: verbs answer EIO, but for those that destroy or take what is there;
 * nothing completes any more. DEVICE_FATAL comes when no memory of what was under way is touched any more: a peer that
 * is just at it is waited for, SOFT_COPY_TIMEOUT_NS at most. */
int soft_lose(struct ibv_context *context);

/* An object breaks, as by a fault of the hardware: ERR and QP_FATAL; CQ_ERR; SRQ_ERR. 0 or an errno. */
int soft_break_qp(struct ibv_qp *qp);
int soft_break_cq(struct ibv_cq *cq);
int soft_break_srq(struct ibv_srq *srq);

/* Stops the context's C thread for good, and the device's fabric, before memory that requests refer to goes away (end of the process). */
void soft_halt(struct ibv_context *context);

#endif
