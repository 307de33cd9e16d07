/* Memory shared by processes, divided into chunks that a process takes for itself: for each chunk a number names the
 * process that owns it. alloc/area.c allocates pieces from it; the creator of the area decides how long it lives. Needs
 * _GNU_SOURCE. */
#ifndef AIOVERBS_ALLOC_AREA_H
#define AIOVERBS_ALLOC_AREA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

struct alloc_area {
    char *memory; /* at a multiple of the chunk size */
    size_t bytes, chunk_bytes;
    _Atomic uint16_t *owners;    /* owner of each chunk; 0: free */
    uint16_t owner;              /* number of this process */
    atomic_uint *highest;        /* this process never owned chunks beyond */
    const atomic_bool *no_reuse; /* a process may still write to chunks that it lost: reuse none */
    void *handle;                /* argument of the next three; the area lives while it is held */
    void (*hold)(void *handle);
    void (*drop)(void *handle);
    void (*reap)(void *handle); /* frees the chunks of processes that have ended */
};

/* Free chunks, and give their pages to the kernel: they read as zero afterwards. */
static inline void alloc_area_put(const struct alloc_area *area, size_t first, size_t count)
{
    char *at = area->memory + first * area->chunk_bytes;

    if (madvise(at, count * area->chunk_bytes, MADV_REMOVE)) /* pages that are locked */
        memset(at, 0, count * area->chunk_bytes);
    while (count-- && !atomic_load(area->no_reuse))
        atomic_store(&area->owners[first++], 0);
}

#endif
