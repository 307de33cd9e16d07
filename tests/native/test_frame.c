/* Tests of packing and parsing frames and messages of the handshake: packed frames are parsed, inconsistent ones
 * refused. */
#include "support.h"

#include "soft/fabric/frame.h"
#include "soft/fabric/handshake_wire.h"

static struct soft_frame a_write(void)
{
    return (struct soft_frame){
        .kind = SOFT_FRAME_REQUEST,
        .opcode = IBV_WR_RDMA_WRITE,
        .flags = SOFT_FRAME_FIRST | SOFT_FRAME_LAST,
        .transport = IBV_QPT_RC,
        .size = 5000,
        .to = 0x12,
        .from = 0xfffffe,
        .token = 0xdeadbeef,
        .psn = 0xffffff,
        .packets = 5,
        .total = 5000,
        .part = 5000,
        .key = 0x12345678,
        .address = 0xfedcba9876543210,
    };
}

static struct soft_frame a_send(void)
{
    struct soft_frame frame = a_write();

    frame.opcode = IBV_WR_SEND;
    frame.key = 0;
    frame.address = 0;
    return frame;
}

static struct soft_frame a_read(void)
{
    struct soft_frame frame = a_write();

    frame.opcode = IBV_WR_RDMA_READ;
    frame.size = 0;
    frame.reads = 1;
    return frame;
}

static struct soft_frame an_atomic(void)
{
    struct soft_frame frame = a_read();

    frame.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
    frame.total = frame.part = 8;
    frame.packets = 1;
    frame.compare_add = 0x0102030405060708;
    frame.swap = UINT64_MAX;
    return frame;
}

static struct soft_frame a_datagram(void)
{
    struct soft_frame frame = a_send();

    frame.transport = IBV_QPT_UD;
    frame.size = frame.total = frame.part = 4096;
    frame.packets = 1;
    frame.key = 0x80000001;
    frame.flow_label = 0xfffff;
    frame.hop_limit = 255;
    frame.traffic_class = 254;
    frame.sgid_index = 1;
    memcpy(frame.dgid, "0123456789abcdef", 16);
    return frame;
}

static struct soft_frame a_direct(void)
{
    struct soft_frame frame = a_write();

    frame.flags |= SOFT_FRAME_DIRECT;
    frame.total = frame.part = SOFT_DIRECT_FRAGMENT;
    frame.packets = SOFT_DIRECT_FRAGMENT / 1024;
    frame.segments = 2;
    frame.size = 2 * SOFT_SEGMENT_SIZE;
    frame.copy_token = SOFT_COPY_TOKENS - 1;
    frame.serial = 77;
    return frame;
}

static struct soft_frame an_answer(void)
{
    return (struct soft_frame){
        .kind = SOFT_FRAME_RESPONSE,
        .opcode = SOFT_FRAME_ACK,
        .size = 9,
        .part = 9,
        .to = 1,
        .from = 2,
        .token = 3,
        .psn = 4,
    };
}

/* With a read cache grant for twice as much. */
static struct soft_frame a_read_cache_grant(void)
{
    struct soft_frame frame = an_answer();

    frame.flags = SOFT_FRAME_READ_CACHE;
    frame.address = 0x7fff00000000;
    frame.compare_add = 2 * (uint64_t)frame.part;
    frame.imm = 17;
    return frame;
}

static const char *parsed(const struct soft_frame *frame)
{
    uint8_t bytes[SOFT_FRAME_SIZE];
    struct soft_frame back;
    const char *wrong;

    soft_frame_pack(frame, bytes);
    wrong = soft_frame_parse(bytes, &back);
    if (!wrong) {
        uint8_t again[SOFT_FRAME_SIZE];

        soft_frame_pack(&back, again);
        CHECK(!memcmp(bytes, again, sizeof(bytes)));
    }
    return wrong;
}

