/* Tests of very many peers at once: silent ones do not keep honest ones out, and all honest ones are accepted. */
#include "support.h"
#include "support_fabric.h"
#include "support_kernel.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "soft/base/address.h"
#include "soft/fabric/stream.h"
#include "soft/fabric/accept.h"
#include "soft/fabric/poll_loop.h"
#include "soft/base/fork_fds.h"
#include "soft/base/memfd.h"

enum { CROWD = SOFT_MAX_HANDSHAKES + 5 };

static struct node *a, *b;

static void close_both(void)
{
    node_close(a);
    node_close(b);
    CHECK_EQ(a->wrong + b->wrong, 0);
    CHECK_EQ(rmdir(directory()), 0);
}

static void raise_limit(struct rlimit *limit)
{
    REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, limit), 0);
    limit->rlim_cur = limit->rlim_max;
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, limit), 0);
}

/* Silent peers have all places, and more of them wait before an honest one: it waits until these have had their
 * time. */
static void silent_peers_do_not_keep_honest_ones_out(void)
{
    static int fds[CROWD];
    unsigned int i;
    struct rlimit limit;
    uint64_t begin;
    int fd;

    raise_limit(&limit);
    REQUIRE(limit.rlim_cur / 4 >= 2 * SOFT_MAX_HANDSHAKES); /* each counts for two here */
    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    begin = now_ns();
    for (i = 0; i < CROWD; i++)
        fds[i] = raw_connect(b);
    EVENTUALLY(stats_of(b).streams == SOFT_MAX_HANDSHAKES);
    fd = raw_open(b);
    EVENTUALLY(stats_of(b).accepted == 1);
    CHECK(now_ns() - begin >= SOFT_PATIENCE_NS); /* no handshake was evicted before */
    CHECK(stats_of(b).refused_peers >= CROWD - SOFT_MAX_HANDSHAKES + 1);
    EVENTUALLY(stats_of(b).refused_peers == CROWD);
    CHECK(last_reason_is(b, "did not complete the handshake in time"));
    CHECK_EQ(stats_of(b).streams, 1);
    for (i = 0; i < CROWD; i++) {
        CHECK(raw_is_closed(fds[i]));
        close(fds[i]);
    }
    close(fd);
    close_both();
}

/* A process that is late itself ends no handshake whose last message has come meanwhile. */
static void a_late_process_completes_a_handshake(void)
{
    uint8_t hello[SOFT_HELLO_SIZE], welcome[SOFT_WELCOME_SIZE], proof[SOFT_PROOF_SIZE];
    static const uint8_t none[SOFT_DIGEST];
    int fd, silent;

    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    fd = raw_connect(b);
    silent = raw_connect(b);
    raw_hello(fd, b, hello);
    REQUIRE(raw_read(fd, welcome, sizeof(welcome)));
    EVENTUALLY(stats_of(b).streams == 2);
    soft_mutex_take(&b->device.fabric->progress);
    soft_proof_pack(none, proof);
    CHECK_EQ(send(fd, proof, sizeof(proof), MSG_NOSIGNAL), SOFT_PROOF_SIZE);
    soft_fabric_sweep(b->device.fabric, now_ns() + SOFT_HANDSHAKE_NS);
    soft_mutex_give(&b->device.fabric->progress);
    CHECK_EQ(stats_of(b).accepted, 1);
    CHECK_EQ(stats_of(b).refused_peers, 1);
    CHECK_EQ(stats_of(b).streams, 1);
    CHECK(raw_is_closed(silent));
    close(silent);
    close(fd);
    close_both();
}

