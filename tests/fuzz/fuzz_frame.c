/* Fuzzer for the parsers of frames, segments and the handshake: accepted input is within the bounds of the memory
 * reserved for it, and packs to the same bytes. The first byte selects the parser. */
#include <stdlib.h>
#include <string.h>

#include "soft/fabric/frame.h"
#include "soft/fabric/handshake_wire.h"

static void require(int holds)
{
    if (!holds)
        abort();
}

static void frame(const uint8_t *data, size_t size)
{
    struct soft_frame_segment segments[SOFT_FRAME_SEGMENTS];
    uint8_t again[SOFT_FRAME_SIZE];
    struct soft_frame parsed;

    if (size < SOFT_FRAME_SIZE || soft_frame_parse(data, &parsed))
        return;
    if (parsed.kind == SOFT_FRAME_SKIP)
        require(parsed.size <= SOFT_FRAME_SKIPPED - SOFT_FRAME_SIZE && !parsed.total);
    else
        require(parsed.size <= SOFT_FRAGMENT);
    require(parsed.part <= SOFT_DIRECT_FRAGMENT && parsed.total <= SOFT_FRAME_MESSAGE);
    require(parsed.segments <= SOFT_FRAME_SEGMENTS && parsed.copy_token < SOFT_COPY_TOKENS && parsed.sgid_index < 2);
    require(parsed.kind != SOFT_FRAME_REQUEST || parsed.offset <= parsed.total - parsed.part);
    soft_frame_pack(&parsed, again);
    require(!memcmp(again, data, sizeof(again)));
    if (!(parsed.flags & SOFT_FRAME_DIRECT) || !parsed.segments || size - SOFT_FRAME_SIZE < parsed.size)
        return;
    if (!soft_segments_parse(&parsed, data + SOFT_FRAME_SIZE, segments)) {
        uint8_t list[SOFT_FRAME_SEGMENTS * SOFT_SEGMENT_SIZE];

        soft_segments_pack(segments, parsed.segments, list);
        require(!memcmp(list, data + SOFT_FRAME_SIZE, parsed.size));
    }
}

static void handshake(const uint8_t *data, size_t size)
{
    uint8_t hello_bytes[SOFT_HELLO_SIZE], welcome_bytes[SOFT_WELCOME_SIZE], proof_bytes[SOFT_PROOF_SIZE];
    uint8_t proof[SOFT_DIGEST];
    struct soft_welcome welcome;
    struct soft_hello hello;

    if (size >= sizeof(hello_bytes) && !soft_hello_parse(data, &hello)) {
        soft_hello_pack(&hello, hello_bytes);
        require(!memcmp(hello_bytes, data, sizeof(hello_bytes)));
    }
    if (size >= sizeof(welcome_bytes) && !soft_welcome_parse(data, &welcome)) {
        soft_welcome_pack(&welcome, welcome_bytes);
        require(!memcmp(welcome_bytes, data, sizeof(welcome_bytes)));
    }
    if (size >= sizeof(proof_bytes) && !soft_proof_parse(data, proof)) {
        soft_proof_pack(proof, proof_bytes);
        require(!memcmp(proof_bytes, data, sizeof(proof_bytes)));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size && data[0] & 1)
        frame(data + 1, size - 1);
    else if (size)
        handshake(data + 1, size - 1);
    return 0;
}
