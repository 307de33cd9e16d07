/* Helpers for tests of allocators: pages that can run out, and checks of memory. */
#ifndef AIOVERBS_TESTS_SUPPORT_ALLOC_H
#define AIOVERBS_TESTS_SUPPORT_ALLOC_H

#include "alloc/alloc.h"

#include <stdbool.h>
#include <stddef.h>

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

#define TYPE_QP (1ull << 32 | 1)
#define TYPE_RECORD (1ull << 32 | 3)

struct alloc_source *base_pages(void);
struct alloc_counts counts_of(struct alloc_source *source);

/* Return a source of base pages that fails after `*left` pieces. */
struct alloc_source *limited_pages(size_t *left);

bool is_zero(const void *memory, size_t size);
bool is_mapped(const void *memory);
bool is_aligned(const void *memory, size_t alignment);

/* Allocate a piece, check it and write all of it. NULL if a check failed. */
void *sound_piece(struct alloc_source *source, size_t size, size_t alignment);

#endif
