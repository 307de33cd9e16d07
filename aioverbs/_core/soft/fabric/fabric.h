/* The fabric: what carries frames between the devices of processes and hosts, as the execution of queue pairs sees it.
 *
 * A device sends requests over streams that it connected (links) and answers over streams that it accepted (served
 * ones). Bytes are read under fabric->progress, by one thread of the device or by who polls; each stream's sending
 * side has a lock of its own. A peer is never trusted: what no honest one sends closes its stream, with a reason that
 * is counted and kept.
 */
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

/* ---- What the queue pairs do (soft/transport/inbound.c) --------------------------------------------------------------- */

/* All of these are called by who reads: under fabric->progress, in a grace section, with no other lock held. The
 * payload is good until they return. False: no honest peer sends this; soft_stream_refuse() has said why.
 *
 * A request arrives while there is room for its answer, of one fragment at most, by soft_stream_answer() from inside
 * the call or from the `batch_ends` that follows, when no further frame is at hand; and for one answer without data
 * for each request since the last `batch_ends`. */
struct soft_fabric_user {
    bool (*request)(struct soft_stream *from, const struct soft_frame *frame, const uint8_t *payload);
    bool (*response)(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload);
    void (*batch_end)(struct soft_stream *from);
    /* It waited for room or for the connection, and waits no more: it tries again. */
    void (*kick)(struct soft_qp *qp);
    /* In a grace section: whether a queue pair is connected to the peer. */
    bool (*is_connected_to_peer)(const struct soft_stream *from);
};

/* ---- A device's fabric -------------------------------------------------------------------------------------- */

/* Before the device is handed out, its GIDs known: 0 or an errno. It does nothing yet. */
int soft_fabric_new(struct soft_device *device, const struct soft_fabric_user *user);

/* The last context closes: no streams, no thread, nothing in the directory any more. Outside of grace sections; no
 * queue pair is left. */
void soft_fabric_stop(struct soft_device *device);

/* The same at the end of the process: queue pairs may be left, which are not served any more, and whose memory no peer
 * writes to from here on; a peer that is just at it is waited for, SOFT_COPY_TIMEOUT_NS at most. Until it is stopped it does
 * not start again. */
void soft_fabric_halt(struct soft_device *device);

/* The settings from here on, unless it has begun. */
void soft_fabric_configure(struct soft_device *device, const struct soft_settings *settings);

/* Those that it has. They are const while a context is open, which the caller's is. */
const struct soft_settings *soft_fabric_settings(const struct soft_device *device);
bool soft_fabric_has_begun(const struct soft_device *device);

/* Peers find the device from here on: 0 or an errno, which soft_fabric_error() explains. Outside of grace sections,
 * no device lock held; again as often as one likes. */
int soft_fabric_listen(struct soft_device *device);

/* Why the last soft_fabric_listen failed: copied to `text`, "" where it did not. */
void soft_fabric_error(struct soft_device *device, char *text, size_t size);

/* Handles what there is, if nobody else does so just now: with no device lock held, outside of grace sections. Never
 * waits. Whether there was something. Who asks again and again, from poll_cq, need not ask for all: a look is cheaper
 * then, and finds within a few times what there is. */
bool soft_fabric_poll(struct soft_device *device, bool all);

/* Who polled goes to sleep (req_notify_cq), on that channel or, if that is NULL, for good: the thread takes over, unless
 * a channel leads. */
void soft_fabric_stop_polling(struct soft_device *device, struct soft_channel *channel);

/* Whether who sleeps on the channel is woken by peers, too (soft/fabric/wakeup.c). Without a lock: he asks about his own. */
bool soft_fabric_is_wakeup_channel(const struct soft_device *device, const struct soft_channel *channel);

/* It leads no more, or, if that is NULL, nobody does: the thread takes over. */
void soft_fabric_drop_wakeup_channel(struct soft_device *device, const struct soft_channel *channel);

