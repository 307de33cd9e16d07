/* Benchmark of two processes that poll, as JSON lines: writes of 8 bytes and reads of 4 KiB whose frames go through
 * rings or sockets, and a bare ring: a word in shared memory that the other process answers by another one. Data of
 * reads is copied directly, or comes through the ring. And writes by 16 and 32 devices of one process in turn, each a
 * peer of its own. The pairs of processes take turns, in short rounds. While another process has one of their two
 * processors, a round takes a thousand times as long, so the figures are those of the fastest round. */
#include "support.h"
#include "support_types.h"
#include "soft/base/settings.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 301, OPERATIONS = 200, READ = 4096, MOST_PEERS = 32 };
enum kind { BARE, RINGS, DATA_IN_RINGS, SOCKETS, SOME_PEERS, MANY_PEERS, KINDS, NONE = KINDS };

static const unsigned int peers[KINDS] = {0, 1, 1, 1, 16, MOST_PEERS}; /* initiating devices */

struct shared {
    _Alignas(128) atomic_uint turn; /* pair of processes that may run; NONE: the round is over */
    _Alignas(128) atomic_uint ping;
    _Alignas(128) atomic_uint pong;
    struct {
        atomic_uint opened, connected; /* ends of the pair */
        union ibv_gid gids[2][MOST_PEERS];
        uint32_t numbers[2][MOST_PEERS];
        uint64_t address;
        uint32_t key;
    } of[KINDS];
    double write_ns[KINDS][ROUNDS], read_ns[KINDS][ROUNDS];
};

static struct shared *shared;
static struct soft_settings settings;

/* ---- Ends ---------------------------------------------------------------------------------------------------- */

static void wait_for(atomic_uint *count, unsigned int value)
{
    while (atomic_load(count) < value)
        sleep_us(100);
}

static void raise_end(struct end *end, struct ibv_qp_attr *attr, enum ibv_qp_state state, int mask)
{
    attr->qp_state = state;
    REQUIRE_EQ(soft_verbs.modify_qp(end->qp, attr, mask), 0);
}

/* Open the ends of a process, and connect them to those of the other process of its pair. The target has one home. */
static void open_ends(struct home *homes, struct end *ends, enum kind kind, int is_target)
{
    struct check_variant variant = {"bench", {.mode = SOFT_INLINE, .settings = &settings}, true};
    unsigned int i;

    settings.rings = kind != SOCKETS;
    settings.direct = kind != DATA_IN_RINGS;
    for (i = 0; i < peers[kind]; i++) {
        struct home *home = &homes[is_target ? 0 : i];

        if (!is_target || !i)
            home_open_like(home, &variant);
        TYPED_OPEN(&ends[i], home, .type = IBV_QPT_RC);
        REQUIRE_EQ(soft_verbs.query_gid(home->context, 1, 1, &shared->of[kind].gids[is_target][i]), 0);
        shared->of[kind].numbers[is_target][i] = ends[i].qp->qp_num;
    }
    if (is_target) {
        shared->of[kind].address = (uintptr_t)ends[0].memory;
        shared->of[kind].key = ends[0].mr->rkey;
    }
    atomic_fetch_add(&shared->of[kind].opened, 1);
    wait_for(&shared->of[kind].opened, 2);
    for (i = 0; i < peers[kind]; i++) {
        struct ibv_qp_attr attr = default_link;

        attr.timeout = 20; /* 4 s: the machine may be busy */
        attr.port_num = 1;
        attr.dest_qp_num = shared->of[kind].numbers[!is_target][i];
        attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1, .grh.sgid_index = 1};
        attr.ah_attr.grh.dgid = shared->of[kind].gids[!is_target][i];
        raise_end(&ends[i], &attr, IBV_QPS_INIT, init_mask(IBV_QPT_RC));
        raise_end(&ends[i], &attr, IBV_QPS_RTR, rtr_mask(IBV_QPT_RC));
        raise_end(&ends[i], &attr, IBV_QPS_RTS, rts_mask(IBV_QPT_RC));
    }
    atomic_fetch_add(&shared->of[kind].connected, 1);
    wait_for(&shared->of[kind].connected, 2);
}

