/* Tests of memory that is taken back while a peer copies from or to it: the owner waits until the peer has ended the
 * copy, or has had the time allowed for it; no other thread waits. */
#include "support.h"
#include "support_fabric.h"
#include "support_kernel.h"
#include "support_threads.h"
#include "support_types.h"
#include "support_work.h"

#include <errno.h>
#include <unistd.h>

#include "soft/fabric/stream.h"
#include "soft/fabric/copy_token.h"

enum { OPEN = 1, BUSY = 2 }; /* states of a word of the page */
enum { ENDS = 3 };

/* Queue pairs of a device, each with a write in flight that the peer is to copy directly; the peer does not answer. */
struct scene {
    struct home home;
    struct ibv_cq *cq;
    struct end ends[ENDS];
    struct node *peer;
    uint8_t *memory; /* that all write */
    struct ibv_mr *mr;
    atomic_bool is_over; /* the verb that takes something back */
};

static struct soft_qp *qp_of(struct scene *scene, unsigned int index)
{
    return to_soft_qp(scene->ends[index].qp);
}

static struct soft_device *device_of(const struct scene *scene)
{
    return to_soft_context(scene->home.context)->device;
}

static unsigned int moving(struct scene *scene)
{
    return atomic_load(&device_of(scene)->direct_parts);
}

/* Change the state of the peer's tokens that are in one of these states. */
static void mark(struct scene *scene, unsigned int from, unsigned int to)
{
    struct soft_copy_token_page *page = qp_of(scene, 0)->link->stream.copy_tokens;
    unsigned int i;

    for (i = 0; i < SOFT_COPY_TOKENS; i++) {
        uint64_t found = atomic_load(&page->words[i]);

        if (found >> 32 == from)
            atomic_store(&page->words[i], (uint64_t)to << 32 | (uint32_t)found);
    }
}

static void connect_to(struct end *end, const struct node *peer)
{
    struct ibv_qp_attr attr = default_link;
    struct ibv_qp *qp = end->qp;

    attr.timeout = 0; /* nothing is sent again, however long a thread is stopped */
    attr.port_num = 1;
    attr.dest_qp_num = 17;
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh = {.sgid_index = 1}};
    attr.ah_attr.grh.dgid = peer->device.gids[0];
    attr.qp_state = IBV_QPS_INIT;
    REQUIRE_EQ(soft_verbs.modify_qp(qp, &attr, init_mask(qp->qp_type)), 0);
    attr.qp_state = IBV_QPS_RTR;
    REQUIRE_EQ(soft_verbs.modify_qp(qp, &attr, rtr_mask(qp->qp_type)), 0);
    attr.qp_state = IBV_QPS_RTS;
    REQUIRE_EQ(soft_verbs.modify_qp(qp, &attr, rts_mask(qp->qp_type)), 0);
}

static void write_all(struct scene *scene)
{
    struct ibv_sge sge = {(uintptr_t)scene->memory, PAIR_MEMORY, scene->mr->lkey};
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 1, &sge, 1);
    unsigned int i;

    wr.wr.rdma.rkey = 1;
    for (i = 0; i < ENDS; i++)
        REQUIRE_EQ(post(scene->ends[i].qp, &wr), 0);
}

static void open_scene(struct scene *scene)
{
    struct check_variant like = *variant;
    unsigned int i;

    memset(scene, 0, sizeof(*scene));
    new_directory();
    settings.rings = false; /* data of this size would go through them */
    like.options.settings = &settings;
    home_open_like(&scene->home, &like);
    scene->peer = node_open();
    atomic_store(&scene->peer->deaf, true);
    REQUIRE_EQ(soft_fabric_listen(&scene->peer->device), 0);
    scene->cq = home_cq(&scene->home, 64, NULL);
    scene->memory = calloc(1, PAIR_MEMORY);
    scene->mr = soft_verbs.reg_mr(scene->home.base, scene->memory, PAIR_MEMORY, IBV_ACCESS_LOCAL_WRITE);
    REQUIRE(scene->mr != NULL);
    for (i = 0; i < ENDS; i++) {
        TYPED_OPEN(&scene->ends[i], &scene->home, .type = IBV_QPT_RC, .cq = scene->cq);
        connect_to(&scene->ends[i], scene->peer);
    }
    write_all(scene);
    EVENTUALLY(moving(scene) == ENDS && atomic_load(&scene->peer->requests) == ENDS);
    mark(scene, OPEN, BUSY);
}

static void close_scene(struct scene *scene)
{
    unsigned int i;

    for (i = 0; i < ENDS; i++)
        if (scene->ends[i].qp)
            end_close(&scene->ends[i]);
    CHECK_EQ(moving(scene), 0);
    CHECK_EQ(soft_verbs.destroy_cq(scene->cq), 0);
    if (scene->mr)
        CHECK_EQ(soft_verbs.dereg_mr(scene->mr), 0);
    home_close(&scene->home);
    free(scene->memory);
    node_close(scene->peer);
    CHECK_EQ(rmdir(directory()), 0);
}

/* ---- What waits ---------------------------------------------------------------------------------------------- */

