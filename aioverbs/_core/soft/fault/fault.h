/* The fault plan of a context: what is to go wrong, when. A plan repeats itself: a fault strikes the n-th call of a
 * verb or the n-th request of a queue pair, and chances are drawn from a seed and such numbers, not from time, so
 * the same program meets the same faults again. */
#ifndef AIOVERBS_SOFT_FAULT_FAULT_H
#define AIOVERBS_SOFT_FAULT_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/objects/fault_counts.h"
#include "soft/objects/verbs.h"

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

struct soft_frame_fault {
    enum soft_mishap mishap;
    unsigned int kinds; /* a bit for each enum soft_frame_kind */
    uint32_t qp_num;    /* 0: of all */
    const uint8_t *gid; /* of the peer's device; NULL: of any */
    uint64_t delay_ns;
    struct soft_strike strike;
};

int soft_fault_frames(struct ibv_context *context, const struct soft_frame_fault *fault);

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

#endif
