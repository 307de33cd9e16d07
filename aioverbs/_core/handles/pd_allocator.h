/* Callbacks between a parent domain and an allocator in C, without the interpreter and without a lock. Included by one
 * Cython module; each thread has a variable of its own. */
#ifndef AIOVERBS_PD_ALLOCATOR_H
#define AIOVERBS_PD_ALLOCATOR_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>

#include "alloc/alloc.h"
#include "abi/libibverbs.h"

/* A member of the domain's handle, which lives as long as the provider may call. */
struct domain_memory {
    alloc_function alloc;
    alloc_free_function free;
    void *self;
    size_t held; /* number of pieces; changed atomically, since verbs of several threads may allocate */
};

/* The domain whose allocator had no memory for this thread's verb. After the failure the verb's caller asks for the
 * reason. */
static _Thread_local const struct domain_memory *domain_memory_failed;

/* Allocate for the provider. Check the address only: zeroing takes long to check, and is each
 * native allocator's duty. */
static inline void *domain_memory_alloc(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment,
                                        uint64_t resource_type)
{
    struct domain_memory *memory = (struct domain_memory *)pd_context;
    void *address = memory->alloc(memory->self, size, alignment, resource_type);

    (void)pd;
    if (address == IBV_ALLOCATOR_USE_DEFAULT)
        return address;
    if (address && alignment && (uintptr_t)address % alignment) {
        memory->free(memory->self, address, resource_type);
        address = NULL;
        errno = EINVAL;
    }
    if (!address) {
        domain_memory_failed = memory;
        return NULL;
    }
    if (domain_memory_failed == memory)
        domain_memory_failed = NULL;
    __atomic_fetch_add(&memory->held, 1, __ATOMIC_RELAXED);
    return address;
}

static inline void domain_memory_free(struct ibv_pd *pd, void *pd_context, void *address, uint64_t resource_type)
{
    struct domain_memory *memory = (struct domain_memory *)pd_context;

    (void)pd;
    __atomic_fetch_sub(&memory->held, 1, __ATOMIC_RELAXED);
    memory->free(memory->self, address, resource_type);
}

/* Return whether this thread's verb failed because this domain had no memory, and forget it. */
static inline int domain_memory_take_failure(const struct domain_memory *memory)
{
    int failed = domain_memory_failed == memory;

    if (failed)
        domain_memory_failed = NULL;
    return failed;
}

static inline size_t domain_memory_held(const struct domain_memory *memory)
{
    return __atomic_load_n(&memory->held, __ATOMIC_RELAXED);
}

#endif
