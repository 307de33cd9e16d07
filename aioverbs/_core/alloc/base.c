/* Functions of all sources of memory, and their behaviour across forks. */
#include "alloc/base.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "abi/libibverbs.h"

#define MOST_BYTES (SIZE_MAX / 8)

/* ---- Failures -------------------------------------------------------------------------------------------- */

static _Thread_local struct alloc_failure last_failure;

const struct alloc_failure *alloc_last_failure(void)
{
    return &last_failure;
}

void alloc_clear_failure(void)
{
    last_failure.step = ALLOC_NOTHING;
}

void *alloc_fail(enum alloc_step step, int error, size_t size, size_t page_bytes, int node)
{
    last_failure = (struct alloc_failure){step, error, size, page_bytes, node};
    errno = error;
    return NULL;
}

/* ---- Forks ----------------------------------------------------------------------------------------------- */

/* All sources, the newest first; their locks are taken in this order. A fork takes all locks: no child is made between
 * the mapping of pages and MADV_DONTFORK, and the child finds every table consistent. */
static struct {
    pthread_mutex_t lock;
    struct alloc_source *newest;
} all = {PTHREAD_MUTEX_INITIALIZER, NULL};

/* Whether this thread is forking. It holds all locks then, and its calls in between take none: the atfork handler of
 * another library may run Python, whose garbage collector may release a source. */
static _Thread_local bool forking;

static void alloc_lock(pthread_mutex_t *mutex)
{
    if (!forking)
        pthread_mutex_lock(mutex);
}

static void unlock(pthread_mutex_t *mutex)
{
    if (!forking)
        pthread_mutex_unlock(mutex);
}

void alloc_source_lock(struct alloc_source *source)
{
    alloc_lock(&source->lock);
}

void alloc_source_unlock(struct alloc_source *source)
{
    unlock(&source->lock);
}

static void alloc_before_fork(void)
{
    struct alloc_source *source;

    pthread_mutex_lock(&all.lock);
    for (source = all.newest; source; source = source->older)
        pthread_mutex_lock(&source->lock);
    forking = true;
}

static void alloc_after_fork(void)
{
    struct alloc_source *source;

    forking = false;
    for (source = all.newest; source; source = source->older)
        pthread_mutex_unlock(&source->lock);
    pthread_mutex_unlock(&all.lock);
}

static void after_fork_in_child(void)
{
    struct alloc_source *source;

    for (source = all.newest; source; source = source->older) {
        source->ops->forget(source);
        source->pieces = 0;
    }
    alloc_after_fork();
}

static pthread_once_t watch_once = PTHREAD_ONCE_INIT;
static int watch_error;

static void alloc_watch_forks_once(void)
{
    watch_error = pthread_atfork(alloc_before_fork, alloc_after_fork, after_fork_in_child);
}

int alloc_watch_forks(void)
{
    pthread_once(&watch_once, alloc_watch_forks_once);
    return watch_error;
}

/* ---- Creation and release -------------------------------------------------------------------------------- */

void *alloc_source_create(size_t size, const struct alloc_ops *ops)
{
    struct alloc_source *source = NULL;
    int error = alloc_watch_forks();

    if (!error && !(source = calloc(1, size)))
        error = ENOMEM;
    if (!error)
        error = pthread_mutex_init(&source->lock, NULL);
    if (error) {
        free(source);
        return alloc_fail(ALLOC_BOOKKEEPING, error, size, 0, ALLOC_ANY_NODE);
    }
    source->ops = ops;
    source->references = 1;
    alloc_lock(&all.lock);
    source->older = all.newest;
    if (source->older)
        source->older->newer = source;
    all.newest = source;
    if (forking) /* the forking thread holds all locks, including this one */
        pthread_mutex_lock(&source->lock);
    unlock(&all.lock);
    return source;
}

void alloc_source_hold(struct alloc_source *source)
{
    alloc_lock(&source->lock);
    source->references++;
    unlock(&source->lock);
}

static void destroy(struct alloc_source *source)
{
    alloc_lock(&all.lock);
    if (source->newer)
        source->newer->older = source->older;
    else
        all.newest = source->older;
    if (source->older)
        source->older->newer = source->newer;
    unlock(&all.lock);
    source->ops->destroy(source);
    if (forking)
        pthread_mutex_unlock(&source->lock);
    pthread_mutex_destroy(&source->lock);
    free(source);
}

size_t alloc_release(struct alloc_source *source)
{
    size_t remaining;
    bool last;

    alloc_lock(&source->lock);
    last = --source->references == 0;
    remaining = last ? source->pieces : 0;
    unlock(&source->lock);
    if (last && !remaining)
        destroy(source);
    return remaining;
}

/* ---- Pieces ---------------------------------------------------------------------------------------------- */

void *alloc_piece(void *self, size_t size, size_t alignment, uint64_t resource_type)
{
    struct alloc_source *source = self;
    bool dirty = false;
    void *address;

    if (!alignment)
        alignment = 1;
    if (!size)
        size = 1; /* return a unique address, as malloc does */
    if (alignment & (alignment - 1))
        return alloc_fail(ALLOC_ARGUMENTS, EINVAL, alignment, 0, ALLOC_ANY_NODE);
    if (size > MOST_BYTES || alignment > MOST_BYTES)
        return alloc_fail(ALLOC_ARGUMENTS, ENOMEM, size, 0, ALLOC_ANY_NODE);
    alloc_lock(&source->lock);
    address = source->ops->allocate(source, size, alignment, resource_type, &dirty);
    if (address && address != IBV_ALLOCATOR_USE_DEFAULT)
        source->pieces++;
    unlock(&source->lock);
    if (dirty) /* after the lock is released: no other thread has the piece */
        memset(address, 0, size);
    return address;
}

int alloc_return(struct alloc_source *source, void *address, uint64_t resource_type)
{
    bool last = false;
    int error;

    alloc_lock(&source->lock);
    error = source->ops->free(source, address, resource_type);
    if (!error)
        last = --source->pieces == 0 && source->references == 0;
    unlock(&source->lock);
    if (last)
        destroy(source);
    return error;
}

void alloc_free(void *source, void *address, uint64_t resource_type)
{
    alloc_return(source, address, resource_type);
}

void alloc_count(struct alloc_source *source, struct alloc_counts *counts)
{
    memset(counts, 0, sizeof(*counts));
    alloc_lock(&source->lock);
    source->ops->count(source, counts);
    counts->pieces = source->pieces;
    unlock(&source->lock);
}
