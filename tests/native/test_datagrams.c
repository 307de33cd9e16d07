/* Tests of unreliable datagrams: delivery and headers, silent losses, and errors that stop a sender. */
#include "support.h"
#include "support_srq.h"
#include "support_threads.h"
#include "support_types.h"

#define MTU 4096u
#define GRH 40u

struct office {
    struct pair pair;
    struct ibv_ah *ah;
};

static void office_open(struct office *office)
{
    TYPED_PAIR_OPEN(&office->pair, .type = IBV_QPT_UD);
    office->ah = make_ah(office->pair.own.base, 1);
}

static void office_close(struct office *office)
{
    if (office->ah)
        CHECK_EQ(soft_verbs.destroy_ah(office->ah), 0);
    pair_close(&office->pair);
}

/* Make a datagram from a to b, of the first bytes of a's memory. */
static struct ibv_send_wr letter(struct office *office, uint64_t wr_id, struct ibv_sge *sge, uint32_t length)
{
    *sge = span(&office->pair.a, 0, length);
    return datagram(IBV_WR_SEND, wr_id, sge, 1, office->ah, office->pair.b.qp->qp_num);
}

/* Check that a datagram arrives in the receive that was posted first. */
static void check_works(struct office *office, uint64_t receive)
{
    struct ibv_sge sge;
    struct ibv_send_wr wr = letter(office, 900, &sge, 8);

    CHECK_EQ(post(office->pair.a.qp, &wr), 0);
    EXPECT(office->pair.a.send_cq, 900, IBV_WC_SUCCESS);
    EXPECT(office->pair.b.recv_cq, receive, IBV_WC_SUCCESS);
    CHECK_EQ(qp_state(office->pair.a.qp), IBV_QPS_RTS);
    CHECK_EQ(qp_state(office->pair.b.qp), IBV_QPS_RTS);
}

/* ---- Arrival ----------------------------------------------------------------------------------------------- */

