/* Moving bytes from memory to memory: whether that is possible. */
#ifndef AIOVERBS_SOFT_FABRIC_DIRECT_COPY_H
#define AIOVERBS_SOFT_FABRIC_DIRECT_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "soft/fabric/handshake_wire.h"

struct soft_link;
struct soft_stream;

/* Link: offers to be moved to and from: false where it cannot be. Served: whether it works with this peer. */
void soft_direct_offer(struct soft_link *link, struct soft_hello *hello);
void soft_direct_probe(struct soft_stream *stream, const struct soft_hello *hello, const uint8_t nonce[SOFT_NONCE]);
bool soft_direct_has_probed(struct soft_link *link, const uint8_t nonce[SOFT_NONCE]); /* whether it wrote that */
void soft_direct_close_gate(struct soft_link *link); /* under tx: from here on it begins to move nothing */
void soft_direct_destroy(struct soft_link *link);    /* the link is freed */
void soft_direct_allow_ptrace(void);                 /* others of this user, where the system wants that to be said */
bool soft_process_has_exited(int pidfd);
int soft_process_open(uint32_t pid); /* a descriptor that is owned, or -1 */

#endif
