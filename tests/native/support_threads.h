/* Threads that begin together. */
#ifndef AIOVERBS_TESTS_SUPPORT_THREADS_H
#define AIOVERBS_TESTS_SUPPORT_THREADS_H

#include <stddef.h>

/* Counts of a stress test: as they are, or fewer where the sanitizer slows everything down. */
#ifdef __SANITIZE_THREAD__
#define SCALED(count) ((count) / 2)
#else
#define SCALED(count) (count)
#endif

/* Calls `function` in `count` threads, in the n-th one with the n-th of `arguments`, which have `size` bytes each;
 * returns when all have ended. */
void run_threads(size_t count, void (*function)(void *), void *arguments, size_t size);

/* The next of a row of numbers that look random, below `limit`; the row goes on in `state`. */
unsigned int next_random(unsigned int *state, unsigned int limit);

#endif
