/* Order of the parts of an inbound message. Pure: neither I/O nor locks.
 *
 * A peer sends the parts of a message one after the other. Each part begins where the one before it ended, and names
 * the operation, length and address of the first one. No other message comes over the connection meanwhile. Parts that
 * a hostile peer sends out of this order never reach a receive or a completion, so every byte that a completion counts
 * as received was sent. */
#ifndef AIOVERBS_SOFT_OBJECTS_INBOUND_MESSAGE_H
#define AIOVERBS_SOFT_OBJECTS_INBOUND_MESSAGE_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

/* A part, as its frame describes it. The parser has checked that the part lies in its message, and is not empty unless
 * the message is. */
struct soft_part {
    uint32_t total, offset, length; /* bytes of the message, before the part, and of the part */
    uint32_t key, srqn;             /* one-sided, XRC; else 0 */
    uint64_t address;               /* one-sided: address of the message's first byte; else 0 */
    uint8_t opcode;
};

struct soft_message {
    bool in_flight;              /* more parts of the message are expected */
    uint32_t offset;             /* offset of the next part: all bytes before it were received */
    struct soft_part first_part; /* first part of the message */
};

/* Return whether the part is the next one of the message in progress, or begins a message if none is. */
static inline bool soft_message_fits(const struct soft_message *message, const struct soft_part *part)
{
    const struct soft_part *first_part = &message->first_part;

    if (!message->in_flight)
        return !part->offset;
    return part->offset == message->offset && part->total == first_part->total && part->opcode == first_part->opcode &&
           part->key == first_part->key && part->srqn == first_part->srqn && part->address == first_part->address;
}

/* Advance past a part that fits. */
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
