/* Calls of objects, and of the fabric, to what stands above them. The device has one table of them for all of its life
 * (api/device.c), so that a call needs no lock. */
#ifndef AIOVERBS_SOFT_OBJECTS_HOOKS_H
#define AIOVERBS_SOFT_OBJECTS_HOOKS_H

#include <stdbool.h>
#include <stdint.h>

#include "soft/objects/fault_counts.h"
#include "soft/objects/verbs.h"

struct soft_channel;
struct soft_context;
struct soft_cq;
struct soft_device;
struct soft_mr;
struct soft_qp;
struct soft_srq;
struct soft_stream;

struct soft_hooks {
    /* The fabric (soft/fabric/fabric.h): reads what peers sent; a poller stops, to sleep on a channel; whether peers
     * wake who sleeps on it; they do no more; a descriptor of the directory's locks, which is owned, or -1 and errno. */
    bool (*poll_peers)(struct soft_device *device, bool all);
    void (*stop_polling)(struct soft_device *device, struct soft_channel *channel);
    bool (*is_wakeup_channel)(const struct soft_device *device, const struct soft_channel *channel);
    void (*drop_wakeup_channel)(struct soft_device *device, const struct soft_channel *channel);
    int (*open_directory_locks)(const struct soft_device *device);

    /* Reads without asking (soft/fabric/read_cache.h): a key leads nowhere any more, or no key does. */
    void (*invalidate_key)(struct soft_device *device, uint32_t number);
    void (*invalidate_all)(struct soft_device *device);

    /* The fault plan (soft/fault/injection.h): the errno of a call that is to fail; completions that it holds of a queue
     * pair or shared receive queue are dropped; what is to become of a frame. */
    int (*verb_fault)(struct soft_context *context, enum soft_verb verb);
    void (*purge_held)(struct soft_context *context, const struct soft_cq *cq, const struct soft_qp *qp,
                       const struct soft_srq *srq);
    enum soft_frame_fault_kind (*frame_fault)(struct soft_qp *qp, enum soft_frame_kind kind,
                                              const struct soft_stream *stream, uint64_t *delay_ns);

    /* The transport: executes a send queue, and says when to come again; requests and messages that are under way give
     * up a region or a shared receive queue, which cannot be found any more. */
    uint64_t (*execute)(struct soft_qp *qp);
    void (*release_mr)(struct soft_device *device, const struct soft_mr *mr);
    void (*release_srq)(struct soft_device *device, const struct soft_srq *srq);
};

#endif
