/* Links, from the inside of the fabric. */
#ifndef AIOVERBS_SOFT_FABRIC_LINK_H
#define AIOVERBS_SOFT_FABRIC_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "soft/fabric/stream.h"

/* Under progress. */
void soft_links_connect(struct soft_fabric *fabric); /* those that want to be; may close others, as accepting does */
void soft_link_connected(struct soft_link *link);    /* the socket is, or failed */
void soft_link_opened(struct soft_link *link);       /* the handshake is over */
void soft_links_sweep(struct soft_fabric *fabric, uint64_t now);

/* Halted, all streams closed, under setup, which keeps links from being freed: waits until no peer moves anything any
 * more, SOFT_COPY_TIMEOUT_NS at most. */
void soft_links_revoke_tokens(struct soft_fabric *fabric);

/* Under progress, in a grace section: those who wait are kicked, as long as there is room; or each once. */
void soft_link_kick(struct soft_link *link, bool all);

/* Under tx: whether EPOLLOUT is wanted for the sake of those who wait. */
static inline bool soft_link_has_waiters(const struct soft_link *link)
{
    return link->first != NULL;
}

#endif
