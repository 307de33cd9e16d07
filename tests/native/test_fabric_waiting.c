/* Tests of queue pairs that wait for their link, or for an answer, while they are drained and connected elsewhere, and
 * while the process ends. */
#include "support.h"
#include "support_fabric.h"
#include "support_types.h"
#include "support_work.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/fabric/stream.h"
#include "soft/fault/fault.h"
#include "soft/objects/fault_counts.h"
#include "soft/transport/completer.h"

/* A device, and a peer whose listener accepts and sends nothing: senders wait for the connection. */
struct scene {
    struct home home;
    struct end end;
    struct node *peer;
    struct soft_directory_entry entry;
    int stream; /* the peer's side of the connection */
};

static struct soft_qp *qp_of(struct scene *scene)
{
    return to_soft_qp(scene->end.qp);
}

static bool by_socket; /* frames go through the socket */

static void open_scene(struct scene *scene, enum ibv_qp_type type)
{
    struct check_variant like = *variant;

    new_directory();
    settings.rings = !by_socket;
    like.options.settings = &settings;
    home_open_like(&scene->home, &like);
    scene->peer = node_open();
    listen_by_hand(scene->peer, &scene->entry);
    TYPED_OPEN(&scene->end, &scene->home, .type = type);
}

static void close_scene(struct scene *scene)
{
    home_close(&scene->home);
    close(scene->stream);
    soft_directory_unregister(&scene->entry);
    node_close(scene->peer);
    CHECK_EQ(rmdir(directory()), 0);
}

static void accept_silently(struct scene *scene)
{
    uint8_t hello[SOFT_HELLO_SIZE];

    scene->stream = accept_by_hand(scene->entry.fd, hello);
    REQUIRE(scene->stream >= 0);
}

/* Return the link for which the queue pair waits, or NULL. */
static struct soft_link *waits_for(struct scene *scene)
{
    struct soft_qp *qp = qp_of(scene);
    struct soft_link *link;

    soft_lock_take(&qp->sq_lock);
    if (qp->link)
        soft_mutex_take(&qp->link->stream.tx);
    link = qp->waiter.link;
    if (qp->link)
        soft_mutex_give(&qp->link->stream.tx);
    soft_lock_give(&qp->sq_lock);
    return link;
}

/* Return whether the wait and its timeout are over. */
static bool is_drained(struct scene *scene)
{
    struct soft_qp *qp = qp_of(scene);
    bool drained;

    soft_lock_take(&qp->sq_lock);
    drained = !qp->req.waiting && qp->req.deadline == UINT64_MAX;
    soft_lock_give(&qp->sq_lock);
    return drained;
}

static struct ibv_qp_attr path_to(const union ibv_gid *gid, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = default_link;

    attr.qp_state = state;
    attr.timeout = 20; /* 4 s, which do not pass here */
    attr.port_num = 1;
    attr.dest_qp_num = 17;
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.dgid = *gid, .sgid_index = 1}};
    return attr;
}

static int modify(struct scene *scene, enum ibv_qp_state state, int mask, const union ibv_gid *gid)
{
    struct ibv_qp_attr attr = path_to(gid, state);

    return soft_verbs.modify_qp(scene->end.qp, &attr, IBV_QP_STATE | mask);
}

/* A request that was not sent waits for no link after draining, wherever it is to go then, and has its whole
 * timeout. */
static void drained_before_the_request_was_sent(void)
{
    struct scene scene = {0};
    const union ibv_gid *gid;
    union ibv_gid elsewhere;
    struct soft_link *before;

    open_scene(&scene, IBV_QPT_RC);
    gid = &scene.peer->device.gids[0];
    elsewhere = *gid;
    elsewhere.raw[15] ^= 1; /* where no device listens */
    REQUIRE_EQ(modify(&scene, IBV_QPS_INIT, init_mask(IBV_QPT_RC), gid), 0);
    REQUIRE_EQ(modify(&scene, IBV_QPS_RTR, rtr_mask(IBV_QPT_RC), gid), 0);
    REQUIRE_EQ(modify(&scene, IBV_QPS_RTS, rts_mask(IBV_QPT_RC), gid), 0);
    CHECK_EQ(post_nothing(scene.end.qp, 1), 0);
    accept_silently(&scene);
    before = soft_link_get(to_soft_context(scene.home.context)->device, gid);
    REQUIRE(before != NULL);
    EVENTUALLY(waits_for(&scene) == before);
    CHECK_EQ(modify(&scene, IBV_QPS_SQD, 0, gid), 0);
    EVENTUALLY(is_drained(&scene));
    CHECK(!waits_for(&scene));
    CHECK_EQ(modify(&scene, IBV_QPS_SQD, IBV_QP_AV, &elsewhere), 0);
    CHECK(qp_of(&scene)->link != before);
    CHECK_EQ(modify(&scene, IBV_QPS_RTS, 0, gid), 0);
    CHECK(waits_for(&scene) != before);
    end_close(&scene.end);
    soft_mutex_take(&before->stream.tx);
    CHECK(!before->first);
    soft_mutex_give(&before->stream.tx);
    soft_link_put(before);
    close_scene(&scene);
}

