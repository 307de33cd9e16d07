/* The fabric: carries frames between devices of different processes and hosts. This header is the interface that the
 * transport layer sees.
 *
 * A device sends requests over the streams that it connected (links), and answers requests over the streams that it
 * accepted (served streams). One thread at a time reads: it holds fabric->progress, and is the device's fabric thread
 * or a thread that polls. The sending side of each stream has a lock of its own (stream->tx). A peer is never trusted:
 * a frame that no honest peer sends closes its stream, and the reason is counted and recorded. */
#ifndef AIOVERBS_SOFT_FABRIC_FABRIC_H
#define AIOVERBS_SOFT_FABRIC_FABRIC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "soft/fabric/frame.h"

struct soft_channel;
struct soft_device;
struct soft_qp;
struct soft_link;
struct soft_stream;
struct soft_fabric;
struct soft_settings;
union ibv_gid;

/* ---- Callbacks of the transport (soft/transport/inbound.c) --------------------------------------------------- */

/* The thread that reads calls these: under fabric->progress, in a grace section, holding no other lock. The payload is
 * valid until the callback returns. A callback returns false when no honest peer sends the frame; it has then given the
 * reason to soft_stream_refuse().
 *
 * The fabric calls `request` only while there is room for the answers: one answer of at most one fragment, by
 * soft_stream_answer() from inside of the call or from the next `batch_end`; and one answer without data for each
 * request since the last `batch_end`. `batch_end` follows when no further frame is at hand. */
struct soft_fabric_user {
    bool (*request)(struct soft_stream *from, const struct soft_frame *frame, const uint8_t *payload);
    bool (*response)(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload);
    void (*batch_end)(struct soft_stream *from);
    /* Retry sending: the queue pair no longer waits for room or for the connection. */
    void (*kick)(struct soft_qp *qp);
    /* Return whether a queue pair is connected to the peer. In a grace section. */
    bool (*is_connected_to_peer)(const struct soft_stream *from);
};

/* ---- A device's fabric -------------------------------------------------------------------------------------- */

/* Create the fabric of a device, before the device is handed out and after its GIDs are known. Return 0 or an errno.
 * The fabric does nothing until soft_fabric_listen() or soft_link_get(). */
int soft_fabric_new(struct soft_device *device, const struct soft_fabric_user *user);

/* Stop the fabric when the last context closes: close all streams, end the thread, remove the directory entry. No queue
 * pair may be left. Call outside of grace sections. */
void soft_fabric_stop(struct soft_device *device);

/* Stop the fabric for good, at the end of the process. Queue pairs may be left: they are not served any more, and no
 * peer writes to their memory after this returns. A peer that is copying at this moment is waited for,
 * SOFT_COPY_TIMEOUT_NS at most. The fabric does not start again before soft_fabric_stop(). */
void soft_fabric_halt(struct soft_device *device);

/* Replace the settings, unless the fabric has started. */
void soft_fabric_configure(struct soft_device *device, const struct soft_settings *settings);

/* Return the settings. They are constant while a context is open, so the caller must have one open. */
const struct soft_settings *soft_fabric_settings(const struct soft_device *device);
bool soft_fabric_has_begun(const struct soft_device *device);

/* Listen for peers. Return 0 or an errno, which soft_fabric_error() explains. Call outside of grace sections, holding
 * no device lock; further calls do nothing. */
int soft_fabric_listen(struct soft_device *device);

/* Copy to `text` why the last soft_fabric_listen() failed, or "" if it succeeded. */
void soft_fabric_error(struct soft_device *device, char *text, size_t size);

/* Handle what peers sent, unless another thread is doing so. Never waits. Call outside of grace sections, holding no
 * device lock. Return whether there was anything to handle, or another thread is doing so.
 *
 * Callers that call again and again (poll_cq) pass false as `all`: most calls then look at one stream only, which is
 * cheaper; within a few calls every stream is looked at. */
bool soft_fabric_poll(struct soft_device *device, bool all);

/* Stop polling (req_notify_cq): the caller is about to sleep on `channel`, or, if that is NULL, polls no more. The
 * fabric thread reads from here on, unless a channel is the wakeup channel. */
void soft_fabric_stop_polling(struct soft_device *device, struct soft_channel *channel);

/* Return whether peers wake a thread that sleeps on this channel (soft/fabric/wakeup.c). Takes no lock: the caller asks
 * about a channel of its own. */
bool soft_fabric_is_wakeup_channel(const struct soft_device *device, const struct soft_channel *channel);

