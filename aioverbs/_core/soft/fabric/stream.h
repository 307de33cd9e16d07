/* Structures that the parts of the fabric share. The comment of a field names its lock, as in soft/objects/device.h,
 * and also:
 *
 *    progress  under fabric->progress
 *    tx        under stream->tx
 *    both      written under progress and tx, read under either
 *    links     under fabric->links */
#ifndef AIOVERBS_SOFT_FABRIC_STREAM_H
#define AIOVERBS_SOFT_FABRIC_STREAM_H

#include <pthread.h>
#include <sys/epoll.h>

#include "soft/fabric/directory.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/fabric/ring.h"
#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/base/wait_budget.h"

#define SOFT_IN_SIZE (SOFT_FRAGMENT + (64u << 10)) /* bytes received and not yet handled */
#define SOFT_SMALL_ANSWERS (32u << 10)             /* bytes of small answers that are queued until the batch ends */
/* Worst case for queued answers: a request is handled only while no more than the small answers are queued; then may
 * come an answer with a fragment, and one without data for each frame that was at hand. */
#define SOFT_OUT_ANSWERS (SOFT_SMALL_ANSWERS + SOFT_FRAME_SIZE + SOFT_FRAGMENT + SOFT_IN_SIZE)
#define SOFT_OUT_REQUEST (SOFT_FRAME_SIZE + SOFT_FRAGMENT)
/* Memory of buffers: 320 KiB at most for a link, 544 KiB for a served stream, and 2 MiB that the two ends of a pair of
 * rings share. The kernel provides pages on first use: a few, while messages are small. */
_Static_assert(SOFT_IN_SIZE + SOFT_OUT_REQUEST < 321u << 10 && SOFT_IN_SIZE + SOFT_OUT_ANSWERS < 545u << 10, "");
#define SOFT_SOCKET_ROOM (1 << 19)    /* requested send buffer of a Unix socket; the system may allow less */
#define SOFT_HANDSHAKE_NS 2000000000u /* time limit for the handshake of a served stream, from accept() on */
/* Time limit for the handshake of a link. The link may first wait in its peer's backlog, behind as many silent
 * connections as the backlog holds. A link that gave up before they are worked off would start again behind connections
 * that came meanwhile, for ever. Working off a backlog takes SOFT_PATIENCE_NS for each SOFT_MAX_HANDSHAKES of
 * SOMAXCONN, 8 s; and longer if the peer's `ulimit -n`, or its connected peers, leave it fewer places. */
#define SOFT_CONNECT_NS 30000000000ull
#define SOFT_PATIENCE_NS 500000000u /* time that a handshake has before a waiting connection may evict it */
#define SOFT_MAX_HANDSHAKES 256u    /* handshakes at a time, for each enum soft_kind */
/* Served streams at a time, for each kind; also limited to a quarter of the process's descriptors. */
#define SOFT_MAX_SERVED 4096u
#define SOFT_LINGER_NS 1000000000u /* time for which an unused link stays connected */
#define SOFT_TURN_BYTES SOFT_OUT_REQUEST

/* Descriptor that epoll watches. Embedded as the first member. */
struct soft_watch {
    enum { SOFT_WATCH_WAKE, SOFT_WATCH_UNIX, SOFT_WATCH_TCP, SOFT_WATCH_TIMER, SOFT_WATCH_STREAM } what; /* const */
    int fd; /* progress; of a stream: both */
};

enum soft_stage {
    SOFT_CLOSED,     /* links only: a served stream is freed when it closes */
    SOFT_CONNECTING, /* link: the socket connects */
    SOFT_GREETING,   /* link: waits for WELCOME; served: waits for HELLO */
    SOFT_PROVING,    /* waits for PROOF; of a link: with a secret only */
    SOFT_OPEN,
};

/* Kinds of streams. Each kind has its own limit of handshakes: peers that use up one limit do not affect the others. */
enum soft_kind { SOFT_SERVED_UNIX, SOFT_SERVED_TCP, SOFT_OUTGOING, SOFT_KINDS };

/* Statistics counter that the end of a stream adds to. */
enum soft_end { SOFT_END_LOST, SOFT_END_REFUSED_PEER, SOFT_END_REFUSED_FRAME, SOFT_END_CONNECT, SOFT_END_UNUSED };

/* Gate of a link: the first memory that the peer touches with each system call that copies data. The gate is a page of
 * its own; it is closed by removing all access rights to that page. */
