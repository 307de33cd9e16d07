/* Tests of messages that come in parts: only in order, and no receive is lost if a message ends early. The peer sends
 * frames by hand. */
#include "support.h"
#include "support_fabric.h"
#include "support_srq.h"
#include "support_threads.h"
#include "support_types.h"

#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/objects/inbound_message.h"
#include "soft/objects/mr.h"
#include "soft/objects/qp.h"
#include "soft/transport/request.h"
#include "soft/transport/responder.h"

enum kind { RC, RC_SHARED, UC, UC_SHARED, XRC, KINDS };

enum {
    ROOM = 20480,      /* bytes of a receive, five pieces of a message; two of them come first in the memory */
    PLACE = 2 * ROOM,  /* and then what is written to */
    PEER_NUMBER = 17,  /* the queue pair's */
    FIRST_RECEIVE = 10 /* wr_id; the other one's is 11 */
};

struct scene {
    enum kind kind;
    struct home home;
    struct ibv_cq *cq;
    struct ibv_xrcd *xrcd;
    struct ibv_srq *srq, *other; /* or NULL */
    struct end end;
    struct node victim; /* has the device's GIDs, by which raw_open finds it, and nothing else */
    int fd;
    uint32_t psn; /* of the next part */
};

static enum ibv_qp_type type_of(const struct scene *scene)
{
    if (scene->kind == XRC)
        return IBV_QPT_XRC_RECV;
    return scene->kind == UC || scene->kind == UC_SHARED ? IBV_QPT_UC : IBV_QPT_RC;
}

static bool is_reliable(const struct scene *scene)
{
    return type_of(scene) != IBV_QPT_UC;
}

/* Move the queue pair to RTR, with the peer that raw_open() claims to be. */
static void connect_end(struct scene *scene)
{
    struct ibv_qp *qp = scene->end.qp;
    struct ibv_qp_attr attr = default_link;

    attr.port_num = 1;
    attr.dest_qp_num = PEER_NUMBER;
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1}};
    memset(attr.ah_attr.grh.dgid.raw, 7, sizeof(attr.ah_attr.grh.dgid.raw));
    attr.qp_state = IBV_QPS_INIT;
    REQUIRE_EQ(soft_verbs.modify_qp(qp, &attr, init_mask(qp->qp_type)), 0);
    attr.qp_state = IBV_QPS_RTR;
    REQUIRE_EQ(soft_verbs.modify_qp(qp, &attr, rtr_mask(qp->qp_type)), 0);
    scene->psn = attr.rq_psn;
}

static void make_end(struct scene *scene)
{
    bool target = scene->kind == XRC;

    TYPED_OPEN(&scene->end, &scene->home, .type = type_of(scene), .srq = target ? NULL : scene->srq,
               .xrcd = scene->xrcd, .cq = target ? NULL : scene->cq);
    connect_end(scene);
}

static void open_scene(struct scene *scene, enum kind kind)
{
    struct check_variant like = *variant;

    memset(scene, 0, sizeof(*scene));
    scene->kind = kind;
    new_directory();
    like.options.settings = &settings;
    home_open_like(&scene->home, &like);
    scene->cq = home_cq(&scene->home, 64, NULL);
    if (kind == XRC) {
        scene->xrcd = make_xrcd(scene->home.context);
        scene->srq = try_xrc_srq(&scene->home, scene->xrcd, scene->cq, 2);
        scene->other = try_xrc_srq(&scene->home, scene->xrcd, scene->cq, 2);
        REQUIRE(scene->srq && scene->other);
    } else if (kind == RC_SHARED || kind == UC_SHARED) {
        scene->srq = make_srq(&scene->home, 2);
    }
    make_end(scene);
    memcpy(scene->victim.device.gids, to_soft_context(scene->home.context)->device->gids,
           sizeof(scene->victim.device.gids));
    scene->fd = raw_open(&scene->victim);
}

static void close_scene(struct scene *scene)
{
    close(scene->fd);
    end_close(&scene->end);
    if (scene->srq)
        CHECK_EQ(soft_verbs.destroy_srq(scene->srq), 0);
    if (scene->other)
        CHECK_EQ(soft_verbs.destroy_srq(scene->other), 0);
    CHECK_EQ(soft_verbs.destroy_cq(scene->cq), 0);
    if (scene->xrcd)
        CHECK_EQ(verbs_close_xrcd(scene->xrcd), 0);
    home_close(&scene->home);
    CHECK_EQ(rmdir(directory()), 0);
}