/* From the inside of the fabric. The thread runs: 0, or an errno: ECANCELED at the end of the process. Any lock but a
 * stream's and the fabric's may be held. */
int soft_fabric_start(struct soft_fabric *fabric);
void soft_fabric_wake(struct soft_fabric *fabric);

/* ---- Links: the way to a remote GID -------------------------------------------------------------------------- */

/* Finds or makes it, and counts the caller; any lock but a stream's may be held. Nothing is connected before the first
 * send. NULL and errno: ENOMEM, or why the thread does not start. */
struct soft_link *soft_link_get(struct soft_device *device, const union ibv_gid *remote);
void soft_link_put(struct soft_link *link);

/* Under qp->sq_lock. 0: it is on its way. EAGAIN: `qp` waits for room, or for others whose turn comes first. ENOTCONN:
 * `qp` waits for the connection, and is kicked when there is one, or none. EHOSTUNREACH: there was none to be had just
 * now, and none is tried before SOFT_CONNECT_RETRY_NS have passed since the last one ended. `qp->waiter.again_at` is the
 * end of that time where no attempt was made since `qp` asked for one, as others did or a connection was just lost; else
 * it is 0. `data` is as long as `frame->size`, in SOFT_FRAME_SEGMENTS pieces at most; so is that of an answer. */
int soft_link_send(struct soft_link *link, struct soft_qp *qp, const struct soft_frame *frame, const struct iovec *data,
                   unsigned int count);
#define SOFT_CONNECT_RETRY_NS 10000000u

/* It waits no more. A kick that is on its way is over after grace_wait(). */
void soft_link_forget(struct soft_link *link, struct soft_qp *qp);

/* Whether data may be moved directly on the connection that there is now. */
bool soft_link_direct(const struct soft_link *link);

/* Whether the fault plan has something to say of its device's frames. */
bool soft_link_has_frame_faults(const struct soft_link *link);

/* Whether it leads to this GID: answers are only from there. */
bool soft_link_is_to(const struct soft_link *link, const union ibv_gid *gid);

/* ---- Leases: the requester's word that a direct request may still touch its memory --------------------------- */

/* For one direct request: 0 with `*copy_token` and `*serial` for its frame; EAGAIN: all are in use. Under qp->sq_lock. */
int soft_copy_token_open(struct soft_link *link, uint16_t *copy_token, uint32_t *serial);

/* It is answered, or given up. True: from here on the peer moves nothing of it, and the copy token is another request's.
 * False: the peer is just moving bytes; to be asked again, as long as soft_copy_token_may_wait. Never waits; any lock but a
 * stream's may be held, like the next two. */
bool soft_copy_token_close(struct soft_link *link, uint16_t copy_token, uint32_t serial);

/* Its frame did not go out, so whatever the peer wrote there, it knows no memory by it. */
void soft_copy_token_cancel(struct soft_link *link, uint16_t copy_token, uint32_t serial);

/* The peer is waited for, since `begin`, to leave memory. False: it had SOFT_COPY_TIMEOUT_NS for that, in this wait and those
 * before (soft/base/wait_budget.h), and is given up. */
bool soft_copy_token_may_wait(struct soft_link *link, uint64_t begin);

/* The peer was waited for as long as it may take: the link is torn, and has no more copy tokens. */
void soft_copy_tokens_give_up(struct soft_link *link);

/* How long a system call that moves SOFT_DIRECT_FRAGMENT bytes takes at most, on a machine that is as busy as can be,
 * where the kernel has to wait for none of their pages. */
#define SOFT_COPY_TIMEOUT_NS 2000000000u

/* ---- Streams ------------------------------------------------------------------------------------------------- */

/* From inside of `request` or `batch_ends` of this stream. */
void soft_stream_answer(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                        unsigned int count);

