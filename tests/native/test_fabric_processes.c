/* Tests of the fabric between processes: killed peers, forks, direct copies, copy tokens. */
#include "support.h"
#include "support_fabric.h"
#include "support_kernel.h"
#include "support_threads.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/base/address.h"
#include "soft/base/fork_fds.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/copy_token.h"

/* Memory that a test and its child share. */
struct shared {
    atomic_uint ready, go;
    atomic_int error;
    union ibv_gid gid[2];
    atomic_ullong address;
    atomic_bool stopped, at;  /* the peer is about to make a copy and does not, as if it were stopped */
    atomic_bool wanted, come; /* `wanted`: a thread waits for a page; `come`: the page has come */
};

static struct shared *shared;
static struct node *node;

static void share(void)
{
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
}

static void unshare_it(void)
{
    munmap(shared, sizeof(*shared));
}

/* Start a child, before the test has threads. The child ends itself, or is killed. */
static pid_t start(void (*function)(void))
{
    pid_t child;

    atomic_store(&shared->ready, 0);
    fflush(stdout);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        alarm(60);
        function();
        fflush(stdout);
        _exit(check_failures() != 0);
    }
    return child;
}

static void end(pid_t child)
{
    int status = -1;

    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) || (WIFEXITED(status) && !WEXITSTATUS(status)));
}

static void serve(void)
{
    node = node_open_at(shared->gid, 0);
    CHECK_EQ(soft_fabric_listen(&node->device), 0);
    atomic_store(&shared->ready, 1);
    for (;;)
        pause();
}

static void begin(void)
{
    new_directory();
    share();
    shared->gid[0] = (union ibv_gid){.raw = {0xfe, 0x80, [15] = 9}};
    shared->gid[1] = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 127, 9, 9, 9}};
}

static void finish(void)
{
    char path[100], name[SOFT_GID_NAME];
    int i;

    for (i = 0; i < 2; i++) { /* killed processes left them */
        soft_gid_name(&shared->gid[i], name);
        snprintf(path, sizeof(path), "%s/%s", directory(), name);
        unlink(path);
    }
    CHECK_EQ(rmdir(directory()), 0);
    unshare_it();
}

/* The survivor's link ends, waiting queue pairs are kicked, and a new process with the same GIDs is found again. */
static void a_peer_is_killed(void)
{
    struct sender sender;
    unsigned int round, random = 7;
    pid_t child;

    begin();
    node = NULL;
    for (round = 0; round < SCALED(20); round++) {
        struct soft_stream_stats stream;
        struct node *own;

        child = start(serve);
        EVENTUALLY(shared->ready);
        own = node_open();
        sender_open(&sender, own, &shared->gid[0], 5);
        sender_want(&sender, round % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, 1000000, SOFT_FRAGMENT);
        sleep_us(next_random(&random, 20000));
        end(child);
        EVENTUALLY(soft_fabric_get_streams(&own->device, &stream, 1) == 1 && !stream.connected);
        EVENTUALLY(sender.error == EHOSTUNREACH || sender.error == 0);
        CHECK_EQ(soft_fabric_get_streams(&own->device, &stream, 1), 1);
        CHECK_EQ(stream.waiting, 0);
        CHECK_EQ(own->wrong, 0);
        sender_close(&sender);
        node_close(own);
    }
    finish();
}

static void ask_on(void)
{
    static struct sender sender;

    node = node_open();
    sender_open(&sender, node, &shared->gid[1], 5);
    sender_want(&sender, IBV_WR_RDMA_READ, 1000000, 10000);
    for (;;)
        pause();
}