/* Post one request and poll until it is done, over and over, by each end in turn. Return the nanoseconds for each. */
static double operate(const struct end *ends, enum kind kind, enum ibv_wr_opcode opcode, uint32_t length)
{
    uint64_t begin = now_ns();
    struct ibv_wc wc;
    unsigned int i;

    for (i = 0; i < OPERATIONS; i++) {
        const struct end *end = &ends[i % peers[kind]];
        struct ibv_sge sge = {(uintptr_t)end->memory, length, end->mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
        struct ibv_send_wr *bad;

        wr.wr.rdma.remote_addr = shared->of[kind].address;
        wr.wr.rdma.rkey = shared->of[kind].key;
        REQUIRE_EQ(verbs_post_send(end->qp, &wr, &bad), 0);
        while (!verbs_poll_cq(end->send_cq, 1, &wc))
            ;
        REQUIRE_EQ(wc.status, IBV_WC_SUCCESS);
    }
    return (double)(now_ns() - begin) / OPERATIONS;
}

/* ---- The bare ring ------------------------------------------------------------------------------------------- */

static double ask_bare(void)
{
    uint64_t begin = now_ns();
    unsigned int i;

    for (i = 0; i < OPERATIONS; i++) {
        unsigned int next = atomic_load_explicit(&shared->ping, memory_order_relaxed) + 1;

        atomic_store_explicit(&shared->ping, next, memory_order_release);
        while (atomic_load_explicit(&shared->pong, memory_order_acquire) != next)
            ;
    }
    return (double)(now_ns() - begin) / OPERATIONS;
}

static void answer_bare(void)
{
    unsigned int asked = atomic_load_explicit(&shared->ping, memory_order_acquire);

    if (asked != atomic_load_explicit(&shared->pong, memory_order_relaxed))
        atomic_store_explicit(&shared->pong, asked, memory_order_release);
}

/* ---- Processes ----------------------------------------------------------------------------------------------- */

static void be_target(enum kind kind)
{
    struct end ends[MOST_PEERS];
    struct home home;
    struct ibv_wc wc;

    if (kind != BARE)
        open_ends(&home, ends, kind, 1);
    for (;;) /* until it is killed */
        if (atomic_load_explicit(&shared->turn, memory_order_relaxed) != kind)
            sleep_us(50);
        else if (kind == BARE)
            answer_bare();
        else
            (void)verbs_poll_cq(ends[0].send_cq, 1, &wc);
}

static void be_initiator(enum kind kind)
{
    struct home homes[MOST_PEERS];
    struct end ends[MOST_PEERS];
    unsigned int i;

    if (kind != BARE)
        open_ends(homes, ends, kind, 0);
    for (i = 0; i < ROUNDS; i++) {
        while (atomic_load(&shared->turn) != kind)
            sleep_us(50);
        if (kind == BARE) {
            ask_bare(); /* until both processes are awake, here as below */
            shared->write_ns[kind][i] = ask_bare();
        } else {
            operate(ends, kind, IBV_WR_RDMA_WRITE, 8);
            shared->write_ns[kind][i] = operate(ends, kind, IBV_WR_RDMA_WRITE, 8);
            shared->read_ns[kind][i] = operate(ends, kind, IBV_WR_RDMA_READ, READ);
        }
        atomic_store(&shared->turn, NONE);
    }
    pause();
}

static pid_t start(void (*be)(enum kind kind), enum kind kind)
{
    pid_t child = fork();

    REQUIRE(child >= 0);
    if (!child) {
        be(kind);
        _exit(1);
    }
    return child;
}

/* ---- Figures ------------------------------------------------------------------------------------------------- */

static double fastest(const double *values)
{
    double least = values[0];
    unsigned int i;

    for (i = 1; i < ROUNDS; i++)
        least = values[i] < least ? values[i] : least;
    return least;
}

static double copy_ns(void)
{
    static char from[READ], to[READ];
    uint64_t begin = now_ns();
    unsigned int i;

    for (i = 0; i < OPERATIONS; i++) {
        memcpy(to, from, READ);
        __asm__ volatile("" : : "r"(to) : "memory"); /* it is wanted */
    }
    return (double)(now_ns() - begin) / OPERATIONS;
}

/* Return the fastest time of the call by which data is copied directly. */
static double copy_call_ns(pid_t process, uint64_t address)
{
    static char to[READ];
    struct iovec near = {to, READ}, far = {(void *)(uintptr_t)address, READ};
    double least = 1e9;
    unsigned int i;

    for (i = 0; i < 100 * OPERATIONS; i++) {
        uint64_t begin = now_ns();
        double took;

        REQUIRE_EQ(process_vm_readv(process, &near, 1, &far, 1, 0), READ);
        took = (double)(now_ns() - begin);
        least = took < least ? took : least;
    }
    return least;
}

int main(void)
{
    char directory[] = "/tmp/aioverbs-bench-XXXXXX", command[64];
    double bare, rings, sockets, in_rings, copy, call;
    pid_t children[2 * KINDS];
    unsigned int i, j;

    REQUIRE(mkdtemp(directory) != NULL);
    soft_settings_default(&settings);
    strcpy(settings.directory, directory);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    atomic_store(&shared->turn, NONE);
    for (i = 0; i < KINDS; i++) {
        children[2 * i] = start(be_target, i);
        children[2 * i + 1] = start(be_initiator, i);
        if (i != BARE)
            wait_for(&shared->of[i].connected, 2);
    }
    for (i = 0; i < ROUNDS; i++)
        for (j = 0; j < KINDS; j++) {
            atomic_store(&shared->turn, (i + j) % KINDS);
            while (atomic_load(&shared->turn) != NONE)
                sleep_us(50);
        }
    bare = fastest(shared->write_ns[BARE]);
    rings = fastest(shared->write_ns[RINGS]);
    sockets = fastest(shared->write_ns[SOCKETS]);
    printf("{\"name\": \"soft_rings_write_8\", \"bare_ring_ns\": %.1f, \"rings_ns\": %.1f, \"sockets_ns\": %.1f, "
           "\"rings_to_bare_ring\": %.2f, \"sockets_to_rings\": %.2f}\n",
           bare, rings, sockets, rings / bare, sockets / rings);
    printf("{\"name\": \"soft_rings_peers\", \"write_8_of_16_ns\": %.1f, \"write_8_of_32_ns\": %.1f}\n",
           fastest(shared->write_ns[SOME_PEERS]), fastest(shared->write_ns[MANY_PEERS]));
    rings = fastest(shared->read_ns[RINGS]);
    sockets = fastest(shared->read_ns[SOCKETS]);
    copy = copy_ns();
    call = copy_call_ns(children[2 * RINGS], shared->of[RINGS].address);
    in_rings = fastest(shared->read_ns[DATA_IN_RINGS]);
    printf(
        "{\"name\": \"soft_rings_read_4k\", \"memcpy_ns\": %.1f, \"process_vm_readv_ns\": %.1f, \"direct_ns\": %.1f, "
        "\"sockets_ns\": %.1f, \"in_rings_ns\": %.1f, \"direct_beyond_the_call_ns\": %.1f, "
        "\"in_rings_to_bare_ring_beyond_two_copies\": %.2f}\n",
        copy, call, rings, sockets, in_rings, rings - call, (in_rings - 2 * copy) / bare);
    for (i = 0; i < 2 * KINDS; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    snprintf(command, sizeof(command), "rm -rf %s", directory);
    return system(command);
}
