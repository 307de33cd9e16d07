/* Baselines of the benchmarks, as called by baselines.py. */
#ifndef AIOVERBS_TESTS_BENCH_BASELINES_H
#define AIOVERBS_TESTS_BENCH_BASELINES_H

#include <stdint.h>

#include "abi/verbs_ops.h"

#define BASELINE_MAX_BATCH 64

struct baseline;

/* Opens `count` queue pairs of depth `depth`, each connected to itself, on one thread domain with one
 * single-threaded completion queue. Returns NULL, with errno, if a verb failed. */
struct baseline *baseline_open(struct ibv_context *context, const struct verbs_table *table, void *local, void *remote,
                               uint64_t length, uint32_t count, uint32_t depth);
int baseline_close(struct baseline *baseline);

/* Number of polls that found nothing so far. */
uint64_t baseline_idle_polls(const struct baseline *baseline);

/* Each posts, and polls by ibv_poll_cq or, if `extended`, by ibv_start_poll and its relatives. With a `stride`, the
 * first operation is at `offset`, and each goes that much further than the one before, wrapping around the memory. */
int64_t baseline_writes(struct baseline *baseline, uint32_t length, uint64_t offset, uint64_t stride,
                        uint64_t operations, int extended);
int64_t baseline_window(struct baseline *baseline, uint32_t length, uint32_t window, uint64_t operations, int extended);
int64_t baseline_batches(struct baseline *baseline, uint32_t length, uint32_t size, uint64_t batches, int extended);
int64_t baseline_round_robin(struct baseline *baseline, uint32_t length, uint64_t operations, int extended);

/* Uses memcpy instead of a write. */
int64_t baseline_copies(struct baseline *baseline, uint32_t length, uint64_t offset, uint64_t stride,
                        uint64_t operations);

/* Thread that writes to an eventfd `delay_ns` after a request, and sleeps in between. NULL, with errno, on failure. */
struct waker;
struct waker *waker_start(int eventfd, uint64_t delay_ns);
void waker_ask(struct waker *waker);
void waker_stop(struct waker *waker);

#endif
