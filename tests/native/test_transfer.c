/* Tests of each operation of a reliable connection: its data and its completions. */
#include "support.h"

#include <arpa/inet.h>

static void fill(uint8_t *memory, size_t size, unsigned int seed)
{
    size_t i;

    for (i = 0; i < size; i++) {
        seed = seed * 1103515245u + 12345u;
        memory[i] = (uint8_t)(seed >> 16);
    }
}

static void check_send_side(const struct pair *pair, const struct ibv_wc *wc, enum ibv_wc_opcode opcode)
{
    CHECK_EQ(wc->opcode, opcode);
    CHECK_EQ(wc->qp_num, pair->a.qp->qp_num);
    CHECK_EQ(wc->wc_flags, 0);
    CHECK_EQ(wc->vendor_err, 0);
}

static void check_receive_side(const struct pair *pair, const struct ibv_wc *wc, enum ibv_wc_opcode opcode,
                               uint32_t byte_len, bool with_imm)
{
    CHECK_EQ(wc->opcode, opcode);
    CHECK_EQ(wc->byte_len, byte_len);
    CHECK_EQ(wc->qp_num, pair->b.qp->qp_num);
    CHECK_EQ(wc->wc_flags, with_imm ? IBV_WC_WITH_IMM : 0);
    if (with_imm)
        CHECK_EQ(ntohl(wc->imm_data), 0x12345678);
}

static void send_lands_in_the_receive(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct ibv_wc wc;
    struct pair pair;
    int imm;

    for (imm = 0; imm < 2; imm++) {
        PAIR_OPEN(&pair, 0);
        fill(pair.a.memory, 1000, 1);
        CHECK_EQ(post_receive(&pair.b, 7, 1500), 0); /* more room than is used */
        sge = span(&pair.a, 0, 1000);
        wr = request(imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, 5, &sge, 1);
        wr.imm_data = htonl(0x12345678);
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        wc = EXPECT(pair.a.send_cq, 5, IBV_WC_SUCCESS);
        check_send_side(&pair, &wc, IBV_WC_SEND);
        wc = EXPECT(pair.b.recv_cq, 7, IBV_WC_SUCCESS);
        check_receive_side(&pair, &wc, IBV_WC_RECV, 1000, imm);
        CHECK(!memcmp(pair.a.memory, pair.b.memory, 1000));
        CHECK_EQ(pair.b.memory[1000], 0);
        EXPECT_NOTHING(pair.a.recv_cq);
        EXPECT_NOTHING(pair.b.send_cq);
        pair_close(&pair);
    }
}

static void write_consumes_no_receive(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct ibv_wc wc;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    fill(pair.a.memory, 1000, 2);
    CHECK_EQ(post_receive(&pair.b, 7, 100), 0);
    sge = span(&pair.a, 0, 1000);
    wr = request_to(IBV_WR_RDMA_WRITE, 5, &sge, 1, &pair.b, 333);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    wc = EXPECT(pair.a.send_cq, 5, IBV_WC_SUCCESS);
    check_send_side(&pair, &wc, IBV_WC_RDMA_WRITE);
    CHECK(!memcmp(pair.a.memory, pair.b.memory + 333, 1000));
    CHECK_EQ(pair.b.memory[332], 0);
    CHECK_EQ(pair.b.memory[1333], 0);
    EXPECT_NOTHING(pair.b.recv_cq);
    pair_close(&pair);
}

static void write_with_imm_takes_a_receive(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct ibv_wc wc;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    fill(pair.a.memory, 1000, 3);
    CHECK_EQ(post_receive_list(&pair.b, 7, NULL, 0), 0); /* its memory is not used */
    sge = span(&pair.a, 0, 1000);
    wr = request_to(IBV_WR_RDMA_WRITE_WITH_IMM, 5, &sge, 1, &pair.b, 2000);
    wr.imm_data = htonl(0x12345678);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    wc = EXPECT(pair.a.send_cq, 5, IBV_WC_SUCCESS);
    check_send_side(&pair, &wc, IBV_WC_RDMA_WRITE);
    wc = EXPECT(pair.b.recv_cq, 7, IBV_WC_SUCCESS);
    check_receive_side(&pair, &wc, IBV_WC_RECV_RDMA_WITH_IMM, 1000, true);
    CHECK(!memcmp(pair.a.memory, pair.b.memory + 2000, 1000));
    pair_close(&pair);
}