/* The serving device drops a client that is killed. */
static void clients_are_killed(void)
{
    enum { CLIENTS = 4 };
    pid_t children[CLIENTS];
    unsigned int i;

    begin();
    for (i = 0; i < CLIENTS; i++)
        children[i] = start(ask_on);
    node = node_open_at(shared->gid, 0);
    REQUIRE_EQ(soft_fabric_listen(&node->device), 0);
    /* They came too early, and do not try again: what they wait for ends, and nothing else. */
    sleep_us(30000);
    for (i = 0; i < CLIENTS; i++)
        end(children[i]);
    EVENTUALLY(!stats_of(node).streams);
    node_close(node);

    for (i = 0; i < (UNDER_TSAN ? 3 : 1); i++) {
        unsigned int before, n;

        for (n = 0; n < CLIENTS; n++) { /* no thread runs: they are forked, and wait for the socket */
            children[n] = start(ask_on);
            kill(children[n], SIGSTOP);
        }
        node = node_open_at(shared->gid, 0);
        REQUIRE_EQ(soft_fabric_listen(&node->device), 0);
        for (n = 0; n < CLIENTS; n++)
            kill(children[n], SIGCONT);
        sleep_us(20000);
        for (n = 0; n < CLIENTS; n++)
            end(children[n]);
        EVENTUALLY(!stats_of(node).streams);
        before = node->requests;
        sleep_us(2000);
        CHECK_EQ(node->requests, before);
        CHECK_EQ(stats_of(node).refused_frames, 0);
        node_close(node);
    }
    finish();
}

static struct sender senders[4];

/* Requests of all sizes, so that a kill may come at any place of a frame. */
static void send_all_sizes(struct node *from, const union ibv_gid *to)
{
    static const uint32_t sizes[] = {0, 90, 5000, SOFT_FRAGMENT};
    unsigned int i;

    for (i = 0; i < COUNT_OF(senders); i++) {
        sender_open(&senders[i], from, to, i);
        sender_want(&senders[i], IBV_WR_SEND, 1000000, sizes[i]);
    }
}

static void send_on(void)
{
    while (!atomic_load(&shared->go))
        sleep_us(100);
    node = node_open();
    send_all_sizes(node, &shared->gid[1]);
    for (;;)
        pause();
}

/* Kill one side in the middle of writes to rings. The survivor handles whole frames only, and keeps nothing of the
 * other side; a link is told. AIOVERBS_KILLS is the number of kills. */
static void kills_amid_writes(void)
{
    unsigned int round, kills = getenv("AIOVERBS_KILLS") ? (unsigned int)atoi(getenv("AIOVERBS_KILLS")) : SCALED(40);
    unsigned int random = 11, descriptors, i;

    begin();
    descriptors = open_descriptors();
    for (round = 0; round < kills; round++) {
        bool serves = round % 2;
        pid_t child;

        atomic_store(&shared->go, 0);
        child = start(serves ? send_on : serve);
        if (serves) {
            node = node_open_at(shared->gid, 0);
            REQUIRE_EQ(soft_fabric_listen(&node->device), 0);
            atomic_store(&shared->go, 1);
            EVENTUALLY(node->requests > 0);
        } else {
            EVENTUALLY(shared->ready);
            node = node_open();
            send_all_sizes(node, &shared->gid[0]);
            EVENTUALLY(node->responses > 0);
        }
        sleep_us(next_random(&random, 3000));
        end(child);
        EVENTUALLY(!stats_of(node).streams);
        CHECK_EQ(node->wrong, 0);
        CHECK_EQ(stats_of(node).refused_frames, 0);
        for (i = 0; !serves && i < COUNT_OF(senders); i++)
            sender_close(&senders[i]);
        node_close(node);
        EVENTUALLY(open_descriptors() == descriptors);
    }
    finish();
}