/* A queue pair in RTS whose peer receives requests, and answers none while it is silent. */
static bool indirect; /* all data goes over the stream */

static void open_unanswered(struct scene *scene)
{
    struct check_variant like = *variant;
    const union ibv_gid *gid;

    new_directory();
    settings.direct = !indirect;
    like.options.settings = &settings;
    home_open_like(&scene->home, &like);
    scene->peer = node_open();
    atomic_store(&scene->peer->deaf, true);
    REQUIRE_EQ(soft_fabric_listen(&scene->peer->device), 0);
    gid = &scene->peer->device.gids[0];
    TYPED_OPEN(&scene->end, &scene->home, .type = IBV_QPT_RC);
    REQUIRE_EQ(modify(scene, IBV_QPS_INIT, init_mask(IBV_QPT_RC), gid), 0);
    REQUIRE_EQ(modify(scene, IBV_QPS_RTR, rtr_mask(IBV_QPT_RC), gid), 0);
    REQUIRE_EQ(modify(scene, IBV_QPS_RTS, rts_mask(IBV_QPT_RC), gid), 0);
}

/* Close the scene after its queue pair. */
static void close_unanswered(struct scene *scene)
{
    home_close(&scene->home);
    node_close(scene->peer);
    CHECK_EQ(rmdir(directory()), 0);
}

