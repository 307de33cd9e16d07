/* Fault plan of a context: the faults to inject, and when. A plan is repeatable: a fault strikes the n-th call of a
 * verb or the n-th request of a queue pair, and random faults are drawn from a seed and such numbers, not from time. So
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

/* Elements of a sequence, counted from 1, that a fault strikes: the first, then each `every`-th after it (0: no further
 * one), at most `times` in all (0: no limit). */
struct soft_strike {
    uint64_t first, every, times;
};

struct soft_fault_record {
    enum {
        SOFT_RECORD_VERB,
        SOFT_RECORD_REQUEST,
        SOFT_RECORD_RECEIVE,
        SOFT_RECORD_LOSS,
        SOFT_RECORD_DROP, /* frames, like the next three; in the order of enum soft_frame_fault_kind */
        SOFT_RECORD_DUPLICATE,
        SOFT_RECORD_DELAY,
        SOFT_RECORD_CUT,
    } what;
    uint32_t which; /* enum soft_verb, or a queue pair's number */
    /* Number of the call, request or frame, as the rule counts them, or as its chance was drawn for. */
    uint64_t ordinal;
    uint32_t value; /* errno or status; enum soft_frame_kind */
};

/* Functions of this header take a lock of their own. Any thread may call them, but not an allocator. They return 0 or
 * an errno: EINVAL, ENOMEM (the plan is unchanged), ENODEV (after a fork). A rule counts from its creation. Each rule
 * counts all its subjects; if several strike at once, the oldest one decides. A rule that can strike no more is
 * removed. */

/* Make calls of a verb (SOFT_ANY_VERB: of all verbs, counted together) fail with `error` and do nothing. */
int soft_fault_verb(struct ibv_context *context, enum soft_verb verb, struct soft_strike strike, int error);

/* Make each call of any verb fail with a chance of `per_million`; 0 ends that. */
int soft_fault_verbs_at_random(struct ibv_context *context, uint32_t per_million, int error);

/* Make requests of a queue pair (0: of all, counted together) complete with `status` and do nothing else but break the
 * queue pair, as that status does. With `receives`, the same for receives, counted as messages arrive for them, which
 * break their queue pair. The sender gets a remote operational error for such a receive; for IBV_WC_LOC_LEN_ERR, an
 * invalid request; if its queue pair is unreliable, nothing. */
int soft_fault_request(struct ibv_context *context, uint32_t qp_num, bool receives, struct soft_strike strike,
                       enum ibv_wc_status status, uint32_t vendor_err);

/* Lose messages of a queue pair (0: of all): counted by attempts, or at random. A chance of 1,000,000 is a link that is
 * cut. */
int soft_fault_loss(struct ibv_context *context, uint32_t qp_num, struct soft_strike strike);
int soft_fault_loss_at_random(struct ibv_context *context, uint32_t per_million);

/* Delay each request by up to `max_ns` before it is executed, in the worker thread. EINVAL if requests are executed
 * inline. */
int soft_fault_jitter(struct ibv_context *context, uint64_t max_ns);

/* Hold completions of a queue pair (0: of all) back, until they are released. soft_fault_release() releases `count` of
 * them (0: all): in the order in which they came, or, with `shuffled`, in an order drawn across queue pairs, in which
 * completions of one queue keep their order. The context of the completion queue holds them, also if an XRC target of
 * another context received. Completions that are not released stay held, and new ones are held, too, until
 * soft_fault_unhold(), which releases all. */
int soft_fault_hold(struct ibv_context *context, uint32_t qp_num);
size_t soft_fault_held(struct ibv_context *context);
size_t soft_fault_release(struct ibv_context *context, size_t count, bool shuffled);
void soft_fault_unhold(struct ibv_context *context);

/* ---- Frames: faults of a network between devices of different processes ------------------------------------ */

struct soft_frame_fault {
    enum soft_frame_fault_kind mishap;
    unsigned int kinds; /* bit set of enum soft_frame_kind */
    uint32_t qp_num;    /* 0: of all queue pairs */
    const uint8_t *gid; /* GID of the peer's device; NULL: any */
    uint64_t delay_ns;
    struct soft_strike strike;
};

int soft_fault_frames(struct ibv_context *context, const struct soft_frame_fault *fault);

/* Apply each fault to frames at random, with its chance; delays are drawn up to `max_delay_ns`. EINVAL if the chances
 * add up to more than a million. */
int soft_fault_frames_at_random(struct ibv_context *context, const uint32_t per_million[SOFT_FRAME_FAULT_KINDS],
                                uint64_t max_delay_ns);

/* Break all streams between the device and that of a GID (NULL: any), for all contexts of the device; or stop or resume
 * reading from them. `*count` is their number. Return 0 or ENODEV. */
int soft_fault_cut(struct ibv_context *context, const uint8_t *gid, unsigned int *count);
int soft_fault_stall(struct ibv_context *context, const uint8_t *gid, bool stall, unsigned int *count);

/* Set the seed of random faults, and restart the counts of random rules. */
void soft_fault_seed(struct ibv_context *context, uint64_t seed);

/* Remove all rules and release all completions. Calls go on being counted; delayed frames come at their time. */
void soft_fault_clear(struct ibv_context *context);

/* Count calls of verbs from soft_fault_count(true) on, and return those of `verb` or of all; for tests that fail each
 * call in turn. */
void soft_fault_count(struct ibv_context *context, bool on);
uint64_t soft_fault_calls(struct ibv_context *context, enum soft_verb verb);

/* Copy up to `room` records of faults from index `from` on, oldest first, and return the number of all. The oldest 4096
 * are kept. */
size_t soft_fault_records(struct ibv_context *context, size_t from, struct soft_fault_record *records, size_t room);

#endif