/* A child of a fork has none of its parent's sockets: if the parent closes a connection, the peer sees its end. */
static void a_fork_keeps_no_sockets(void)
{
    unsigned int before = 0, after = 0;
    struct node *server, *client;
    struct sender sender;
    int pipes[2], status, fd;
    pid_t child;

    if (UNDER_TSAN) /* it does not let a process with threads fork */
        return;
    begin();
    server = node_open_at(shared->gid, 0);
    client = node_open();
    REQUIRE_EQ(soft_fabric_listen(&server->device), 0);
    sender_open(&sender, client, &shared->gid[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(client->responses == 1);
    for (fd = 0; fd < 1024; fd++)
        before += fcntl(fd, F_GETFD) >= 0;
    REQUIRE_EQ(pipe(pipes), 0);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        for (fd = 0; fd < 1024; fd++)
            after += fcntl(fd, F_GETFD) >= 0;
        if (write(pipes[1], &after, sizeof(after)) < 0)
            _exit(1);
        pause();
    }
    CHECK_EQ(read(pipes[0], &after, sizeof(after)), (ssize_t)sizeof(after));
    /* Of each: epoll and eventfd; the server's listener; both ends of the stream; copy tokens and processes. */
    CHECK(before - (after - 2) >= 7);
    node_close(server);
    EVENTUALLY(!stats_of(client).streams); /* though the child lives */
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, &status, 0), child);
    sender_close(&sender);
    node_close(client);
    close(pipes[0]);
    close(pipes[1]);
    CHECK_EQ(rmdir(directory()), 0);
    unshare_it();
}

/* ---- Directly -------------------------------------------------------------------------------------------- */

enum { LARGE = 3000000 };

static uint8_t *region; /* the owner's */

/* The owner's side makes the copies: it reads the data of writes, and writes the data of reads. */
static bool move_request(struct soft_stream *from, const struct soft_frame *frame, const uint8_t *payload)
{
    struct soft_frame answer = {.kind = SOFT_FRAME_RESPONSE,
                                .to = frame->from,
                                .from = frame->to,
                                .token = frame->token,
                                .psn = frame->psn,
                                .flags = SOFT_FRAME_DIRECT,
                                .part = frame->part};
    struct iovec local[2] = {{region, 1000}, {region + 1000, LARGE - 1000}};
    int error;

    if (!(frame->flags & SOFT_FRAME_DIRECT))
        return false;
    for (atomic_store(&shared->at, true); atomic_load(&shared->stopped);)
        sleep_us(100);
    error = soft_direct_move(from, frame, payload, local, 2, frame->opcode == IBV_WR_RDMA_WRITE);
    atomic_store(&shared->error, error);
    atomic_fetch_add(&shared->go, 1);
    if (!error)
        soft_stream_answer(from, &answer, NULL, 0);
    return true;
}

static atomic_uint answered;

static bool move_response(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload)
{
    (void)by;
    (void)payload;
    CHECK(frame->flags & SOFT_FRAME_DIRECT);
    atomic_fetch_add(&answered, 1);
    return true;
}

static void nothing_to_do(struct soft_stream *from)
{
    (void)from;
}

static void no_kick(struct soft_qp *qp)
{
    (void)qp;
}

static bool is_expected(const struct soft_stream *from)
{
    (void)from;
    return true;
}

static const struct soft_fabric_user movers = {move_request, move_response, nothing_to_do, no_kick, is_expected};

static void serve_directly(void)
{
    static struct soft_device device;

    region = malloc(LARGE);
    REQUIRE(region != NULL);
    fill_pattern(region, LARGE, 1);
    memcpy(device.gids, shared->gid, sizeof(device.gids));
    CHECK_EQ(soft_fabric_new(&device, &movers), 0);
    soft_fabric_configure(&device, &settings);
    CHECK_EQ(soft_fabric_listen(&device), 0);
    atomic_store(&shared->ready, 1);
    for (;;)
        pause();
}

static struct soft_device *own; /* never freed, as devices are not: each leads to the one before */
static struct soft_qp qp;

static int send_by(struct soft_link *link, const struct soft_frame *frame, const struct iovec *data, unsigned int count)
{
    int error;

    soft_lock_take(&qp.sq_lock);
    error = soft_link_send(link, &qp, frame, data, count);
    soft_lock_give(&qp.sq_lock);
    return error;
}

