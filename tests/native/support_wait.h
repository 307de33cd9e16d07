/* Waiting that always ends: everything that a test waits for has a deadline. */
#ifndef AIOVERBS_TESTS_SUPPORT_WAIT_H
#define AIOVERBS_TESTS_SUPPORT_WAIT_H

#include "support_pair.h"

#define WAIT_S (UNDER_TSAN ? 30 : 10)

uint64_t now_ns(void); /* CLOCK_MONOTONIC */
void sleep_us(unsigned int microseconds);

/* Until no context of the device of this one has anything to do for some milliseconds: what its thread does without being
 * asked is done. Those milliseconds at most: where requests are tried again all the time, that is often. */
void settle(struct ibv_context *context);

/* The next completion; false where none comes. */
bool wait_completion(struct ibv_cq *cq, struct ibv_wc *wc);

/* The next completion, which must be this one; a REQUIRE where none comes. */
struct ibv_wc expect_at(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status, struct check_place place);
#define EXPECT(cq, wr_id, status) expect_at(cq, wr_id, status, HERE)

/* The start_poll of an extended queue, at the next completion; a REQUIRE where none comes. */
void start_poll(struct ibv_cq_ex *cq);

/* The session's next entry, once it is there: a REQUIRE where none comes. The device finds what came late. */
void next_poll(struct ibv_cq_ex *cq);

/* Nothing is there, nor comes. */
void expect_nothing_at(struct ibv_cq *cq, struct check_place place);
#define EXPECT_NOTHING(cq) expect_nothing_at(cq, HERE)

/* That a queue pair of `default_link` has executed so many requests of one packet since it was connected: their
 * completions are there. */
void wait_executed(struct ibv_qp *qp, uint32_t count);

bool wait_state(struct ibv_qp *qp, enum ibv_qp_state state);

/* That a queue pair in RTS has begun a request that its peer does not take, so that it would have to be drained; or
 * that the request has failed meanwhile. */
void wait_begun(struct ibv_qp *qp);

/* Ends the wait of a request that its peer did not take, however long that was to be: the device comes for it now. */
void end_wait(struct ibv_qp *qp);

/* That nobody is inside of a half on a thread domain any more; with locks, whoever comes waits anyway. */
struct soft_half;
void wait_left(const struct soft_half *half);

/* Whether a descriptor is readable now, or within the deadline. */
bool is_readable(int fd);
bool wait_readable(int fd);

/* Calls `call` in another thread and returns what it returned. */
int call_elsewhere(int (*call)(void *), void *argument);

/* What a function writes to stderr; the text must be freed. */
char *stderr_of(void (*function)(void *), void *argument);

#endif
