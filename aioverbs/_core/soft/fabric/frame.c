/* Packing and parsing of frames. */
#define _GNU_SOURCE
#include "soft/fabric/frame.h"

#include <stdbool.h>
#include <string.h>

#include "abi/libibverbs.h"
#include "soft/base/endian.h"

/* Offsets of the fields. */
enum {
    AT_KIND = 0,
    AT_OPCODE = 1,
    AT_FLAGS = 2,
    AT_TRANSPORT = 3,
    AT_STATUS = 4,
    AT_SGID_INDEX = 5,
    AT_HOP_LIMIT = 6,
    AT_TRAFFIC_CLASS = 7,
    AT_SIZE = 8,
    AT_TO = 12,
    AT_FROM = 16,
    AT_TOKEN = 20,
    AT_PSN = 24,
    AT_PACKETS = 28,
    AT_TOTAL = 32,
    AT_OFFSET = 36,
    AT_PART = 40,
    AT_KEY = 44,
    AT_ADDRESS = 48,
    AT_IMM = 56,
    AT_SRQN = 60,
    AT_READS = 64,
    AT_FLOW_LABEL = 68,
    AT_DGID = 72, /* datagram; else the operands of an atomic */
    AT_COPY_TOKEN = 88,
    AT_SEGMENTS = 90,
    AT_SERIAL = 92,
};
_Static_assert(AT_SERIAL + 4 == SOFT_FRAME_SIZE, "the header ends with its last field");