/* The answer is lost while the queue drains: the request is sent again, and its answer ends the draining. */
static void repeated_while_it_drains(void)
{
    struct scene scene = {0};
    const union ibv_gid *gid;

    open_unanswered(&scene);
    gid = &scene.peer->device.gids[0];
    CHECK_EQ(post_nothing(scene.end.qp, 1), 0);
    EVENTUALLY(atomic_load(&scene.peer->requests) == 1);
    CHECK_EQ(modify(&scene, IBV_QPS_SQD, 0, gid), 0);
    CHECK_EQ(post_nothing(scene.end.qp, 2), 0);
    end_wait(scene.end.qp);
    EVENTUALLY(atomic_load(&scene.peer->requests) == 2);
    CHECK(!is_drained(&scene));
    atomic_store(&scene.peer->deaf, false);
    end_wait(scene.end.qp);
    EXPECT(scene.end.send_cq, 1, IBV_WC_SUCCESS);
    EVENTUALLY(is_drained(&scene));
    CHECK_EQ(modify(&scene, IBV_QPS_RTS, 0, gid), 0);
    EXPECT(scene.end.send_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(atomic_load(&scene.peer->requests), 4);
    end_close(&scene.end);
    close_unanswered(&scene);
}

static uint8_t theirs[4096]; /* what the peer lets read */

static void post_read(struct scene *scene, struct ibv_mr *mr, uint64_t id)
{
    struct ibv_sge sge = {(uintptr_t)mr->addr, 64, mr->lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_READ, id, &sge, 1);

    wr.wr.rdma.rkey = 0x1234;
    wr.wr.rdma.remote_addr = (uintptr_t)theirs;
    CHECK_EQ(post(scene->end.qp, &wr), 0);
}

/* Return whether a read that was sent asks for a read cache grant. */
static bool asks_for_grant(struct scene *scene)
{
    struct soft_qp *qp = qp_of(scene);
    bool asks;

    soft_lock_take(&qp->sq_lock);
    asks = qp->req.pending_entry.owner_serial;
    soft_lock_give(&qp->sq_lock);
    return asks;
}

/* Answer the oldest read like the peer: with data and a read cache grant, or by an RNR NAK without a delay. */
static void answer_read(struct scene *scene, bool well)
{
    struct soft_qp *qp = qp_of(scene);
    struct soft_frame frame = {.kind = SOFT_FRAME_RESPONSE, .to = scene->end.qp->qp_num, .from = 17};
    static const uint8_t data[64];
    struct grace_reader *grace;

    frame.opcode = well ? SOFT_FRAME_ACK : SOFT_FRAME_RNR;
    frame.token = qp->req.token;
    frame.psn = qp->req.window.first_psn;
    if (well) {
        frame.part = frame.size = sizeof(data);
        frame.flags = SOFT_FRAME_READ_CACHE;
        frame.address = (uintptr_t)theirs;
        frame.compare_add = sizeof(theirs);
    }
    REQUIRE(grace_ready());
    grace = grace_enter();
    soft_handle_response(qp->link, &frame, data);
    grace_leave(grace);
}

/* A read that was refused is requested again, even if the peer granted reads without asking meanwhile, and finishes. */
static void a_read_is_refused_while_it_drains(void)
{
    struct scene scene = {0};
    struct ibv_mr *mr;
    unsigned int asked = 1;
    void *memory = calloc(1, 4096);

    REQUIRE(memory != NULL);
    open_unanswered(&scene);
    mr = soft_verbs.reg_mr(scene.home.base, memory, 4096, IBV_ACCESS_LOCAL_WRITE);
    REQUIRE(mr != NULL);
    post_read(&scene, mr, 1); /* which brings up the link */
    EVENTUALLY(atomic_load(&scene.peer->requests) == 1);
    if (!asks_for_grant(&scene)) { /* the first one that does is the next */
        answer_read(&scene, true);
        post_read(&scene, mr, 2);
        asked++;
        EVENTUALLY(atomic_load(&scene.peer->requests) == asked);
    }
    post_read(&scene, mr, 3);
    asked++;
    EVENTUALLY(atomic_load(&scene.peer->requests) == asked);
    CHECK_EQ(qp_to(scene.end.qp, IBV_QPS_SQD), 0);
    answer_read(&scene, true);
    answer_read(&scene, false);
    EVENTUALLY(atomic_load(&scene.peer->requests) == asked + 1);
    CHECK_EQ(qp_to(scene.end.qp, IBV_QPS_ERR), 0);
    end_close(&scene.end);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    free(memory);
    close_unanswered(&scene);
}

/* ---- A peer that comes back --------------------------------------------------------------------------------- */

/* Move the queue pair to RTS without a timeout: nothing is sent because of one. */
static void make_ready(struct scene *scene, const union ibv_gid *gid)
{
    struct soft_qp *qp = qp_of(scene);

    REQUIRE_EQ(modify(scene, IBV_QPS_INIT, init_mask(IBV_QPT_RC), gid), 0);
    REQUIRE_EQ(modify(scene, IBV_QPS_RTR, rtr_mask(IBV_QPT_RC), gid), 0);
    REQUIRE_EQ(modify(scene, IBV_QPS_RTS, rts_mask(IBV_QPT_RC), gid), 0);
    soft_lock_take(&qp->sq_lock);
    qp->attr.timeout = 0;
    soft_lock_give(&qp->sq_lock);
}

static enum soft_stage stage_of(struct soft_link *link)
{
    enum soft_stage stage;

    soft_mutex_take(&link->stream.tx);
    stage = link->stream.stage;
    soft_mutex_give(&link->stream.tx);
    return stage;
}

/* Allow no attempt to connect for `ns`, as if the connection had ended just now. */
static void restart_timer(struct soft_link *link, uint64_t ns)
{
    soft_mutex_take(&link->stream.tx);
    CHECK_EQ(link->stream.stage, SOFT_CLOSED);
    link->retry_at = now_ns() + ns;
    soft_mutex_give(&link->stream.tx);
}

/* A request that is posted while no attempt to connect is allowed is sent after the next attempt. */
static void sent_just_after_the_peer_came_back(void)
{
    struct scene scene = {0};

    open_scene(&scene, IBV_QPT_RC);
    soft_directory_unregister(&scene.entry);
    REQUIRE_EQ(soft_fabric_listen(&scene.peer->device), 0);
    make_ready(&scene, &scene.peer->device.gids[0]);
    CHECK_EQ(post_nothing(scene.end.qp, 1), 0);
    EXPECT(scene.end.send_cq, 1, IBV_WC_SUCCESS);
    node_close(scene.peer);
    REQUIRE_EQ(soft_fabric_listen(&scene.peer->device), 0);
    EVENTUALLY(stage_of(qp_of(&scene)->link) == SOFT_CLOSED);
    restart_timer(qp_of(&scene)->link, 50000000);
    CHECK_EQ(post_nothing(scene.end.qp, 2), 0);
    EXPECT(scene.end.send_cq, 2, IBV_WC_SUCCESS);
    end_close(&scene.end);
    scene.stream = -1;
    close_scene(&scene);
}

/* An attempt fails that had begun before the request, with a former process of the peer: another one is made for that
 * request, and none for the requests before the attempt. */
static void sent_while_an_attempt_to_connect_fails(void)
{
    struct scene scene = {0}, other = {0};
    const union ibv_gid *gid;

    open_scene(&scene, IBV_QPT_RC);
    gid = &scene.peer->device.gids[0];
    TYPED_OPEN(&other.end, &scene.home, .type = IBV_QPT_RC);
    make_ready(&scene, gid);
    make_ready(&other, gid);
    CHECK_EQ(post_nothing(scene.end.qp, 1), 0);
    accept_silently(&scene);
    CHECK_EQ(post_nothing(other.end.qp, 2), 0);
    EVENTUALLY(waits_for(&other));
    soft_directory_unregister(&scene.entry);
    REQUIRE_EQ(soft_fabric_listen(&scene.peer->device), 0);
    shutdown(scene.stream, SHUT_RDWR);
    EXPECT(other.end.send_cq, 2, IBV_WC_SUCCESS);
    CHECK_EQ(atomic_load(&scene.peer->requests), 1);
    end_close(&other.end);
    end_close(&scene.end);
    close_scene(&scene);
}

/* Make the queue pair look as if it had sent nothing since it asked for the current connection. */
static void forget_sending(struct scene *scene, struct soft_link *link)
{
    soft_mutex_take(&link->stream.tx);
    qp_of(scene)->waiter.attempt = link->attempts;
    soft_mutex_give(&link->stream.tx);
}

/* The connection for which requests waited breaks at the first request, before the turn of the second: another one is
 * made for both, at once. Only a socket shows that to the sender. */
static void sent_into_a_connection_that_breaks(void)
{
    struct scene scene = {0}, other = {0};
    struct keeper keeper;
    struct soft_link *link;

    by_socket = true;
    open_scene(&scene, IBV_QPT_RC);
    by_socket = false;
    TYPED_OPEN(&other.end, &scene.home, .type = IBV_QPT_RC);
    soft_directory_unregister(&scene.entry);
    REQUIRE_EQ(soft_fabric_listen(&scene.peer->device), 0);
    make_ready(&scene, &scene.peer->device.gids[0]);
    make_ready(&other, &scene.peer->device.gids[0]);
    CHECK_EQ(post_nothing(scene.end.qp, 1), 0);
    EXPECT(scene.end.send_cq, 1, IBV_WC_SUCCESS);
    link = qp_of(&scene)->link;
    keep_from_reading(link->stream.fabric,
                      &keeper); /* otherwise the thread that reads finds the end of the connection */
    forget_sending(&scene, link);
    shutdown(link->stream.watch.fd, SHUT_WR);
    CHECK_EQ(post_nothing(scene.end.qp, 2), 0);
    EVENTUALLY(waits_for(&scene) == link);
    CHECK_EQ(post_nothing(other.end.qp, 3), 0);
    EVENTUALLY(waits_for(&other) == link);
    forget_sending(&other, link);
    let_read(&keeper);
    EXPECT(scene.end.send_cq, 2, IBV_WC_SUCCESS);
    EXPECT(other.end.send_cq, 3, IBV_WC_SUCCESS);
    end_close(&other.end);
    end_close(&scene.end);
    scene.stream = -1;
    close_scene(&scene);
}

/* ---- The end of the process ---------------------------------------------------------------------------------- */

static atomic_bool halted;

static void *halt(void *context)
{
    soft_halt(context);
    atomic_store(&halted, true);
    return NULL;
}

static struct ibv_ah *ah_to(struct scene *scene, const union ibv_gid *gid)
{
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = *gid, .sgid_index = 1}};
    struct ibv_ah *ah = soft_verbs.create_ah(scene->home.base, &attr);

    REQUIRE(ah != NULL);
    return ah;
}

