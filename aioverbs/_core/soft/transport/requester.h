/* Requester of a queue pair. All under sq_lock, in a grace section, unless noted otherwise. */
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

/* Return whether the queue pair is connected to a peer of another device. */
static inline bool soft_is_remote(const struct soft_qp *qp)
{
    return qp->link && qp->qp.qp_type != IBV_QPT_UD;
}

/* Turn of one send queue, in bytes of data; each request also counts as SOFT_REQUEST_COST. A queue pair to which
 * requests are posted as fast as they are executed must delay neither other queue pairs nor threads that wait for a
 * grace period. */
#define SOFT_QUEUE_TURN (1 << 20)
#define SOFT_REQUEST_COST 4096

static inline bool soft_is_atomic(uint8_t opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Return whether the response to the opcode has data. */
static inline bool soft_returns_data(uint8_t opcode)
{
    return opcode == IBV_WR_RDMA_READ || soft_is_atomic(opcode);
}

static inline bool soft_is_local_op(uint8_t opcode)
{
    return opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV;
}

/* Read the doorbell record. Return whether a posted request was not sent completely yet. */
static inline bool soft_has_posted(struct soft_qp *qp)
{
    return soft_window_post(&qp->req.window, atomic_load_explicit(qp->sq.posted, memory_order_acquire));
}

/* Complete the request before window.finished, which is finished. An error is reported whether or not the request was
 * signalled, and breaks the queue; so does a full completion queue, and then an event reports it. */
void soft_complete_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status,
                           uint32_t vendor_err, uint32_t byte_len);

/* Finish the request at window.finished, which took so many packets, and complete it. Nothing is in flight. */
void soft_end_request(struct soft_qp *qp, const struct soft_wqe *wqe, enum ibv_wc_status status, uint32_t vendor_err,
                      uint32_t byte_len, uint32_t packets);

/* Check the local side of a request, and find its memory. */
enum ibv_wc_status soft_resolve(struct soft_qp *qp, const struct soft_wqe *wqe, struct soft_segment *segments,
                                struct soft_request *request);

/* Return the number of packets of a message, or of the response to a read: sequence numbers count packets. */
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

/* Start the timeout for the request at window.finished, which was tried. The first attempt and each repetition have the
 * whole timeout, 4.096 us * 2^timeout. With timeout 0 nothing is sent again, and only a change of state ends the
 * wait. */
void soft_await_response(struct soft_qp *qp);

/* Go back to window.finished: all requests in flight are sent again, or none is. The peer has ended all copies. */
void soft_requester_go_back(struct soft_qp *qp);

/* Fail the request at window.finished, and the queue with it. The application receives the completion now, and those of
 * the flushed requests behind it soon, and may reuse their memory. The peer has ended all copies. */
void soft_requester_fail(struct soft_qp *qp, enum ibv_wc_status status);

/* Handle a refusal: the peer refused the request at window.finished, and executed nothing that came after it. */
void soft_requester_refused(struct soft_qp *qp, const struct soft_reply *reply);

/* Reset timeout and retry counters: the peer made progress beyond any before. */
void soft_reset_retries(struct soft_qp *qp);

/* ---- Execution ------------------------------------------------------------------------------------------- */

/* Execute, repeat or flush the requests of a queue pair. In a grace section, no device lock held. Return when to call
 * again (CLOCK_MONOTONIC), or UINT64_MAX. */
uint64_t soft_execute(struct soft_qp *qp);

/* Have soft_execute() called: at once if requests are executed inline, else by the worker thread. In a grace section,
 * no device lock held. */
void soft_kick(struct soft_qp *qp);

/* The same from a driver half, outside of grace sections. grace_ready() has returned true. */
void soft_kick_from_driver(struct soft_qp *qp);

/* Give up all requests in flight: their responses are ignored. The peer has ended all copies. */
void soft_requester_stop(struct soft_qp *qp);

#endif