struct soft_gate {
    uint8_t probe[SOFT_NONCE]; /* the peer writes its nonce here once, from its own process */
    uint8_t byte;              /* read or written first by each copy, with any value */
};

/* Page of words that a link shares with its peer: the state of the copy token of each direct request. */
struct soft_copy_token_page {
    _Atomic uint64_t words[SOFT_COPY_TOKENS]; /* untrusted: the peer may write any value */
};

struct soft_stream {
    struct soft_watch watch;
    struct soft_fabric *fabric;        /* const */
    bool is_link;                      /* const */
    enum soft_stage stage;             /* both */
    bool is_unix;                      /* progress, like the next fifteen */
    struct soft_stream *next, **place; /* list of fabric->streams */
    /* End of the handshake's time; served and open: the stream is not evicted before. */
    uint64_t deadline;
    union ibv_gid peer[2];
    uint32_t pid, uid;
    /* Descriptors that came with the first bytes, or -1; closed before the stream opens. Served: copy tokens, then
     * rings; link: page of the read cache. */
    int received_fds[SOFT_MEMORY_FILES];
    bool discarded;      /* a descriptor of another kind came and was discarded: no further one is accepted */
    bool has_read_cache; /* served: this device grants reads; link: the peer does */
    uint8_t hello[SOFT_HELLO_SIZE], welcome[SOFT_WELCOME_SIZE];
    uint8_t *in; /* buffer of SOFT_IN_SIZE bytes; [in_begin, in_end) is not handled yet */
    uint32_t in_begin, in_end;
    uint64_t frames_in, bytes_in;
    const char *refusal; /* the stream is to be closed for this reason; or NULL */
    enum soft_end refused_as;
    char refusal_text[96]; /* text of a `refusal` that is not a constant */
    bool ended;            /* rings: the socket has ended; what is in the ring is still handled */
    bool paused;           /* both. Served: no requests are handled, since there is no room for answers */
    bool stalled;          /* both: nothing is read, by soft_fabric_stall() */
    bool unfinished;       /* both: complete frames were left when the stream's turn was over */
    /* Progress. State of descriptor passing over a Unix socket. In the handshake a descriptor may come. Then either the
     * kernel cannot refuse descriptors, and they are rejected (peer of another user) or closed in this thread (peer of
     * this user); or the kernel refuses new ones, and the ones sent before are drained; or it refuses them and none is
     * left. */
    enum {
        SOFT_RIGHTS_HANDSHAKE,
        SOFT_RIGHTS_REJECT,
        SOFT_RIGHTS_CLOSE,
        SOFT_RIGHTS_DRAIN,
        SOFT_RIGHTS_REFUSED
    } rights;
    atomic_bool direct, has_rings; /* written under progress; read by senders */
    char why_not_direct[64], why_not_rings[64];
    /* Progress, like the next seven. Rings, see soft/fabric/shared_rings.h: their mapping (both), or NULL; list of
     * fabric->armed_rings or unarmed_rings, while the stream is open. */
    uint8_t *ring_memory;
    struct soft_stream *next_ring, **ring_place;
    struct soft_ring_consumer ring_in;
    bool armed;          /* the peer rings for what the stream waits for, if anything */
    bool wants_bytes;    /* it was asked to ring when it writes bytes */
    bool rung;           /* it has rung, or is about to: the socket gets a byte that is of no use any more */
    uint32_t idle_looks; /* looks at the ring that found nothing in a row, while there were many such streams */
    /* Progress: link whose next doorbell is also for answers in the ring, or NULL; its `doorbells` when these were
     * written. */
    struct soft_stream *payer;
    uint32_t owed_at;
    atomic_uint doorbells; /* doorbells to the peer, counted before each is sent; read anywhere */
    /* Progress, like the next one: list of fabric->deferred. */
    struct soft_stream *next_deferred;
    bool is_deferred;
    char reason[96]; /* progress: why the stream last ended */
    /* served: progress; links: both. pidfd of the peer's process, or -1; a link keeps it until the next connection */
    int pidfd;
    struct soft_copy_token_page
        *copy_tokens; /* served: progress. Links: const after the first connection, written under tx */
    uint64_t gate;    /* served: progress: address of the gate's byte in the peer's memory */