/* Drop `channel` as the wakeup channel, or any channel if NULL. The fabric thread reads from here on. */
void soft_fabric_drop_wakeup_channel(struct soft_device *device, const struct soft_channel *channel);

/* Start the fabric's thread, from inside of the fabric. Return 0 or an errno: ECANCELED at the end of the process. Any
 * locks but those of streams and of the fabric may be held. */
int soft_fabric_start(struct soft_fabric *fabric);
void soft_fabric_wake(struct soft_fabric *fabric);

/* ---- Links: connections to remote GIDs ----------------------------------------------------------------------- */

/* Find or create the link to a remote GID, and add a reference. Nothing is connected before the first send. Any lock
 * but those of streams may be held. Return NULL and errno: ENOMEM, or why the thread does not start. */
struct soft_link *soft_link_get(struct soft_device *device, const union ibv_gid *remote);
void soft_link_put(struct soft_link *link);

/* Send a frame. Under qp->sq_lock. Return:
 *
 * - 0: the frame is sent, or queued for sending;
 * - EAGAIN: `qp` waits for room, or for other queue pairs whose turn comes first;
 * - ENOTCONN: `qp` waits for the connection, and is kicked when the attempt to connect succeeds or fails;
 * - EHOSTUNREACH: the last attempt failed, and none is made before SOFT_CONNECT_RETRY_NS have passed since its end.
 *
 * After EHOSTUNREACH, `qp->waiter.retry_at` is the end of that time if no attempt was made since `qp` asked for one
 * (others asked before, or a connection was just lost); else it is 0. `data` has `frame->size` bytes in at most
 * SOFT_FRAME_SEGMENTS pieces; so has the data of an answer. */
int soft_link_send(struct soft_link *link, struct soft_qp *qp, const struct soft_frame *frame, const struct iovec *data,
                   unsigned int count);
#define SOFT_CONNECT_RETRY_NS 10000000u

/* Cancel the wait of a queue pair. A kick that has begun is over after grace_wait(). */
void soft_link_forget(struct soft_link *link, struct soft_qp *qp);

/* Return whether the current connection allows direct copies. */
bool soft_link_direct(const struct soft_link *link);

/* Return whether data goes through shared memory, if it is not copied directly. */
bool soft_link_has_rings(const struct soft_link *link);

/* Return whether a fault plan may affect frames of the link's device. */
bool soft_link_has_frame_faults(const struct soft_link *link);

/* Return whether the link's remote GID is `gid`: answers come only from there. */
bool soft_link_is_to(const struct soft_link *link, const union ibv_gid *gid);

/* ---- Copy tokens: permissions of the requester to copy from or to its memory --------------------------------- */

/* Open a copy token for one direct request. Return 0, with `*copy_token` and `*serial` for the frame, or EAGAIN if all
 * are in use. Under qp->sq_lock. */
int soft_copy_token_open(struct soft_link *link, uint16_t *copy_token, uint32_t *serial);

/* Close a copy token: its request was answered, or is given up. Return true if the peer copies nothing for the request
 * from here on; the token may be reused. Return false if the peer is copying right now: call again, as long as
 * soft_copy_token_may_wait() allows. Never waits. Any lock but those of streams may be held, as with the next two
 * functions. */
bool soft_copy_token_close(struct soft_link *link, uint16_t copy_token, uint32_t serial);

/* Cancel a copy token of which the frame was not sent: whatever the peer wrote to the token's word, it was told of no
 * memory. */
void soft_copy_token_cancel(struct soft_link *link, uint16_t copy_token, uint32_t serial);

/* Return whether the peer may be waited for any longer; the wait began at `begin`. False once waits have taken
 * SOFT_COPY_TIMEOUT_NS, this one alone or with earlier ones (soft/base/wait_budget.h). */
bool soft_copy_token_may_wait(struct soft_link *link, uint64_t begin);

/* Give the peer up: it was waited for as long as allowed. Shut the gate, break the stream, and use no copy tokens on
 * this link any more. */
void soft_copy_tokens_give_up(struct soft_link *link);

/* Upper bound, on the busiest machine, for the time of a system call that copies SOFT_DIRECT_FRAGMENT bytes, if the
 * kernel has to wait for none of their pages. */
#define SOFT_COPY_TIMEOUT_NS 2000000000u

/* ---- Streams ------------------------------------------------------------------------------------------------- */

/* Answer a request. Call from inside of `request` or `batch_end` of this stream. */
void soft_stream_answer(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                        unsigned int count);

