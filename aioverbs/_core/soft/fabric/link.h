/* Links, as other parts of the fabric use them. */
#ifndef AIOVERBS_SOFT_FABRIC_LINK_H
#define AIOVERBS_SOFT_FABRIC_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "soft/fabric/stream.h"

/* Under progress. */
/* Connect links of the todo queue; may close other links, as accepting may. */
void soft_links_connect(struct soft_fabric *fabric);
void soft_link_connected(struct soft_link *link); /* the socket connected, or failed to */
void soft_link_opened(struct soft_link *link);    /* the handshake succeeded */
void soft_links_sweep(struct soft_fabric *fabric, uint64_t now);
/* Return the link to a remote GID, or NULL; it stays as long as progress is held. */
struct soft_link *soft_link_find(struct soft_fabric *fabric, const union ibv_gid *gid);

/* Revoke all copy tokens, and wait until no peer copies any more, SOFT_COPY_TIMEOUT_NS at most. The fabric is halted
 * and all streams are closed. Under setup, which keeps links from being freed. */
void soft_links_revoke_tokens(struct soft_fabric *fabric);

/* Kick waiting queue pairs: as long as there is room, or, with `all`, each one once. Under progress, in a grace
 * section. */
void soft_link_kick(struct soft_link *link, bool all);

/* Return whether queue pairs wait, so that EPOLLOUT is to be watched. Under tx. */
static inline bool soft_link_has_waiters(const struct soft_link *link)
{
    return link->first != NULL;
}

#endif
