/* Number of forks between this process and the one that first loaded the extension: tells a handle whether it was
 * created before a fork. Included by one Cython module. */
#ifndef AIOVERBS_FORK_COUNT_H
#define AIOVERBS_FORK_COUNT_H

#include <pthread.h>
#include <stdint.h>

static uint32_t fork_count;

static void fork_count_increment(void)
{
    fork_count++;
}

/* Count forks from here on; return 0 or an errno. Call once. Forks that no interpreter knows of count, too. */
static inline int fork_count_begin(void)
{
    return pthread_atfork(NULL, NULL, fork_count_increment);
}

#endif
