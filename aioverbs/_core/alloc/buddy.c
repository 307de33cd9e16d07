#include "alloc/buddy.h"

#include <string.h>

void buddy_init(uint8_t *tree, unsigned int order)
{
    unsigned int depth;

    tree[0] = 0;
    for (depth = 0; depth <= order; depth++)
        memset(tree + ((size_t)1 << depth), (int)(order - depth) + 1, (size_t)1 << depth);
}

/* Update the ancestors of `node`, which has order `at` and has changed. */
static void update_ancestors(uint8_t *tree, size_t node, unsigned int at)
{
    for (; node > 1; node /= 2, at++) {
        uint8_t one = tree[node], other = tree[node ^ 1];
        bool whole = one == at + 1 && other == at + 1;

        tree[node / 2] = whole ? one + 1 : one > other ? one : other;
    }
}

size_t buddy_allocate(uint8_t *tree, unsigned int order, unsigned int wanted)
{
    size_t node = 1;
    unsigned int at;

    for (at = order; at > wanted; at--) {
        uint8_t left = tree[2 * node], right = tree[2 * node + 1];

        /* Choose the half that fits more tightly, to keep large blocks whole. */
        node = 2 * node + (left <= wanted || (right > wanted && right < left));
    }
    tree[node] = 0;
    update_ancestors(tree, node, wanted);
    return (node << wanted) - ((size_t)1 << order);
}

bool buddy_free(uint8_t *tree, unsigned int order, size_t unit)
{
    size_t node = ((size_t)1 << order) + unit;
    unsigned int at = 0;

    /* The first node upwards from the unit without a free block is the allocated block: its descendants keep old
     * values. */
    for (; tree[node]; node /= 2, at++)
        if (node & 1) /* the root: all is free; a right half: no block begins here */
            return false;
    tree[node] = (uint8_t)(at + 1);
    update_ancestors(tree, node, at);
    return true;
}
