/* Allocators in C of memory for queues, doorbell records and buffers, so that a provider that allocates never waits for
 * an interpreter. Usable without Python and without the rest of the core.
 *
 * A new piece is zero, aligned as requested, and never copied by a fork: its pages are shared, which no process copies
 * on a write, and the child of a fork does not have them at all (MADV_DONTFORK). A child finds each allocator empty and
 * may use it as if it were new; the parent's pieces remain the parent's.
 *
 * Any thread may call these functions. */
#ifndef AIOVERBS_ALLOC_H
#define AIOVERBS_ALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct alloc_source;

struct alloc_counts {
    size_t pieces;            /* allocated pieces */
    size_t mappings;          /* mappings of memory, by this source and the sources under it */
    size_t mapped_bytes;      /* bytes in these mappings */
    size_t huge_bytes;        /* bytes of them in huge pages */
    size_t bound_bytes;       /* bytes of them bound to the requested NUMA node */
    size_t bookkeeping_bytes; /* bytes used beside them */
};

/* The step at which this thread's last call failed; `errno` has the error. */
enum alloc_step {
    ALLOC_NOTHING,     /* no failure */
    ALLOC_ARGUMENTS,   /* checking the arguments: no memory has that size or alignment */
    ALLOC_MAP,         /* mapping pages */
    ALLOC_MAP_HUGE,    /* mapping huge pages of `page_bytes` */
    ALLOC_DONT_FORK,   /* keeping pages from the children of forks */
    ALLOC_BIND,        /* binding pages to `node` */
    ALLOC_AREA,        /* taking chunks of the shared area; ENODEV: not in this process, after a fork; ENXIO: closed */
    ALLOC_BOOKKEEPING, /* allocating memory of the process itself */
};

struct alloc_failure {
    enum alloc_step step;
    int error;
    size_t size, page_bytes; /* requested size, and page size, in bytes */
    int node;
};

/* Return, or clear, the last failure of this thread. */
const struct alloc_failure *alloc_last_failure(void);
void alloc_clear_failure(void);

/* Callbacks of a provider: alloc_piece() and alloc_free(), or functions with the same guarantees. */
typedef void *(*alloc_function)(void *self, size_t size, size_t alignment, uint64_t resource_type);
typedef void (*alloc_free_function)(void *self, void *address, uint64_t resource_type);

/* ---- Functions of all sources ----------------------------------------------------------------------------- */

/* Allocate a piece of `size` bytes at a multiple of `alignment`, a power of two (0: any). Return NULL and errno without
 * memory; IBV_ALLOCATOR_USE_DEFAULT where the caller shall use its own memory. `source` is a struct alloc_source. */
void *alloc_piece(void *source, size_t size, size_t alignment, uint64_t resource_type);

/* Free a piece: return 0, or EINVAL where the source has no piece at that address. */
int alloc_return(struct alloc_source *source, void *address, uint64_t resource_type);

/* Free a piece, for callers that cannot handle an error, such as a verb's callback. */
void alloc_free(void *source, void *address, uint64_t resource_type);

/* Get the counts of a source. */
void alloc_count(struct alloc_source *source, struct alloc_counts *counts);

/* Watch for forks: return 0 or an errno. Call before any other code that runs in the children of forks, so that it
 * finds the allocators in order there. */
int alloc_watch_forks(void);

/* Release the caller's reference to a source. The source is freed when its last piece is freed and no source on top of
 * it is left. Return the number of pieces that keep it, where nothing else does. */
size_t alloc_release(struct alloc_source *source);

/* ---- Kinds of sources; NULL and errno where one cannot be created ----------------------------------------- */

/* Create a source that returns IBV_ALLOCATOR_USE_DEFAULT for everything. */
struct alloc_source *alloc_default_create(void);

#define ALLOC_BASE_PAGES 0
#define ALLOC_ANY_NODE (-1)
#define ALLOC_MAX_NODES 1024

/* Create a source with a mapping for each piece. `page_bytes`: ALLOC_BASE_PAGES, or the size of huge pages. With a
 * `node`, pages come from that node alone, and a call fails where the kernel cannot do so if `strict`; else pages come
 * from there while the node has some. */
struct alloc_source *alloc_pages_create(size_t page_bytes, int node, bool strict);

/* Create a source whose small pieces share chunks of `chunk_bytes` from `under`; a piece of more than half a chunk
 * comes from `under` directly. A piece takes at least `unit_bytes`. Both are powers of two; a chunk has 2 to 2^24
 * units. */
struct alloc_source *alloc_arena_create(struct alloc_source *under, size_t chunk_bytes, size_t unit_bytes);

struct alloc_area;

/* Create a source that takes one or more chunks of memory shared by processes for each piece. */
struct alloc_source *alloc_area_create(const struct alloc_area *area);
void alloc_area_close(struct alloc_source *source); /* allocate nothing more; the memory goes with the last piece */

#define ALLOC_MAX_TIERS 3

/* Create a source that takes each piece from the first of several sources that has one. */
struct alloc_source *alloc_tiers_create(struct alloc_source *const *tiers, size_t count);

/* ---- Records of allocations ------------------------------------------------------------------------------- */

struct alloc_usage {
    uint64_t resource_type;
    size_t pieces, bytes, peak_pieces, peak_bytes; /* now, and at most so far; bytes as requested */
    uint64_t allocations, defaults, failures;      /* results so far: memory, USE_DEFAULT, none */
};

/* Create a source that passes all calls to `inner`. With NULL the source only records: its creator allocates elsewhere,
 * records the result, and calls alloc_return() when it frees. */
struct alloc_source *alloc_recording_create(struct alloc_source *inner);

/* Record a piece: return 0; EEXIST where an allocated piece has that address; ENOMEM. */
int alloc_recording_note(struct alloc_source *recording, const void *address, size_t size, uint64_t resource_type);
void alloc_recording_without(struct alloc_source *recording, uint64_t resource_type, bool use_default);

/* Copy up to `room` usages, in the order in which their types were first allocated; return the number of usages. */
size_t alloc_recording_usage(struct alloc_source *recording, struct alloc_usage *usages, size_t room);

#endif
