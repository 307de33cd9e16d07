/* Frames that processes exchange, as bytes and as fields. Pure: no I/O, no memory but the caller's.
 *
 * A frame is a header of fixed size, little-endian, and `size` bytes of payload. A parsed frame is consistent: each
 * number is in its range, and each field that has no meaning for the kind and opcode is 0. Queue pairs, keys, bounds
 * and sequence numbers are checked by the code that executes the frame. */
#ifndef AIOVERBS_SOFT_FABRIC_FRAME_H
#define AIOVERBS_SOFT_FABRIC_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "soft/objects/psn_window.h"

#define SOFT_FRAME_SIZE 96u
#define SOFT_FRAGMENT (128u << 10)      /* maximum payload, bytes */
#define SOFT_DIRECT_FRAGMENT (4u << 20) /* maximum of bytes that one frame has copied directly */
#define SOFT_FRAME_PIECE 4096u          /* every part of a message but its last is a multiple of this */
#define SOFT_FRAME_MESSAGE (1u << 30)   /* maximum message, bytes */
#define SOFT_FRAME_SEGMENTS 32u         /* maximum segments of a direct frame */
#define SOFT_SEGMENT_SIZE 16u
#define SOFT_COPY_TOKENS 512u

#define SOFT_FRAME_SKIPPED (1u << 20) /* maximum that is skipped with its header: a ring */

enum { SOFT_FRAME_REQUEST = 1, SOFT_FRAME_RESPONSE = 2, SOFT_FRAME_SKIP = 3 }; /* kind */

/* Opcode of a response. */
enum {
    SOFT_FRAME_ACK, /* acknowledges all up to `psn`; may have the data of a read or the former value of an atomic */
    SOFT_FRAME_NAK, /* refusal for good, with `status`: IBV_WC_REM_INV_REQ_ERR, _REM_ACCESS_ERR or _REM_OP_ERR */
    SOFT_FRAME_RNR, /* no receive: to be repeated after `address` nanoseconds */
};

enum {
    SOFT_FRAME_SOLICITED = 1,
    SOFT_FRAME_FIRST = 2, /* first part of a message; a single part is first and last */
    SOFT_FRAME_LAST = 4,
    /* request: the payload is a list of the requester's segments; response: the data was copied directly */
    SOFT_FRAME_DIRECT = 8,
    SOFT_FRAME_READ_CACHE =
        16, /* response to a read: the requester may read there without asking, see soft/fabric/read_cache.h */
};

struct soft_frame {
    uint8_t kind;
    uint8_t opcode; /* request: enum ibv_wr_opcode */
    uint8_t flags;
    uint8_t transport;  /* request: enum ibv_qp_type of the sender; response: 0 */
    uint8_t status;     /* NAK */
    uint8_t sgid_index; /* request: index of the sender's GID */
    uint8_t hop_limit;  /* datagrams, like the next two */
    uint8_t traffic_class;
    uint32_t flow_label;
    /* bytes of payload: `part`; or 0 for a read request; or the size of the list of segments; or the number of bytes to
     * skip, whose frame has no other field */
    uint32_t size;
    uint32_t to, from; /* queue pair numbers */
    /* request: number of the sender's queue pair since its last reset; response: copied from the request */
    uint32_t token;
    /* request: first packet; response: last acknowledged packet, or first packet of the refused request */
    uint32_t psn;
    uint32_t packets;       /* request: packets that `part` takes, with an MTU of 256 to 4096 bytes */
    uint32_t total, offset; /* request: bytes of the message; offset of this part */
    uint32_t part;          /* request: bytes of this part; response: bytes of data */
    uint32_t key;           /* one-sided: rkey; datagram: Q_Key */
    /* one-sided: remote address of this part; RNR: nanoseconds; read cache grant: first address */
    uint64_t address;
    /* immediate data, or the key to invalidate; read cache grant: number of a descriptor plus one, or 0 */
    uint32_t imm;
    uint32_t srqn;  /* XRC */
    uint32_t reads; /* read or atomic: number in flight, with this one */
    union {
        struct {
            uint64_t compare_add, swap; /* atomic; `compare_add` also: bytes of a read cache grant */
        };
        uint8_t dgid[16]; /* datagram */
    };
    uint16_t copy_token, segments; /* direct */
    uint32_t serial;               /* direct: serial number of the copy token */
};

/* Return the sequence number of the last packet of a request. */
static inline uint32_t soft_frame_last_psn(const struct soft_frame *frame)
{
    return (frame->psn + frame->packets - 1) & SOFT_PSN_MASK;
}

/* Write all fields. Fields without a meaning must be 0. */
void soft_frame_pack(const struct soft_frame *frame, uint8_t out[SOFT_FRAME_SIZE]);

/* Parse a header. Return NULL, or what is wrong with it. */
const char *soft_frame_parse(const uint8_t in[SOFT_FRAME_SIZE], struct soft_frame *frame);

/* Piece of the requester's memory, in a direct frame. */
struct soft_frame_segment {
    uint64_t address;
    uint32_t length;
};

void soft_segments_pack(const struct soft_frame_segment *segments, unsigned int count, uint8_t *out);

/* Parse the payload of a direct frame: `frame->segments` segments of `frame->part` bytes together. Return NULL, or what
 * is wrong. */
const char *soft_segments_parse(const struct soft_frame *frame, const uint8_t *payload,
                                struct soft_frame_segment segments[SOFT_FRAME_SEGMENTS]);

#endif
