/* Helpers for waiting, all of which have a deadline. */
#ifndef AIOVERBS_TESTS_SUPPORT_WAIT_H
#define AIOVERBS_TESTS_SUPPORT_WAIT_H

#include "support_pair.h"

/* `nox -s aarch64` defines a longer time. */
#ifndef WAIT_S
#define WAIT_S 30
#endif

uint64_t now_ns(void); /* CLOCK_MONOTONIC */
void sleep_us(unsigned int microseconds);

/* Wait until no context of this context's device has anything to do for some milliseconds: then the work of its thread
 * is done. Waits no longer than these milliseconds while requests are retried all the time. */
void settle(struct ibv_context *context);

/* Wait for the next completion. Return false if none comes. */
bool wait_completion(struct ibv_cq *cq, struct ibv_wc *wc);

/* Wait for the next completion. REQUIRE that it comes and is this one. */
struct ibv_wc expect_at(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status, struct check_place place);
#define EXPECT(cq, wr_id, status) expect_at(cq, wr_id, status, HERE)

/* Start a poll session of an extended queue, at the next completion. REQUIRE that one comes. */
void start_poll(struct ibv_cq_ex *cq);

/* Go to the session's next entry. REQUIRE that one comes; the device adds late completions to the session. */
void next_poll(struct ibv_cq_ex *cq);

/* Check that no completion is there, nor comes. */
void expect_nothing_at(struct ibv_cq *cq, struct check_place place);
#define EXPECT_NOTHING(cq) expect_nothing_at(cq, HERE)

/* Wait until a queue pair of `default_link` has executed so many requests of one packet since it was connected: their
 * completions are there. */
void wait_executed(struct ibv_qp *qp, uint32_t count);

bool wait_state(struct ibv_qp *qp, enum ibv_qp_state state);

/* Wait until a queue pair in RTS has begun a request that its peer does not take, so that draining would wait for it;
 * or until that request has failed. */
void wait_begun(struct ibv_qp *qp);

/* End the wait of a request that its peer did not take: the device handles the request now, whatever its timeout. */
void end_wait(struct ibv_qp *qp);

/* Wait until no thread is inside of a half on a thread domain any more. With locks, a thread that enters waits
 * anyway. */
struct soft_half;
void wait_left(const struct soft_half *half);

/* Return whether a descriptor is readable now, or becomes readable within the deadline. */
bool is_readable(int fd);
bool wait_readable(int fd);

/* Call `call` in another thread. Return its result. */
int call_elsewhere(int (*call)(void *), void *argument);

/* Return the text that a function writes to stderr; free it afterwards. */
char *stderr_of(void (*function)(void *), void *argument);

#endif
