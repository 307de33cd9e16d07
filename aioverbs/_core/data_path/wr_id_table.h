/* Find the operation of a completion: operations in flight stand in slots, and the `wr_id` that the device returns
 * names the slot and its generation. A slot gets a new generation each time that it is freed, so that a late completion
 * finds nothing.
 *
 *     63    62       61 .. 32      31 .. 22   21 .. 0
 *     kind of queue  generation    element    slot
 *
 * The element number tells the requests of a batch apart, which share a slot. The caller of these functions holds the
 * GIL; without a GIL, the rules of data_path.pyx apply. */
#ifndef AIOVERBS_WR_ID_TABLE_H
#define AIOVERBS_WR_ID_TABLE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS_MOST (1u << 22)
#define SLOTS_ELEMENTS (1u << 10)
#define SLOTS_RECEIVE (1ull << 62) /* the completion has a length */
#define SLOTS_SHARED (1ull << 63)  /* the slot is in a shared receive queue's table, found by queue pair */

#define SLOTS_NONE UINT32_MAX
#define SLOTS_GENERATIONS (1u << 30)

struct slot {
    void *work;          /* NULL: free */
    uint32_t generation; /* 30 bits, never 0: numbers of other code are not mistaken for one of these */
    uint32_t next;       /* index of the next free slot */
};

struct slots {
    struct slot *at;
    uint32_t size;
    uint32_t free; /* index of the first free slot */
};

static inline void slots_begin(struct slots *slots)
{
    slots->at = NULL;
    slots->size = 0;
    slots->free = SLOTS_NONE;
}

static inline void slots_end(struct slots *slots)
{
    free(slots->at);
    slots_begin(slots);
}

static bool slots_grow(struct slots *slots)
{
    uint32_t size = slots->size ? 2 * slots->size : 16, i;
    struct slot *at = size <= SLOTS_MOST ? realloc(slots->at, size * sizeof(*at)) : NULL;

    if (!at)
        return false;
    for (i = slots->size; i < size; i++)
        at[i] = (struct slot){.generation = 1, .next = i + 1 < size ? i + 1 : slots->free};
    slots->free = slots->size;
    slots->at = at;
    slots->size = size;
    return true;
}

/* Put `work` into a slot and return its number; 0 without memory, or when all slots are in use. */
static inline uint64_t slots_take(struct slots *slots, void *work, uint64_t kind)
{
    struct slot *slot;
    uint32_t index;

    if (slots->free == SLOTS_NONE && !slots_grow(slots))
        return 0;
    index = slots->free;
    slot = &slots->at[index];
    slots->free = slot->next;
    slot->work = work;
    return kind | (uint64_t)slot->generation << 32 | index;
}

static inline uint32_t slots_element(uint64_t number)
{
    return (uint32_t)number >> 22;
}

static inline uint64_t slots_with_element(uint64_t number, uint32_t element)
{
    return number | (uint64_t)element << 22;
}

static inline struct slot *slots_at(const struct slots *slots, uint64_t number)
{
    uint32_t index = (uint32_t)number & (SLOTS_MOST - 1);

    return index < slots->size ? &slots->at[index] : NULL;
}

/* Return what stands in the slot of `number`, or NULL where the slot has been freed since. */
static inline void *slots_find(const struct slots *slots, uint64_t number)
{
    const struct slot *slot = slots_at(slots, number);

    return slot && slot->generation == (uint32_t)(number >> 32) % SLOTS_GENERATIONS ? slot->work : NULL;
}

/* Free the slot of `number`; call once for each number that slots_take returned. */
static inline void slots_give(struct slots *slots, uint64_t number)
{
    struct slot *slot = slots_at(slots, number);

    slot->work = NULL;
    slot->generation = slot->generation + 1 < SLOTS_GENERATIONS ? slot->generation + 1 : 1;
    slot->next = slots->free;
    slots->free = (uint32_t)number & (SLOTS_MOST - 1);
}

#endif