/* Halting does not execute waiting requests: the next datagram needs another link, which cannot be had any more. */
static void halted_while_datagrams_wait(void)
{
    struct scene scene = {0};
    struct ibv_sge sge;
    struct ibv_send_wr wr;
    union ibv_gid elsewhere;
    struct ibv_ah *ways[2];
    pthread_t thread;
    uint64_t i;

    open_scene(&scene, IBV_QPT_UD);
    type_connect(scene.end.qp, &default_link, 0);
    elsewhere = scene.peer->device.gids[0];
    ways[0] = ah_to(&scene, &elsewhere);
    elsewhere.raw[15] ^= 1;
    ways[1] = ah_to(&scene, &elsewhere);
    for (i = 0; i < 2; i++) {
        sge = span(&scene.end, 0, 8);
        wr = datagram(IBV_WR_SEND, i, &sge, 1, ways[i], 5);
        CHECK_EQ(post(scene.end.qp, &wr), 0);
    }
    accept_silently(&scene);
    CHECK_EQ(soft_set_port(scene.home.context, false), 0); /* the executing thread has finished the first one */
    atomic_store(&halted, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, halt, scene.home.context), 0);
    EVENTUALLY(atomic_load(&halted));
    REQUIRE(atomic_load(&halted));
    pthread_join(thread, NULL);
    CHECK_EQ(soft_set_port(scene.home.context, true), 0);
    end_close(&scene.end);
    for (i = 0; i < 2; i++)
        CHECK_EQ(soft_verbs.destroy_ah(ways[i]), 0);
    close_scene(&scene);
}

