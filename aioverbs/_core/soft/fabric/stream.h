/* What the parts of the fabric know of each other. Rules beside fields, as in soft/objects/device.h, and beyond:
 *
 *   progress  under fabric->progress
 *   tx        under stream->tx
 *   both      written under progress and tx, read under either
 *   links     under fabric->links
 */
#ifndef AIOVERBS_SOFT_FABRIC_STREAM_H
#define AIOVERBS_SOFT_FABRIC_STREAM_H

#include <pthread.h>
#include <sys/epoll.h>

#include "soft/fabric/directory.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/base/lock_order.h"
#include "soft/base/wait_budget.h"

#define SOFT_IN_SIZE (SOFT_FRAGMENT + (64u << 10)) /* of what was received and not handled */
#define SOFT_SMALL_ANSWERS (32u << 10)             /* are gathered until the batch ends */
/* What answers may need at worst: they are begun when no more than the small ones wait; then comes one with a
 * fragment, and then one without data for each frame that was at hand. */
#define SOFT_OUT_ANSWERS (SOFT_SMALL_ANSWERS + SOFT_FRAME_SIZE + SOFT_FRAGMENT + SOFT_IN_SIZE)
#define SOFT_OUT_REQUEST (SOFT_FRAME_SIZE + SOFT_FRAGMENT)
/* So a link costs 320 KiB at most and a served stream 544 KiB, of which the kernel gives pages when they are used first:
 * a few, where messages are small. */
_Static_assert(SOFT_IN_SIZE + SOFT_OUT_REQUEST < 321u << 10 && SOFT_IN_SIZE + SOFT_OUT_ANSWERS < 545u << 10, "");
#define SOFT_SOCKET_ROOM (1 << 19)    /* that a Unix socket is asked to have; the system gives what it allows */
#define SOFT_HANDSHAKE_NS 2000000000u /* of a peer that is served, from when it is accepted */
/* The same of a link, which may wait in its peer's backlog first, behind as many silent ones as that holds: one that
 * gave up before they are worked off would begin again behind those that came meanwhile, for ever. That takes
 * SOFT_PATIENCE_NS for each SOFT_MAX_HANDSHAKES of SOMAXCONN, 8 s, and longer where the peer's `ulimit -n`, or those
 * that are connected to it, leave it fewer places. */
#define SOFT_CONNECT_NS 30000000000ull
#define SOFT_PATIENCE_NS 500000000u /* that a handshake has for itself, however many others wait for its place */
#define SOFT_MAX_HANDSHAKES 256u    /* of each kind of streams at a time, like the next one */
#define SOFT_MAX_SERVED 4096u       /* and as many as find room in a quarter of the process's descriptors */
#define SOFT_LINGER_NS 1000000000u  /* how long a link stays connected that nobody uses */
#define SOFT_TURN_BYTES SOFT_OUT_REQUEST

/* What epoll tells of; embedded first. */
struct soft_watch {
    enum { SOFT_WATCH_WAKE, SOFT_WATCH_UNIX, SOFT_WATCH_TCP, SOFT_WATCH_TIMER, SOFT_WATCH_STREAM } what; /* const */
    int fd; /* progress; a stream's: both */
};

enum soft_stage {
    SOFT_CLOSED,     /* a link only: others are gone then */
    SOFT_CONNECTING, /* link: the socket is being connected */
    SOFT_GREETING,   /* link: waits for WELCOME; served: for HELLO */
    SOFT_PROVING,    /* waits for PROOF; a link only with a secret */
    SOFT_OPEN,
};

/* Each has places of its own for handshakes: who fills those of one kind keeps nobody out of the others. */
enum soft_kind { SOFT_SERVED_UNIX, SOFT_SERVED_TCP, SOFT_OUTGOING, SOFT_KINDS };

/* What a stream's end counts as. */
enum soft_end { SOFT_END_LOST, SOFT_END_REFUSED_PEER, SOFT_END_REFUSED_FRAME, SOFT_END_CONNECT, SOFT_END_UNUSED };

/* Where a link's peer begins with each system call that moves data: the first memory that it reaches. In a page of its
 * own, and shut by taking all rights to that page. */
struct soft_gate {
    uint8_t probe[SOFT_NONCE]; /* the peer writes its nonce here, once, from outside of the process */
    uint8_t byte;              /* that it brings or takes along, with any value */
};

/* One page of words that a link shares with its peer: what each direct request may still do. */
struct soft_copy_token_page {
    _Atomic uint64_t words[SOFT_COPY_TOKENS]; /* the peer may write anything here */
};

