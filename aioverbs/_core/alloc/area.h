/* Memory that processes have together, in chunks that each of them takes for itself: a number for each chunk tells who
 * has it. Pieces of it are given out by alloc/area.c; who made it tells how long it stays. _GNU_SOURCE is needed. */
#ifndef AIOVERBS_ALLOC_AREA_H
#define AIOVERBS_ALLOC_AREA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

struct alloc_area {
    char *memory; /* at a multiple of a chunk */
    size_t bytes, chunk_bytes;
    _Atomic uint16_t *owners; /* of the chunks; 0: nobody */
    uint16_t owner;           /* this process */
    atomic_uint *highest;     /* chunks beyond were never this process' */
    const atomic_bool *late;  /* somebody may still write to what he has no right to: chunks are not given out again */
    void *handle;             /* for the next three: the area stays as long as somebody holds it */
    void (*hold)(void *handle);
    void (*drop)(void *handle);
    void (*reap)(void *handle); /* frees the chunks of processes that are gone */
};

/* Chunks come back, their pages to the kernel: they are zero again. */
static inline void alloc_area_put(const struct alloc_area *area, size_t first, size_t count)
{
    char *at = area->memory + first * area->chunk_bytes;

    if (madvise(at, count * area->chunk_bytes, MADV_REMOVE)) /* pages that are locked */
        memset(at, 0, count * area->chunk_bytes);
    while (count-- && !atomic_load(area->late))
        atomic_store(&area->owners[first++], 0);
}

#endif
