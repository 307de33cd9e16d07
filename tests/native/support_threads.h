/* Threads that begin together. */
#ifndef AIOVERBS_TESTS_SUPPORT_THREADS_H
#define AIOVERBS_TESTS_SUPPORT_THREADS_H

#include <stddef.h>

/* Counts of a stress test. The thread sanitizer sees a race whenever both sides come by, the address sanitizer a use of
 * what is gone whenever it happens; elsewhere only what a race has broken shows: a short form that all sides take. */
#if defined __SANITIZE_THREAD__
#define SCALED(count) ((count) / 2)
#elif defined __SANITIZE_ADDRESS__
#define SCALED(count) ((count) / 4)
#else
#define SCALED(count) ((count) / 10)
#endif

/* Calls `function` in `count` threads, in the n-th one with the n-th of `arguments`, which have `size` bytes each;
 * returns when all have ended. */
void run_threads(size_t count, void (*function)(void *), void *arguments, size_t size);

/* The next of a row of numbers that look random, below `limit`; the row goes on in `state`. */
unsigned int next_random(unsigned int *state, unsigned int limit);

#endif
