/* Tests of two threads that send to each other and destroy all objects meanwhile, for each type of queue pair.
 * Sanitizers detect accesses to freed objects. */
#include "support.h"
#include "support_srq.h"
#include "support_threads.h"
#include "support_types.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROUNDS = UNDER_TSAN ? 40 : 120, POSTS = 12 };

/* Offsets in the memory of a side: data to send, data to read, memory for the other side, received data. Two threads
 * touch the same bytes only in an order that the device establishes. */
enum { SENT = 0, READ = 8 << 10, REACHED = 16 << 10, RECEIVED = 32 << 10 };

/* Data that one side publishes for the other one; it may be of an earlier round when it is read. */
struct card {
    atomic_uint qp_num, srq_num, rkey;
    atomic_ullong address;
};

static struct {
    enum ibv_qp_type type; /* of the sender */
    pthread_barrier_t barrier;
    struct card cards[2];
    int inode;
    atomic_uint arrived;
} both;

struct side {
    struct card *own, *other;
    unsigned int seed;
    struct home home;
    struct end sender, receiver; /* one and the same but for XRC */
    struct ibv_ah *ah;
    struct ibv_xrcd *xrcd;
    struct ibv_cq *srq_cq;
    struct ibv_srq *srq;
    struct ibv_mw *mw;
};

static bool is_xrc(void)
{
    return both.type == IBV_QPT_XRC_SEND;
}

/* ---- Up ---------------------------------------------------------------------------------------------------- */

static void open_xrc(struct side *side)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        .fd = both.inode,
        .oflags = O_CREAT,
    };

    side->xrcd = verbs_open_xrcd(side->home.context, &attr);
    REQUIRE(side->xrcd != NULL);
    side->srq_cq = home_cq(&side->home, 64, NULL);
    side->srq = try_xrc_srq(&side->home, side->xrcd, side->srq_cq, 16);
    REQUIRE(side->srq != NULL);
    TYPED_OPEN(&side->receiver, &side->home, .type = IBV_QPT_XRC_RECV, .xrcd = side->xrcd);
}

static void side_open(struct side *side, bool shared)
{
    uint32_t srq_num = 0;

    if (is_xrc()) {
        open_xrc(side);
        CHECK_EQ(verbs_get_srq_num(side->srq, &srq_num), 0);
    } else if (shared) {
        side->srq = make_srq(&side->home, 16);
    }
    TYPED_OPEN(&side->sender, &side->home, .type = both.type, .srq = is_xrc() ? NULL : side->srq);
    if (!is_xrc())
        side->receiver = side->sender;
    side->ah = make_ah(side->home.base, 1);
    if (both.type == IBV_QPT_RC || both.type == IBV_QPT_UC)
        side->mw = verbs_alloc_mw(side->home.base, IBV_MW_TYPE_2);
    atomic_store(&side->own->qp_num, side->receiver.qp->qp_num);
    atomic_store(&side->own->srq_num, srq_num);
    atomic_store(&side->own->address, (uintptr_t)side->receiver.memory);
    atomic_store(&side->own->rkey, side->mw ? side->mw->rkey ^ 1 : side->receiver.mr->rkey);
}

/* An XRC initiator sends to its own side's target, and names the other side's shared queue. */
static void side_connect(struct side *side)
{
    uint32_t dest = atomic_load(&side->other->qp_num);

    if (is_xrc()) {
        type_connect(side->sender.qp, &default_link, side->receiver.qp->qp_num);
        type_connect(side->receiver.qp, &default_link, side->sender.qp->qp_num);
    } else {
        type_connect(side->sender.qp, &default_link, dest);
    }
}

/* ---- Traffic ----------------------------------------------------------------------------------------------- */

static void post_one_receive(struct side *side, uint64_t wr_id)
{
    struct ibv_sge sge = span(&side->receiver, RECEIVED + next_random(&side->seed, 8) * 512, 512);
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

    if (side->srq)
        CHECK_EQ(verbs_post_srq_recv(side->srq, &wr, &bad), 0);
    else
        CHECK_EQ(verbs_post_recv(side->receiver.qp, &wr, &bad), 0);
}

static void bind_window(struct side *side)
{
    struct ibv_send_wr wr = request(IBV_WR_BIND_MW, 1, NULL, 0);

    wr.bind_mw.mw = side->mw;
    wr.bind_mw.rkey = side->mw->rkey ^ 1;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = side->receiver.mr,
        .addr = (uintptr_t)side->receiver.memory,
        .length = PAIR_MEMORY,
        .mw_access_flags = REMOTE_ALL,
    };
    CHECK_EQ(post(side->sender.qp, &wr), 0);
}