static uint32_t get16(const uint8_t *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

/* Length of UDP, base and datagram headers, checksum, padded data and immediate data. */
static uint32_t transport_length(uint32_t length, bool immediate)
{
    return 8 + 12 + 8 + 4 + (length + 3) / 4 * 4 + (immediate ? 4 : 0);
}

static void check_ipv4(struct ibv_context *context, const uint8_t *grh, uint32_t length, bool immediate)
{
    static const uint8_t nothing[20];
    const uint8_t *ip = grh + 20;
    union ibv_gid self;
    uint32_t sum = 0;
    int i;

    CHECK_EQ(soft_verbs.query_gid(context, 1, 1, &self), 0);
    CHECK(!memcmp(grh, nothing, sizeof(nothing)));
    CHECK_EQ(ip[0], 0x45);
    CHECK_EQ(ip[1], 0x2c);
    CHECK_EQ(get16(ip + 2), 20 + transport_length(length, immediate));
    CHECK_EQ(ip[8], 64);
    CHECK_EQ(ip[9], 17);
    CHECK(!memcmp(ip + 12, self.raw + 12, 4) && !memcmp(ip + 16, self.raw + 12, 4));
    for (i = 0; i < 20; i += 2)
        sum += get16(ip + i);
    CHECK_EQ((sum & 0xffff) + (sum >> 16), 0xffff);
}

static void check_ipv6(struct ibv_context *context, const uint8_t *grh, uint32_t length, bool immediate)
{
    union ibv_gid gid;

    CHECK_EQ(soft_verbs.query_gid(context, 1, 0, &gid), 0);
    CHECK_EQ(get16(grh), 0x62ca); /* version, traffic class and the flow label's upper bits */
    CHECK_EQ(get16(grh + 2), 0xbcde);
    CHECK_EQ(get16(grh + 4), transport_length(length, immediate));
    CHECK_EQ(grh[7], 64);
    CHECK(!memcmp(grh + 8, gid.raw, 16) && !memcmp(grh + 24, gid.raw, 16));
}

static void check_arrival(struct office *office, uint8_t gid_index, uint32_t length, bool immediate)
{
    struct end *a = &office->pair.a, *b = &office->pair.b;
    struct ibv_ah *ah = make_ah(office->pair.own.base, gid_index);
    struct ibv_sge sge = span(a, 0, length);
    struct ibv_send_wr wr = datagram(immediate ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, 1, &sge, 1, ah, b->qp->qp_num);
    struct ibv_wc wc;
    uint32_t i;

    for (i = 0; i < length; i++)
        a->memory[i] = (uint8_t)(i * 7 + 1);
    memset(b->memory, 0xee, GRH + length + 1);
    wr.imm_data = 0x01020304;
    CHECK_EQ(post_room(b, 2, 0, GRH + length + 1), 0);
    CHECK_EQ(post(a->qp, &wr), 0);
    EXPECT(a->send_cq, 1, IBV_WC_SUCCESS);
    wc = EXPECT(b->recv_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(wc.opcode, IBV_WC_RECV);
    CHECK_EQ(wc.byte_len, GRH + length);
    CHECK_EQ(wc.wc_flags, IBV_WC_GRH | (immediate ? IBV_WC_WITH_IMM : 0));
    CHECK_EQ(wc.src_qp, a->qp->qp_num);
    CHECK_EQ(wc.qp_num, b->qp->qp_num);
    if (immediate)
        CHECK_EQ(wc.imm_data, 0x01020304);
    if (gid_index)
        check_ipv4(office->pair.own.context, b->memory, length, immediate);
    else
        check_ipv6(b->qp->context, b->memory, length, immediate);
    CHECK(!memcmp(b->memory + GRH, a->memory, length));
    CHECK_EQ(b->memory[GRH + length], 0xee);
    CHECK_EQ(soft_verbs.destroy_ah(ah), 0);
}

static void arrivals(void)
{
    static const uint32_t lengths[] = {0, 1, 5, 8, MTU};
    struct office office;
    size_t i;

    office_open(&office);
    for (i = 0; i < 4 * COUNT_OF(lengths); i++)
        check_arrival(&office, i & 1, lengths[i / 4], i & 2);
    office_close(&office);
}

/* The header may lie across entries of the receive, and the data be inline. */
static void scattered_inline(void)
{
    struct office office;
    struct ibv_sge room[3], sge;
    struct ibv_send_wr wr;
    char text[9] = "datagram";

    office_open(&office);
    room[0] = span(&office.pair.b, 0, 30);
    room[1] = span(&office.pair.b, 100, 14);
    room[2] = span(&office.pair.b, 200, 100);
    CHECK_EQ(post_receive_list(&office.pair.b, 2, room, 3), 0);
    sge = (struct ibv_sge){(uintptr_t)text, 8, 0};
    wr = datagram(IBV_WR_SEND, 1, &sge, 1, office.ah, office.pair.b.qp->qp_num);
    wr.send_flags |= IBV_SEND_INLINE;
    CHECK_EQ(post(office.pair.a.qp, &wr), 0);
    memset(text, 0, sizeof(text));
    EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(EXPECT(office.pair.b.recv_cq, 2, IBV_WC_SUCCESS).byte_len, GRH + 8);
    CHECK(!memcmp(office.pair.b.memory + 110, "data", 4));
    CHECK(!memcmp(office.pair.b.memory + 200, "gram", 4));
    office_close(&office);
}

/* A Q_Key with the highest bit set stands for that of the sending queue pair. */
static void controlled_key(void)
{
    struct ibv_qp_attr attr = {.qkey = 77};
    struct office office;
    struct ibv_send_wr wr;
    struct ibv_sge sge;

    office_open(&office);
    wr = letter(&office, 1, &sge, 8);
    wr.wr.ud.remote_qkey = 0x80000000u | 5;
    CHECK_EQ(post_room(&office.pair.b, 2, 0, 100), 0);
    CHECK_EQ(post(office.pair.a.qp, &wr), 0);
    EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(office.pair.b.recv_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.modify_qp(office.pair.a.qp, &attr, IBV_QP_QKEY), 0);
    CHECK_EQ(post_room(&office.pair.b, 3, 0, 100), 0);
    CHECK_EQ(post(office.pair.a.qp, &wr), 0);
    EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT_EMPTY(office.pair.b.recv_cq);
    check_works(&office, 3);
    office_close(&office);
}

/* Posting copies what it needs from the address handle. */
static void destroyed_address_handle(void)
{
    struct soft_counts counts;
    struct office office;
    struct ibv_send_wr wr;
    struct ibv_sge sge;

    office_open(&office);
    CHECK_EQ(soft_verbs.dealloc_pd(office.pair.own.base), EBUSY);
    wr = letter(&office, 1, &sge, 8);
    CHECK_EQ(post_room(&office.pair.b, 2, 0, 100), 0);
    CHECK_EQ(post(office.pair.a.qp, &wr), 0);
    CHECK_EQ(soft_verbs.destroy_ah(office.ah), 0);
    office.ah = NULL;
    soft_get_counts(office.pair.own.context, &counts);
    CHECK_EQ(counts.ahs, 0);
    EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
    EXPECT(office.pair.b.recv_cq, 2, IBV_WC_SUCCESS);
    office_close(&office);
}

static void shared_queue(void)
{
    struct office office;
    struct ibv_send_wr wr;
    struct ibv_srq *srq;
    struct ibv_sge sge;
    struct end shared;

    office_open(&office);
    srq = make_srq(&office.pair.own, 4);
    TYPED_OPEN(&shared, &office.pair.own, .type = IBV_QPT_UD, .srq = srq);
    type_connect(shared.qp, &default_link, 0);
    wr = letter(&office, 1, &sge, 8);
    wr.wr.ud.remote_qpn = shared.qp->qp_num;
    CHECK_EQ(post(office.pair.a.qp, &wr), 0); /* nothing is posted there: lost */
    EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(srq_post_room(srq, &shared, 2, 0, 100), 0);
    EXPECT_EMPTY(shared.recv_cq);
    CHECK_EQ(post(office.pair.a.qp, &wr), 0);
    EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(EXPECT(shared.recv_cq, 2, IBV_WC_SUCCESS).byte_len, GRH + 8);
    end_close(&shared);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    office_close(&office);
}

/* ---- Silence ----------------------------------------------------------------------------------------------- */

enum loss { OTHER_KEY, NOBODY, OTHER_TYPE, NOT_READY, RECEIVE_TOO_SMALL, TOO_LARGE, LOSSES };

/* The sender sees no error, and the posted receive waits for the next datagram. */
static void datagrams_lost_without_error(void)
{
    struct office office;
    struct end unconnected, raw;
    int loss;

    office_open(&office);
    TYPED_OPEN(&unconnected, &office.pair.own, .type = IBV_QPT_UC);
    type_connect(unconnected.qp, &default_link, 0);
    TYPED_OPEN(&raw, &office.pair.own, .type = IBV_QPT_UD);
    type_raise(raw.qp, IBV_QPS_INIT, &default_link, 0);
    CHECK_EQ(post_room(&unconnected, 50, 0, 8192), 0);
    CHECK_EQ(post_room(&raw, 51, 0, 8192), 0);
    for (loss = 0; loss < LOSSES; loss++) {
        struct ibv_sge sge;
        struct ibv_send_wr wr = letter(&office, 1, &sge, loss == TOO_LARGE ? MTU + 1 : 8);
        uint32_t room = loss == TOO_LARGE ? 8192 : GRH + 8;

        if (loss == OTHER_KEY)
            wr.wr.ud.remote_qkey++;
        if (loss == NOBODY)
            wr.wr.ud.remote_qpn = 0xabcdef;
        if (loss == OTHER_TYPE)
            wr.wr.ud.remote_qpn = unconnected.qp->qp_num;
        if (loss == NOT_READY)
            wr.wr.ud.remote_qpn = raw.qp->qp_num;
        if (loss == RECEIVE_TOO_SMALL)
            sge.length = 9;
        CHECK_EQ(post_room(&office.pair.b, 10, 0, room), 0);
        CHECK_EQ(post(office.pair.a.qp, &wr), 0);
        EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
        EXPECT_EMPTY(office.pair.b.recv_cq);
        check_works(&office, 10);
    }
    EXPECT_EMPTY(unconnected.recv_cq);
    EXPECT_EMPTY(raw.recv_cq);
    end_close(&unconnected);
    end_close(&raw);
    office_close(&office);
}

/* A datagram without a receive is dropped. */
static void no_receive(void)
{
    struct office office;
    struct ibv_send_wr wr;
    struct ibv_sge sge;

    office_open(&office);
    wr = letter(&office, 1, &sge, 8);
    CHECK_EQ(post(office.pair.a.qp, &wr), 0);
    EXPECT(office.pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(post_room(&office.pair.b, 2, 0, 100), 0);
    EXPECT_NOTHING(office.pair.b.recv_cq);
    check_works(&office, 2);
    office_close(&office);
}

/* ---- Errors ------------------------------------------------------------------------------------------------ */

/* Only the send queue stops; receives go on, and sends after its way back to RTS. */
static void check_stopped(struct office *office, enum ibv_wc_status status)
{
    struct pair *pair = &office->pair;
    struct ibv_sge sge = span(&pair->b, 0, 8), own;
    struct ibv_send_wr back = datagram(IBV_WR_SEND, 30, &sge, 1, office->ah, pair->a.qp->qp_num);
    struct ibv_send_wr wr = letter(office, 32, &own, 8);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_SQE};

    EXPECT(pair->a.send_cq, 1, status);
    EXPECT(pair->a.send_cq, 2, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(qp_state(pair->a.qp), IBV_QPS_SQE);
    CHECK_EQ(post(pair->a.qp, &wr), 0);
    EXPECT(pair->a.send_cq, 32, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(post_room(&pair->a, 31, 1000, 100), 0);
    CHECK_EQ(post(pair->b.qp, &back), 0);
    EXPECT(pair->b.send_cq, 30, IBV_WC_SUCCESS);
    EXPECT(pair->a.recv_cq, 31, IBV_WC_SUCCESS);
    CHECK_EQ(qp_state(pair->a.qp), IBV_QPS_SQE);
    CHECK_EQ(soft_verbs.modify_qp(pair->a.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), 0);
    CHECK_EQ(post_room(&pair->b, 33, 0, 100), 0);
    check_works(office, 33);
    EXPECT_EMPTY(pair->a.send_cq);
}

static void foreign_handle(void)
{
    struct ibv_send_wr wrs[2];
    struct office office;
    struct ibv_sge sges[2];
    struct ibv_pd *other;
    struct ibv_ah *ah;

    office_open(&office);
    other = soft_verbs.alloc_pd(office.pair.own.context);
    REQUIRE(other != NULL);
    ah = make_ah(other, 1);
    wrs[0] = letter(&office, 1, &sges[0], 8);
    wrs[0].wr.ud.ah = ah;
    wrs[0].send_flags = 0; /* an error completes all the same */
    wrs[0].next = &wrs[1];
    wrs[1] = letter(&office, 2, &sges[1], 8);
    CHECK_EQ(post(office.pair.a.qp, wrs), 0);
    check_stopped(&office, IBV_WC_LOC_QP_OP_ERR);
    CHECK_EQ(soft_verbs.dealloc_pd(other), EBUSY);
    CHECK_EQ(soft_verbs.destroy_ah(ah), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(other), 0);
    office_close(&office);
}

static void unreadable_send_memory(void)
{
    struct ibv_send_wr wrs[2];
    struct office office;
    struct ibv_sge sges[2];

    office_open(&office);
    wrs[0] = letter(&office, 1, &sges[0], 8);
    wrs[0].next = &wrs[1];
    sges[0].lkey ^= 1;
    wrs[1] = letter(&office, 2, &sges[1], 8);
    CHECK_EQ(post(office.pair.a.qp, wrs), 0);
    check_stopped(&office, IBV_WC_LOC_PROT_ERR);
    office_close(&office);
}

/* One turn of a sender breaks several peers: each gets its event, and flushes. */
static void unwritable_receive_memory(void)
{
    enum { PEERS = 4 };
    struct ibv_send_wr wrs[PEERS];
    struct ibv_sge sges[PEERS];
    struct end peers[PEERS];
    struct office office;
    int i;

    office_open(&office);
    for (i = 0; i < PEERS; i++) {
        struct ibv_sge bad;

        TYPED_OPEN(&peers[i], &office.pair.own, .type = IBV_QPT_UD);
        type_connect(peers[i].qp, &default_link, 0);
        bad = span(&peers[i], 0, 100);
        bad.lkey ^= 1;
        CHECK_EQ(post_receive_list(&peers[i], 10, &bad, 1), 0);
        CHECK_EQ(post_room(&peers[i], 11, 0, 100), 0);
        wrs[i] = letter(&office, (uint64_t)i, &sges[i], 8);
        wrs[i].wr.ud.remote_qpn = peers[i].qp->qp_num;
        wrs[i].next = i + 1 < PEERS ? &wrs[i + 1] : NULL;
    }
    CHECK_EQ(post(office.pair.a.qp, wrs), 0);
    for (i = 0; i < PEERS; i++)
        EXPECT(office.pair.a.send_cq, i, IBV_WC_SUCCESS);
    for (i = 0; i < PEERS; i++) {
        EXPECT(peers[i].recv_cq, 10, IBV_WC_LOC_PROT_ERR);
        EXPECT(peers[i].recv_cq, 11, IBV_WC_WR_FLUSH_ERR);
        CHECK_EQ(qp_state(peers[i].qp), IBV_QPS_ERR);
        end_close(&peers[i]);
    }
    CHECK_EQ(qp_state(office.pair.a.qp), IBV_QPS_RTS);
    office_close(&office);
}

static void refused_at_post(void)
{
    static const enum ibv_wr_opcode wrong[] = {
        IBV_WR_RDMA_WRITE,           IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV,           IBV_WR_BIND_MW,   IBV_WR_SEND_WITH_INV,
    };
    struct ibv_send_wr wr, *bad = NULL;
    struct office office;
    struct ibv_sge sge;
    struct home other;
    struct ibv_ah *ah;
    size_t i;

    office_open(&office);
    for (i = 0; i < COUNT_OF(wrong); i++) {
        wr = letter(&office, 1, &sge, 8);
        wr.opcode = wrong[i];
        CHECK_EQ(verbs_post_send(office.pair.a.qp, &wr, &bad), EINVAL);
        CHECK(bad == &wr);
    }
    wr = letter(&office, 1, &sge, 8);
    wr.wr.ud.ah = NULL;
    CHECK_EQ(post(office.pair.a.qp, &wr), EINVAL);
    wr = letter(&office, 1, &sge, 8);
    wr.wr.ud.remote_qpn = 0x1000000;
    CHECK_EQ(post(office.pair.a.qp, &wr), EINVAL);
    home_open(&other);
    ah = make_ah(other.base, 1);
    wr = letter(&office, 1, &sge, 8);
    wr.wr.ud.ah = ah;
    CHECK_EQ(post(office.pair.a.qp, &wr), EINVAL);
    CHECK_EQ(soft_verbs.destroy_ah(ah), 0);
    home_close(&other);
    EXPECT_NOTHING(office.pair.a.send_cq);
    CHECK_EQ(post_room(&office.pair.b, 2, 0, 100), 0);
    check_works(&office, 2);
    office_close(&office);
}

static void wrong_handles(void)
{
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1}}, wrong;
    struct home home;

    home_open(&home);
    wrong = attr;
    wrong.is_global = 0;
    CHECK_REFUSED(soft_verbs.create_ah(home.base, &wrong), EINVAL);
    wrong = attr;
    wrong.port_num = 2;
    CHECK_REFUSED(soft_verbs.create_ah(home.base, &wrong), EINVAL);
    wrong = attr;
    wrong.grh.sgid_index = 2;
    CHECK_REFUSED(soft_verbs.create_ah(home.base, &wrong), EINVAL);
    home_close(&home);
}

/* ---- Several senders ---------------------------------------------------------------------------------------- */

enum { SENDERS = 3, LETTERS = 300 };

struct sender {
    uint32_t number, target;
};

/* In a context of its own, since a thread domain is one thread's. */
static void send_all(void *argument)
{
    const struct sender *sender = argument;
    struct home home;
    struct ibv_ah *ah;
    struct end end;
    uint64_t i;

    home_open(&home);
    ah = make_ah(home.base, 1);
    TYPED_OPEN(&end, &home, .type = IBV_QPT_UD);
    type_connect(end.qp, &default_link, 0);
    for (i = 0; i < LETTERS; i++) {
        struct ibv_sge sge = span(&end, 0, 8);
        struct ibv_send_wr wr = datagram(IBV_WR_SEND_WITH_IMM, i, &sge, 1, ah, sender->target);

        memcpy(end.memory, &i, 8);
        wr.imm_data = sender->number;
        CHECK_EQ(post(end.qp, &wr), 0);
        EXPECT(end.send_cq, i, IBV_WC_SUCCESS);
    }
    end_close(&end);
    CHECK_EQ(soft_verbs.destroy_ah(ah), 0);
    home_close(&home);
}

/* No datagram is lost if there is room for all, and those of one sender keep their order. */
static void several_senders(void)
{
    struct sender senders[SENDERS];
    uint64_t next[SENDERS] = {0};
    struct ibv_sge sge;
    struct home home;
    struct end end;
    uint64_t i;

    home_open(&home);
    TYPED_OPEN(&end, &home, .type = IBV_QPT_UD, .depth = 1024, .cqe = 1024);
    type_connect(end.qp, &default_link, 0);
    for (i = 0; i < SENDERS * LETTERS; i++) {
        sge = span(&end, i * (GRH + 8), GRH + 8);
        CHECK_EQ(post_receive_list(&end, i, &sge, 1), 0);
    }
    for (i = 0; i < SENDERS; i++)
        senders[i] = (struct sender){(uint32_t)i, end.qp->qp_num};
    run_threads(SENDERS, send_all, senders, sizeof(senders[0]));
    for (i = 0; i < SENDERS * LETTERS; i++) {
        struct ibv_wc wc = EXPECT(end.recv_cq, i, IBV_WC_SUCCESS);
        uint64_t value;

        REQUIRE(wc.imm_data < SENDERS);
        memcpy(&value, end.memory + i * (GRH + 8) + GRH, 8);
        CHECK_EQ(value, next[wc.imm_data]);
        next[wc.imm_data]++;
    }
    end_close(&end);
    home_close(&home);
}

CHECK_MAIN(CASE(arrivals), CASE(scattered_inline), CASE(controlled_key), CASE(destroyed_address_handle),
           CASE(shared_queue), CASE(datagrams_lost_without_error), CASE(no_receive), CASE(foreign_handle),
           CASE(unreadable_send_memory), CASE(unwritable_receive_memory), CASE(refused_at_post), CASE(wrong_handles),
           CASE(several_senders))
