/* A work request as the verbs take it, with space for two scatter/gather entries, which are enough for most. */
#ifndef AIOVERBS_WORK_REQUEST_H
#define AIOVERBS_WORK_REQUEST_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "abi/libibverbs.h"

#define REQUEST_SGES 2

struct request {
    union {
        struct ibv_send_wr send;
        struct ibv_recv_wr receive; /* begins like ibv_send_wr */
    };
    struct ibv_sge sge[REQUEST_SGES];
};

_Static_assert(offsetof(struct ibv_send_wr, next) == offsetof(struct ibv_recv_wr, next) &&
                   offsetof(struct ibv_send_wr, sg_list) == offsetof(struct ibv_recv_wr, sg_list) &&
                   offsetof(struct ibv_send_wr, num_sge) == offsetof(struct ibv_recv_wr, num_sge),
               "a receive request is not how a send request begins");

static inline void request_begin(struct request *request)
{
    memset(&request->send, 0, sizeof(request->send));
    request->send.sg_list = request->sge;
}

static inline void request_move(struct request *to, const struct request *from)
{
    *to = *from;
    if (from->send.sg_list == from->sge)
        to->send.sg_list = to->sge;
}

/* Move `count` requests to a larger array and free the old one; return NULL, and change nothing, without memory. */
static inline struct request *request_grow(struct request *requests, size_t count, size_t size)
{
    struct request *larger = malloc(size * sizeof(*larger));
    size_t i;

    for (i = 0; larger && i < count; i++)
        request_move(&larger[i], &requests[i]);
    if (larger)
        free(requests);
    return larger;
}

#endif
