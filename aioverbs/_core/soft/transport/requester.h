/* The requester of a queue pair. All under sq_lock, in a grace section, unless it is said otherwise. */
#ifndef AIOVERBS_SOFT_TRANSPORT_REQUESTER_H
#define AIOVERBS_SOFT_TRANSPORT_REQUESTER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/objects/qp.h"

struct soft_reply;
struct soft_request;
struct soft_segment;

/* Whether the peer is not of this device. */
static inline bool soft_is_remote(const struct soft_qp *qp)
{
    return qp->link && qp->qp.qp_type != IBV_QPT_UD;
}

/* One queue's turn, in bytes, where a request counts for its data and for SOFT_REQUEST_COST. Whoever posts as fast as
 * we execute must keep neither other queue pairs waiting nor those who wait for a grace period. */
#define SOFT_QUEUE_TURN (1 << 20)
#define SOFT_REQUEST_COST 4096

static inline bool soft_is_atomic(uint8_t opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* The peer has something to say beyond that it was done. */
static inline bool soft_returns_data(uint8_t opcode)
{
    return opcode == IBV_WR_RDMA_READ || soft_is_atomic(opcode);
}

static inline bool soft_is_local_op(uint8_t opcode)
{
    return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}

/* Look at the doorbell: whether a request was posted that did not leave whole yet. */
static inline bool soft_has_posted(struct soft_qp *qp)
{
    return soft_window_post(&qp->req.window, atomic_load_explicit(qp->sq.posted, memory_order_acquire));
}

/* Complete the request before window.taken, which is over. An error completes whether or not the request was signalled,
 * and breaks the queue; so does a completion that found no room, and then an event tells what it would have told. */
void soft_complete_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status,
                           uint32_t vendor_err, uint32_t byte_len);

/* The same for the request at window.taken, where nothing is in flight: it is over, and took so many packets. */
void soft_end_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status, uint32_t vendor_err,
                      uint32_t byte_len, uint32_t packets);

/* Checks the local side of a request and finds its memory. */
enum ibv_wc_status soft_resolve(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_segment *segments,
                                struct soft_request *request);

/* How many packets a message, or a read's answer, takes: sequence numbers count them. */
uint32_t soft_packets(const struct soft_qp *qp, uint32_t length);

static inline const struct soft_wqe *soft_request_at(const struct soft_qp *qp, uint32_t counter)
{
    return soft_ring_entry(&qp->sq, counter);
}

uint32_t soft_request_length(const struct soft_wqe *wqe);

/* ---- Retries --------------------------------------------------------------------------------------------- */

static inline bool soft_is_in_flight(const struct soft_qp *qp)
{
    return !soft_window_is_idle(&qp->req.window);
}

/* The request at window.taken is tried now, if not well. The first attempt and each repetition have the whole timeout,
 * 4.096 us * 2^timeout; with timeout 0 nothing is ever sent again, and only a change of state ends the wait. */
void soft_await_response(struct soft_qp *qp);

/* All is to be sent again, or nothing. The peer has left all memory. */
void soft_requester_go_back(struct soft_qp *qp);

/* Fail the request at window.taken, and the queue with it. The user is told of this request now, and may use its memory
 * again; and that of those behind it soon, which are flushed. The peer has left all of it. */
void soft_requester_fail(struct soft_qp *qp, enum ibv_wc_status status);

/* The peer refused the request at window.taken, and did not do what came after it. */
void soft_requester_refused(struct soft_qp *qp, const struct soft_reply *reply);

/* The peer made progress that it never made before: what is left has all its time and all its repetitions again. */
void soft_reset_retries(struct soft_qp *qp);

/* ---- Execution ------------------------------------------------------------------------------------------- */

/* Does what there is to do for a queue pair now: executes, retries or flushes. In a grace section, no device
 * lock held. Returns when to come again (CLOCK_MONOTONIC), or UINT64_MAX. */
uint64_t soft_execute(struct soft_qp *qp);

/* Has soft_execute called: at once in inline mode, else by the engine. In a grace section, no device lock held. */
void soft_kick(struct soft_qp *qp);

/* The same from a driver half, outside of any section; grace_ready() was true. */
void soft_kick_from_driver(struct soft_qp *qp);

/* Nothing is under way any more, and the peer has left all memory. Its answers find nothing. */
void soft_requester_stop(struct soft_qp *qp);

#endif
