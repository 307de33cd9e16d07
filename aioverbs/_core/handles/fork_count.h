/* How many forks lie between this process and the one that first loaded the extension, so that a handle knows whether
 * it was made before one. Included by one Cython module. */
#ifndef AIOVERBS_FORK_COUNT_H
#define AIOVERBS_FORK_COUNT_H

#include <pthread.h>
#include <stdint.h>

static uint32_t fork_count;

static void fork_count_increment(void)
{
    fork_count++;
}

/* Once; 0 or an errno. A fork that no interpreter knows of counts, too. */
static inline int fork_count_begin(void)
{
    return pthread_atfork(NULL, NULL, fork_count_increment);
}

#endif
