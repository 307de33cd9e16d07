/* Blocks of a chunk of memory, in a tree of bytes beside the chunk, where no device writes.
 *
 * A node is a block, and its children are its halves. The node's byte is the order of the largest free block in it,
 * plus one; 0: none. A block of order n has 2^n units and begins at a multiple of its size, so that alignment costs
 * nothing, and two free halves form a free whole again. All descendants of a free block are free blocks; those of an
 * allocated block keep their values, which is how the block of an address is found. */
#ifndef AIOVERBS_ALLOC_BUDDY_H
#define AIOVERBS_ALLOC_BUDDY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Return the size of a tree over 2^order units, in bytes. */
static inline size_t buddy_bytes(unsigned int order)
{
    return (size_t)2 << order;
}

void buddy_init(uint8_t *tree, unsigned int order);

/* Return the order of the largest free block of the chunk, plus one; 0: none. */
static inline unsigned int buddy_largest(const uint8_t *tree)
{
    return tree[1];
}

/* Allocate a block of order `wanted`, at most that of the largest free block; return its first unit. */
size_t buddy_allocate(uint8_t *tree, unsigned int order, unsigned int wanted);

/* Free the block that begins with this unit; return false, and do nothing, where no block does. */
bool buddy_free(uint8_t *tree, unsigned int order, size_t unit);

#endif