static int send_direct(struct soft_link *link, enum ibv_wr_opcode opcode, uint16_t copy_token, uint32_t serial,
                       const struct soft_frame_segment *segments, unsigned int count)
{
    struct soft_frame frame = request_frame(opcode, 5, 0, 0);
    uint8_t list[4 * SOFT_SEGMENT_SIZE];
    struct iovec piece = {list, count * SOFT_SEGMENT_SIZE};
    unsigned int i;

    for (i = 0; i < count; i++)
        frame.part += segments[i].length;
    frame.total = frame.part;
    frame.packets = (frame.part + 4095) / 4096;
    frame.flags |= SOFT_FRAME_DIRECT;
    frame.segments = (uint16_t)count;
    frame.size = (uint32_t)piece.iov_len;
    frame.copy_token = copy_token;
    frame.serial = serial;
    soft_segments_pack(segments, count, list);
    return send_by(link, &frame, &piece, 1);
}

static struct soft_link *connect_directly(void)
{
    struct soft_device *device = calloc(1, sizeof(*device));
    struct soft_frame none = request_frame(IBV_WR_SEND, 5, 0, 0);
    struct soft_link *link;
    struct soft_stream_stats stream;
    union ibv_gid gids[2] = {{.raw = {0xfe, 0x80, [15] = 1}}, {.raw = {[10] = 0xff, 0xff, 127, 1, 1, 1}}};

    REQUIRE(device != NULL);
    device->next = own;
    own = device;
    memset(&qp, 0, sizeof(qp));
    soft_lock_init(&qp.sq_lock, SOFT_RANK_SQ);
    memcpy(own->gids, gids, sizeof(gids));
    atomic_store(&answered, 0);
    REQUIRE_EQ(soft_fabric_new(own, &movers), 0);
    soft_fabric_configure(own, &settings);
    link = soft_link_get(own, &shared->gid[1]);
    REQUIRE(link != NULL);
    CHECK_EQ(send_by(link, &none, NULL, 0), ENOTCONN);
    EVENTUALLY(soft_fabric_get_streams(own, &stream, 1) && stream.connected && !stream.waiting);
    CHECK_EQ(stream.uid, geteuid());
    return link;
}

static void end_directly(struct soft_link *link)
{
    soft_link_forget(link, &qp);
    grace_wait();
    soft_link_put(link);
    soft_fabric_stop(own);
}

static void direct_copies(void)
{
    uint8_t *data = malloc(LARGE), *expected = malloc(LARGE);
    struct soft_frame_segment segments[4];
    struct soft_link *link;
    uint32_t serial, first_serial;
    uint16_t copy_token;
    pid_t child;

    if (!kernel_reads_other_processes())
        return;
    REQUIRE(data != NULL && expected != NULL);
    begin();
    child = start(serve_directly);
    EVENTUALLY(shared->ready);
    link = connect_directly();
    CHECK_EQ(shared->ready, 1);
    REQUIRE(soft_link_direct(link)); /* where a kernel does not allow it, this fails and says why */

    segments[0] = (struct soft_frame_segment){(uintptr_t)data, 1};
    segments[1] = (struct soft_frame_segment){(uintptr_t)data + 1, 999998};
    segments[2] = (struct soft_frame_segment){(uintptr_t)data + 999999, LARGE - 999999};
    REQUIRE_EQ(soft_copy_token_open(link, &copy_token, &serial), 0);
    CHECK_EQ(send_direct(link, IBV_WR_RDMA_READ, copy_token, serial, segments, 3), 0);
    EVENTUALLY(answered == 1);
    CHECK(soft_copy_token_close(link, copy_token, serial));
    fill_pattern(expected, LARGE, 1);
    CHECK(!memcmp(data, expected, LARGE));
    first_serial = serial;

    /* There and back again. */
    fill_pattern(data, LARGE, 2);
    memcpy(expected, data, LARGE);
    REQUIRE_EQ(soft_copy_token_open(link, &copy_token, &serial), 0);
    CHECK(serial != first_serial);
    CHECK_EQ(send_direct(link, IBV_WR_RDMA_WRITE, copy_token, serial, segments, 3), 0);
    EVENTUALLY(answered == 2);
    CHECK(soft_copy_token_close(link, copy_token, serial));
    memset(data, 0, LARGE);
    REQUIRE_EQ(soft_copy_token_open(link, &copy_token, &serial), 0);
    CHECK_EQ(send_direct(link, IBV_WR_RDMA_READ, copy_token, serial, segments, 3), 0);
    EVENTUALLY(answered == 3);
    CHECK(!memcmp(data, expected, LARGE));

    /* What was given up moves nothing, whatever else has the word by then. */
    memset(data, 0, LARGE);
    CHECK(soft_copy_token_close(link, copy_token, serial));
    CHECK_EQ(send_direct(link, IBV_WR_RDMA_READ, copy_token, serial, segments, 3), 0);
    EVENTUALLY(shared->go == 4);
    CHECK_EQ(shared->error, ESTALE);
    REQUIRE_EQ(soft_copy_token_open(link, &copy_token, &serial), 0);
    CHECK_EQ(send_direct(link, IBV_WR_RDMA_READ, copy_token, serial - 1, segments, 3), 0);
    EVENTUALLY(shared->go == 5);
    CHECK_EQ(shared->error, ESTALE);
    CHECK(!data[0] && !memcmp(data, data + 1, LARGE - 1));

    /* Memory that is not there. */
    segments[1].address = 4096;
    CHECK_EQ(send_direct(link, IBV_WR_RDMA_WRITE, copy_token, serial, segments, 3), 0);
    EVENTUALLY(shared->go == 6);
    CHECK_EQ(shared->error, EFAULT);
    CHECK_EQ(answered, 3);
    CHECK(soft_copy_token_close(link, copy_token, serial));

    /* Segments that are not those of their frame. */
    segments[1].length = 0;
    CHECK_EQ(send_direct(link, IBV_WR_RDMA_WRITE, copy_token, serial, segments, 3), 0);
    EVENTUALLY(shared->go == 7);
    CHECK_EQ(shared->error, EPROTO);
    EVENTUALLY(!soft_link_direct(link));
    end_directly(link);
    end(child);
    finish();
    free(data);
    free(expected);
}