/* Evicted peers connect again, behind those that wait: so many that the others take longer than a handshake may. */
static void silent_peers_that_reconnect_do_not_keep_honest_ones_out(void)
{
    static struct pollfd silent[6 * SOFT_MAX_HANDSHAKES];
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    struct sender sender;
    struct rlimit limit;
    unsigned int i;

    raise_limit(&limit);
    REQUIRE(limit.rlim_cur > COUNT_OF(silent) + SOFT_MAX_HANDSHAKES + 50);
    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    for (i = 0; i < COUNT_OF(silent); i++)
        silent[i] = (struct pollfd){raw_connect(b), POLLIN, 0};
    sender_open(&sender, a, &b->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    while (!atomic_load(&a->responses) && now_ns() < end) {
        CHECK(poll(silent, COUNT_OF(silent), 10) >= 0);
        for (i = 0; i < COUNT_OF(silent); i++)
            if (silent[i].revents) {
                close(silent[i].fd);
                silent[i].fd = raw_connect(b);
            }
        if (atomic_load(&sender.error) == EHOSTUNREACH)
            sender_want(&sender, IBV_WR_SEND, 0, 8); /* another attempt */
    }
    CHECK_EQ(a->responses, 1);
    CHECK_EQ(stats_of(b).accepted, 1);
    sender_close(&sender);
    for (i = 0; i < COUNT_OF(silent); i++)
        close(silent[i].fd);
    close_both();
}

static int raw_connect_tcp(const struct node *node)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(node->device.address.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    REQUIRE(fd >= 0);
    REQUIRE_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

/* Silent peers on the network do not affect those of this host, nor the device's own links. None is evicted, as no peer
 * of the same kind waits. */
static void silent_peers_of_the_network(void)
{
    static int fds[SOFT_MAX_HANDSHAKES];
    struct sender sender;
    unsigned int i;
    int fd;

    new_directory();
    a = node_open();
    b = node_with_port(free_port());
    REQUIRE_EQ(soft_fabric_listen(&a->device), 0);
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    for (i = 0; i < COUNT_OF(fds); i++)
        fds[i] = raw_connect_tcp(b);
    EVENTUALLY(stats_of(b).streams == SOFT_MAX_HANDSHAKES);
    fd = raw_open(b);
    sender_open(&sender, b, &a->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(b->responses == 1);
    EVENTUALLY(stats_of(b).accepted == 1);
    CHECK(!last_reason_is(b, "another connection waits"));
    sender_close(&sender);
    close(fd);
    for (i = 0; i < COUNT_OF(fds); i++)
        close(fds[i]);
    close_both();
}

/* Add one more name of a listener that answers no peer. */
static void add_name(const struct soft_directory_entry *entry, const union ibv_gid *gid, char path[SOFT_MAX_PATH])
{
    char name[SOFT_GID_NAME];

    soft_gid_name(gid, name);
    snprintf(path, SOFT_MAX_PATH, "%.60s/%s", directory(), name);
    REQUIRE_EQ(link(entry->names[0], path), 0);
}

/* Silent peers to which a device connects keep out neither peers that connect to it, nor its other links. */
static void links_to_silent_peers(void)
{
    static char paths[CROWD][SOFT_MAX_PATH];
    struct sender *silent = calloc(CROWD, sizeof(*silent)), honest;
    union ibv_gid gid = {.raw = {0xfe, 0x80}};
    struct node *nobody;
    struct soft_directory_entry entry;
    unsigned int i;
    int fd;

    REQUIRE(silent != NULL);
    new_directory();
    settings.direct = false; /* which needs more descriptors */
    a = node_open();
    b = node_open();
    nobody = node_open();
    listen_by_hand(nobody, &entry);
    REQUIRE_EQ(soft_fabric_listen(&a->device), 0);
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    for (i = 0; i < CROWD; i++) {
        gid.raw[14] = (uint8_t)(i >> 8);
        gid.raw[15] = (uint8_t)i;
        add_name(&entry, &gid, paths[i]);
        sender_open(&silent[i], b, &gid, 6);
        sender_want(&silent[i], IBV_WR_SEND, 1, 8);
    }
    EVENTUALLY(stats_of(b).streams >= SOFT_MAX_HANDSHAKES);
    CHECK(stats_of(b).streams <= SOFT_MAX_HANDSHAKES);
    fd = raw_open(b);
    EVENTUALLY(stats_of(b).accepted == 1);
    CHECK_EQ(stats_of(b).refused_peers, 0);
    sender_open(&honest, b, &a->device.gids[0], 5);
    sender_want(&honest, IBV_WR_SEND, 1, 8);
    EVENTUALLY(b->responses == 1);
    sender_close(&honest);
    for (i = 0; i < CROWD; i++) {
        sender_close(&silent[i]);
        CHECK_EQ(unlink(paths[i]), 0);
    }
    close(fd);
    soft_directory_unregister(&entry);
    node_close(nobody);
    close_both();
    free(silent);
}

/* With one link more than handshakes may run at once, the last one waits, and starts as soon as a handshake ends. */
static void a_free_place_is_taken_at_once(void)
{
    enum { ALL = SOFT_MAX_HANDSHAKES + 1 };
    static char paths[ALL][SOFT_MAX_PATH];
    struct sender *silent = calloc(ALL, sizeof(*silent));
    uint8_t hello[SOFT_HELLO_SIZE];
    union ibv_gid gid = {.raw = {0xfe, 0x80}};
    struct soft_directory_entry entry;
    unsigned int i;
    int fd;

    REQUIRE(silent && grace_ready());
    new_directory();
    settings.direct = false;
    a = node_open();
    b = node_open();
    listen_by_hand(a, &entry);
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    for (i = 0; i < ALL; i++) {
        gid.raw[14] = (uint8_t)(i >> 8);
        gid.raw[15] = (uint8_t)i;
        add_name(&entry, &gid, paths[i]);
        sender_open(&silent[i], b, &gid, 6);
        sender_want(&silent[i], IBV_WR_SEND, 1, 8);
    }
    EVENTUALLY(stats_of(b).streams == SOFT_MAX_HANDSHAKES);
    soft_mutex_take(&b->device.fabric->progress);
    atomic_store(&b->device.fabric->sweep_at, UINT64_MAX); /* no sweep starts the link that waits */
    for (i = 0; i < ALL; i++)
        silent[i].wanted = 0; /* nor does a sender, when it is kicked, by another attempt */
    while (soft_fabric_poll_locked(b->device.fabric, true))
        continue; /* nor does a wake-up that the thread has not read yet */
    soft_mutex_give(&b->device.fabric->progress);
    CHECK_EQ(stats_of(b).failed_connects, 0);
    fd = accept_by_hand(entry.fd, hello);
    REQUIRE(fd >= 0);
    close(fd);
    EVENTUALLY(stats_of(b).failed_connects == 1);
    EVENTUALLY(stats_of(b).streams == SOFT_MAX_HANDSHAKES);
    for (i = 0; i < ALL; i++) {
        sender_close(&silent[i]);
        CHECK_EQ(unlink(paths[i]), 0);
    }
    soft_directory_unregister(&entry);
    close_both();
    free(silent);
}

/* Number of allowed streams, both ends of which are in this process. */
static unsigned int allowed_pairs(unsigned int most)
{
    struct rlimit limit;

    raise_limit(&limit);
    return limit.rlim_cur < 4 * most ? (unsigned int)limit.rlim_cur / 4 : most; /* that are served */
}

/* All peers connect while none is accepted, and none is refused. */
static void honest_peers_wait_and_all_get_in(void)
{
    static int fds[1000];
    unsigned int i, count = allowed_pairs(COUNT_OF(fds));
    uint8_t bytes[SOFT_WELCOME_SIZE], message[SOFT_PROOF_SIZE + SOFT_FRAME_SIZE];
    struct soft_frame frame = request_frame(IBV_WR_SEND, 6, 0, 0);
    static const uint8_t none[SOFT_DIGEST];
    uint8_t hello[SOFT_HELLO_SIZE];

    REQUIRE(count > SOFT_MAX_HANDSHAKES);
    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    soft_proof_pack(none, message);
    soft_frame_pack(&frame, message + SOFT_PROOF_SIZE);
    soft_mutex_take(&b->device.fabric->progress);
    for (i = 0; i < count; i++) {
        fds[i] = raw_connect(b);
        raw_hello(fds[i], b, hello);
    }
    soft_mutex_give(&b->device.fabric->progress);
    for (i = 0; i < count; i++) {
        REQUIRE(raw_read(fds[i], bytes, sizeof(bytes)));
        CHECK_EQ(send(fds[i], message, sizeof(message), MSG_NOSIGNAL), (ssize_t)sizeof(message));
    }
    EVENTUALLY(b->requests == count);
    CHECK_EQ(stats_of(b).refused_peers, 0);
    for (i = 0; i < count; i++)
        close(fds[i]);
    close_both();
}

/* Let the served streams grow old while another connection waits. */
static void accept_late(struct node *node)
{
    struct soft_fabric *fabric = node->device.fabric;
    struct soft_stream *stream;

    soft_mutex_take(&fabric->progress);
    for (stream = fabric->streams; stream; stream = stream->next)
        stream->deadline = 1;
    soft_fabric_accept(fabric, &fabric->unix_watch);
    soft_mutex_give(&fabric->progress);
}

/* Open two devices in a process with a limit of descriptors, whose queue pairs are connected to all peers. Return the
 * former limit. */
static struct rlimit open_both_within(rlim_t most)
{
    struct rlimit before, limit;

    REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    limit = (struct rlimit){most, before.rlim_max};
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    new_directory();
    a = node_open();
    b = node_open();
    REQUIRE_EQ(soft_fabric_listen(&b->device), 0);
    atomic_store(&b->expects, true);
    return before;
}

/* Idle peers that completed the handshake leave most descriptors to the process. A later connection waits, which is
 * recorded if the wait does not end by itself; it is accepted once a stream has no connected queue pair. */
static void idle_peers_leave_descriptors(void)
{
    enum { LIMIT = 200, MOST = LIMIT / 4, HIGHEST = 2 * MOST + 100 };
    struct rlimit before;
    int fds[MOST], fd;
    unsigned int i;

    REQUIRE(HIGHEST <= LIMIT && grace_ready());
    before = open_both_within(LIMIT);
    for (i = 0; i < MOST; i++)
        fds[i] = raw_open(b);
    EVENTUALLY(stats_of(b).accepted == MOST);
    fd = raw_connect(b);
    accept_late(b);
    CHECK_EQ(stats_of(b).streams, MOST); /* queue pairs are connected to all of them */
    CHECK(last_reason_is(b, "`ulimit -n` (or 4096 streams): raise that limit"));
    accept_late(b);
    CHECK_EQ(stats_of(b).refused_peers, 1); /* which is said once */
    atomic_store(&b->expects, false);
    accept_late(b);
    CHECK(last_reason_is(b, "no queue pair is connected to the peer, and another connection waits"));
    CHECK_EQ(stats_of(b).refused_peers, 2);
    CHECK_EQ(stats_of(b).streams, MOST);
    close(fd);
    for (i = 0; i < MOST; i++)
        close(fds[i]);
    close_both();
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

/* Complete the handshake as a peer that offers direct copies. */
static int raw_open_directly(const struct node *to)
{
    static const uint8_t none[SOFT_DIGEST];
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE], proof[SOFT_PROOF_SIZE], nonce[SOFT_NONCE] = {1};
    struct soft_hello said = {.flags = SOFT_HELLO_DIRECT, .pid = (uint32_t)getpid(), .probe = (uintptr_t)nonce};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec piece = {hello, sizeof(hello)};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    struct soft_welcome welcome;
    int fd = raw_connect(to), copy_tokens;

    copy_tokens = soft_sealed_create("copy-tokens", sizeof(struct soft_copy_token_page), F_SEAL_SEAL);
    REQUIRE(copy_tokens >= 0);
    memcpy(CMSG_DATA(&control.header), &copy_tokens, sizeof(copy_tokens));
    memset(said.gids, 7, sizeof(said.gids));
    memcpy(said.wanted, &to->device.gids[0], sizeof(said.wanted));
    memcpy(said.nonce, nonce, sizeof(said.nonce));
    soft_hello_pack(&said, hello);
    REQUIRE_EQ(sendmsg(fd, &message, MSG_NOSIGNAL), SOFT_HELLO_SIZE);
    soft_descriptor_close(copy_tokens);
    REQUIRE(raw_read(fd, bytes, sizeof(bytes)));
    REQUIRE(!soft_welcome_parse(bytes, &welcome));
    CHECK(welcome.flags & SOFT_HELLO_DIRECT); /* where a kernel does not allow it, this fails */
    soft_proof_pack(none, proof);
    REQUIRE_EQ(send(fd, proof, sizeof(proof), MSG_NOSIGNAL), SOFT_PROOF_SIZE);
    return fd;
}

/* A peer with direct copies uses two descriptors, and so does one of which that is not known yet. */
static void direct_peers_leave_descriptors(void)
{
    enum { LIMIT = 200, MOST = LIMIT / 4 / 2 };
    struct rlimit before;
    unsigned int open, i;
    int fds[MOST], fd;

    if (!kernel_reads_other_processes())
        return;
    REQUIRE(grace_ready());
    before = open_both_within(LIMIT);
    fds[0] = raw_open_directly(b); /* the page of the read cache is made */
    open = open_descriptors();
    for (i = 1; i < MOST; i++)
        fds[i] = raw_open_directly(b);
    EVENTUALLY(stats_of(b).accepted == MOST);
    CHECK_EQ(open_descriptors() - open, 3 * (MOST - 1)); /* each has one here */
    fd = raw_connect(b);
    accept_late(b);
    CHECK_EQ(stats_of(b).streams, MOST); /* queue pairs are connected to all of them */
    close(fd);
    for (i = 0; i < MOST; i++)
        close(fds[i]);
    EVENTUALLY(!stats_of(b).streams);

    for (i = 0; i < MOST; i++)
        fds[i] = raw_connect(b);
    EVENTUALLY(stats_of(b).streams == MOST);
    fd = raw_connect(b);
    soft_mutex_take(&b->device.fabric->progress);
    soft_fabric_accept(b->device.fabric, &b->device.fabric->unix_watch);
    soft_mutex_give(&b->device.fabric->progress);
    CHECK(stats_of(b).streams <= MOST); /* the first ones may have given way by now */
    for (i = 0; i < MOST; i++)
        close(fds[i]);
    close(fd);
    close_both();
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

CHECK_MAIN_ONCE(CASE(silent_peers_do_not_keep_honest_ones_out), CASE(a_late_process_completes_a_handshake),
                CASE(silent_peers_that_reconnect_do_not_keep_honest_ones_out), CASE(silent_peers_of_the_network),
                CASE(links_to_silent_peers), CASE(a_free_place_is_taken_at_once),
                CASE(honest_peers_wait_and_all_get_in), CASE(idle_peers_leave_descriptors),
                CASE(direct_peers_leave_descriptors))