static void deregister(struct scene *scene)
{
    CHECK_EQ(soft_verbs.dereg_mr(scene->mr), 0);
    scene->mr = NULL;
    CHECK_EQ(moving(scene), 0);
}

static void reset(struct scene *scene)
{
    unsigned int i;

    for (i = 0; i < ENDS; i++) {
        CHECK_EQ(qp_to(scene->ends[i].qp, IBV_QPS_RESET), 0);
        CHECK_EQ(qp_of(scene, i)->req.direct_count, 0);
    }
    CHECK_EQ(moving(scene), 0);
}

static void destroy(struct scene *scene)
{
    unsigned int i;

    for (i = 0; i < ENDS; i++)
        end_close(&scene->ends[i]);
    memset(scene->ends, 0, sizeof(scene->ends));
    CHECK_EQ(moving(scene), 0);
}

/* The application reuses the memory as soon as the loss is reported. */
static void lose(struct scene *scene)
{
    CHECK_EQ(soft_lose(scene->home.context), 0);
    CHECK_EQ(moving(scene), 0);
    CHECK(is_readable(scene->home.context->async_fd));
}

static bool is_lost(const struct scene *scene)
{
    return atomic_load(&to_soft_context(scene->home.context)->special) & SOFT_SPECIAL_LOST;
}

static void (*const verbs[])(struct scene *) = {deregister, reset, destroy, lose};

/* Return whether the requester has found that the peer copies memory of that queue pair, and by which copy token. */
static bool is_waited_for(struct scene *scene, unsigned int index, uint16_t *copy_token)
{
    struct soft_qp *qp = qp_of(scene, index);
    bool waited_for = false;

    soft_lock_take(&qp->sq_lock);
    if (qp->req.direct_count) {
        const struct soft_direct_part *first = &qp->direct_parts[qp->req.direct_first % SOFT_DIRECT_PARTS];

        waited_for = first->revoked_at;
        *copy_token = first->copy_token;
    }
    soft_lock_give(&qp->sq_lock);
    return waited_for;
}

/* One thread takes memory back; another one does unrelated work, and then ends the copy. */
struct part {
    struct scene *scene;
    void (*verb)(struct scene *); /* or NULL */
};

static void play(void *argument)
{
    struct part *part = argument;
    struct scene *scene = part->scene;
    static uint8_t other[4096];
    struct ibv_mr *mr;
    uint16_t copy_token;

    if (part->verb) {
        part->verb(scene);
        atomic_store(&scene->is_over, true);
        return;
    }
    EVENTUALLY(is_waited_for(scene, 0, &copy_token));
    CHECK(soft_fabric_get_streams(device_of(scene), NULL, 0) > 0);
    mr = soft_verbs.reg_mr(scene->home.base, other, sizeof(other), IBV_ACCESS_LOCAL_WRITE);
    CHECK_EQ(mr != NULL, !is_lost(scene));
    if (mr)
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    CHECK(!is_readable(scene->home.context->async_fd));
    CHECK(!atomic_load(&scene->is_over));
    mark(scene, BUSY, OPEN);
}

static void memory_is_released_after_the_peers_copy(void)
{
    unsigned int verb;

    if (!kernel_reads_other_processes())
        return;
    for (verb = 0; verb < sizeof(verbs) / sizeof(verbs[0]); verb++) {
        struct scene scene;
        struct part parts[2] = {{&scene, verbs[verb]}, {&scene, NULL}};

        open_scene(&scene);
        run_threads(2, play, parts, sizeof(parts[0]));
        if (verbs[verb] == deregister) /* all is sent again, and there is no memory any more */
            EXPECT(scene.cq, 1, IBV_WC_LOC_PROT_ERR);
        close_scene(&scene);
    }
}

/* The peer is waited for once, however many copy tokens and queue pairs there are; afterwards it gets none. */
static void a_peer_that_does_not_end_its_copy_is_given_up(void)
{
    struct scene scene;
    uint64_t begin = now_ns();
    struct soft_link *link;
    uint32_t serial;
    uint16_t copy_token;

    if (!kernel_reads_other_processes())
        return;
    open_scene(&scene);
    link = soft_link_get(device_of(&scene), &scene.peer->device.gids[0]);
    REQUIRE(link != NULL);
    destroy(&scene);
    CHECK(now_ns() - begin < 2 * (uint64_t)SOFT_COPY_TIMEOUT_NS);
    CHECK_EQ(soft_copy_token_open(link, &copy_token, &serial), EAGAIN);
    EVENTUALLY(!soft_link_direct(link));
    soft_link_put(link);
    close_scene(&scene);
}

/* ---- A peer that leaves just in time --------------------------------------------------------------------------- */

#define STAY_NS (SOFT_COPY_TIMEOUT_NS - 100000000ull)

static void reset_one_by_one(struct scene *scene)
{
    uint64_t begin = now_ns();
    unsigned int i;

    for (i = 0; i < ENDS; i++)
        CHECK_EQ(qp_to(scene->ends[i].qp, IBV_QPS_RESET), 0);
    CHECK(now_ns() - begin < 2 * (uint64_t)STAY_NS);
}