static void read(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct ibv_wc wc;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    fill(pair.b.memory, 4000, 4);
    sge = span(&pair.a, 100, 3000);
    wr = request_to(IBV_WR_RDMA_READ, 5, &sge, 1, &pair.b, 11);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    wc = EXPECT(pair.a.send_cq, 5, IBV_WC_SUCCESS);
    check_send_side(&pair, &wc, IBV_WC_RDMA_READ);
    CHECK_EQ(wc.byte_len, 3000);
    CHECK(!memcmp(pair.a.memory + 100, pair.b.memory + 11, 3000));
    CHECK_EQ(pair.a.memory[99], 0);
    CHECK_EQ(pair.a.memory[3100], 0);
    pair_close(&pair);
}

static uint64_t word(const struct end *end, size_t offset)
{
    uint64_t value;

    memcpy(&value, end->memory + offset, sizeof(value));
    return value;
}

static void set_word(const struct end *end, size_t offset, uint64_t value)
{
    memcpy(end->memory + offset, &value, sizeof(value));
}

static void fetch_and_add(void)
{
    static const uint64_t values[][2] = {{0, 0}, {5, 7}, {UINT64_MAX, 1}, {1ull << 63, 1ull << 63}};
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct ibv_wc wc;
    struct pair pair;
    size_t i;

    PAIR_OPEN(&pair, 0);
    for (i = 0; i < COUNT_OF(values); i++) {
        set_word(&pair.a, 64, 99);
        set_word(&pair.b, 16, values[i][0]);
        sge = span(&pair.a, 64, 8);
        wr = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, i, &sge, 1, &pair.b, 16);
        wr.wr.atomic.compare_add = values[i][1];
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        wc = EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        check_send_side(&pair, &wc, IBV_WC_FETCH_ADD);
        CHECK_EQ(wc.byte_len, 8);
        CHECK_EQ(word(&pair.a, 64), values[i][0]);
        CHECK_EQ(word(&pair.b, 16), values[i][0] + values[i][1]);
    }
    pair_close(&pair);
}

static void compare_and_swap(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge[2];
    struct ibv_wc wc;
    struct pair pair;
    int equal;

    PAIR_OPEN(&pair, 0);
    for (equal = 0; equal < 2; equal++) {
        set_word(&pair.b, 24, 0x1122334455667788);
        sge[0] = span(&pair.a, 0, 3); /* the answer is scattered, too */
        sge[1] = span(&pair.a, 100, 5);
        wr = request_to(IBV_WR_ATOMIC_CMP_AND_SWP, 1, sge, 2, &pair.b, 24);
        wr.wr.atomic.compare_add = equal ? 0x1122334455667788 : 0x1122334455667789;
        wr.wr.atomic.swap = 42;
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        wc = EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        check_send_side(&pair, &wc, IBV_WC_COMP_SWAP);
        CHECK_EQ(word(&pair.b, 24), equal ? 42 : 0x1122334455667788);
        memmove(pair.a.memory + 3, pair.a.memory + 100, 5);
        CHECK_EQ(word(&pair.a, 0), 0x1122334455667788);
    }
    pair_close(&pair);
}

/* A message of zero bytes works; its keys and addresses are not checked. */
static void nothing_to_transfer(void)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
                                                 IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ};
    struct ibv_sge empty = {1, 0, 2};
    struct ibv_wc wc;
    struct pair pair;
    size_t i;
    int sges;

    PAIR_OPEN(&pair, 0);
    for (i = 0; i < COUNT_OF(opcodes); i++) {
        for (sges = 0; sges < 2; sges++) {
            bool received = i != 2 && i != 4;
            struct ibv_send_wr wr = request(opcodes[i], i, &empty, sges);

            wr.wr.rdma.remote_addr = 3;
            wr.wr.rdma.rkey = 4;
            if (received)
                CHECK_EQ(post_receive_list(&pair.b, 7, &empty, sges), 0);
            CHECK_EQ(post(pair.a.qp, &wr), 0);
            EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
            if (received) {
                wc = EXPECT(pair.b.recv_cq, 7, IBV_WC_SUCCESS);
                CHECK_EQ(wc.byte_len, 0);
            }
        }
    }
    pair_close(&pair);
}

