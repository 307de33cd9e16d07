/* Definitions shared by the kinds of allocators, and used by no other code. */
#ifndef AIOVERBS_ALLOC_BASE_H
#define AIOVERBS_ALLOC_BASE_H

#include "alloc/alloc.h"

#include <pthread.h>

/* Each is called with the source's lock held, except for `destroy`, which runs when no other thread has the source. */
struct alloc_ops {
    /* Allocate. `size` is not 0, `alignment` is a power of two, and their sums do not overflow. Set `dirty` where the
     * caller has to clear the piece. */
    void *(*allocate)(struct alloc_source *source, size_t size, size_t alignment, uint64_t resource_type, bool *dirty);
    int (*free)(struct alloc_source *source, void *address, uint64_t resource_type);
    void (*count)(struct alloc_source *source, struct alloc_counts *counts); /* all but `pieces`, into zeros */
    void (*forget)(struct alloc_source *source); /* in the child of a fork: drop memory that is not there */
    void (*destroy)(struct alloc_source *source);
};

/* The first member of each kind. A source on top of others is created later, and its lock is taken first: a source may
 * call one under it with its own lock held. */
struct alloc_source {
    const struct alloc_ops *ops;
    pthread_mutex_t lock;
    size_t references, pieces;          /* under the lock; the source is freed when both are 0 */
    struct alloc_source *older, *newer; /* under the lock of the list of all sources */
};

/* Create a source of `size` bytes, zero except for the fields above, or return NULL with errno. */
void *alloc_source_create(size_t size, const struct alloc_ops *ops);
/* Add a reference to a source. */
void alloc_source_hold(struct alloc_source *source);

/* Lock a source. A thread that is forking holds all locks, and these functions do nothing in it. */
void alloc_source_lock(struct alloc_source *source);
void alloc_source_unlock(struct alloc_source *source);

/* Record why the current call fails, and return NULL with that errno. */
void *alloc_fail(enum alloc_step step, int error, size_t size, size_t page_bytes, int node);

/* ---- A table of addresses, under its owner's lock --------------------------------------------------------- */

struct alloc_entry {
    uintptr_t address; /* 0: unused */
    size_t size;
    uint64_t value;
};

struct alloc_table {
    struct alloc_entry *entries;
    size_t room, used; /* room: 0 or a power of two */
};

int alloc_table_reserve(struct alloc_table *table); /* make room for one entry: 0 or ENOMEM */
void alloc_table_insert(struct alloc_table *table, const void *address, size_t size, uint64_t value); /* in that room */
struct alloc_entry *alloc_table_find(const struct alloc_table *table, uintptr_t address);
void alloc_table_remove(struct alloc_table *table, struct alloc_entry *entry);
void alloc_table_clear(struct alloc_table *table);

#endif
