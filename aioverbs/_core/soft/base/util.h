/* Small helpers without state. */
#ifndef AIOVERBS_SOFT_BASE_UTIL_H
#define AIOVERBS_SOFT_BASE_UTIL_H

#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define container_of(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

/* Return the page size of this kernel: 4 KiB, 16 KiB or 64 KiB. */
static inline size_t soft_page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Return the smallest power of two that is not less than `at_least`, which is far below 2^31. */
static inline uint32_t soft_power_of_two(uint32_t at_least)
{
    uint32_t size = 1;

    while (size < at_least)
        size *= 2;
    return size;
}

#endif