static void leave_one_by_one(void *argument)
{
    struct part *part = argument;
    struct scene *scene = part->scene;
    struct soft_copy_token_page *page;
    unsigned int i;

    if (part->verb) {
        play(part);
        return;
    }
    page = qp_of(scene, 0)->link->stream.copy_tokens;
    for (i = 0; i < ENDS; i++) {
        uint64_t begin, word;
        uint16_t copy_token = 0;

        EVENTUALLY(atomic_load(&scene->is_over) || is_waited_for(scene, i, &copy_token));
        for (begin = now_ns(); !atomic_load(&scene->is_over) && now_ns() - begin < STAY_NS;)
            sleep_us(500);
        word = atomic_load(&page->words[copy_token]);
        if (word >> 32 == BUSY)
            atomic_store(&page->words[copy_token], (uint64_t)OPEN << 32 | (uint32_t)word);
    }
}

/* Each wait is a bit shorter than the limit for one: in sum they take no longer than one. */
static void waits_for_a_slow_peer_are_limited_in_sum(void)
{
    struct scene scene;
    struct part parts[2] = {{&scene, reset_one_by_one}, {&scene, NULL}};
    struct soft_link *link;

    if (!kernel_reads_other_processes())
        return;
    open_scene(&scene);
    link = soft_link_get(device_of(&scene), &scene.peer->device.gids[0]);
    REQUIRE(link != NULL);
    run_threads(2, leave_one_by_one, parts, sizeof(parts[0]));
    CHECK(soft_copy_tokens_are_overdue(link));
    soft_link_put(link);
    close_scene(&scene);
}

/* ---- The end of the process ---------------------------------------------------------------------------------- */

static unsigned int count_words(struct scene *scene, unsigned int state)
{
    struct soft_copy_token_page *page = qp_of(scene, 0)->link->stream.copy_tokens;
    unsigned int i, count = 0;

    for (i = 0; i < SOFT_COPY_TOKENS; i++)
        count += atomic_load(&page->words[i]) >> 32 == state;
    return count;
}

static void halt(struct scene *scene)
{
    soft_halt(scene->home.context);
}

/* Check the gate, as the kernel does for a peer's system call. */
static bool gate_is_shut(struct scene *scene)
{
    struct soft_link *link = qp_of(scene, 0)->link;
    bool shut;
    int pipes[2];

    REQUIRE_EQ(pipe(pipes), 0);
    soft_mutex_take(&link->stream.tx);
    shut = write(pipes[1], &link->gate->byte, 1) < 0 && errno == EFAULT;
    soft_mutex_give(&link->stream.tx);
    close(pipes[0]);
    close(pipes[1]);
    return shut;
}

static void leave_at_the_end(void *argument)
{
    struct part *part = argument;
    struct scene *scene = part->scene;

    if (part->verb) {
        play(part);
        return;
    }
    EVENTUALLY(count_words(scene, OPEN) == 0);
    CHECK_EQ(count_words(scene, BUSY), 1);
    CHECK(gate_is_shut(scene));
    CHECK(!atomic_load(&scene->is_over));
    mark(scene, BUSY, OPEN);
}

/* Once the device is halted, no peer begins a copy, and the one in progress has ended. */
static void nothing_is_copied_after_the_end(void)
{
    struct scene scene;
    struct part parts[2] = {{&scene, halt}, {&scene, NULL}};
    struct soft_copy_token_page *page;
    uint64_t word;
    uint16_t copy_token;

    if (!kernel_reads_other_processes())
        return;
    open_scene(&scene);
    page = qp_of(&scene, 0)->link->stream.copy_tokens;
    mark(&scene, BUSY, OPEN);
    for (copy_token = 0; (word = atomic_load(&page->words[copy_token])) >> 32 != OPEN;)
        copy_token++;
    CHECK(soft_copy_token_enter(page, copy_token, (uint32_t)word));
    run_threads(2, leave_at_the_end, parts, sizeof(parts[0]));
    CHECK_EQ(count_words(&scene, OPEN) + count_words(&scene, BUSY), 0);
    CHECK(!soft_copy_token_enter(page, copy_token, (uint32_t)word));
    close_scene(&scene);
}

/* A peer that has ended its copy is not waited for, whether or not its process exists. */
static void a_peer_that_exited_is_not_waited_for(void)
{
    struct scene scene;
    struct soft_link *link;

    if (!kernel_reads_other_processes())
        return;
    open_scene(&scene);
    link = qp_of(&scene, 0)->link;
    CHECK(!soft_copy_tokens_revoke_all(link));
    mark(&scene, BUSY, OPEN);
    CHECK(soft_copy_tokens_revoke_all(link));
    CHECK(!soft_copy_tokens_are_overdue(link));
    close_scene(&scene);
}

CHECK_MAIN_ONCE(CASE(memory_is_released_after_the_peers_copy), CASE(a_peer_that_does_not_end_its_copy_is_given_up),
                CASE(waits_for_a_slow_peer_are_limited_in_sum), CASE(nothing_is_copied_after_the_end),
                CASE(a_peer_that_exited_is_not_waited_for))
