/* The frames that processes exchange, as bytes and as fields. Pure: no I/O, no memory but the caller's.
 *
 * A frame is a header of fixed size, little-endian, and `size` bytes of payload. What was parsed holds together: each
 * number is in its range, each field that the kind and opcode leave without a meaning is 0. What it is about (queue
 * pairs, keys, bounds, sequence) is for who executes it to check. */
#ifndef AIOVERBS_SOFT_FABRIC_FRAME_H
#define AIOVERBS_SOFT_FABRIC_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "soft/objects/psn_window.h"

#define SOFT_FRAME_SIZE 96u
#define SOFT_FRAGMENT (128u << 10)      /* bytes of payload at most */
#define SOFT_DIRECT_FRAGMENT (4u << 20) /* bytes that one frame has moved from memory to memory at most */
#define SOFT_FRAME_PIECE 4096u          /* all parts of a message but its last are a multiple of this */
#define SOFT_FRAME_MESSAGE (1u << 30)   /* bytes of a message at most */
#define SOFT_FRAME_SEGMENTS 32u         /* of a direct frame */
#define SOFT_SEGMENT_SIZE 16u
#define SOFT_COPY_TOKENS 512u

enum { SOFT_FRAME_REQUEST = 1, SOFT_FRAME_RESPONSE = 2 }; /* kind */

/* opcode of a response */
enum {
    SOFT_FRAME_ACK, /* of all up to `psn`; with the data of a read or the former value of an atomic */
    SOFT_FRAME_NAK, /* for good, with `status`: IBV_WC_REM_INV_REQ_ERR, _REM_ACCESS_ERR or _REM_OP_ERR */
    SOFT_FRAME_RNR, /* again after `address` nanoseconds */
};

enum {
    SOFT_FRAME_SOLICITED = 1,
    SOFT_FRAME_FIRST = 2, /* of the parts of a message; where there is one part, it is first and last */
    SOFT_FRAME_LAST = 4,
    SOFT_FRAME_DIRECT = 8, /* the payload is a list of the requester's segments; in a response: the data was moved */
    SOFT_FRAME_READ_CACHE =
        16, /* response to a read: what lies there may be read without asking, see soft/fabric/read_cache.h */
};

struct soft_frame {
    uint8_t kind;
    uint8_t opcode; /* request: enum ibv_wr_opcode */
    uint8_t flags;
    uint8_t transport;  /* request: enum ibv_qp_type of who sends it; response: 0 */
    uint8_t status;     /* NAK */
    uint8_t sgid_index; /* request: which of the sender's GIDs it comes from */
    uint8_t hop_limit;  /* datagram, like the next two */
    uint8_t traffic_class;
    uint32_t flow_label;
    uint32_t size;          /* bytes of payload: `part`, or none where a read asks, or the segments' */
    uint32_t to, from;      /* queue pair numbers */
    uint32_t token;         /* request: the life of the sender's queue pair since its last reset; response: that of
                             * the request */
    uint32_t psn;           /* request: of its first packet; response: of the last one that is acknowledged, or of the
                             * request that is refused */
    uint32_t packets;       /* request: what `part` takes, with an MTU of 256 to 4096 bytes */
    uint32_t total, offset; /* request: bytes of the message; where this part begins */
    uint32_t part;          /* bytes of this part; response: of data */
    uint32_t key;           /* one-sided: the rkey; datagram: the Q_Key */
    uint64_t address;       /* one-sided: remote, of this part; RNR: nanoseconds; licence: where it begins */
    uint32_t imm;           /* request with immediate data, or the key to invalidate */
    uint32_t srqn;          /* XRC */
    uint32_t reads;         /* read or atomic: how many are in flight with it */
    union {
        struct {
            uint64_t compare_add, swap; /* atomic; the first one of a licence: how many bytes it is for */
        };
        uint8_t dgid[16]; /* datagram */
    };
    uint16_t copy_token, segments; /* direct */
    uint32_t serial;               /* direct: of the copy token */
};

/* Return the sequence number of the last packet of a request. */
static inline uint32_t soft_frame_last_psn(const struct soft_frame *frame)
{
    return (frame->psn + frame->packets - 1) & SOFT_PSN_MASK;
}

/* Writes all fields: what has no meaning must be 0. */
void soft_frame_pack(const struct soft_frame *frame, uint8_t out[SOFT_FRAME_SIZE]);

/* NULL, or what is wrong with it. */
const char *soft_frame_parse(const uint8_t in[SOFT_FRAME_SIZE], struct soft_frame *frame);

/* The requester's memory, as a direct frame has it. */
struct soft_frame_segment {
    uint64_t address;
    uint32_t length;
};

void soft_segments_pack(const struct soft_frame_segment *segments, unsigned int count, uint8_t *out);

/* The payload of a direct frame that was parsed: `frame->segments` of them, `frame->part` bytes together. NULL, or
 * what is wrong. */
const char *soft_segments_parse(const struct soft_frame *frame, const uint8_t *payload,
                                struct soft_frame_segment segments[SOFT_FRAME_SEGMENTS]);

#endif