/* Datagrams go to the devices that they name, and a queue pair holds only the link of the last one. */
static void datagrams_to_two_devices(void)
{
    struct scene scene = {0};
    struct node *devices[2];
    struct ibv_ah *ways[2];
    uint64_t i, j;

    open_scene(&scene, IBV_QPT_UD);
    scene.stream = -1;
    type_connect(scene.end.qp, &default_link, 0);
    for (i = 0; i < 2; i++) {
        devices[i] = node_open();
        atomic_store(&devices[i]->deaf, true);
        REQUIRE_EQ(soft_fabric_listen(&devices[i]->device), 0);
        ways[i] = ah_to(&scene, &devices[i]->device.gids[0]);
    }
    for (i = 0; i < 4; i++) {
        struct ibv_sge sge = span(&scene.end, 0, 8);
        struct ibv_send_wr wr = datagram(IBV_WR_SEND, i, &sge, 1, ways[i % 2], 5);

        CHECK_EQ(post(scene.end.qp, &wr), 0);
        EXPECT(scene.end.send_cq, i, IBV_WC_SUCCESS);
        EVENTUALLY(devices[i % 2]->requests == i / 2 + 1);
        for (j = 0; j < 2; j++) {
            struct soft_link *link =
                soft_link_get(to_soft_context(scene.home.context)->device, &devices[j]->device.gids[0]);

            REQUIRE(link != NULL);
            CHECK_EQ(link->references, j == i % 2 ? 2 : 1);
            CHECK_EQ(qp_of(&scene)->link == link, j == i % 2);
            soft_link_put(link);
        }
    }
    end_close(&scene.end);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(soft_verbs.destroy_ah(ways[i]), 0);
        node_close(devices[i]);
    }
    close_scene(&scene);
}

/* A link that a refused change of state looked up is released. */
static void refused_while_connected(void)
{
    struct scene scene = {0};
    const union ibv_gid *gid;
    struct soft_link *link;

    open_unanswered(&scene);
    gid = &scene.peer->device.gids[0];
    CHECK_EQ(modify(&scene, IBV_QPS_RTR, rtr_mask(IBV_QPT_RC), gid), EINVAL);
    link = soft_link_get(to_soft_context(scene.home.context)->device, gid);
    REQUIRE(link != NULL && link == qp_of(&scene)->link);
    CHECK_EQ(link->references, 2);
    soft_link_put(link);
    end_close(&scene.end);
    close_unanswered(&scene);
}

static uint64_t deadline_of(struct scene *scene)
{
    uint64_t deadline;

    soft_lock_take(&qp_of(scene)->sq_lock);
    deadline = qp_of(scene)->req.deadline;
    soft_lock_give(&qp_of(scene)->sq_lock);
    return deadline;
}

