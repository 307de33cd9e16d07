/* Reading from streams, by a thread that polls or by the fabric thread. All under progress. */
#ifndef AIOVERBS_SOFT_FABRIC_POLL_LOOP_H
#define AIOVERBS_SOFT_FABRIC_POLL_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct epoll_event;
struct soft_fabric;

/* Handle what peers sent, for a bounded time. Return whether there was anything. Without `all`, a few calls in a row
 * may look only at the stream that last had something. Call outside of grace sections, after grace_ready(). */
bool soft_fabric_poll_locked(struct soft_fabric *fabric, bool all);
/* Return whether there was anything but doorbells for frames that were handled before. */
bool soft_fabric_handle_events(struct soft_fabric *fabric, const struct epoll_event *events, int count);
void soft_fabric_sweep(struct soft_fabric *fabric, uint64_t now); /* handle deadlines */
/* Main function of the fabric thread, which takes progress itself */
void *soft_fabric_main(void *fabric);

#endif
