/* Calls of objects and of the fabric to the layers above them. A device has one table for all of its life
 * (api/device.c), so a call needs no lock. */
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
    /* Fabric (soft/fabric/fabric.h).
     *
     *   poll_peers           read what peers sent
     *   stop_polling         a polling thread stops, to sleep on a channel
     *   is_wakeup_channel    return whether frames of peers wake threads that sleep on the channel
     *   drop_wakeup_channel  frames of peers wake no thread on the channel any more
     *   open_directory_locks return an owned descriptor of the directory's lock file, or -1 and errno
     */
    bool (*poll_peers)(struct soft_device *device, bool all);
    void (*stop_polling)(struct soft_device *device, struct soft_channel *channel);
    bool (*is_wakeup_channel)(const struct soft_device *device, const struct soft_channel *channel);
    void (*drop_wakeup_channel)(struct soft_device *device, const struct soft_channel *channel);
    int (*open_directory_locks)(const struct soft_device *device);

    /* Read cache (soft/fabric/read_cache.h): one key, or every key, is not valid any more. */
    void (*invalidate_key)(struct soft_device *device, uint32_t number);
    void (*invalidate_all)(struct soft_device *device);

    /* Fault plan (soft/fault/injection.h).
     *
     *   verb_fault   return the errno of a call that is to fail, or 0
     *   purge_held   drop the held completions of a queue pair or shared receive queue
     *   frame_fault  return the fault of a frame
     */
    int (*verb_fault)(struct soft_context *context, enum soft_verb verb);
    void (*purge_held)(struct soft_context *context, const struct soft_cq *cq, const struct soft_qp *qp,
                       const struct soft_srq *srq);
    enum soft_frame_fault_kind (*frame_fault)(struct soft_qp *qp, enum soft_frame_kind kind,
                                              const struct soft_stream *stream, uint64_t *delay_ns);

    /* Transport.
     *
     *   execute      execute a send queue; return when to execute it again
     *   release_mr   end the uses of a region, which no key finds any more, by requests and messages in flight
     *   release_srq  the same of a shared receive queue
     */
    uint64_t (*execute)(struct soft_qp *qp);
    void (*release_mr)(struct soft_device *device, const struct soft_mr *mr);
    void (*release_srq)(struct soft_device *device, const struct soft_srq *srq);
};

#endif