static bool is_atomic(uint8_t opcode)
{
    return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

void soft_frame_pack(const struct soft_frame *frame, uint8_t out[SOFT_FRAME_SIZE])
{
    out[AT_KIND] = frame->kind;
    out[AT_OPCODE] = frame->opcode;
    out[AT_FLAGS] = frame->flags;
    out[AT_TRANSPORT] = frame->transport;
    out[AT_STATUS] = frame->status;
    out[AT_SGID_INDEX] = frame->sgid_index;
    out[AT_HOP_LIMIT] = frame->hop_limit;
    out[AT_TRAFFIC_CLASS] = frame->traffic_class;
    soft_put32(out + AT_SIZE, frame->size);
    soft_put32(out + AT_TO, frame->to);
    soft_put32(out + AT_FROM, frame->from);
    soft_put32(out + AT_TOKEN, frame->token);
    soft_put32(out + AT_PSN, frame->psn);
    soft_put32(out + AT_PACKETS, frame->packets);
    soft_put32(out + AT_TOTAL, frame->total);
    soft_put32(out + AT_OFFSET, frame->offset);
    soft_put32(out + AT_PART, frame->part);
    soft_put32(out + AT_KEY, frame->key);
    soft_put64(out + AT_ADDRESS, frame->address);
    soft_put32(out + AT_IMM, frame->imm);
    soft_put32(out + AT_SRQN, frame->srqn);
    soft_put32(out + AT_READS, frame->reads);
    soft_put32(out + AT_FLOW_LABEL, frame->flow_label);
    if (frame->transport == IBV_QPT_UD) {
        memcpy(out + AT_DGID, frame->dgid, sizeof(frame->dgid));
    } else {
        soft_put64(out + AT_DGID, frame->compare_add);
        soft_put64(out + AT_DGID + 8, frame->swap);
    }
    soft_put16(out + AT_COPY_TOKEN, frame->copy_token);
    soft_put16(out + AT_SEGMENTS, frame->segments);
    soft_put32(out + AT_SERIAL, frame->serial);
}

static void unpack(const uint8_t in[SOFT_FRAME_SIZE], struct soft_frame *frame)
{
    *frame = (struct soft_frame){
        .kind = in[AT_KIND],
        .opcode = in[AT_OPCODE],
        .flags = in[AT_FLAGS],
        .transport = in[AT_TRANSPORT],
        .status = in[AT_STATUS],
        .sgid_index = in[AT_SGID_INDEX],
        .hop_limit = in[AT_HOP_LIMIT],
        .traffic_class = in[AT_TRAFFIC_CLASS],
        .size = soft_get32(in + AT_SIZE),
        .to = soft_get32(in + AT_TO),
        .from = soft_get32(in + AT_FROM),
        .token = soft_get32(in + AT_TOKEN),
        .psn = soft_get32(in + AT_PSN),
        .packets = soft_get32(in + AT_PACKETS),
        .total = soft_get32(in + AT_TOTAL),
        .offset = soft_get32(in + AT_OFFSET),
        .part = soft_get32(in + AT_PART),
        .key = soft_get32(in + AT_KEY),
        .address = soft_get64(in + AT_ADDRESS),
        .imm = soft_get32(in + AT_IMM),
        .srqn = soft_get32(in + AT_SRQN),
        .reads = soft_get32(in + AT_READS),
        .flow_label = soft_get32(in + AT_FLOW_LABEL),
        .copy_token = soft_get16(in + AT_COPY_TOKEN),
        .segments = soft_get16(in + AT_SEGMENTS),
        .serial = soft_get32(in + AT_SERIAL),
    };
    if (frame->transport == IBV_QPT_UD) {
        memcpy(frame->dgid, in + AT_DGID, sizeof(frame->dgid));
    } else {
        frame->compare_add = soft_get64(in + AT_DGID);
        frame->swap = soft_get64(in + AT_DGID + 8);
    }
}

/* ---- Checks of requests ---------------------------------------------------------------------------------- */

#define BIT(opcode) (1u << (opcode))

/* Return the opcodes of a transport, as bits. */
static uint32_t transport_opcodes(uint8_t transport)
{
    const uint32_t sends = BIT(IBV_WR_SEND) | BIT(IBV_WR_SEND_WITH_IMM);
    const uint32_t unanswered =
        sends | BIT(IBV_WR_SEND_WITH_INV) | BIT(IBV_WR_RDMA_WRITE) | BIT(IBV_WR_RDMA_WRITE_WITH_IMM);

    switch (transport) {
    case IBV_QPT_UD:
        return sends;
    case IBV_QPT_UC:
        return unanswered;
    case IBV_QPT_RC:
    case IBV_QPT_XRC_SEND:
        return unanswered | BIT(IBV_WR_RDMA_READ) | BIT(IBV_WR_ATOMIC_CMP_AND_SWP) | BIT(IBV_WR_ATOMIC_FETCH_AND_ADD);
    default:
        return 0;
    }
}

#define ONE_SIDED                                                                       \
    (BIT(IBV_WR_RDMA_WRITE) | BIT(IBV_WR_RDMA_WRITE_WITH_IMM) | BIT(IBV_WR_RDMA_READ) | \
     BIT(IBV_WR_ATOMIC_CMP_AND_SWP) | BIT(IBV_WR_ATOMIC_FETCH_AND_ADD))
#define ANSWERED (BIT(IBV_WR_RDMA_READ) | BIT(IBV_WR_ATOMIC_CMP_AND_SWP) | BIT(IBV_WR_ATOMIC_FETCH_AND_ADD))
#define WITH_IMM (BIT(IBV_WR_RDMA_WRITE_WITH_IMM) | BIT(IBV_WR_SEND_WITH_IMM) | BIT(IBV_WR_SEND_WITH_INV))

/* Check that the part lies in its message. */
static const char *check_part(const struct soft_frame *frame)
{
    uint32_t limit = frame->flags & SOFT_FRAME_DIRECT ? SOFT_DIRECT_FRAGMENT : SOFT_FRAGMENT;
    bool first = frame->flags & SOFT_FRAME_FIRST, last = frame->flags & SOFT_FRAME_LAST;

    if (frame->total > SOFT_FRAME_MESSAGE)
        return "a message is too long";
    if (frame->part > limit)
        return "a part is too long";
    if (frame->offset > frame->total || frame->part > frame->total - frame->offset)
        return "a part exceeds its message";
    if (first != !frame->offset || last != (frame->offset + frame->part == frame->total))
        return "a part's offset does not match its flags";
    if (frame->offset % SOFT_FRAME_PIECE || (!last && frame->part % SOFT_FRAME_PIECE))
        return "a part's offset or size is not a multiple of 4096";
    if (!frame->part && frame->total)
        return "a part is empty";
    return NULL;
}

static const char *check_packets(const struct soft_frame *frame)
{
    uint32_t most = frame->part ? (frame->part + 255) / 256 : 1;
    uint32_t least = frame->part ? (frame->part + 4095) / 4096 : 1;

    if (frame->transport == IBV_QPT_UD)
        most = least = 1;
    return frame->packets < least || frame->packets > most ? "a number of packets does not match the part's size"
                                                           : NULL;
}

static const char *check_payload(const struct soft_frame *frame, uint32_t opcode)
{
    if (frame->flags & SOFT_FRAME_DIRECT) {
        if (frame->transport == IBV_QPT_UD || frame->transport == IBV_QPT_UC ||
            opcode & (BIT(IBV_WR_ATOMIC_CMP_AND_SWP) | BIT(IBV_WR_ATOMIC_FETCH_AND_ADD)))
            return "a direct frame has an opcode or transport that cannot be copied directly";
        if (!frame->part || !frame->segments || frame->segments > SOFT_FRAME_SEGMENTS ||
            frame->size != frame->segments * SOFT_SEGMENT_SIZE || frame->copy_token >= SOFT_COPY_TOKENS)
            return "a list of segments is invalid";
        return NULL;
    }
    if (frame->copy_token || frame->segments || frame->serial)
        return "a reserved field is not zero";
    if (frame->size != (opcode & ANSWERED ? 0 : frame->part))
        return "a payload has another size than its part";
    return NULL;
}

/* Check fields that only some opcodes and transports have. */
static const char *check_reserved(const struct soft_frame *frame, uint32_t opcode)
{
    bool datagram = frame->transport == IBV_QPT_UD;

    if (frame->status || (!(opcode & ONE_SIDED) && (frame->address || (frame->key && !datagram))) ||
        (!(opcode & WITH_IMM) && frame->imm) || (frame->transport != IBV_QPT_XRC_SEND && frame->srqn) ||
        (!(opcode & ANSWERED) && frame->reads) ||
        (!datagram && (frame->flow_label || frame->hop_limit || frame->traffic_class)) ||
        (!datagram && !is_atomic(frame->opcode) && (frame->compare_add || frame->swap)) ||
        (frame->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD && frame->swap))
        return "a reserved field is not zero";
    if (frame->flow_label >> 20 || frame->srqn >> 24 || frame->sgid_index > 1)
        return "a number is out of range";
    if (opcode & ANSWERED && (!frame->reads || frame->reads > 255))
        return "a number of reads is not between 1 and 255";
    if (datagram && frame->total > 4096)
        return "a datagram is longer than 4096 bytes";
    if (is_atomic(frame->opcode) && frame->total != 8)
        return "an atomic is not 8 bytes long";
    return NULL;
}

static const char *check_request(const struct soft_frame *frame)
{
    uint32_t opcode = frame->opcode < 32 ? BIT(frame->opcode) : 0;
    const char *wrong;

    if (!(opcode & transport_opcodes(frame->transport)))
        return "an opcode or transport is unknown";
    if (frame->flags & ~(SOFT_FRAME_SOLICITED | SOFT_FRAME_FIRST | SOFT_FRAME_LAST | SOFT_FRAME_DIRECT))
        return "a flag is unknown";
    wrong = check_part(frame);
    if (!wrong)
        wrong = check_packets(frame);
    if (!wrong)
        wrong = check_payload(frame, opcode);
    return wrong ? wrong : check_reserved(frame, opcode);
}

/* ---- Checks of responses --------------------------------------------------------------------------------- */

static const char *check_response(const struct soft_frame *frame)
{
    bool direct = frame->flags & SOFT_FRAME_DIRECT, grants_read_cache = frame->flags & SOFT_FRAME_READ_CACHE;

    if (frame->transport || frame->sgid_index || frame->hop_limit || frame->traffic_class || frame->flow_label ||
        frame->packets || frame->total || frame->offset || frame->key || frame->srqn || frame->reads ||
        ((frame->compare_add || frame->imm) && !grants_read_cache) || frame->swap || frame->copy_token ||
        frame->segments || frame->serial || (frame->opcode != SOFT_FRAME_NAK && frame->status) ||
        (frame->opcode != SOFT_FRAME_RNR && !grants_read_cache && frame->address))
        return "a reserved field is not zero";
    if (frame->flags & ~(SOFT_FRAME_DIRECT | SOFT_FRAME_READ_CACHE) ||
        ((direct || grants_read_cache) && frame->opcode != SOFT_FRAME_ACK))
        return "a flag is unknown";
    if (grants_read_cache &&
        (!frame->part || frame->compare_add < frame->part || frame->address > UINT64_MAX - frame->compare_add))
        return "a read cache grant covers no memory";
    if (frame->part > (direct ? SOFT_DIRECT_FRAGMENT : SOFT_FRAGMENT) || frame->size != (direct ? 0 : frame->part))
        return "a payload has another size than its part";
    if (frame->part && frame->opcode != SOFT_FRAME_ACK)
        return "a NAK has data";
    switch (frame->opcode) {
    case SOFT_FRAME_ACK:
        return NULL;
    case SOFT_FRAME_NAK:
        return frame->status == IBV_WC_REM_INV_REQ_ERR || frame->status == IBV_WC_REM_ACCESS_ERR ||
                       frame->status == IBV_WC_REM_OP_ERR
                   ? NULL
                   : "a status is unknown";
    case SOFT_FRAME_RNR:
        return frame->address <= 1000000000u ? NULL : "a delay is too long";
    default:
        return "an opcode or transport is unknown";
    }
}

/* ---- Check of bytes to skip ------------------------------------------------------------------------------- */

static const char *check_skip(const uint8_t in[SOFT_FRAME_SIZE], const struct soft_frame *frame)
{
    const struct soft_frame skip = {.kind = SOFT_FRAME_SKIP, .size = frame->size};
    uint8_t expected[SOFT_FRAME_SIZE];

    soft_frame_pack(&skip, expected);
    if (memcmp(in, expected, sizeof(expected)))
        return "a reserved field is not zero";
    return frame->size > SOFT_FRAME_SKIPPED - SOFT_FRAME_SIZE ? "more bytes are to be skipped than there are" : NULL;
}

const char *soft_frame_parse(const uint8_t in[SOFT_FRAME_SIZE], struct soft_frame *frame)
{
    unpack(in, frame);
    if (frame->to >> 24 || frame->from >> 24 || frame->psn >> 24)
        return "a number is out of range";
    switch (frame->kind) {
    case SOFT_FRAME_REQUEST:
        return check_request(frame);
    case SOFT_FRAME_RESPONSE:
        return check_response(frame);
    case SOFT_FRAME_SKIP:
        return check_skip(in, frame);
    default:
        return "a kind of frame is unknown";
    }
}

/* ---- Segments -------------------------------------------------------------------------------------------- */

void soft_segments_pack(const struct soft_frame_segment *segments, unsigned int count, uint8_t *out)
{
    for (; count--; segments++, out += SOFT_SEGMENT_SIZE) {
        soft_put64(out, segments->address);
        soft_put32(out + 8, segments->length);
        soft_put32(out + 12, 0);
    }
}

const char *soft_segments_parse(const struct soft_frame *frame, const uint8_t *payload,
                                struct soft_frame_segment segments[SOFT_FRAME_SEGMENTS])
{
    uint64_t total = 0;
    unsigned int i;

    for (i = 0; i < frame->segments; i++, payload += SOFT_SEGMENT_SIZE) {
        segments[i].address = soft_get64(payload);
        segments[i].length = soft_get32(payload + 8);
        if (soft_get32(payload + 12))
            return "a reserved field is not zero";
        if (!segments[i].length || segments[i].address > UINT64_MAX - segments[i].length)
            return "a segment is empty or exceeds the address space";
        total += segments[i].length;
    }
    return total == frame->part ? NULL : "segments have another size than their part";
}