/* Different lists on both sides, with empty entries in between. */
static void scatter_and_gather(void)
{
    static const uint32_t from[] = {0, 1, 700, 0, 13, 2000}, to[] = {999, 0, 1, 2, 0, 3000};
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    size_t op, i, j;

    for (op = 0; op < COUNT_OF(opcodes); op++) {
        struct ibv_sge sources[6], targets[6];
        uint8_t sent[4096], got[4096];
        size_t at = 17, length = 0, room = 0;
        struct ibv_send_wr wr;
        struct pair pair;

        PAIR_OPEN(&pair, .cap = {4, 4, 6, 6, 0});
        fill(pair.a.memory, PAIR_MEMORY, 5);
        fill(pair.b.memory, PAIR_MEMORY, 6);
        for (i = 0; i < 6; i++) {
            sources[i] = span(&pair.a, at, from[i]);
            targets[i] = span(&pair.b, at + 1, to[i]);
            if (!from[i])
                sources[i].lkey = 0xdead; /* not looked at */
            memcpy(sent + length, pair.a.memory + at, from[i]);
            length += from[i];
            at += 3100;
        }
        wr = request_to(opcodes[op], 1, sources, 6, &pair.b, 40000);
        if (opcodes[op] == IBV_WR_SEND)
            CHECK_EQ(post_receive_list(&pair.b, 2, targets, 6), 0);
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        if (opcodes[op] == IBV_WR_SEND) {
            CHECK_EQ(EXPECT(pair.b.recv_cq, 2, IBV_WC_SUCCESS).byte_len, length);
            for (i = 0; i < 6; i++) {
                memcpy(got + room, (void *)(uintptr_t)targets[i].addr, targets[i].length);
                room += targets[i].length;
            }
            CHECK(!memcmp(sent, got, length));
        } else if (opcodes[op] == IBV_WR_RDMA_WRITE) {
            CHECK(!memcmp(sent, pair.b.memory + 40000, length));
        } else {
            for (i = j = 0; i < 6; j += from[i++])
                CHECK(!memcmp((void *)(uintptr_t)sources[i].addr, pair.b.memory + 40000 + j, from[i]));
        }
        pair_close(&pair);
    }
}

/* All list lengths up to the device's limit. */
static void longest_lists(void)
{
    struct ibv_device_attr limits;
    struct ibv_sge *list;
    struct ibv_send_wr wr;
    struct pair pair;
    struct home home;
    int i;

    home_open(&home);
    CHECK_EQ(soft_verbs.query_device(home.context, &limits), 0);
    PAIR_OPEN(&pair, .homes = {&home, &home}, .cap = {2, 2, (uint32_t)limits.max_sge, (uint32_t)limits.max_sge, 0});
    fill(pair.a.memory, PAIR_MEMORY, 7);
    list = calloc((size_t)limits.max_sge + 1, sizeof(*list));
    REQUIRE(list != NULL);
    for (i = 0; i <= limits.max_sge; i++)
        list[i] = span(&pair.a, (size_t)i * 16, 16);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, list, limits.max_sge, &pair.b, 0);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.a.memory, pair.b.memory, (size_t)limits.max_sge * 16));
    wr.num_sge = limits.max_sge + 1;
    CHECK_EQ(post(pair.a.qp, &wr), EINVAL);
    wr.num_sge = -1;
    CHECK_EQ(post(pair.a.qp, &wr), EINVAL);
    CHECK_EQ(post_receive_list(&pair.a, 1, list, limits.max_sge + 1), EINVAL);
    CHECK_EQ(post_receive_list(&pair.a, 1, list, -1), EINVAL);
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RTS);
    free(list);
    pair_close(&pair);
    home_close(&home);
}

/* Inline data is copied in the call: it needs no region, and may change at once. */
static void inline_data(void)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
                                                 IBV_WR_RDMA_WRITE_WITH_IMM};
    struct ibv_qp_init_attr granted;
    struct ibv_qp_attr attr;
    struct pair pair;
    size_t i;

    PAIR_OPEN(&pair, 0);
    CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, IBV_QP_CAP, &granted), 0);
    for (i = 0; i < COUNT_OF(opcodes); i++) {
        uint32_t limit = granted.cap.max_inline_data, length;

        for (length = 0; length <= limit; length += length + 8 < limit ? 7 : 1) {
            uint8_t bytes[2048], kept[2048];
            struct ibv_sge list[3] = {
                {(uintptr_t)bytes, length / 3, 0xdead},
                {1, 0, 0xdead},
                {(uintptr_t)bytes + length / 3, length - length / 3, 0xdead},
            };
            struct ibv_send_wr wr = request_to(opcodes[i], length, list, 3, &pair.b, 0);

            fill(bytes, length, length);
            memcpy(kept, bytes, length);
            wr.send_flags |= IBV_SEND_INLINE;
            if (i != 2)
                CHECK_EQ(post_receive(&pair.b, 2, 2048), 0);
            CHECK_EQ(post(pair.a.qp, &wr), 0);
            memset(bytes, 0xee, sizeof(bytes));
            EXPECT(pair.a.send_cq, length, IBV_WC_SUCCESS);
            if (i != 2)
                EXPECT(pair.b.recv_cq, 2, IBV_WC_SUCCESS);
            CHECK(!memcmp(kept, pair.b.memory, length));
        }
    }
    pair_close(&pair);
}

