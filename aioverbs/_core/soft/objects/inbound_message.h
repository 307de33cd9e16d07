/* The order of the parts of an inbound message. Pure: neither I/O nor locks.
 *
 * A peer sends the parts of a message one after the other: each begins where the one before it ended, and names the
 * operation, the length and the place that the first one named. Nobody else sends on the connection meanwhile. What a
 * hostile peer sends out of this order never reaches a receive or a completion, so that whatever a completion counts as
 * received was sent. */
#ifndef AIOVERBS_SOFT_OBJECTS_INBOUND_MESSAGE_H
#define AIOVERBS_SOFT_OBJECTS_INBOUND_MESSAGE_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

/* A part, as its frame describes it. The parser has seen to it that the part lies in its message, and has bytes unless
 * the message has none. */
struct soft_part {
    uint32_t total, offset, length; /* bytes: of the message; before the part; of the part */
    uint32_t key, srqn;             /* one-sided, XRC; else 0 */
    uint64_t address;               /* one-sided: of the message's first byte; else 0 */
    uint8_t opcode;
};

struct soft_message {
    bool in_flight;              /* more parts are to come */
    uint32_t offset;             /* where the next one begins: all bytes before came */
    struct soft_part first_part; /* the first one */
};

/* Whether the part is the next one of the message under way, or begins a message where none is. */
static inline bool soft_message_fits(const struct soft_message *message, const struct soft_part *part)
{
    const struct soft_part *first_part = &message->first_part;

    if (!message->in_flight)
        return !part->offset;
    return part->offset == message->offset && part->total == first_part->total && part->opcode == first_part->opcode &&
           part->key == first_part->key && part->srqn == first_part->srqn && part->address == first_part->address;
}

/* The part fits and came. */
static inline void soft_message_advance(struct soft_message *message, const struct soft_part *part)
{
    assert(soft_message_fits(message, part));
    assert(part->length <= part->total - part->offset && (part->length || !part->total));
    message->offset = part->offset + part->length;
    message->in_flight = message->offset != part->total;
    if (message->in_flight && !part->offset)
        message->first_part = *part;
}

#endif