/* Have the stream closed, and the reason counted and recorded. `reason` must stay valid until then. Call from inside of
 * a callback of this stream. */
void soft_stream_refuse(struct soft_stream *stream, const char *reason);
struct soft_stream *soft_link_stream(struct soft_link *link); /* for soft_stream_refuse() */

/* Return whether `gid` is one of the peer's two GIDs, or the one at `index` (0 or 1). The peer states its GIDs;
 * soft/fabric/handshake.c says how far they are verified. They do not change while the stream lasts. */
bool soft_stream_is_from(const struct soft_stream *stream, const union ibv_gid *gid);
const union ibv_gid *soft_stream_gid(const struct soft_stream *stream, unsigned int index);

struct soft_device *soft_stream_device(const struct soft_stream *stream);

/* A coalesced acknowledgement: the last one of a run to one queue pair acknowledges all before it. */
struct soft_coalesced_ack {
    const struct soft_stream *stream; /* stream of the requests, or NULL: there is no acknowledgement to send */
    struct soft_frame frame;
};

/* Return the coalesced acknowledgement of the stream's device. Under fabric->progress. */
struct soft_coalesced_ack *soft_stream_coalesced_ack(struct soft_stream *stream);

/* Return whether the peer was given the page that it needs to read without asking (soft/fabric/read_cache.h). */
bool soft_stream_has_read_cache(const struct soft_stream *stream);

/* Copy `frame->part` bytes between the requester's segments and `local` memory, if the frame's copy token is still
 * open: from the requester if `is_read`, else to it. Call from inside of `request`, after the local memory was checked.
 * Return 0, or ESTALE: the request was given up, so it needs no answer; or another errno: the copy failed, and the
 * caller only refuses the stream or sends a NAK. */
int soft_direct_move(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload,
                     const struct iovec *local, unsigned int count, bool is_read);

/* ---- Faults of networks -------------------------------------------------------------------------------------- */

/* Break all connections with the device of this GID (NULL: all), as if the network failed. They may be made anew.
 * Return their number. Call outside of grace sections, holding no device lock, as with the next function. */
unsigned int soft_fabric_cut(struct soft_device *device, const union ibv_gid *peer);

/* Stop or resume reading from the current connections with the device of this GID (NULL: all): such a peer seems to be
 * silent. Return their number. */
unsigned int soft_fabric_stall(struct soft_device *device, const union ibv_gid *peer, bool stall);

/* ---- Statistics ---------------------------------------------------------------------------------------------- */

struct soft_stream_stats {
    uint8_t own[16], peer[2][16]; /* GIDs; of a link that was never connected, peer[0] is the GID to connect to */
    bool is_link;                 /* true: this device sends requests; false: it receives them */
    bool connected, is_unix, direct;
    uint32_t pid, uid;       /* Unix sockets */
    char why_not_direct[64]; /* "" if direct */
    bool rings;              /* frames go through shared memory */
    char why_not_rings[64];  /* "" if they do */
    char reason[96];         /* why the last connection ended, or could not be made */
    uint64_t frames_in, frames_out, bytes_in, bytes_out;
    uint64_t connected_times;
    uint32_t waiting; /* number of waiting queue pairs */
};

struct soft_fabric_event {
    uint64_t time_ns; /* CLOCK_REALTIME */
    uint8_t peer[16]; /* GID, or zeroes if the peer had sent none yet */
    char reason[96];
};

enum { SOFT_FABRIC_EVENTS = 16 };

struct soft_fabric_stats {
    uint64_t accepted, connected; /* streams since the fabric exists */
    uint64_t refused_peers;       /* rejected before any frame: credentials, versions, secrets, timeouts */
    uint64_t refused_frames;      /* streams closed because of a frame */
    uint64_t lost;                /* streams that ended for any other reason */
    uint64_t failed_connects;
    uint32_t streams; /* current number */
    bool listening;
    char path[108], address[64]; /* addresses of the listening sockets, or "" */
    uint32_t events;             /* number of valid entries of `event`: the last refusals, oldest first */
    struct soft_fabric_event event[SOFT_FABRIC_EVENTS];
};

void soft_fabric_get_stats(struct soft_device *device, struct soft_fabric_stats *stats);

/* Describe the first `room` streams, and return the number of all streams. Waits for the thread that reads. */
size_t soft_fabric_get_streams(struct soft_device *device, struct soft_stream_stats *streams, size_t room);

#endif
