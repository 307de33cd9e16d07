/* Blocks of a chunk of memory, in a tree of bytes that stands beside the chunk, where no device writes.
 *
 * A node is a block, its children are its halves. Its byte is the order of the largest block that is free in it, plus
 * one; 0: none. A block of order n has 2^n units and begins at a multiple of its size, so that alignment costs nothing,
 * and two free halves are a free whole again. All of a free block's descendants are free blocks; those of a taken one
 * are left as they were, which is how the block that an address belongs to is found. */
#ifndef AIOVERBS_ALLOC_BUDDY_H
#define AIOVERBS_ALLOC_BUDDY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The bytes of a tree over 2^order units. */
static inline size_t buddy_bytes(unsigned int order)
{
    return (size_t)2 << order;
}

void buddy_init(uint8_t *tree, unsigned int order);

/* What the largest free block of the chunk is: its order plus one, or 0. */
static inline unsigned int buddy_largest(const uint8_t *tree)
{
    return tree[1];
}

/* Takes a block of `wanted`, which is not more than the largest free one's order: its first unit. */
size_t buddy_take(uint8_t *tree, unsigned int order, unsigned int wanted);

/* Frees the block that begins with this unit; false, and nothing done, where none does. */
bool buddy_give(uint8_t *tree, unsigned int order, size_t unit);

#endif
