/* Leases: the pages in which a link and its peer agree on what may still be moved. */
#ifndef AIOVERBS_SOFT_FABRIC_COPY_TOKEN_H
#define AIOVERBS_SOFT_FABRIC_COPY_TOKEN_H

#include <stdbool.h>
#include <stdint.h>

struct soft_copy_token_page;
struct soft_link;
struct soft_stream;

int soft_copy_tokens_create(struct soft_link *link); /* the page: 0 or an errno */
void soft_copy_tokens_destroy(struct soft_link *link);
const char *soft_copy_tokens_map(struct soft_stream *stream); /* maps the page that came: NULL, or why not */
void soft_copy_tokens_unmap(struct soft_stream *stream);

bool soft_copy_tokens_are_overdue(struct soft_link *link); /* the peer kept memory that it was to leave */
void soft_copy_tokens_free_busy(struct soft_link *link);   /* under tx: its process is gone, and another one's comes */

/* The link is closed, and for good. Whether the peer moves nothing any more, of whatever request; else ask again. */
bool soft_copy_tokens_revoke_all(struct soft_link *link);

/* The peer's side: whether the request is still wanted, and is not given up until it is left. */
bool soft_copy_token_enter(struct soft_copy_token_page *page, uint16_t copy_token, uint32_t serial);
void soft_copy_token_leave(struct soft_copy_token_page *page, uint16_t copy_token, uint32_t serial);

#endif