/* A peer that was stopped before the system call, for longer than the limit, copies nothing when it goes on. */
static void nothing_is_copied_after_the_peer_was_given_up(void)
{
    enum ibv_wr_opcode opcodes[2] = {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE};
    uint8_t *data = calloc(1, LARGE);
    unsigned int i;

    if (!kernel_reads_other_processes())
        return;
    REQUIRE(data != NULL);
    for (i = 0; i < 2; i++) {
        struct soft_frame_segment segment = {(uintptr_t)data, LARGE};
        struct soft_link *link;
        uint32_t serial;
        uint16_t copy_token;
        pid_t child;

        begin();
        shared->stopped = true;
        child = start(serve_directly);
        EVENTUALLY(shared->ready);
        link = connect_directly();
        REQUIRE(soft_link_direct(link));
        REQUIRE_EQ(soft_copy_token_open(link, &copy_token, &serial), 0);
        CHECK_EQ(send_direct(link, opcodes[i], copy_token, serial, &segment, 1), 0);
        EVENTUALLY(shared->at);
        soft_copy_tokens_give_up(link); /* the word says that it may, as it did when the peer looked */
        shared->stopped = false;
        EVENTUALLY(shared->go == 1);
        CHECK_EQ(shared->error, EFAULT);
        CHECK(!data[0] && !memcmp(data, data + 1, LARGE - 1));
        CHECK(soft_copy_token_close(link, copy_token, serial));
        CHECK_EQ(answered, 0);
        end_directly(link);
        end(child);
        finish();
    }
    free(data);
}

/* Handle page faults by userfaultfd; return -1 if the kernel does not allow that. */
static int bring_by_hand(void *address, size_t size)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.range = {(uintptr_t)address, size}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);

    if (fd < 0 || !address)
        return fd;
    REQUIRE_EQ(ioctl(fd, UFFDIO_API, &api), 0);
    REQUIRE_EQ(ioctl(fd, UFFDIO_REGISTER, &range), 0);
    return fd;
}

