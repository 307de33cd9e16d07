/* The channel whose sleeper is woken by peers. */
#ifndef AIOVERBS_SOFT_FABRIC_WAKEUP_H
#define AIOVERBS_SOFT_FABRIC_WAKEUP_H

#include <stdbool.h>

struct soft_channel;
struct soft_fabric;

/* Whether it, or another one, leads from here on. */
bool soft_wakeup_channel_set(struct soft_fabric *fabric, struct soft_channel *channel);

/* The channel leads no more, or, if that is NULL, nobody does: whether one did. */
bool soft_wakeup_channel_clear(struct soft_fabric *fabric, const struct soft_channel *channel);

#endif