struct soft_stream {
    struct soft_watch watch;
    struct soft_fabric *fabric;        /* const */
    bool is_link;                      /* const */
    enum soft_stage stage;             /* both */
    bool is_unix;                      /* progress, like the next eleven */
    struct soft_stream *next, **place; /* of fabric->streams */
    uint64_t deadline;                 /* of the handshake; served and open: till then it gives way to nobody */
    union ibv_gid peer[2];
    uint32_t pid, uid;
    int received_fd;     /* came beside the first bytes: served: of copy tokens; link: of licences; or -1 */
    bool discarded;      /* one came that is none of these: no other one may */
    bool has_read_cache; /* served: it gives licences. Link: it has them */
    uint8_t hello[SOFT_HELLO_SIZE], welcome[SOFT_WELCOME_SIZE];
    uint8_t *in; /* SOFT_IN_SIZE bytes, of which [in_begin, in_end) are to be handled */
    uint32_t in_begin, in_end;
    uint64_t frames_in, bytes_in;
    const char *refusal; /* it is to be closed */
    enum soft_end refused_as;
    char refusal_text[96]; /* where `refusal` is no constant */
    bool paused;           /* both. Served: no room for answers, so no requests are taken */
    bool stalled;          /* both: nothing is read, by order */
    bool unfinished;       /* both: its turn was over before all frames were handled that are at hand */
    /* Progress. Descriptors may come over a Unix socket; the kernel cannot refuse them, from others or from a peer of
     * this user; it does; none is left. */
    enum {
        SOFT_RIGHTS_HANDSHAKE,
        SOFT_RIGHTS_REJECT,
        SOFT_RIGHTS_CLOSE,
        SOFT_RIGHTS_DRAIN,
        SOFT_RIGHTS_REFUSED
    } rights;
    atomic_bool direct; /* written under progress; read by who sends */
    char why_not_direct[64];
    char reason[96]; /* progress: why it ended last */
    int pidfd;       /* served: progress; links: both. The peer's process, or -1; a link keeps it until the next one */
    struct soft_copy_token_page
        *copy_tokens; /* served: progress. Links: const since the first connection, written under tx */
    uint64_t gate;    /* served: progress: where the byte of its gate is in the peer's memory */

    struct soft_mutex tx;
    uint8_t *out; /* tx, like all that follows: [out_begin, out_end) of it waits for room in the socket */
    uint32_t out_begin, out_end, out_size;
    bool blocked;    /* the socket took not all: EPOLLOUT tells when it goes on */
    bool broken;     /* ... or nothing any more: it was shut down, and who reads closes it */
    uint32_t events; /* that epoll watches for */
    uint64_t frames_out, bytes_out, connected_times;
    struct soft_held_frame *held; /* frames that the fault plan has come later, the next one first */
    uint32_t held_bytes;
};

struct soft_link {
    struct soft_stream stream;
    union ibv_gid remote;        /* const */
    struct soft_link *next;      /* links, like the next five */
    struct soft_link *next_todo; /* to be connected */
    bool todo;
    uint32_t references;
    uint64_t unused_since;
    bool is_found; /* in the table */

    bool connect_requested;                        /* tx, like the next seven: it is to be connected, and not begun */
    uint64_t retry_at;                             /* no attempt to connect before */
    uint64_t attempts;                             /* to connect that were begun */
    uint64_t opened;                               /* the last of them that led to a connection */
    struct soft_waiter *first, *last;              /* queue pairs that wait, in the order of their tickets */
    uint32_t waiting;                              /* how many */
    uint64_t tickets;                              /* the last one that was given */
    uint64_t tokens_in_use[SOFT_COPY_TOKENS / 64]; /* tx: a bit for each copy token that is in use */
    uint32_t serials[SOFT_COPY_TOKENS];            /* tx: the last one of each */
    struct soft_waited waited;                     /* tx: for the peer to leave memory */
    bool overdue;           /* tx: the peer kept memory that it was to leave: there are no copy tokens any more */
    int tokens_fd;          /* progress: to be sent with HELLO, or -1 */
    struct soft_gate *gate; /* tx: NULL before the first offer; not to be touched when the peer is overdue */

    /* Owner of the memory that reads on this link may copy. Written under progress; read in grace sections. */
    struct soft_read_cache_owner *_Atomic read_cache_owner;
    /* Progress: the last owner, then the earlier ones that a reader may still use. */
    struct soft_read_cache_owner *read_cache_owners;
};

struct soft_fabric {
    struct soft_device *device; /* const, like the next two */
    const struct soft_fabric_user *user;
    struct soft_settings settings;
    uint16_t port; /* const: of TCP; 0: the device has no address */