static void post_both(struct scene *scene)
{
    uint64_t i;

    memset(scene->end.memory, 'S', PAIR_MEMORY);
    for (i = 0; i < 2; i++) {
        uint64_t wr_id = FIRST_RECEIVE + i;

        REQUIRE_EQ(scene->srq ? srq_post_room(scene->srq, &scene->end, wr_id, i * ROOM, ROOM)
                              : post_room(&scene->end, wr_id, i * ROOM, ROOM),
                   0);
    }
}

/* ---- The peer ---------------------------------------------------------------------------------------------- */

struct piece {
    uint8_t opcode;
    uint32_t total, offset, length;
};

static uint8_t byte_at(uint32_t offset)
{
    return (uint8_t)(offset * 2654435761u >> 24);
}

static struct soft_frame frame_of(const struct scene *scene, const struct piece *piece)
{
    bool writes = piece->opcode == IBV_WR_RDMA_WRITE || piece->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    struct soft_frame frame = {
        .kind = SOFT_FRAME_REQUEST,
        .opcode = piece->opcode,
        .flags = (piece->offset ? 0 : SOFT_FRAME_FIRST) |
                 (piece->offset + piece->length == piece->total ? SOFT_FRAME_LAST : 0),
        .transport = scene->kind == XRC ? IBV_QPT_XRC_SEND : (uint8_t)type_of(scene),
        .size = piece->length,
        .to = scene->end.qp->qp_num,
        .from = PEER_NUMBER,
        .psn = scene->psn,
        .packets = (piece->length + 1023) / 1024,
        .total = piece->total,
        .offset = piece->offset,
        .part = piece->length,
        .key = writes ? scene->end.mr->rkey : 0,
        .address = writes ? (uintptr_t)scene->end.memory + PLACE + piece->offset : 0,
    };

    if (scene->kind == XRC)
        CHECK_EQ(verbs_get_srq_num(scene->srq, &frame.srqn), 0);
    return frame;
}

static void say_frame(struct scene *scene, const struct soft_frame *frame)
{
    uint8_t bytes[SOFT_FRAME_SIZE + ROOM];
    struct soft_frame parsed;
    uint32_t i;

    soft_frame_pack(frame, bytes);
    CHECK(!soft_frame_parse(bytes, &parsed)); /* it is grammar that is not what is wrong with it */
    for (i = 0; i < frame->size; i++)
        bytes[SOFT_FRAME_SIZE + i] = byte_at(frame->offset + i);
    CHECK_EQ(send(scene->fd, bytes, SOFT_FRAME_SIZE + frame->size, MSG_NOSIGNAL), SOFT_FRAME_SIZE + frame->size);
    scene->psn = (frame->psn + frame->packets) & SOFT_PSN_MASK;
}

static void say(struct scene *scene, const struct piece *piece)
{
    struct soft_frame frame = frame_of(scene, piece);

    say_frame(scene, &frame);
}

#define SAY(scene, ...) say(scene, &(struct piece){__VA_ARGS__})

/* Return the next answer that is not an acknowledgement. */
static struct soft_frame hear_refusal(const struct scene *scene)
{
    uint8_t bytes[SOFT_FRAME_SIZE];
    struct soft_frame frame;

    do {
        REQUIRE(raw_read(scene->fd, bytes, sizeof(bytes)));
        REQUIRE(!soft_frame_parse(bytes, &frame));
    } while (frame.opcode == SOFT_FRAME_ACK);
    return frame;
}

static bool has_left_before(const struct scene *scene)
{
    struct soft_qp *qp = to_soft_qp(scene->end.qp);
    bool begun;

    soft_lock_take(&qp->rq_lock);
    begun = qp->in.message.in_flight;
    soft_lock_give(&qp->rq_lock);
    return begun;
}

static void expect_bytes(const struct scene *scene, uint32_t place, uint32_t length)
{
    uint32_t i, wrong = 0;

    for (i = 0; i < length; i++)
        wrong += scene->end.memory[place + i] != byte_at(i);
    CHECK_EQ(wrong, 0);
}

/* Check that the receives from this one on are posted: each gets a message of its own. */
static void use_up(struct scene *scene, uint64_t wr_id)
{
    for (; wr_id < FIRST_RECEIVE + 2; wr_id++) {
        SAY(scene, IBV_WR_SEND, 100, 0, 100);
        CHECK_EQ(EXPECT(scene->cq, wr_id, IBV_WC_SUCCESS).byte_len, 100);
        expect_bytes(scene, (uint32_t)(wr_id - FIRST_RECEIVE) * ROOM, 100);
    }
}

