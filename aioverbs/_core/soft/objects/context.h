/* The context: what one caller opened of a device. */
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
    uint32_t generation; /* const: soft_generation when it was opened */
    enum soft_mode mode; /* const */
    atomic_ullong delay_ns;
    /* atomic: what is alive, and the next handle to give */
    atomic_uint pds, parent_domains, thread_domains, xrcds, mrs, mws, ahs, channels, cqs, srqs, qps;
    atomic_uint overlaps, next_handle;
    struct soft_worker worker;
    struct soft_events events;
    struct soft_faults *faults;        /* const */
    atomic_uint special;               /* enum soft_special, any combination; 0 on the usual path */
    struct soft_context *next, **link; /* under device->lock */
    struct verbs_context verbs;        /* must be last: libibverbs' layout is counted from its end */
};

static inline struct soft_context *to_soft_context(const struct ibv_context *context)
{
    return container_of(context, struct soft_context, verbs.context);
}

/* LOST is looked for in grace sections, sequentially consistently: see soft_lose. FAULTS may be looked for relaxed. Faults
 * are planned for requests that come after the planning: those of the planning thread, and those of threads that it told
 * of it. Their posting, or a lock or an atomic operation by which another thread gets them to execute, is what orders the
 * planning before the look. What else is executed meanwhile is executed either way. */
enum soft_special {
    SOFT_SPECIAL_FAULTS = 1, /* the fault plan has something to say */
    SOFT_SPECIAL_LOST = 2,   /* the device was taken away, for good as far as this context goes */
};

/* The errno with which this call of a verb is to fail before it does anything: the device is lost, or the fault plan
 * has it so. 0 on the usual path. */
static inline int soft_verb_error(struct soft_context *context, enum soft_verb verb)
{
    return atomic_load_explicit(&context->special, memory_order_relaxed)
               ? context->device->hooks->verb_fault(context, verb)
               : 0;
}

static inline bool soft_stale(const struct soft_context *context)
{
    return context->generation != soft_generation;
}

#endif