    struct soft_mutex tx;
    uint8_t *out; /* tx, like all that follows: [out_begin, out_end) waits for room in the socket */
    uint32_t out_begin, out_end, out_size;
    struct soft_ring_producer ring_out;
    /* The socket is full, and EPOLLOUT reports when there is room; or the ring is, and the peer rings. */
    bool blocked;
    atomic_bool starved; /* read anywhere: the ring is full */
    atomic_bool broken;  /* read anywhere: the socket was shut down; the thread that reads closes the stream */
    uint32_t events;     /* events that epoll watches */
    uint64_t frames_out, bytes_out, connected_times;
    struct soft_held_frame *held; /* frames that the fault plan delays, in order of their time */
    uint32_t held_bytes;
};

struct soft_link {
    struct soft_stream stream;
    union ibv_gid remote;        /* const */
    struct soft_link *next;      /* links, like the next five: chain of the hash table */
    struct soft_link *next_todo; /* queue of links to be connected */
    bool todo;
    uint32_t references;
    uint64_t unused_since;
    bool is_found; /* in fabric->table */

    /* tx, like the next seven: a connection was requested, and the attempt has not begun */
    bool connect_requested;
    uint64_t retry_at;                             /* earliest time of the next attempt to connect */
    uint64_t attempts;                             /* number of attempts to connect that have begun */
    uint64_t opened;                               /* number of the last attempt that led to a connection */
    struct soft_waiter *first, *last;              /* waiting queue pairs, in the order of their tickets */
    uint32_t waiting;                              /* number of waiting queue pairs */
    uint64_t tickets;                              /* last ticket that was given */
    uint64_t tokens_in_use[SOFT_COPY_TOKENS / 64]; /* tx: a bit for each copy token in use */
    uint32_t serials[SOFT_COPY_TOKENS];            /* tx: last serial number of each copy token */
    struct soft_wait_budget waited;                /* tx: time spent waiting for the peer to finish copies */
    bool overdue;           /* tx: the peer did not finish a copy in time: the link has no copy tokens any more */
    int tokens_fd;          /* progress: descriptor of `copy_tokens`, sent with HELLO, or -1 */
    struct soft_gate *gate; /* tx: NULL before the first offer; not to be accessed once `overdue` */

    /* Owner of the memory that reads on this link may copy. Written under progress; read in grace sections. */
    struct soft_read_cache_owner *_Atomic read_cache_owner;
    /* Progress: the last owner, then the earlier ones that a reader may still use. */
    struct soft_read_cache_owner *read_cache_owners;
};

struct soft_fabric {
    struct soft_device *device; /* const, like the next two */
    const struct soft_fabric_user *user;
    struct soft_settings settings;
    uint16_t port; /* const: TCP port; 0: the device has no address */

    struct soft_mutex setup;           /* starts, listens, stops */
    bool running;                      /* setup: the thread exists */
    bool listening;                    /* setup */
    atomic_bool halted;                /* written under setup: stopped at the end of the process */
    char error[256];                   /* setup: why listening failed */
    pthread_t thread;                  /* setup */
    struct soft_directory_entry entry; /* setup; unix_watch watches its socket */

    int epoll; /* const while the thread runs */
    struct soft_watch wake, unix_watch, tcp_watch;
    struct soft_watch timer; /* timerfd for delayed frames, set under `held` */
    atomic_bool stop;
    atomic_bool active;            /* the thread runs: there may be something to read */
    atomic_uint polls;             /* polls by other threads since soft_fabric_stop_polling() */
    atomic_uint frame_fault_plans; /* contexts whose fault plan may affect frames */
    atomic_bool thread_yields;     /* the thread leaves reading to threads that poll */
    atomic_bool sockets_due;       /* no thread has looked at the sockets for a while: the next poll does */

    struct soft_mutex wakeup_lock; /* protects `wakeup_channel`, see soft/fabric/wakeup.c */
    atomic_uint outgoing;          /* streams that wait for room in their sockets: changed under their tx */
    struct soft_channel *_Atomic wakeup_channel; /* written under wakeup_lock */

