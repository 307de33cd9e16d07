/* Common code of the benchmark programs. */
#ifndef AIOVERBS_BENCH_BASELINE_H
#define AIOVERBS_BENCH_BASELINE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline void check(bool good, const char *what)
{
    if (good)
        return;
    perror(what);
    exit(1);
}

static inline int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

#endif
