/* The fault plan of a context: what is to go wrong, when. A plan repeats itself: a fault strikes the n-th call of a
 * verb or the n-th request of a queue pair, and chances are drawn from a seed and such numbers, not from time, so
 * the same program meets the same faults again. */
#ifndef AIOVERBS_SOFT_FAULT_H
#define AIOVERBS_SOFT_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/libibverbs.h"

/* X(name): the verbs of the device, as a fault plan names and counts them. */
#define SOFT_VERBS(X)       \
    X(close_device)         \
    X(query_device)         \
    X(query_device_ex)      \
    X(query_port)           \
    X(query_gid)            \
    X(query_pkey)           \
    X(query_rt_values)      \
    X(get_async_event)      \
    X(alloc_pd)             \
    X(dealloc_pd)           \
    X(alloc_td)             \
    X(dealloc_td)           \
    X(alloc_parent_domain)  \
    X(alloc_shpd)           \
    X(share_pd)             \
    X(open_xrcd)            \
    X(close_xrcd)           \
    X(reg_mr)               \
    X(dereg_mr)             \
    X(alloc_mw)             \
    X(bind_mw)              \
    X(dealloc_mw)           \
    X(create_comp_channel)  \
    X(destroy_comp_channel) \
    X(get_cq_event)         \
    X(create_cq)            \
    X(create_cq_ex)         \
    X(resize_cq)            \
    X(modify_cq)            \
    X(destroy_cq)           \
    X(req_notify_cq)        \
    X(poll_cq)              \
    X(start_poll)           \
    X(create_srq)           \
    X(create_srq_ex)        \
    X(modify_srq)           \
    X(query_srq)            \
    X(get_srq_num)          \
    X(destroy_srq)          \
    X(post_srq_recv)        \
    X(create_qp)            \
    X(create_qp_ex)         \
    X(query_qp)             \
    X(modify_qp)            \
    X(destroy_qp)           \
    X(post_send)            \
    X(post_recv)            \
    X(create_ah)            \
    X(destroy_ah)

enum soft_verb {
#define X(name) SOFT_VERB_##name,
    SOFT_VERBS(X)
#undef X
        SOFT_VERB_COUNT
};

#define SOFT_ANY_VERB SOFT_VERB_COUNT

const char *soft_verb_name(enum soft_verb verb);

/* Which ones of a sequence that counts from 1: the first, then each `every`-th after it (0: no more), `times` at
 * most (0: without end). */
struct soft_strike {
    uint64_t first, every, times;
};

struct soft_fault_record {
    enum {
        SOFT_RECORD_VERB,
        SOFT_RECORD_REQUEST,
        SOFT_RECORD_RECEIVE,
        SOFT_RECORD_LOSS,
        SOFT_RECORD_DROP, /* of a frame, like the next three; in the order of enum soft_mishap */
        SOFT_RECORD_DUPLICATE,
        SOFT_RECORD_DELAY,
        SOFT_RECORD_CUT,
    } what;
    uint32_t which;   /* enum soft_verb, or a queue pair's number */
    uint64_t ordinal; /* of the call, request or frame, as the rule counts them; what its chance was drawn for */
    uint32_t value;   /* errno or status; enum soft_frame_kind */
};

/* All of these take a lock of their own; any thread may call them, not from an allocator. 0, or an errno: EINVAL,
 * ENOMEM (the plan is as it was), ENODEV (after a fork). Counting begins when the rule is made. Each rule counts all
 * that it is about; where several strike at once, the oldest one decides. A rule that can strike no more is gone. */

/* Calls of a verb (SOFT_ANY_VERB: of all, counted together) fail with `error` and do nothing. */
int soft_fault_verb(struct ibv_context *context, enum soft_verb verb, struct soft_strike strike, int error);

/* Each call of any verb fails with a chance of `per_million`; 0 ends that. */
int soft_fault_verbs_at_random(struct ibv_context *context, uint32_t per_million, int error);

/* Requests of a queue pair (0: of all, counted together) complete with `status` and do nothing else but break the
 * queue pair, as that status does. `receives`: receives, counted as messages come for them, which break their queue
 * pair. The sender sees what such a receive makes of its request: a remote operational error; where the status is
 * IBV_WC_LOC_LEN_ERR, that the request is invalid; nothing at all where its queue pair is unreliable. */
int soft_fault_request(struct ibv_context *context, uint32_t qp_num, bool receives, struct soft_strike strike,
                       enum ibv_wc_status status, uint32_t vendor_err);

/* Messages of a queue pair (0: of all) are lost on their way: counted by attempts, or at random. `per_million` of
 * 1,000,000 is a link that is cut. */
int soft_fault_loss(struct ibv_context *context, uint32_t qp_num, struct soft_strike strike);
int soft_fault_loss_at_random(struct ibv_context *context, uint32_t per_million);

/* Each request waits up to `max_ns` longer before it is executed, in engine mode; EINVAL in inline mode. */
int soft_fault_jitter(struct ibv_context *context, uint64_t max_ns);

/* Completions of a queue pair (0: of all) are held back from here on, until they are released: `count` of them
 * (0: all that are held). It is the context of the completion queue that holds them, also where an XRC target of
 * another one received. In the order in which they came, or, `shuffled`, drawn across queue pairs, where those of
 * one queue keep their order. What is held stays held for later releases, and new ones are held, too, until
 * soft_fault_unhold, which releases all. */