    struct soft_mutex progress;
    struct soft_stream *streams;
    struct soft_coalesced_ack ack;
    struct soft_stream *hot; /* stream that last had something to read */
    /* Open streams that use rings: the ones whose peers ring, and the others, at which each poll looks; and the next
     * one of these to look at, or NULL for the first. */
    struct soft_stream *armed_rings, *unarmed_rings, *next_unarmed;
    uint32_t ring_count, unarmed; /* number of all of them; of those that are not armed */
    uint32_t slow_rings;          /* progress: how often it was slow to give the pages of a ring back */
    /* Written under progress: list of streams with deferred answers, see soft_stream_send_deferred. */
    struct soft_stream *_Atomic deferred;
    uint32_t polls_for_reply; /* progress: polls before deferred answers are sent, so that a reply pays for doorbells */
    uint32_t hot_polls;
    uint32_t stream_count, handshakes;
    uint32_t streams_of[SOFT_KINDS], handshakes_of[SOFT_KINDS];
    uint32_t two_descriptors_of[SOFT_KINDS]; /* streams that count as two descriptors */
    atomic_ullong sweep_at;                  /* written under progress: next check of deadlines, CLOCK_MONOTONIC */
    bool listener_paused[SOFT_OUTGOING]; /* no peer is accepted there until the next sweep, or until a place is free */
    /* An event says that a connection waits and no stream may be evicted for it. */
    bool crowding_recorded[SOFT_OUTGOING];
    /* Streams closed so far: events that epoll returned before may be of a closed stream. */
    uint32_t closes;
    struct soft_fabric_stats stats; /* counters, and `event` as a ring */
    uint64_t event_count;

    /* Page that this device shares with its peers; written under progress. */
    struct soft_read_cache_page *_Atomic read_cache_page;
    int read_cache_fd;                    /* progress: descriptor of read_cache_page, or -1 */
    uint8_t read_cache_nonce[SOFT_NONCE]; /* progress: peers read it from their own processes */

    struct soft_mutex held;
    uint64_t held_at; /* held: time at which the timer expires; UINT64_MAX: it is not armed */

    struct soft_mutex links;
    struct soft_link *table[64];
    /* Queue of links to be connected; `last_todo` is valid only if there is a first one. */
    struct soft_link *first_todo, *last_todo;
};

/* ---- Functions ------------------------------------------------------------------------------------------------ */

int soft_stream_init(struct soft_stream *stream, struct soft_fabric *fabric, bool is_link); /* 0 or an errno */
void soft_stream_destroy(struct soft_stream *stream);

/* Begin a connection. Under progress. The stream takes ownership of the socket, also if this fails. Return 0 or an
 * errno. */
int soft_stream_begin(struct soft_stream *stream, int fd, bool is_unix, enum soft_stage stage);
void soft_stream_set_stage(struct soft_stream *stream, enum soft_stage stage);

/* Close a stream. Under progress, not from its own callbacks. A served stream is freed. */
void soft_stream_close(struct soft_stream *stream, enum soft_end end, const char *reason);

/* Count the end of a stream, and record why a peer was refused. Under progress. `peer` may be NULL. */
void soft_fabric_record_end(struct soft_fabric *fabric, enum soft_end end, const uint8_t *peer, const char *reason);

/* Send a frame. Under tx. Return 0, or EPIPE if the stream is broken. Bytes that the socket does not take are queued;
 * there must be room for them. */
int soft_stream_write(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                      unsigned int count);

/* Send a message of the handshake, with the descriptors of `fds` that are not -1. Under progress, while no frames are
 * sent. Return false if the message was not sent. */
bool soft_stream_send_message(struct soft_stream *stream, const void *message, size_t size,
                              const int fds[SOFT_MEMORY_FILES]);

/* Close the descriptors that came with the first bytes. Under progress. */
void soft_stream_drop_received(struct soft_stream *stream);

/* Shut the connection down. Under tx. The thread that reads notices, and closes the stream. */
void soft_stream_break(struct soft_stream *stream);

/* Send queued bytes as far as the socket or the ring takes them. Under tx. */
void soft_stream_flush(struct soft_stream *stream);

/* The same without the doorbell, which the caller sends. Return whether bytes were sent. */
bool soft_stream_flush_silently(struct soft_stream *stream);

/* Update the events that epoll watches. Under tx. */
void soft_stream_watch(struct soft_stream *stream);

/* Return whether frames go through rings. Under progress. */
static inline bool soft_stream_uses_rings(const struct soft_stream *stream)
{
    return stream->stage == SOFT_OPEN && stream->ring_memory;
}

static inline uint32_t soft_stream_pending(const struct soft_stream *stream)
{
    return stream->out_end - stream->out_begin;
}

#endif
