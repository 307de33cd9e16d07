/* The wakeup channel: a thread that sleeps on it is woken by peers. */
#ifndef AIOVERBS_SOFT_FABRIC_WAKEUP_H
#define AIOVERBS_SOFT_FABRIC_WAKEUP_H

#include <stdbool.h>

struct soft_channel;
struct soft_fabric;

/* Make `channel` the wakeup channel if there is none. Return whether there is one now. */
bool soft_wakeup_channel_set(struct soft_fabric *fabric, struct soft_channel *channel);

/* Clear the wakeup channel if it is `channel`, or any one if NULL. Return whether it was cleared. */
bool soft_wakeup_channel_clear(struct soft_fabric *fabric, const struct soft_channel *channel);

#endif