int soft_fault_hold(struct ibv_context *context, uint32_t qp_num);
size_t soft_fault_held(struct ibv_context *context);
size_t soft_fault_release(struct ibv_context *context, size_t count, bool shuffled);
void soft_fault_unhold(struct ibv_context *context);

/* ---- Frames: what a network does between devices of different processes ------------------------------------ */

/* What goes to and fro on behalf of a queue pair that has a remote peer. One request has one frame or more; one answer
 * may acknowledge many of them, so that how many there are depends on what is at hand at once. */
enum soft_frame_kind {
    SOFT_REQUEST_OUT, /* its own requests */
    SOFT_ANSWER_IN,   /* and what is answered to these */
    SOFT_REQUEST_IN,  /* the peer's requests */
    SOFT_ANSWER_OUT,
    SOFT_FRAME_KINDS,
};

/* What becomes of a frame: it is lost; comes a second time, behind what comes meanwhile; comes later, and what follows
 * it overtakes it; or its stream is cut, and it is lost as all is that is on its way. */
enum soft_mishap { SOFT_DROP, SOFT_DUPLICATE, SOFT_DELAY, SOFT_CUT, SOFT_MISHAPS };

struct soft_frame_fault {
    enum soft_mishap mishap;
    unsigned int kinds; /* a bit for each enum soft_frame_kind */
    uint32_t qp_num;    /* 0: of all */
    const uint8_t *gid; /* of the peer's device; NULL: of any */
    uint64_t delay_ns;
    struct soft_strike strike;
};

/* A stream keeps SOFT_HELD_BYTES at most of what comes later; what is more is lost. */
int soft_fault_frames(struct ibv_context *context, const struct soft_frame_fault *fault);
#define SOFT_HELD_BYTES (4u << 20)

/* Each frame meets with one of these with its chance; delays are drawn up to `max_delay_ns`. EINVAL: chances of more
 * than a million together. */
int soft_fault_frames_at_random(struct ibv_context *context, const uint32_t per_million[SOFT_MISHAPS],
                                uint64_t max_delay_ns);

/* All streams of the device with that of a GID (NULL: with all), for all of its contexts: they are cut, or nothing more
 * is read of them until they are told otherwise, or end. 0 or ENODEV; how many there were. */
int soft_fault_cut(struct ibv_context *context, const uint8_t *gid, unsigned int *count);
int soft_fault_stall(struct ibv_context *context, const uint8_t *gid, bool stall, unsigned int *count);

/* Where chances are drawn from; also begins the count of what random rules saw anew. */
void soft_fault_seed(struct ibv_context *context, uint64_t seed);

/* No rule is left; everything is released. Calls go on being counted, delayed frames come in their time. */
void soft_fault_clear(struct ibv_context *context);

/* From soft_fault_count(true) on, calls of verbs are counted, `verb` or all; for who wants to fail each in turn. */
void soft_fault_count(struct ibv_context *context, bool on);
uint64_t soft_fault_calls(struct ibv_context *context, enum soft_verb verb);

/* What was done so far, oldest first: copies up to `room` records from `from` on and returns how many there were in
 * all. The oldest 4096 are kept. */
size_t soft_fault_records(struct ibv_context *context, size_t from, struct soft_fault_record *records, size_t room);

/* ---- From the device's side ------------------------------------------------------------------------------- */

struct soft_context;
struct soft_cq;
struct soft_cqe;
struct soft_qp;
struct soft_srq;
struct soft_stream;

/* What chances were drawn for a queue pair since `epoch`. Under the plan's lock. */
struct soft_fault_counts {
    uint64_t epoch, attempts, delays;
};

/* The same of frames, under another lock. */
struct soft_frame_counts {
    uint64_t epoch, frames[SOFT_FRAME_KINDS];
};

struct soft_faults *soft_faults_new(uint64_t first_serial); /* of the queue pairs to come */
void soft_faults_free(struct soft_context *context);
int soft_fault_refusal(struct soft_context *context, enum soft_verb verb);

/* These are asked only while SOFT_SPECIAL_FAULTS is set, under whatever lock of the queue pair: once for each request
 * or receive, and the first time that it is tried; for each attempt to deliver a message; for each request that is
 * posted. SUCCESS: nothing happens. */
enum ibv_wc_status soft_fault_status(struct soft_qp *qp, bool receive, uint32_t *vendor_err);
bool soft_fault_loses(struct soft_qp *qp);
uint64_t soft_fault_delay(struct soft_qp *qp);

/* Asked while fabric->disturbed is not 0, for each frame of this kind that goes over this stream, which is open; under
 * whatever lock. SOFT_MISHAPS: nothing happens. */
enum soft_mishap soft_fault_frame(struct soft_qp *qp, enum soft_frame_kind kind, const struct soft_stream *stream,
                                  uint64_t *delay_ns);

/* In place of soft_cq_push. */
bool soft_fault_complete(struct soft_context *context, struct soft_cq *cq, const struct soft_cqe *cqe);

/* Forgets what is held of a queue pair or shared receive queue, and gives credits back, as soft_cq_purge does, which
 * calls it before it looks at the ring: what is being released meanwhile must be in there when this returns. */
void soft_fault_purge(struct soft_context *context, const struct soft_cq *cq, const struct soft_qp *qp,
                      const struct soft_srq *srq);

#endif
