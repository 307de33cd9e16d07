/* Queues whose completions are told to a channel. */
#ifndef AIOVERBS_TESTS_SUPPORT_WATCHED_H
#define AIOVERBS_TESTS_SUPPORT_WATCHED_H

#include "support_home.h"

/* A pair whose receiving end has its receives told to a channel. */
struct watched {
    struct home home;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq, *silent;
    struct ibv_qp *sender, *receiver;
};

/* `blocking`: what its descriptor is. */
void open_watched(struct watched *watched, bool blocking);
void close_watched(struct watched *watched);

/* One message, which completes on the watched queue by the time this returns. */
void deliver(struct watched *watched, bool solicited);

/* Takes an event of the watched queue and acknowledges it; get_cq_event's answer. */
int take_event(struct watched *watched);

void check_no_event(struct watched *watched);

#endif