/* ---- The rule by itself ------------------------------------------------------------------------------------ */

/* For all sequences of parts: the part that fits is the one that continues the message, and a finished message arrived
 * as a whole, each byte once. */
static void any_order_of_parts(void)
{
    struct soft_message message = {.in_flight = false};
    unsigned int random = 7, i, j, whole = 0, came = 0; /* a bit for each byte */
    struct soft_part begun = {0};

    for (i = 0; i < 40000; i++) {
        struct soft_part part = {.total = next_random(&random, 5)};
        bool fits;

        part.offset = part.total ? next_random(&random, part.total) : 0;
        part.length = part.total ? 1 + next_random(&random, part.total - part.offset) : 0;
        part.opcode = next_random(&random, 8) ? IBV_WR_SEND : IBV_WR_RDMA_WRITE;
        part.key = !next_random(&random, 8);
        part.srqn = !next_random(&random, 8);
        part.address = !next_random(&random, 8);
        fits = message.in_flight ? part.offset && came == (1u << part.offset) - 1 && part.total == begun.total &&
                                       part.opcode == begun.opcode && part.key == begun.key &&
                                       part.srqn == begun.srqn && part.address == begun.address
                                 : !part.offset;
        REQUIRE_EQ(soft_message_fits(&message, &part), fits);
        if (!fits)
            continue;
        if (!message.in_flight)
            begun = part;
        soft_message_advance(&message, &part);
        for (j = 0; j < part.length; j++)
            came |= 1u << (part.offset + j);
        REQUIRE_EQ(message.in_flight, came != (1u << part.total) - 1);
        if (!message.in_flight) {
            whole += part.offset != 0;
            came = 0;
        }
    }
    CHECK(whole > 100);
}

/* ---- In order ---------------------------------------------------------------------------------------------- */

static void parts_make_a_message(void)
{
    struct scene scene;
    struct ibv_wc wc;
    int kind;

    for (kind = 0; kind < KINDS; kind++) {
        open_scene(&scene, (enum kind)kind);
        post_both(&scene);
        SAY(&scene, IBV_WR_SEND, 20000, 0, 4096);
        SAY(&scene, IBV_WR_SEND, 20000, 4096, 12288);
        SAY(&scene, IBV_WR_SEND, 20000, 16384, 3616);
        wc = EXPECT(scene.cq, FIRST_RECEIVE, IBV_WC_SUCCESS);
        CHECK_EQ(wc.byte_len, 20000);
        expect_bytes(&scene, 0, 20000);
        SAY(&scene, IBV_WR_RDMA_WRITE_WITH_IMM, 8192, 0, 4096);
        SAY(&scene, IBV_WR_RDMA_WRITE_WITH_IMM, 8192, 4096, 4096);
        wc = EXPECT(scene.cq, FIRST_RECEIVE + 1, IBV_WC_SUCCESS);
        CHECK_EQ(wc.byte_len, 8192);
        expect_bytes(&scene, PLACE, 8192);
        close_scene(&scene);
    }
}

/* ---- Out of order ------------------------------------------------------------------------------------------ */

struct violation {
    struct piece begin, then; /* a length of 0: nothing */
    bool elsewhere;           /* the other one is for another place in memory, or by another key */
    bool of_another;          /* ... or for another shared receive queue */
};

#define A_SEND {IBV_WR_SEND, ROOM, 0, 4096}
#define A_WRITE {IBV_WR_RDMA_WRITE, ROOM, 0, 4096}

static const struct violation violations[] = {
    {A_SEND, {IBV_WR_SEND, ROOM, 16384, 4096}, false, false}, /* a gap up to the end */
    {A_SEND, {IBV_WR_SEND, ROOM, 8192, 4096}, false, false},  /* a gap */
    {{IBV_WR_SEND, ROOM, 0, 8192}, {IBV_WR_SEND, ROOM, 4096, 4096}, false, false},
    {A_SEND, A_SEND, false, false},                     /* its beginning again */
    {A_SEND, {IBV_WR_SEND, 100, 0, 100}, false, false}, /* another one inside of it */
    {A_SEND, {IBV_WR_RDMA_WRITE, 100, 0, 100}, false, false},
    {A_SEND, {IBV_WR_SEND, 8192, 4096, 4096}, false, false},           /* another length */
    {A_SEND, {IBV_WR_SEND_WITH_IMM, ROOM, 4096, 16384}, false, false}, /* the end of another one */
    {A_SEND, {IBV_WR_RDMA_WRITE, ROOM, 4096, 16384}, false, false},
    {{0}, {IBV_WR_SEND, ROOM, 4096, 16384}, false, false}, /* no beginning */
    {{0}, {IBV_WR_RDMA_WRITE, ROOM, 4096, 16384}, false, false},
    {{0}, {IBV_WR_RDMA_WRITE_WITH_IMM, ROOM, 4096, 16384}, false, false},
    {A_WRITE, {IBV_WR_RDMA_WRITE_WITH_IMM, ROOM, 4096, 16384}, false, false},
    {A_WRITE, {IBV_WR_RDMA_WRITE, ROOM, 4096, 16384}, true, false},
    {A_SEND, {IBV_WR_SEND, ROOM, 4096, 16384}, false, true},
};

