/* Watched queue: a completion queue with a channel. */
#ifndef AIOVERBS_TESTS_SUPPORT_WATCHED_H
#define AIOVERBS_TESTS_SUPPORT_WATCHED_H

#include "support_home.h"

/* A pair whose receives complete on a watched queue. */
struct watched {
    struct home home;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq, *silent;
    struct ibv_qp *sender, *receiver;
};

/* Open a watched pair, whose channel is blocking or not. */
void open_watched(struct watched *watched, bool blocking);
void close_watched(struct watched *watched);

/* Send one message, which is complete on the watched queue on return. */
void deliver(struct watched *watched, bool solicited);

/* Take and acknowledge an event of the watched queue. Return the result of get_cq_event. */
int take_event(struct watched *watched);

void check_no_event(struct watched *watched);

#endif
