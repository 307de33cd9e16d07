/* Allocators of memory for queues, doorbell records and buffers, in C, so that a provider that asks for memory never
 * waits for an interpreter. Usable without Python and without the rest of the core.
 *
 * A piece is zero when it is given out, aligned as asked for, and never copied by a fork: its pages are shared ones,
 * which no process copies when it writes, and a child of a fork does not have them at all (MADV_DONTFORK). A child finds
 * each allocator empty and may use it as if it were new; what the parent had out is the parent's.
 *
 * All functions may be called from any thread. */
#ifndef AIOVERBS_ALLOC_H
#define AIOVERBS_ALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct alloc_source;

struct alloc_counts {
    size_t pieces;            /* out */
    size_t mappings;          /* of memory, by this source and those under it */
    size_t mapped_bytes;      /* in these */
    size_t huge_bytes;        /* of them: in huge pages */
    size_t bound_bytes;       /* of them: bound to the NUMA node that was asked for */
    size_t bookkeeping_bytes; /* beside them */
};

/* What a failed call of this thread was about; `errno` says how it failed. */
enum alloc_step {
    ALLOC_NOTHING,     /* it did not fail */
    ALLOC_ARGUMENTS,   /* a size or an alignment that no memory can have */
    ALLOC_MAP,         /* pages */
    ALLOC_MAP_HUGE,    /* huge pages, of `page_bytes` */
    ALLOC_DONT_FORK,   /* the advice not to give pages to a child */
    ALLOC_BIND,        /* to `node` */
    ALLOC_AREA,        /* room in what processes have together; ENODEV: it is not here, after a fork; ENXIO: closed */
    ALLOC_BOOKKEEPING, /* memory of the process' own */
};

struct alloc_failure {
    enum alloc_step step;
    int error;
    size_t size, page_bytes; /* bytes of the pages asked for, and of one of them */
    int node;
};

const struct alloc_failure *alloc_last_failure(void);
void alloc_clear_failure(void);

/* What a provider's callbacks need of an allocator: alloc_piece() and alloc_free(), or others with the same promises. */
typedef void *(*alloc_function)(void *self, size_t size, size_t alignment, uint64_t resource_type);
typedef void (*alloc_free_function)(void *self, void *address, uint64_t resource_type);

/* ---- What all have --------------------------------------------------------------------------------------- */

/* A piece of `size` bytes at a multiple of `alignment`, a power of two (0: any); NULL and errno where there is none;
 * IBV_ALLOCATOR_USE_DEFAULT where the caller shall use its own memory. `source` is a struct alloc_source. */
void *alloc_piece(void *source, size_t size, size_t alignment, uint64_t resource_type);

/* Takes a piece back: 0, or EINVAL where this address is no piece of the source's. */
int alloc_return(struct alloc_source *source, void *address, uint64_t resource_type);

/* The same for callers that could not do anything about it, as a verb's callback. */
void alloc_free(void *source, void *address, uint64_t resource_type);

void alloc_count(struct alloc_source *source, struct alloc_counts *counts);

/* Before anything else that runs code in the children of forks, so that it finds all as it should be there: 0 or an
 * errno. */
int alloc_watch_forks(void);

/* The maker of a source is done with it. It goes when its last piece has come back and no source on top of it is left:
 * how many pieces keep it, where nothing else does. */
size_t alloc_release(struct alloc_source *source);

/* ---- The kinds; NULL and errno where one cannot be made -------------------------------------------------- */

/* Answers IBV_ALLOCATOR_USE_DEFAULT to everything. */
struct alloc_source *alloc_default_create(void);

#define ALLOC_BASE_PAGES 0
#define ALLOC_ANY_NODE (-1)
#define ALLOC_MAX_NODES 1024

/* A mapping for each piece. `page_bytes`: ALLOC_BASE_PAGES, or the size of huge pages. With a `node`, pages come from
 * there alone and a kernel that cannot do so makes the call fail if `strict`, else from there while it has some. */
struct alloc_source *alloc_pages_create(size_t page_bytes, int node, bool strict);

/* Small pieces share chunks of `chunk_bytes` that come from `under`; what needs more than half a chunk comes from there
 * directly. No piece takes less than `unit_bytes`. Both are powers of two, a chunk has 2 units to 2^24. */
struct alloc_source *alloc_arena_create(struct alloc_source *under, size_t chunk_bytes, size_t unit_bytes);

struct alloc_area;

/* A chunk or more of memory that processes have together for each piece. */
struct alloc_source *alloc_area_create(const struct alloc_area *area);
void alloc_area_close(struct alloc_source *source); /* it gives out nothing more; the memory goes with the last piece */

#define ALLOC_MAX_TIERS 3

/* Each piece comes from the first of the sources that has one. */
struct alloc_source *alloc_tiers_create(struct alloc_source *const *tiers, size_t count);

/* ---- What was asked for, and is out ---------------------------------------------------------------------- */

struct alloc_usage {
    uint64_t resource_type;
    size_t pieces, bytes, peak_pieces, peak_bytes; /* now, and at most at any time; bytes as asked for */
    uint64_t allocations, defaults, failures;      /* answers so far: memory, USE_DEFAULT, none */
};

/* Passes everything on to `inner`. With NULL it is a ledger only: its maker asks for memory elsewhere, notes what came,
 * and calls alloc_return() for what goes. */
struct alloc_source *alloc_recording_create(struct alloc_source *inner);

/* 0; EEXIST where a piece at that address is out already; ENOMEM. */
int alloc_recording_note(struct alloc_source *recording, const void *address, size_t size, uint64_t resource_type);
void alloc_recording_without(struct alloc_source *recording, uint64_t resource_type, bool use_default);

/* Copies up to `room` usages in the order in which their types were first asked for; how many there are. */
size_t alloc_recording_usage(struct alloc_source *recording, struct alloc_usage *usages, size_t room);

#endif