/* A reliable connection breaks, and an unreliable one drops the message. Each receive completes or is still posted. */
static void check_violation(struct scene *scene, const struct violation *violation)
{
    struct soft_frame then, refusal;
    bool held = violation->begin.opcode == IBV_WR_SEND && violation->begin.length;

    post_both(scene);
    if (violation->begin.length)
        say(scene, &violation->begin);
    then = frame_of(scene, &violation->then);
    if (violation->elsewhere)
        then.address -= 4096;
    if (violation->of_another)
        CHECK_EQ(verbs_get_srq_num(scene->other, &then.srqn), 0);
    say_frame(scene, &then);
    if (!is_reliable(scene)) {
        bool whole = violation->then.length == violation->then.total && violation->then.opcode == IBV_WR_SEND;

        if (whole)
            CHECK_EQ(EXPECT(scene->cq, FIRST_RECEIVE, IBV_WC_SUCCESS).byte_len, violation->then.total);
        use_up(scene, FIRST_RECEIVE + whole);
        return;
    }
    refusal = hear_refusal(scene);
    CHECK_EQ(refusal.psn, then.psn);
    CHECK_EQ(refusal.status, IBV_WC_REM_INV_REQ_ERR);
    CHECK(wait_state(scene->end.qp, IBV_QPS_ERR));
    if (held || !scene->srq)
        EXPECT(scene->cq, FIRST_RECEIVE, IBV_WC_WR_FLUSH_ERR);
    if (!scene->srq)
        EXPECT(scene->cq, FIRST_RECEIVE + 1, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(qp_to(scene->end.qp, IBV_QPS_RESET), 0);
    connect_end(scene);
    if (scene->srq)
        use_up(scene, FIRST_RECEIVE + held);
}

static void parts_out_of_order(void)
{
    struct scene scene;
    size_t i;
    int kind;

    for (kind = 0; kind < KINDS; kind++) {
        open_scene(&scene, (enum kind)kind);
        for (i = 0; i < COUNT_OF(violations); i++)
            if (kind == XRC || !violations[i].of_another)
                check_violation(&scene, &violations[i]);
        EXPECT_NOTHING(scene.cq);
        close_scene(&scene);
    }
}

/* The sequence number tells where a part belongs, too: repeated reads are answered again. */
static void reads_may_be_repeated(void)
{
    uint8_t answer[SOFT_FRAME_SIZE + 4096];
    struct soft_frame frame, parsed;
    struct scene scene;
    int i;

    open_scene(&scene, RC);
    for (i = 0; i < 3; i++) {
        frame = frame_of(&scene, &(struct piece){IBV_WR_RDMA_WRITE, 8192, 4096 * (i == 1), 4096});
        frame.opcode = IBV_WR_RDMA_READ;
        frame.size = 0;
        frame.reads = 1;
        if (i == 2) /* the first part again, which was answered before */
            frame.psn = default_link.rq_psn;
        say_frame(&scene, &frame);
        REQUIRE(raw_read(scene.fd, answer, sizeof(answer)));
        CHECK(!soft_frame_parse(answer, &parsed));
        CHECK_EQ(parsed.opcode, SOFT_FRAME_ACK);
        CHECK_EQ(parsed.part, 4096);
    }
    close_scene(&scene);
}

/* ---- Messages that are not finished ------------------------------------------------------------------------ */

/* The queue pair is destroyed or reset: a receive of a shared queue becomes available to others. */
static void unfinished_messages_return_their_receive(void)
{
    static const enum kind kinds[] = {RC_SHARED, UC_SHARED, XRC};
    struct scene scene;
    size_t i;
    int again;

    for (i = 0; i < COUNT_OF(kinds); i++) {
        open_scene(&scene, kinds[i]);
        for (again = 0; again < 2; again++) {
            post_both(&scene);
            SAY(&scene, IBV_WR_SEND, ROOM, 0, 8192);
            EVENTUALLY(has_left_before(&scene));
            if (again) {
                uint8_t *memory = scene.end.memory; /* which the receives are for */
                struct ibv_mr *mr = scene.end.mr;

                CHECK_EQ(soft_verbs.destroy_qp(scene.end.qp), 0);
                make_end(&scene);
                CHECK_EQ(soft_verbs.dereg_mr(scene.end.mr), 0);
                free(scene.end.memory);
                scene.end.memory = memory;
                scene.end.mr = mr;
            } else {
                CHECK_EQ(qp_to(scene.end.qp, IBV_QPS_RESET), 0);
                connect_end(&scene);
            }
            use_up(&scene, FIRST_RECEIVE);
        }
        EXPECT_EMPTY(scene.cq);
        close_scene(&scene);
    }
}

/* The shared queue of a message's receive is destroyed before the rest of the message comes. */
static void shared_queue_destroyed_during_a_message(void)
{
    struct scene scene;
    struct soft_frame rest;
    int resets;

    for (resets = 0; resets < 2; resets++) {
        open_scene(&scene, XRC);
        post_both(&scene);
        SAY(&scene, IBV_WR_SEND, ROOM, 0, 4096);
        EVENTUALLY(has_left_before(&scene));
        rest = frame_of(&scene, &(struct piece){IBV_WR_SEND, ROOM, 4096, 16384});
        CHECK_EQ(soft_verbs.destroy_srq(scene.srq), 0);
        scene.srq = NULL;
        if (resets) {
            CHECK_EQ(qp_to(scene.end.qp, IBV_QPS_RESET), 0);
        } else {
            say_frame(&scene, &rest);
            CHECK_EQ(hear_refusal(&scene).status, IBV_WC_REM_INV_REQ_ERR);
            CHECK(wait_state(scene.end.qp, IBV_QPS_ERR));
        }
        EXPECT_NOTHING(scene.cq);
        close_scene(&scene);
    }
}

/* ---- Parts that the peer gives up -------------------------------------------------------------------------- */

/* A peer that delays its copies. */
struct reluctant {
    struct soft_carrier carrier;
    int refusals;
};

static int carrier_read(struct soft_carrier *carrier, const struct soft_segment *to, uint32_t length)
{
    struct reluctant *reluctant = container_of(carrier, struct reluctant, carrier);

    if (reluctant->refusals-- > 0)
        return ESTALE;
    memset(to->address, 'A', length < to->length ? length : to->length);
    return 0;
}

static int respond(struct scene *scene, struct reluctant *reluctant, struct ibv_srq *srq, const struct piece *piece)
{
    struct soft_qp *qp = to_soft_qp(scene->end.qp);
    struct soft_wqe wqe = {.opcode = piece->opcode};
    struct soft_request request = {
        .wqe = &wqe,
        .carrier = &reluctant->carrier,
        .total = piece->total,
        .offset = piece->offset,
        .length = piece->length,
    };
    struct soft_reply reply = {.kind = SOFT_SILENT};

    if (scene->kind == XRC)
        CHECK_EQ(verbs_get_srq_num(srq, &wqe.remote_srqn), 0);
    REQUIRE(grace_ready());
    grace_enter();
    soft_lock_take(&qp->rq_lock);
    soft_respond(qp, &request, &reply);
    soft_lock_give(&qp->rq_lock);
    grace_leave(grace_self);
    CHECK(!reply.broken);
    return reply.kind;
}

static void parts_given_up_by_the_sender(void)
{
    static const struct piece begin = {IBV_WR_SEND, 8192, 0, 4096}, end = {IBV_WR_SEND, 8192, 4096, 4096};
    struct reluctant reluctant = {{carrier_read, NULL}, 0};
    struct scene scene;
    int kind, i;

    for (kind = 0; kind < KINDS; kind++) {
        open_scene(&scene, (enum kind)kind);
        post_both(&scene);
        if (kind == XRC)
            CHECK_EQ(srq_post_room(scene.other, &scene.end, 20, PLACE, ROOM), 0);
        for (i = 0; i < 3; i++) { /* to both queues in turns, for nothing of it came */
            reluctant.refusals = 1;
            CHECK_EQ(respond(&scene, &reluctant, i % 2 ? scene.other : scene.srq, &begin), SOFT_SILENT);
            if (kind != XRC)
                continue;
            reluctant.refusals = 1;
            CHECK_EQ(respond(&scene, &reluctant, scene.other, &begin), SOFT_SILENT);
        }
        reluctant.refusals = 0;
        CHECK_EQ(respond(&scene, &reluctant, scene.srq, &begin), SOFT_ACK);
        reluctant.refusals = 2;
        CHECK_EQ(respond(&scene, &reluctant, scene.srq, &end), SOFT_SILENT);
        CHECK_EQ(respond(&scene, &reluctant, scene.srq, &end), SOFT_SILENT);
        EXPECT_EMPTY(scene.cq);
        CHECK_EQ(respond(&scene, &reluctant, scene.srq, &end), SOFT_ACK);
        CHECK_EQ(EXPECT(scene.cq, FIRST_RECEIVE, IBV_WC_SUCCESS).byte_len, 8192);
        use_up(&scene, FIRST_RECEIVE + 1);
        if (kind == XRC) {
            CHECK_EQ(respond(&scene, &reluctant, scene.other, &begin), SOFT_ACK);
            CHECK_EQ(respond(&scene, &reluctant, scene.other, &end), SOFT_ACK);
            EXPECT(scene.cq, 20, IBV_WC_SUCCESS);
        }
        close_scene(&scene);
    }
}

/* ---- Receives that come back ------------------------------------------------------------------------------- */

/* A thread that posts meanwhile does not overwrite a receive that is returned: the number of posted receives is
 * right. */
struct posting {
    struct ibv_srq *srq;
    atomic_bool *over;
    uint64_t first, count;
};

static void post_or_take(void *argument)
{
    struct posting *posting = argument;
    struct soft_srq *srq = to_soft_srq(posting->srq);
    uint64_t next = 0, random = 7;

    if (!posting->count) { /* takes, and gives every other one back */
        REQUIRE(grace_ready());
        while (!atomic_load(posting->over)) {
            struct soft_receive receive;

            random = random * 6364136223846793005u + 1442695040888963407u;
            grace_enter();
            if (soft_srq_take(srq, &receive)) {
                CHECK_EQ(receive.num_sge, 0);
                if (random >> 40 & 1) {
                    soft_srq_return(srq, &receive);
                } else {
                    CHECK_EQ(receive.wr_id, posting->first++);
                    soft_srq_credit(srq, 1);
                }
            } else {
                sched_yield();
            }
            grace_leave(grace_self);
        }
        return;
    }
    while (next < posting->count) {
        int error = srq_post(posting->srq, next);

        next += !error;
        if (error) {
            REQUIRE_EQ(error, ENOMEM);
            sched_yield();
        }
    }
    EVENTUALLY(!atomic_load(&srq->outstanding));
    atomic_store(posting->over, true);
}

static void receives_come_back_while_others_are_posted(void)
{
    atomic_bool over = false;
    struct home home;
    struct posting both[2];

    home_open(&home);
    both[0] = (struct posting){make_srq(&home, 4), &over, 0, SCALED(20000)};
    both[1] = (struct posting){both[0].srq, &over, 0, 0};
    run_threads(2, post_or_take, both, sizeof(both[0]));
    CHECK_EQ(both[1].first, both[0].count);
    CHECK_EQ(soft_verbs.destroy_srq(both[0].srq), 0);
    home_close(&home);
}

/* A queue pair may be destroyed while its peer still sends: the connection stays. */
static void parts_for_unknown_queue_pairs(void)
{
    struct piece piece = {IBV_WR_SEND, 4096, 0, 4096};
    struct soft_frame stray;
    struct scene scene;
    uint32_t psn;

    open_scene(&scene, RC);
    post_both(&scene);
    stray = frame_of(&scene, &piece);
    stray.to ^= 0x800000;
    psn = scene.psn;
    say_frame(&scene, &stray);
    scene.psn = psn;
    SAY(&scene, IBV_WR_SEND, 4096, 0, 4096);
    EXPECT(scene.cq, FIRST_RECEIVE, IBV_WC_SUCCESS);
    close_scene(&scene);
}

CHECK_MAIN(CASE(parts_for_unknown_queue_pairs), CASE(any_order_of_parts), CASE(parts_make_a_message),
           CASE(parts_out_of_order), CASE(reads_may_be_repeated), CASE(unfinished_messages_return_their_receive),
           CASE(shared_queue_destroyed_during_a_message), CASE(parts_given_up_by_the_sender),
           CASE(receives_come_back_while_others_are_posted))
