/* Contexts: each is one opening of a device. */
#ifndef AIOVERBS_SOFT_OBJECTS_CONTEXT_H
#define AIOVERBS_SOFT_OBJECTS_CONTEXT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/base/epoch.h"
#include "soft/base/settings.h"
#include "soft/base/util.h"
#include "soft/objects/async_event.h"
#include "soft/objects/device.h"
#include "soft/objects/hooks.h"
#include "soft/objects/worker_thread.h"

struct soft_faults;

struct soft_context {
    struct soft_device *device;
    uint32_t generation; /* const: value of soft_generation at opening */
    enum soft_mode mode; /* const */
    atomic_ullong delay_ns;
    /* atomic: number of live objects, and the next handle */
    atomic_uint pds, parent_domains, thread_domains, xrcds, mrs, mws, ahs, channels, cqs, srqs, qps;
    atomic_uint overlaps, next_handle;
    struct soft_worker worker;
    struct soft_events events;
    struct soft_faults *faults;        /* const */
    atomic_uint special;               /* combination of enum soft_special; 0 on the usual path */
    struct soft_context *next, **link; /* under device->lock */
    struct verbs_context verbs;        /* must be last: libibverbs addresses it from its end */
};

static inline struct soft_context *to_soft_context(const struct ibv_context *context)
{
    return container_of(context, struct soft_context, verbs.context);
}

/* Conditions that take a call off the usual path.
 *
 * LOST is read in grace sections with sequential consistency: see soft_lose. FAULTS may be read relaxed: faults are
 * planned for requests that come after the planning, of the planning thread and of threads that it notified. The later
 * posting, or the lock or atomic operation by which another thread gets to execute those requests, orders the planning
 * before the read. A request that is executed concurrently with the planning may or may not see the plan. */
enum soft_special {
    SOFT_SPECIAL_FAULTS = 1, /* the fault plan has rules */
    SOFT_SPECIAL_LOST = 2,   /* the device is lost to this context, for good */
};

/* Return the errno with which this call of a verb fails before it does anything, because the device is lost or by the
 * fault plan; 0 on the usual path. */
static inline int soft_verb_error(struct soft_context *context, enum soft_verb verb)
{
    return atomic_load_explicit(&context->special, memory_order_relaxed)
               ? context->device->hooks->verb_fault(context, verb)
               : 0;
}

/* Return whether the context was opened before a fork that made this process. */
static inline bool soft_stale(const struct soft_context *context)
{
    return context->generation != soft_generation;
}

#endif