/* Closes it, counts and keeps the reason, which stays until then. From inside of a callback of this stream. */
void soft_stream_refuse(struct soft_stream *stream, const char *reason);
struct soft_stream *soft_link_stream(struct soft_link *link); /* to refuse it */

/* Whether the peer has this GID, and which GIDs it has: index 0 or 1. It says so, and soft/fabric/handshake.c says what that
 * is worth; it does not change. */
bool soft_stream_is_from(const struct soft_stream *stream, const union ibv_gid *gid);
const union ibv_gid *soft_stream_gid(const struct soft_stream *stream, unsigned int index);

struct soft_device *soft_stream_device(const struct soft_stream *stream);

/* The last of a run of acknowledgements to one queue pair, which tells of all of them. */
struct soft_coalesced_ack {
    const struct soft_stream *stream; /* that asked, or NULL: there is none */
    struct soft_frame frame;
};

/* That of the stream's device, for who reads. */
struct soft_coalesced_ack *soft_stream_coalesced_ack(struct soft_stream *stream);

/* Whether who is there was shown what it takes to read without asking (soft/fabric/read_cache.h). */
bool soft_stream_has_read_cache(const struct soft_stream *stream);

/* Moves `frame->part` bytes between the requester's segments and `local` memory, as the copy token allows: `pull` brings
 * them here, else they go there. From inside of `request`, the local memory checked. 0; ESTALE: the request
 * was given up, so there is nobody to answer; another errno: it does not work, and nothing else is to be done than to
 * refuse the stream or NAK. */
int soft_direct_move(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload,
                     const struct iovec *local, unsigned int count, bool is_read);

/* ---- What networks do ---------------------------------------------------------------------------------------- */

/* Ends all connections with the device of this GID (NULL: with all), as if they were cut; they may be made anew.
 * Outside of grace sections, no device lock held, like the next one. How many there were. */
unsigned int soft_fabric_cut(struct soft_device *device, const union ibv_gid *peer);

/* Reads nothing of those that there are now, until they are told otherwise or end: the peer seems to be silent. */
unsigned int soft_fabric_stall(struct soft_device *device, const union ibv_gid *peer, bool stall);

/* ---- Statistics ---------------------------------------------------------------------------------------------- */

struct soft_stream_stats {
    uint8_t own[16], peer[2][16]; /* GIDs; of a link that was never connected: peer[0] is the one that is looked for */
    bool is_link;                 /* requests go out; else they come in */
    bool connected, is_unix, direct;
    uint32_t pid, uid;       /* Unix sockets */
    char why_not_direct[64]; /* "" where it is */
    char reason[96];         /* why the last connection ended, or none was to be had */
    uint64_t frames_in, frames_out, bytes_in, bytes_out;
    uint64_t connected_times;
    uint32_t waiting; /* queue pairs */
};

struct soft_fabric_event {
    uint64_t time_ns; /* CLOCK_REALTIME */
    uint8_t peer[16]; /* its GID, or zeroes: it had told none yet */
    char reason[96];
};

enum { SOFT_FABRIC_EVENTS = 16 };

struct soft_fabric_stats {
    uint64_t accepted, connected; /* streams, ever */
    uint64_t refused_peers;       /* turned away before any frame: credentials, versions, secrets, too late */
    uint64_t refused_frames;      /* streams closed because of what came over them */
    uint64_t lost;                /* streams that ended otherwise */
    uint64_t failed_connects;
    uint32_t streams; /* now */
    bool listening;
    char path[108], address[64]; /* of the listening sockets, "" */
    uint32_t events;             /* of `event`, oldest first: the last refusals */
    struct soft_fabric_event event[SOFT_FABRIC_EVENTS];
};

void soft_fabric_get_stats(struct soft_device *device, struct soft_fabric_stats *stats);

/* How many streams there are; the first `room` of them are described. Waits for who reads just now. */
size_t soft_fabric_get_streams(struct soft_device *device, struct soft_stream_stats *streams, size_t room);

#endif