#define GOOD(frame) check_true(!parsed(&(frame)), HERE, parsed(&(frame)))
#define BAD(make, change)                                  \
    do {                                                   \
        struct soft_frame frame = make;                    \
                                                           \
        GOOD(frame);                                       \
        frame.change;                                      \
        check_true(parsed(&frame) != NULL, HERE, #change); \
    } while (0)

static void every_kind_of_frame_is_parsed_as_packed(void)
{
    struct soft_frame frames[] = {a_write(),    a_send(),   a_read(),    an_atomic(),
                                  a_datagram(), a_direct(), an_answer(), a_read_cache_grant()};
    size_t i;

    for (i = 0; i < COUNT_OF(frames); i++)
        GOOD(frames[i]);
}

/* Check the layout, so that both ends agree whatever they are compiled for. */
static void layout_of_a_frame(void)
{
    static const uint8_t expected[SOFT_FRAME_SIZE] = {
        1,    IBV_WR_RDMA_WRITE,
        6,    2,
        0,    0,
        0,    0,
        0x88, 0x13,
        0,    0,
        0x12, 0,
        0,    0,
        0xfe, 0xff,
        0xff, 0,
        0xef, 0xbe,
        0xad, 0xde,
        0xff, 0xff,
        0xff, 0,
        5,    0,
        0,    0,
        0x88, 0x13,
        0,    0,
        0,    0,
        0,    0,
        0x88, 0x13,
        0,    0,
        0x78, 0x56,
        0x34, 0x12,
        0x10, 0x32,
        0x54, 0x76,
        0x98, 0xba,
        0xdc, 0xfe,
    };
    struct soft_frame frame = a_write();
    uint8_t bytes[SOFT_FRAME_SIZE];

    soft_frame_pack(&frame, bytes);
    CHECK(!memcmp(bytes, expected, sizeof(bytes)));
}

static void numbers_out_of_range(void)
{
    BAD(a_write(), kind = 0);
    BAD(a_write(), kind = 3);
    BAD(a_write(), to = 1u << 24);
    BAD(a_write(), from = 1u << 24);
    BAD(a_write(), psn = 1u << 24);
    BAD(a_write(), flags |= 16);
    BAD(a_write(), sgid_index = 2);
    BAD(a_write(), opcode = IBV_WR_LOCAL_INV);
    BAD(a_write(), opcode = IBV_WR_BIND_MW);
    BAD(a_write(), opcode = IBV_WR_TSO);
    BAD(a_write(), opcode = 32);
    BAD(a_write(), opcode = 255);
    BAD(a_write(), transport = IBV_QPT_XRC_RECV);
    BAD(a_write(), transport = 0);
    BAD(a_write(), transport = IBV_QPT_UD);
    BAD(a_read(), transport = IBV_QPT_UC);
    BAD(a_read(), reads = 0);
    BAD(a_read(), reads = 256);
    BAD(an_atomic(), transport = IBV_QPT_UC);
    BAD(a_datagram(), flow_label = 1u << 20);
}

static void parts_that_do_not_fit(void)
{
    struct soft_frame middle = a_write();

    BAD(a_write(), size = 4999);
    BAD(a_write(), size = UINT32_MAX);
    BAD(a_write(), part = 4999);
    BAD(a_write(), total = 5001);
    BAD(a_write(), offset = 4096);
    BAD(a_write(), flags = SOFT_FRAME_FIRST);
    BAD(a_write(), flags = SOFT_FRAME_LAST);
    BAD(a_write(), packets = 0);
    BAD(a_write(), packets = 1);
    BAD(a_write(), packets = 21);
    BAD(a_read(), size = 1);
    BAD(an_atomic(), total = 16);
    BAD(a_datagram(), packets = 2);
    middle.total = SOFT_FRAME_MESSAGE;
    middle.offset = SOFT_FRAGMENT;
    middle.size = middle.part = SOFT_FRAGMENT;
    middle.flags = 0;
    middle.packets = 32;
    BAD(middle, total = SOFT_FRAME_MESSAGE + 1);
    BAD(middle, offset = SOFT_FRAGMENT + 1);
    BAD(middle, offset = UINT32_MAX - 4095);
    BAD(middle, size = frame.part = SOFT_FRAGMENT + 4096);
    BAD(middle, size = frame.part = 4097);
    BAD(middle, size = frame.part = 0);
    BAD(a_datagram(), size = frame.part = frame.total = 4097);
}

static void fields_without_a_meaning(void)
{
    BAD(a_write(), status = 1);
    BAD(a_write(), imm = 1);
    BAD(a_write(), srqn = 1);
    BAD(a_write(), reads = 1);
    BAD(a_write(), hop_limit = 1);
    BAD(a_write(), traffic_class = 1);
    BAD(a_write(), flow_label = 1);
    BAD(a_write(), swap = 1);
    BAD(a_write(), compare_add = 1);
    BAD(a_write(), copy_token = 1);
    BAD(a_write(), segments = 1);
    BAD(a_write(), serial = 1);
    BAD(a_send(), address = 1);
    BAD(a_send(), key = 1);
    BAD(a_datagram(), address = 1);
    BAD(an_atomic(), opcode = IBV_WR_ATOMIC_FETCH_AND_ADD);
    BAD(an_answer(), transport = IBV_QPT_RC);
    BAD(an_answer(), packets = 1);
    BAD(an_answer(), total = 9);
    BAD(an_answer(), offset = 9);
    BAD(an_answer(), key = 9);
    BAD(an_answer(), address = 9);
    BAD(an_answer(), compare_add = 9);
    BAD(an_answer(), imm = 1);
    BAD(an_answer(), serial = 9);
    BAD(an_answer(), status = IBV_WC_REM_OP_ERR);
}

static void answers_of_each_kind(void)
{
    struct soft_frame nak = an_answer(), rnr;

    nak.part = nak.size = 0;
    rnr = nak;
    nak.opcode = SOFT_FRAME_NAK;
    nak.status = IBV_WC_REM_ACCESS_ERR;
    rnr.opcode = SOFT_FRAME_RNR;
    rnr.address = 655360000;
    GOOD(nak);
    nak.status = IBV_WC_REM_INV_REQ_ERR;
    GOOD(nak);
    nak.status = IBV_WC_REM_OP_ERR;
    GOOD(nak);
    BAD(nak, status = 0);
    BAD(nak, status = IBV_WC_RETRY_EXC_ERR);
    BAD(nak, status = 255);
    BAD(nak, size = frame.part = 1);
    BAD(nak, flags = SOFT_FRAME_DIRECT);
    BAD(rnr, address = 1000000001);
    BAD(rnr, opcode = 3);
    BAD(an_answer(), flags = SOFT_FRAME_FIRST);
    BAD(an_answer(), flags = SOFT_FRAME_DIRECT);
    BAD(an_answer(), size = 10);
    BAD(an_answer(), part = 10);
    BAD(an_answer(), size = frame.part = SOFT_FRAGMENT + 1);
    BAD(an_answer(), address = 0x1000);
    BAD(an_answer(), compare_add = 4096);
    BAD(a_read_cache_grant(), opcode = SOFT_FRAME_RNR);
    BAD(a_read_cache_grant(), size = frame.part = 0);
    BAD(a_read_cache_grant(), compare_add = frame.part - 1);
    BAD(a_read_cache_grant(), compare_add = UINT64_MAX);
    BAD(a_read_cache_grant(), swap = 1);
}

static void direct_frames(void)
{
    struct soft_frame frame = a_direct();
    struct soft_frame_segment segments[SOFT_FRAME_SEGMENTS] = {{0x1000, 4096}, {0x7fff00000001, 4190208}};
    struct soft_frame_segment back[SOFT_FRAME_SEGMENTS];
    uint8_t payload[2 * SOFT_SEGMENT_SIZE];

    BAD(a_direct(), copy_token = SOFT_COPY_TOKENS);
    BAD(a_direct(), segments = 0);
    BAD(a_direct(), segments = 3);
    BAD(a_direct(), size = 0);
    BAD(a_direct(), transport = IBV_QPT_UC);
    BAD(a_direct(), part = frame.total = SOFT_DIRECT_FRAGMENT + 1);
    BAD(a_direct(), size = (frame.segments = SOFT_FRAME_SEGMENTS + 1) * SOFT_SEGMENT_SIZE);

    soft_segments_pack(segments, 2, payload);
    CHECK(!soft_segments_parse(&frame, payload, back));
    CHECK_EQ(back[0].address, 0x1000);
    CHECK_EQ(back[1].address, 0x7fff00000001);
    CHECK_EQ(back[0].length + back[1].length, SOFT_DIRECT_FRAGMENT);
    payload[12] = 1;
    CHECK(soft_segments_parse(&frame, payload, back) != NULL);
    payload[12] = 0;
    payload[8] = 1;
    CHECK(soft_segments_parse(&frame, payload, back) != NULL);
    segments[0].address = UINT64_MAX - 4095;
    soft_segments_pack(segments, 2, payload);
    CHECK(soft_segments_parse(&frame, payload, back) != NULL);
    segments[0] = (struct soft_frame_segment){0x1000, 0};
    segments[1].length = SOFT_DIRECT_FRAGMENT;
    soft_segments_pack(segments, 2, payload);
    CHECK(soft_segments_parse(&frame, payload, back) != NULL);
}

static struct soft_frame a_skip(void)
{
    return (struct soft_frame){.kind = SOFT_FRAME_SKIP, .size = SOFT_FRAME_SKIPPED - SOFT_FRAME_SIZE};
}

static void frames_to_skip(void)
{
    BAD(a_skip(), size = SOFT_FRAME_SKIPPED - SOFT_FRAME_SIZE + 1);
    BAD(a_skip(), size = UINT32_MAX);
    BAD(a_skip(), opcode = 1);
    BAD(a_skip(), flags = SOFT_FRAME_LAST);
    BAD(a_skip(), transport = IBV_QPT_RC);
    BAD(a_skip(), from = 1);
    BAD(a_skip(), part = 1);
    BAD(a_skip(), swap = 1);
    BAD(a_skip(), serial = 1);
    BAD(a_skip(), token = 1);
}

/* A header that is accepted is within the bounds for which memory is reserved, whatever its bytes. */
static void random_bytes(void)
{
    uint8_t bytes[SOFT_FRAME_SIZE];
    struct soft_frame seeds[] = {a_write(),    a_send(),   a_read(),    an_atomic(),
                                 a_datagram(), a_direct(), an_answer(), a_read_cache_grant()};
    struct soft_frame frame;
    unsigned int state = 1, i, good = 0;

    for (i = 0; i < 200000; i++) {
        soft_frame_pack(&seeds[i % COUNT_OF(seeds)], bytes);
        bytes[rand_r(&state) % SOFT_FRAME_SIZE] ^= (uint8_t)rand_r(&state);
        if (soft_frame_parse(bytes, &frame))
            continue;
        good++;
        CHECK(frame.size <= SOFT_FRAGMENT && frame.part <= SOFT_DIRECT_FRAGMENT);
        CHECK(frame.total <= SOFT_FRAME_MESSAGE && frame.segments <= SOFT_FRAME_SEGMENTS);
    }
    CHECK(good > 0 && good < i);
}

/* ---- The handshake --------------------------------------------------------------------------------------- */

static void handshake_messages(void)
{
    struct soft_hello hello = {.flags = SOFT_HELLO_DIRECT, .pid = 77, .probe = 0x7fffdeadbeef}, hello_back;
    struct soft_welcome welcome = {.flags = SOFT_HELLO_SECRET}, welcome_back;
    uint8_t hello_bytes[SOFT_HELLO_SIZE], welcome_bytes[SOFT_WELCOME_SIZE], proof_bytes[SOFT_PROOF_SIZE];
    uint8_t first[SOFT_DIGEST], proof[SOFT_DIGEST], hello_again[SOFT_HELLO_SIZE], welcome_again[SOFT_WELCOME_SIZE];
    uint16_t version;

    memset(hello.gids, 1, sizeof(hello.gids));
    memset(hello.wanted, 2, sizeof(hello.wanted));
    memset(hello.nonce, 3, sizeof(hello.nonce));
    memset(welcome.gids, 4, sizeof(welcome.gids));
    memset(welcome.nonce, 5, sizeof(welcome.nonce));
    memset(first, 6, sizeof(first));
    soft_hello_pack(&hello, hello_bytes);
    CHECK(!soft_hello_parse(hello_bytes, &hello_back));
    soft_hello_pack(&hello_back, hello_again);
    CHECK(!memcmp(hello_bytes, hello_again, sizeof(hello_bytes)));
    CHECK_EQ(hello_back.pid, 77);
    CHECK_EQ(hello_back.probe, 0x7fffdeadbeef);
    CHECK_EQ(hello_back.nonce[0] + hello_back.wanted[0] + hello_back.gids[1][15], 3 + 2 + 1);
    soft_welcome_pack(&welcome, welcome_bytes);
    CHECK(!soft_welcome_parse(welcome_bytes, &welcome_back));
    soft_welcome_pack(&welcome_back, welcome_again);
    CHECK(!memcmp(welcome_bytes, welcome_again, sizeof(welcome_bytes)));
    CHECK_EQ(welcome_back.nonce[0] + welcome_back.gids[1][15], 5 + 4);
    soft_proof_pack(first, proof_bytes);
    CHECK(!soft_proof_parse(proof_bytes, proof));
    CHECK(!memcmp(proof, first, sizeof(proof)));
    CHECK(!soft_head_parse(hello_bytes, &version) && version == SOFT_VERSION);
    CHECK(!soft_head_parse(welcome_bytes, &version) && version == SOFT_VERSION);

    hello_bytes[8]++;
    welcome_bytes[8]++;
    CHECK(soft_head_parse(hello_bytes, &version) == soft_other_version && version == SOFT_VERSION + 1);
    CHECK(soft_hello_parse(hello_bytes, &hello_back) == soft_other_version);
    CHECK(soft_welcome_parse(welcome_bytes, &welcome_back) == soft_other_version);
    hello_bytes[8]--;
    welcome_bytes[8]--;
    hello_bytes[10] |= 8;
    welcome_bytes[10] |= 8;
    CHECK(soft_hello_parse(hello_bytes, &hello_back) != NULL);
    CHECK(soft_welcome_parse(welcome_bytes, &welcome_back) != NULL);
    hello_bytes[10] = 0; /* nothing is to be moved directly: a probe has no meaning */
    CHECK(soft_hello_parse(hello_bytes, &hello_back) != NULL);
    welcome_bytes[10] = 0;
    welcome_bytes[12] = SOFT_REFUSED_GID;
    CHECK(soft_welcome_parse(welcome_bytes, &welcome_back) == soft_refusal_text(SOFT_REFUSED_GID));
    welcome_bytes[12] = 99;
    CHECK(soft_welcome_parse(welcome_bytes, &welcome_back) != NULL);
    welcome_bytes[12] = 0;
    welcome_bytes[SOFT_WELCOME_SIZE - 1] = 1; /* reserved */
    CHECK(soft_welcome_parse(welcome_bytes, &welcome_back) != NULL);
    welcome_bytes[SOFT_WELCOME_SIZE - 1] = 0;
    CHECK(!soft_welcome_parse(welcome_bytes, &welcome_back));
    hello_bytes[0] = welcome_bytes[0] = proof_bytes[0] = 'x';
    CHECK(soft_hello_parse(hello_bytes, &hello_back) != NULL);
    CHECK(soft_welcome_parse(welcome_bytes, &welcome_back) != NULL);
    CHECK(soft_proof_parse(proof_bytes, proof) != NULL);
    CHECK(soft_head_parse(hello_bytes, &version) == soft_hello_parse(hello_bytes, &hello_back));
}

/* A proof depends on the role, the secret and each byte of the messages before it. */
static void proofs_depend_on_all(void)
{
    uint8_t hello[SOFT_HELLO_SIZE] = {0}, welcome[SOFT_WELCOME_SIZE] = {0};
    uint8_t zeroes[SOFT_DIGEST] = {0}, first[SOFT_DIGEST], other[SOFT_DIGEST];
    size_t i;

    soft_prove(SOFT_ROLE_ACCEPTING, "secret", 0, hello, welcome, first);
    CHECK(soft_digest_equal(first, zeroes));
    soft_prove(SOFT_ROLE_ACCEPTING, "secret", 6, hello, welcome, first);
    soft_prove(SOFT_ROLE_ACCEPTING, "secret", 6, hello, welcome, other);
    CHECK(soft_digest_equal(first, other));
    soft_prove(SOFT_ROLE_CONNECTING, "secret", 6, hello, welcome, other);
    CHECK(!soft_digest_equal(first, other));
    soft_prove(SOFT_ROLE_ACCEPTING, "secreT", 6, hello, welcome, other);
    CHECK(!soft_digest_equal(first, other));
    for (i = 0; i < sizeof(hello); i++) {
        hello[i] = 1;
        soft_prove(SOFT_ROLE_ACCEPTING, "secret", 6, hello, welcome, other);
        CHECK(!soft_digest_equal(first, other));
        hello[i] = 0;
    }
    for (i = 0; i < sizeof(welcome) - SOFT_DIGEST; i++) {
        welcome[i] = 1;
        soft_prove(SOFT_ROLE_ACCEPTING, "secret", 6, hello, welcome, other);
        CHECK(!soft_digest_equal(first, other));
        welcome[i] = 0;
    }
}

CHECK_MAIN_ONCE(CASE(every_kind_of_frame_is_parsed_as_packed), CASE(layout_of_a_frame), CASE(numbers_out_of_range),
                CASE(parts_that_do_not_fit), CASE(fields_without_a_meaning), CASE(answers_of_each_kind),
                CASE(direct_frames), CASE(frames_to_skip), CASE(random_bytes), CASE(handshake_messages),
                CASE(proofs_depend_on_all))