static void *bring_late(void *fd)
{
    struct uffd_msg missed;
    struct uffdio_zeropage page;

    REQUIRE_EQ(read(*(int *)fd, &missed, sizeof(missed)), (ssize_t)sizeof(missed));
    for (atomic_store(&shared->wanted, true); !atomic_load(&shared->come);)
        sleep_us(100);
    page = (struct uffdio_zeropage){{missed.arg.pagefault.address / soft_page() * soft_page(), soft_page()}, 0, 0};
    REQUIRE_EQ(ioctl(*(int *)fd, UFFDIO_ZEROPAGE, &page), 0);
    return NULL;
}

struct reading {
    int fd;
    void *to;
};

static void *read_one(void *argument)
{
    struct reading *reading = argument;

    CHECK_EQ(read(reading->fd, reading->to, 1), 1);
    return NULL;
}

/* Take the lock as a fork does, again and again. */
static void *hold_again_and_again(void *done)
{
    int i;

    for (i = 0; i < 1000; i++) {
        soft_descriptors_hold();
        soft_descriptors_release();
        sleep_us(20);
    }
    atomic_store((atomic_bool *)done, true);
    return NULL;
}

/* A sender that keeps a copy of a socket can read from it into memory whose pages do not come: other readers of that
 * socket wait. */