static void too_much_inline(void)
{
    static const enum ibv_wr_opcode answered[] = {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
                                                  IBV_WR_ATOMIC_FETCH_AND_ADD};
    struct ibv_qp_init_attr granted;
    struct ibv_qp_attr attr;
    struct ibv_send_wr wr;
    struct ibv_sge list[2];
    struct pair pair;
    size_t i;

    PAIR_OPEN(&pair, 0);
    CHECK_EQ(soft_verbs.query_qp(pair.a.qp, &attr, IBV_QP_CAP, &granted), 0);
    list[0] = span(&pair.a, 0, granted.cap.max_inline_data);
    list[1] = span(&pair.a, 0, 1);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, list, 2, &pair.b, 0);
    wr.send_flags |= IBV_SEND_INLINE;
    CHECK_EQ(post(pair.a.qp, &wr), EINVAL);
    list[1].length = UINT32_MAX; /* and with a sum that would wrap around */
    CHECK_EQ(post(pair.a.qp, &wr), EINVAL);
    list[0].length = 8; /* an answer needs memory to go to */
    for (i = 0; i < COUNT_OF(answered); i++) {
        wr = request_to(answered[i], 1, list, 1, &pair.b, 0);
        wr.send_flags |= IBV_SEND_INLINE;
        CHECK_EQ(post(pair.a.qp, &wr), EINVAL);
    }
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RTS);
    EXPECT_NOTHING(pair.a.send_cq);
    pair_close(&pair);
}

static void unsupported_requests(void)
{
    static const struct {
        int opcode;
        unsigned int flags;
        int error;
    } table[] = {
        {IBV_WR_BIND_MW, 0, EINVAL}, /* which window? */
        {IBV_WR_LOCAL_INV, IBV_SEND_INLINE, EINVAL},
        {IBV_WR_TSO, 0, EOPNOTSUPP},
        {IBV_WR_DRIVER1, 0, EOPNOTSUPP},
        {IBV_WR_ATOMIC_WRITE, 0, EOPNOTSUPP},
        {99, 0, EINVAL},
        {-1, 0, EINVAL},
        {IBV_WR_SEND, IBV_SEND_IP_CSUM, EINVAL},
        {IBV_WR_SEND, 1u << 20, EINVAL},
    };
    struct pair pair;
    size_t i;

    PAIR_OPEN(&pair, 0);
    for (i = 0; i < COUNT_OF(table); i++) {
        struct ibv_send_wr wr = request((enum ibv_wr_opcode)table[i].opcode, 1, NULL, 0);

        wr.send_flags |= table[i].flags;
        CHECK_EQ(post(pair.a.qp, &wr), table[i].error);
    }
    CHECK_EQ(qp_state(pair.a.qp), IBV_QPS_RTS);
    EXPECT_NOTHING(pair.a.send_cq);
    pair_close(&pair);
}

/* A large message, many packets, to memory that overlaps its source. */
static void overlapping_and_large(void)
{
    enum { SIZE = 1 << 20 };
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;
    uint8_t *copy = malloc(SIZE);

    PAIR_OPEN(&pair, .memory = 2 * SIZE);
    REQUIRE(copy != NULL);
    fill(pair.a.memory, SIZE, 8);
    memcpy(copy, pair.a.memory, SIZE);
    sge = span(&pair.a, 0, SIZE);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair.b, 4097);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(!memcmp(copy, pair.b.memory + 4097, SIZE));
    qp_to(pair.a.qp, IBV_QPS_RESET);
    qp_connect(pair.a.qp, &default_link, pair.a.qp->qp_num); /* to itself */
    wr = request_to(IBV_WR_RDMA_WRITE, 2, &sge, 1, &pair.a, 1000);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    CHECK(!memcmp(copy, pair.a.memory + 1000, SIZE));
    free(copy);
    pair_close(&pair);
}

CHECK_MAIN(CASE(send_lands_in_the_receive), CASE(write_consumes_no_receive), CASE(write_with_imm_takes_a_receive),
           CASE(read), CASE(fetch_and_add), CASE(compare_and_swap), CASE(nothing_to_transfer), CASE(scatter_and_gather),
           CASE(longest_lists), CASE(inline_data), CASE(too_much_inline), CASE(unsupported_requests),
           CASE(overlapping_and_large))