/* Each part names its address; and the answer to one gives the next ones the whole timeout. */
static void parts_of_a_long_message(void)
{
    struct soft_frame frame = {.kind = SOFT_FRAME_RESPONSE, .opcode = SOFT_FRAME_ACK, .from = 17};
    void *memory = calloc(2, SOFT_FRAGMENT);
    struct grace_reader *grace;
    struct scene scene = {0};
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct ibv_mr *mr;
    uint64_t before;

    REQUIRE(memory != NULL && grace_ready());
    indirect = true;
    open_unanswered(&scene);
    indirect = false;
    mr = soft_verbs.reg_mr(scene.home.base, memory, 2 * SOFT_FRAGMENT, IBV_ACCESS_LOCAL_WRITE);
    REQUIRE(mr != NULL);
    sge = (struct ibv_sge){(uintptr_t)memory, 2 * SOFT_FRAGMENT, mr->lkey};
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, 1);
    wr.wr.rdma.remote_addr = 0x10000;
    CHECK_EQ(post(scene.end.qp, &wr), 0);
    EVENTUALLY(atomic_load(&scene.peer->requests) == 2);
    CHECK_EQ(atomic_load(&scene.peer->address), 0x10000 + SOFT_FRAGMENT);
    before = deadline_of(&scene);
    frame.to = scene.end.qp->qp_num;
    frame.token = qp_of(&scene)->req.token;
    frame.psn = (qp_of(&scene)->req.window.first_psn + SOFT_FRAGMENT / 4096 - 1) & SOFT_PSN_MASK;
    grace = grace_enter();
    soft_handle_response(qp_of(&scene)->link, &frame, NULL);
    grace_leave(grace);
    CHECK(deadline_of(&scene) > before);
    CHECK_EQ(qp_to(scene.end.qp, IBV_QPS_ERR), 0);
    end_close(&scene.end);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    free(memory);
    close_unanswered(&scene);
}

static void plan(struct scene *scene, enum soft_frame_fault_kind mishap, enum soft_frame_kind kind, uint64_t delay_ns)
{
    struct soft_frame_fault fault = {
        .mishap = mishap, .kinds = 1u << kind, .delay_ns = delay_ns, .strike = {.first = 1, .times = 1}};

    CHECK_EQ(soft_fault_frames(scene->home.context, &fault), 0);
}

/* One frame is lost, one delayed, one duplicated and one never delivered: each is recorded. */
static void frames_with_faults(void)
{
    struct soft_fault_record records[8];
    struct scene scene = {0};
    uint64_t id;

    open_unanswered(&scene);
    atomic_store(&scene.peer->deaf, false);
    CHECK_EQ(post_nothing(scene.end.qp, 0), 0);
    EXPECT(scene.end.send_cq, 0, IBV_WC_SUCCESS);
    plan(&scene, SOFT_DROP, SOFT_REQUEST_OUT, 0);
    CHECK_EQ(post_nothing(scene.end.qp, 1), 0);
    EVENTUALLY(soft_fault_records(scene.home.context, 0, records, 8) == 1);
    end_wait(scene.end.qp);
    EXPECT(scene.end.send_cq, 1, IBV_WC_SUCCESS);
    for (id = 2; id < 4; id++) {
        plan(&scene, id == 2 ? SOFT_DELAY : SOFT_DUPLICATE, SOFT_ANSWER_IN, 1000000);
        CHECK_EQ(post_nothing(scene.end.qp, id), 0);
        EVENTUALLY(soft_fault_records(scene.home.context, 0, records, 8) == id);
        EXPECT(scene.end.send_cq, id, IBV_WC_SUCCESS);
    }
    CHECK_EQ(records[0].what, SOFT_RECORD_DROP);
    CHECK_EQ(records[1].what, SOFT_RECORD_DELAY);
    CHECK_EQ(records[2].what, SOFT_RECORD_DUPLICATE);
    plan(&scene, SOFT_DELAY, SOFT_REQUEST_OUT, 1000000000ull * WAIT_S);
    CHECK_EQ(post_nothing(scene.end.qp, 4), 0);
    EVENTUALLY(soft_fault_records(scene.home.context, 0, records, 8) == 4);
    CHECK_EQ(qp_to(scene.end.qp, IBV_QPS_ERR), 0);
    end_close(&scene.end);
    close_unanswered(&scene);
}

CHECK_MAIN(CASE(refused_while_connected), CASE(parts_of_a_long_message), CASE(frames_with_faults),
           CASE(drained_before_the_request_was_sent), CASE(repeated_while_it_drains),
           CASE(a_read_is_refused_while_it_drains), CASE(sent_just_after_the_peer_came_back),
           CASE(sent_while_an_attempt_to_connect_fails), CASE(sent_into_a_connection_that_breaks),
           CASE(halted_while_datagrams_wait), CASE(datagrams_to_two_devices))