static void post_one_send(struct side *side, uint64_t wr_id)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
                                                 IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ};
    unsigned int choices = both.type == IBV_QPT_UD ? 2 : both.type == IBV_QPT_UC ? 4 : 5;
    enum ibv_wr_opcode opcode = opcodes[next_random(&side->seed, choices)];
    size_t area = opcode == IBV_WR_RDMA_READ ? READ : SENT;
    struct ibv_sge sge =
        span(&side->sender, area + next_random(&side->seed, 8) * 512, 1 + next_random(&side->seed, 400));
    struct ibv_send_wr wr = request(opcode, wr_id, &sge, 1);

    wr.wr.rdma.remote_addr = atomic_load(&side->other->address) + REACHED;
    wr.wr.rdma.rkey = atomic_load(&side->other->rkey);
    if (both.type == IBV_QPT_UD)
        wr = datagram(opcode, wr_id, &sge, 1, side->ah, atomic_load(&side->other->qp_num));
    wr.qp_type.xrc.remote_srqn = atomic_load(&side->other->srq_num);
    CHECK_EQ(post(side->sender.qp, &wr), 0);
}

static void poll_some(struct ibv_cq *cq)
{
    struct ibv_wc wc[4];
    int i, n;

    n = cq ? verbs_poll_cq(cq, 4, wc) : 0;
    CHECK(n >= 0);
    for (i = 0; i < n; i++)
        if (wc[i].status == IBV_WC_SUCCESS)
            atomic_fetch_add(&both.arrived, 1);
}

static void traffic(struct side *side)
{
    uint64_t i;

    if (side->mw)
        bind_window(side);
    for (i = 0; i < POSTS; i++) {
        post_one_send(side, i);
        poll_some(side->srq_cq);
        poll_some(side->receiver.recv_cq);
    }
    sleep_us(next_random(&side->seed, 600));
    poll_some(side->srq_cq);
    poll_some(side->receiver.recv_cq);
}

/* ---- Down -------------------------------------------------------------------------------------------------- */

static void destroy_queue_pair(struct end *end)
{
    CHECK_EQ(soft_verbs.destroy_qp(end->qp), 0);
    end->qp = NULL;
}

/* Deregister memory while it is being written to, and its window with it. */
static void destroy_memory(struct side *side, struct end *end)
{
    if (side->mw)
        CHECK_EQ(verbs_dealloc_mw(side->mw), 0);
    side->mw = NULL;
    CHECK_EQ(soft_verbs.dereg_mr(end->mr), 0);
    end->mr = NULL;
    free(end->memory);
    end->memory = NULL;
}

static void side_close(struct side *side)
{
    struct end *receiver = is_xrc() ? &side->receiver : &side->sender;

    switch (next_random(&side->seed, 4)) {
    case 0:
        destroy_memory(side, receiver);
        break;
    case 1:
        destroy_queue_pair(receiver);
        break;
    case 2:
        CHECK_EQ(qp_to(receiver->qp, IBV_QPS_RESET), 0);
        break;
    default: /* an XRC queue goes while requests name it; no other can */
        if (is_xrc()) {
            CHECK_EQ(soft_verbs.destroy_srq(side->srq), 0);
            side->srq = NULL;
        }
        break;
    }
    CHECK_EQ(soft_verbs.destroy_ah(side->ah), 0);
    if (side->mw)
        CHECK_EQ(verbs_dealloc_mw(side->mw), 0);
    side->mw = NULL;
    end_close(&side->sender);
    if (is_xrc())
        end_close(&side->receiver);
    if (side->srq)
        CHECK_EQ(soft_verbs.destroy_srq(side->srq), 0);
    side->srq = NULL;
    if (side->srq_cq)
        CHECK_EQ(soft_verbs.destroy_cq(side->srq_cq), 0);
    side->srq_cq = NULL;
    if (side->xrcd)
        CHECK_EQ(verbs_close_xrcd(side->xrcd), 0);
    side->xrcd = NULL;
}

static void take_part(void *argument)
{
    struct side *side = argument;
    uint64_t i;
    int round;

    home_open(&side->home);
    for (round = 0; round < ROUNDS; round++) {
        side_open(side, round % 2);
        pthread_barrier_wait(&both.barrier);
        side_connect(side);
        for (i = 0; i < POSTS / 2; i++)
            post_one_receive(side, i);
        pthread_barrier_wait(&both.barrier);
        traffic(side);
        side_close(side);
    }
    home_close(&side->home);
}

static void turmoil(enum ibv_qp_type type)
{
    struct side sides[2] = {
        {.own = &both.cards[0], .other = &both.cards[1], .seed = 1},
        {.own = &both.cards[1], .other = &both.cards[0], .seed = 2},
    };

    both.type = type;
    both.inode = memfd_create("turmoil", MFD_CLOEXEC);
    REQUIRE(both.inode >= 0);
    atomic_store(&both.arrived, 0);
    REQUIRE_EQ(pthread_barrier_init(&both.barrier, NULL, 2), 0);
    run_threads(2, take_part, sides, sizeof(sides[0]));
    pthread_barrier_destroy(&both.barrier);
    close(both.inode);
    CHECK(atomic_load(&both.arrived) > 0);
}

static void reliable(void)
{
    turmoil(IBV_QPT_RC);
}

static void unreliable(void)
{
    turmoil(IBV_QPT_UC);
}

static void datagrams(void)
{
    turmoil(IBV_QPT_UD);
}

static void extended(void)
{
    turmoil(IBV_QPT_XRC_SEND);
}

CHECK_MAIN(CASE(reliable), CASE(unreliable), CASE(datagrams), CASE(extended))