    struct soft_mutex setup;           /* starting, listening, stopping */
    bool running;                      /* setup: the thread runs */
    bool listening;                    /* setup */
    atomic_bool halted;                /* written under setup: for good */
    char error[256];                   /* setup: why listening failed */
    pthread_t thread;                  /* setup */
    struct soft_directory_entry entry; /* setup; its socket is watched by unix_watch */

    int epoll; /* const while it runs */
    struct soft_watch wake, unix_watch, tcp_watch;
    struct soft_watch timer; /* of frames that come later; a timerfd, set under `held` */
    atomic_bool stop;
    atomic_bool active;            /* it runs: there may be something to look at */
    atomic_uint polls;             /* by others than the thread, since the last rest */
    atomic_uint frame_fault_plans; /* contexts whose fault plan has something to say of frames */
    atomic_bool thread_yields;     /* the thread leaves the reading to who polls */

    struct soft_mutex wakeup_lock; /* see soft/fabric/wakeup.c */
    atomic_uint outgoing;          /* streams that wait for room in their sockets: changed under their tx */
    struct soft_channel *_Atomic wakeup_channel; /* written under leading */

    struct soft_mutex progress;
    struct soft_stream *streams;
    struct soft_coalesced_ack ack;
    struct soft_stream *hot;              /* the last one that had something */
    struct soft_stream *_Atomic deferred; /* written under progress: its answers wait, see soft_stream_send_deferred */
    uint32_t hot_polls;
    uint32_t stream_count, handshakes;
    uint32_t streams_of[SOFT_KINDS], handshakes_of[SOFT_KINDS];
    uint32_t two_descriptors_of[SOFT_KINDS]; /* that count as two descriptors */
    atomic_ullong sweep_at; /* written under progress: when deadlines are looked at again, CLOCK_MONOTONIC */
    bool listener_paused[SOFT_OUTGOING]; /* nobody is accepted there: until the next sweep, or until a place is free */
    bool crowding_recorded[SOFT_OUTGOING]; /* it was said that one waits there for which no other one gives way */
    uint32_t closes;                /* streams that were closed, ever: what epoll told before may be of one of them */
    struct soft_fabric_stats stats; /* what is counted of them, and `event` as a ring */
    uint64_t event_count;

    struct soft_read_cache_page *_Atomic read_cache_page; /* that this device shows its peers; written under progress */
    int read_cache_fd;                                    /* progress: of it, or -1 */
    uint8_t read_cache_nonce[SOFT_NONCE];                 /* progress: peers read it from outside of the process */

    struct soft_mutex held;
    uint64_t held_at; /* held: when the timer comes; UINT64_MAX: never */

    struct soft_mutex links;
    struct soft_link *table[64];
    struct soft_link *first_todo, *last_todo; /* to be connected, in this order; the last one only if there is one */
};

/* ---- Functions ------------------------------------------------------------------------------------------------ */

int soft_stream_init(struct soft_stream *stream, struct soft_fabric *fabric, bool is_link); /* 0 or an errno */
void soft_stream_destroy(struct soft_stream *stream);

/* Under progress. The socket, which is owned, is the stream's from here on, also where this fails. 0 or an errno. */
int soft_stream_begin(struct soft_stream *stream, int fd, bool is_unix, enum soft_stage stage);
void soft_stream_set_stage(struct soft_stream *stream, enum soft_stage stage);

/* Under progress, outside of its own callbacks. A served stream is freed. */
void soft_stream_close(struct soft_stream *stream, enum soft_end end, const char *reason);

/* Under progress: keeps and counts why a peer was refused; `peer` may be NULL. */
void soft_fabric_record_end(struct soft_fabric *fabric, enum soft_end end, const uint8_t *peer, const char *reason);

/* Under tx: 0, or EPIPE and it is broken. What the socket does not take is kept, for which there must be room. */
int soft_stream_write(struct soft_stream *stream, const struct soft_frame *frame, const struct iovec *data,
                      unsigned int count);

/* Under progress, while nobody else sends: a message of the handshake, with a descriptor or -1. False: it did not go. */
bool soft_stream_send_message(struct soft_stream *stream, const void *message, size_t size, int fd);

/* Under tx: nothing goes over it any more. Who reads finds it, and closes it. */
void soft_stream_break(struct soft_stream *stream);

/* Under tx: sends what waits, as far as it goes; watches for what there is to watch for. */
void soft_stream_flush(struct soft_stream *stream);
void soft_stream_watch(struct soft_stream *stream);

static inline uint32_t soft_stream_pending(const struct soft_stream *stream)
{
    return stream->out_end - stream->out_begin;
}

#endif
