/* Helpers for threads that start together. */
#ifndef AIOVERBS_TESTS_SUPPORT_THREADS_H
#define AIOVERBS_TESTS_SUPPORT_THREADS_H

#include <stddef.h>

/* Choose the count of a stress test. ThreadSanitizer sees a race whenever both sides are executed, and AddressSanitizer
 * every use of freed memory; without them only the effect of a race shows, so the short count suffices, which all sides
 * execute. */
#if defined __SANITIZE_THREAD__
#define SCALED(count) ((count) / 2)
#elif defined __SANITIZE_ADDRESS__
#define SCALED(count) ((count) / 4)
#else
#define SCALED(count) ((count) / 10)
#endif

/* Call `function` in `count` threads, the n-th with the n-th of `arguments`, which have `size` bytes each. Return when
 * all have ended. */
void run_threads(size_t count, void (*function)(void *), void *arguments, size_t size);

/* Return the next pseudo-random number below `limit`; `state` is the state of the generator. */
unsigned int next_random(unsigned int *state, unsigned int limit);

#endif
