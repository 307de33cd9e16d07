/* Reading what is there, by who polls or by the thread. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_POLL_LOOP_H
#define AIOVERBS_SOFT_FABRIC_POLL_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct epoll_event;
struct soft_fabric;

/* Handles what there is, for a bounded time: whether there was something. Who does not ask for all may be told of none
 * of what came over other streams than the last one did, a few times. Not in a grace section; grace_ready(). */
bool soft_fabric_poll_locked(struct soft_fabric *fabric, bool all);
void soft_fabric_handle_events(struct soft_fabric *fabric, const struct epoll_event *events, int count);
void soft_fabric_sweep(struct soft_fabric *fabric, uint64_t now); /* what is due */
void *soft_fabric_main(void *fabric);                             /* the thread; it takes progress by itself */

#endif
