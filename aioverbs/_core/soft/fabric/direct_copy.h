/* Direct copies between the memory of two processes: finding out whether they are possible. */
#ifndef AIOVERBS_SOFT_FABRIC_DIRECT_COPY_H
#define AIOVERBS_SOFT_FABRIC_DIRECT_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "soft/fabric/handshake_wire.h"

struct soft_link;
struct soft_stream;

/* Link: offer direct copies in HELLO, if they are possible here. Served: find out whether they work with this peer. */
void soft_direct_offer(struct soft_link *link, struct soft_hello *hello);
void soft_direct_probe(struct soft_stream *stream, const struct soft_hello *hello, const uint8_t nonce[SOFT_NONCE]);
/* Return whether the peer wrote `nonce`. */
bool soft_direct_has_probed(struct soft_link *link, const uint8_t nonce[SOFT_NONCE]);
void soft_direct_close_gate(struct soft_link *link); /* under tx: copies that begin after this copy nothing */
void soft_direct_destroy(struct soft_link *link);    /* the link is about to be freed */
void soft_direct_allow_ptrace(void);                 /* let processes of this user read this one, if Yama does not */
bool soft_process_has_exited(int pidfd);
int soft_process_open(uint32_t pid); /* return a pidfd, or -1 */

#endif