static void a_socket_that_its_sender_reads_keeps_no_fork_waiting(void)
{
    int trial = bring_by_hand(NULL, 0), ends[2], fd;
    pthread_t bringer, reader, forker;
    struct pollfd hung_up = {.events = 0};
    atomic_bool done = false;
    struct reading reading;

    if (trial < 0)
        return;
    close(trial);
    REQUIRE_EQ(soft_descriptors_watch_forks(), 0);
    share();
    reading.to = mmap(NULL, soft_page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(reading.to != MAP_FAILED);
    fd = bring_by_hand(reading.to, soft_page());
    REQUIRE(fd >= 0);
    REQUIRE_EQ(pthread_create(&bringer, NULL, bring_late, &fd), 0);
    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    REQUIRE_EQ(write(ends[0], "", 1), 1);
    reading.fd = fcntl(ends[1], F_DUPFD_CLOEXEC, 0);
    REQUIRE_EQ(pthread_create(&reader, NULL, read_one, &reading), 0);
    EVENTUALLY(shared->wanted);
    soft_descriptor_discard(ends[1]);
    hung_up.fd = ends[0];
    CHECK_EQ(poll(&hung_up, 1, WAIT_S * 1000), 1); /* and then it is read */
    REQUIRE_EQ(pthread_create(&forker, NULL, hold_again_and_again, &done), 0);
    EVENTUALLY(done);
    shared->come = true;
    CHECK_EQ(pthread_join(forker, NULL) || pthread_join(reader, NULL) || pthread_join(bringer, NULL), 0);
    close(reading.fd);
    close(ends[0]);
    close(fd);
    munmap(reading.to, soft_page());
    unshare_it();
}

static void all_copy_tokens_can_be_used(void)
{
    static uint16_t copy_tokens[SOFT_COPY_TOKENS];
    static uint32_t serials[SOFT_COPY_TOKENS];
    struct soft_link *link;
    unsigned int round, i;
    uint16_t copy_token;
    uint32_t serial;
    pid_t child;

    begin();
    child = start(serve_directly);
    EVENTUALLY(shared->ready);
    link = connect_directly();
    for (round = 0; round < 3; round++) {
        for (i = 0; i < SOFT_COPY_TOKENS; i++)
            REQUIRE_EQ(soft_copy_token_open(link, &copy_tokens[i], &serials[i]), 0);
        CHECK_EQ(soft_copy_token_open(link, &copy_token, &serial), EAGAIN);
        for (i = 0; i < SOFT_COPY_TOKENS; i++)
            CHECK(soft_copy_token_close(link, copy_tokens[i], serials[i]));
    }
    /* Closing after the peer's end, in the middle of moving: the word stays as it was. */
    REQUIRE_EQ(soft_copy_token_open(link, &copy_token, &serial), 0);
    CHECK(soft_copy_token_enter(link->stream.copy_tokens, copy_token, serial));
    end(child);
    CHECK(soft_copy_token_close(link, copy_token, serial));
    end_directly(link);
    finish();
}

static void serve_without(void)
{
    settings.direct = false;
    serve_directly();
}

static void direct_copies_can_be_disabled(void)
{
    struct soft_stream_stats stream;
    struct soft_link *link;
    pid_t child;
    int here;

    for (here = 0; here < 2; here++) {
        begin();
        child = start(here ? serve_directly : serve_without);
        EVENTUALLY(shared->ready);
        if (here)
            settings.direct = false;
        link = connect_directly();
        CHECK(!soft_link_direct(link));
        CHECK_EQ(soft_fabric_get_streams(own, &stream, 1), 1);
        CHECK(strstr(stream.why_not_direct, here ? "AIOVERBS_SOFT_DIRECT" : "cannot access") != NULL);
        end_directly(link);
        end(child);
        finish();
    }
}

/* ---- Leases and memory ------------------------------------------------------------------------------------ */

/* Another thread makes copies: it may access `bytes` only between enter and leave. */
static struct {
    struct soft_copy_token_page page;
    struct soft_link link;
    uint64_t offered; /* atomic: copy token and serial */
    unsigned char bytes[64];
    bool stop;
} scene;

static void move_bytes(void *argument)
{
    unsigned int moved = 0;

    (void)argument;
    while (!__atomic_load_n(&scene.stop, __ATOMIC_ACQUIRE)) {
        uint64_t offered = __atomic_load_n(&scene.offered, __ATOMIC_RELAXED); /* which tells nothing of `bytes` */

        if (!soft_copy_token_enter(&scene.page, (uint16_t)(offered >> 32), (uint32_t)offered))
            continue;
        memset(scene.bytes, (int)++moved, sizeof(scene.bytes));
        soft_copy_token_leave(&scene.page, (uint16_t)(offered >> 32), (uint32_t)offered);
    }
}

static void own_bytes(void)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull; /* fewer rounds, where others want the processor as well */
    unsigned int round, i;

    for (round = 0; round < SCALED(20000) && now_ns() < end; round++) {
        uint16_t copy_token;
        uint32_t serial;

        for (i = 1; i < sizeof(scene.bytes); i++)
            CHECK_EQ(scene.bytes[i], scene.bytes[0]);
        memset(scene.bytes, (int)round, sizeof(scene.bytes));
        REQUIRE_EQ(soft_copy_token_open(&scene.link, &copy_token, &serial), 0);
        __atomic_store_n(&scene.offered, (uint64_t)copy_token << 32 | serial, __ATOMIC_RELAXED);
        if (round % 8 == 0)
            sched_yield();
        while (!soft_copy_token_close(&scene.link, copy_token, serial))
            sched_yield();
    }
    __atomic_store_n(&scene.stop, true, __ATOMIC_RELEASE);
}

static void own_or_move(void *argument)
{
    if (*(int *)argument)
        own_bytes();
    else
        move_bytes(NULL);
}

/* ThreadSanitizer reports accesses outside of that. */
static void nothing_is_copied_without_a_token(void)
{
    int roles[2] = {0, 1};

    memset(&scene, 0, sizeof(scene));
    scene.link.stream.copy_tokens = &scene.page;
    scene.link.stream.pidfd = -1;
    REQUIRE_EQ(soft_mutex_init(&scene.link.stream.tx, SOFT_RANK_TX), 0);
    run_threads(2, own_or_move, roles, sizeof(roles[0]));
    soft_mutex_destroy(&scene.link.stream.tx);
}

CHECK_MAIN_ONCE(CASE(a_peer_is_killed), CASE(clients_are_killed), CASE(kills_amid_writes), CASE(direct_copies),
                CASE(nothing_is_copied_after_the_peer_was_given_up),
                CASE(a_socket_that_its_sender_reads_keeps_no_fork_waiting), CASE(all_copy_tokens_can_be_used),
                CASE(direct_copies_can_be_disabled), CASE(nothing_is_copied_without_a_token),
                CASE(a_fork_keeps_no_sockets))
