/* Copy tokens: a page shared by a link and its peer, in which they agree on the copies that may still be made. */
#ifndef AIOVERBS_SOFT_FABRIC_COPY_TOKEN_H
#define AIOVERBS_SOFT_FABRIC_COPY_TOKEN_H

#include <stdbool.h>
#include <stdint.h>

struct soft_copy_token_page;
struct soft_link;
struct soft_stream;

int soft_copy_tokens_create(struct soft_link *link); /* create the page; return 0 or an errno */
void soft_copy_tokens_destroy(struct soft_link *link);
const char *soft_copy_tokens_map(struct soft_stream *stream); /* map the page that came; return NULL, or why not */
void soft_copy_tokens_unmap(struct soft_stream *stream);

bool soft_copy_tokens_are_overdue(struct soft_link *link); /* the peer did not end a copy in time */
/* Under tx: the peer's process has exited, and another one connects. */
void soft_copy_tokens_free_busy(struct soft_link *link);

/* Revoke all tokens of a link that is closed for good. Return whether the peer copies nothing any more; if not, call
 * again. */
bool soft_copy_tokens_revoke_all(struct soft_link *link);

/* The peer's side: mark the token BUSY before a copy, and OPEN after it. Return false if the request was given up.
 * While the token is BUSY the requester does not give the request up. */
bool soft_copy_token_enter(struct soft_copy_token_page *page, uint16_t copy_token, uint32_t serial);
void soft_copy_token_leave(struct soft_copy_token_page *page, uint16_t copy_token, uint32_t serial);

#endif
