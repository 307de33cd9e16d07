#include "support.h"
#include "support_fabric.h"

#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "soft/fabric/directory.h"
#include "soft/fabric/stream.h"
#include "soft/base/settings.h"

/* ---- Nodes ----------------------------------------------------------------------------------------------- */

static struct node *nodes;

static struct node *node_of(const struct soft_stream *stream)
{
    return container_of(soft_stream_device(stream), struct node, device);
}

void fill_pattern(uint8_t *data, uint32_t size, uint32_t seed)
{
    uint32_t i;

    for (i = 0; i < size; i++)
        data[i] = (uint8_t)((i + seed) * 2654435761u >> 24);
}

static bool has_pattern(const uint8_t *data, uint32_t size, uint32_t seed)
{
    uint32_t i;

    for (i = 0; i < size; i++)
        if (data[i] != (uint8_t)((i + seed) * 2654435761u >> 24))
            return false;
    return true;
}

static void count_lead(struct node *node, uint32_t number)
{
    unsigned int i, least = UINT32_MAX;

    if (number >= node->of)
        return;
    node->requests_of[number]++;
    for (i = 0; i < node->of; i++)
        least = node->requests_of[i] < least ? node->requests_of[i] : least;
    if (node->requests_of[number] - least > node->lead)
        node->lead = node->requests_of[number] - least;
}

static bool on_request(struct soft_stream *from, const struct soft_frame *frame, const uint8_t *payload)
{
    struct node *node = node_of(from);
    struct soft_frame answer = {
        .kind = SOFT_FRAME_RESPONSE, .to = frame->from, .from = frame->to, .token = frame->token, .psn = frame->psn};
    static _Thread_local uint8_t data[SOFT_FRAGMENT];
    struct iovec piece = {data, frame->part};

    if (frame->opcode == IBV_WR_SEND_WITH_INV) { /* a value that no node sends */
        soft_stream_refuse(from, "nobody here invalidates");
        return false;
    }
    if (frame->size && !has_pattern(payload, frame->size, frame->psn))
        atomic_fetch_add(&node->wrong, 1);
    count_lead(node, frame->from);
    if (frame->opcode == IBV_WR_RDMA_READ) {
        fill_pattern(data, frame->part, frame->psn);
        answer.part = answer.size = frame->part;
    }
    if (!atomic_load(&node->deaf))
        soft_stream_answer(from, &answer, &piece, answer.size ? 1 : 0);
    atomic_fetch_add(&node->bytes, frame->size);
    atomic_store(&node->address, frame->address);
    atomic_fetch_add(&node->requests, 1);
    return true;
}

static bool on_response(struct soft_link *by, const struct soft_frame *frame, const uint8_t *payload)
{
    struct node *node = node_of(soft_link_stream(by));

    if (frame->size && !has_pattern(payload, frame->size, frame->psn))
        atomic_fetch_add(&node->wrong, 1);
    atomic_fetch_add(&node->bytes, frame->size);
    atomic_fetch_add(&node->responses, 1);
    return true;
}

static void on_batch(struct soft_stream *from)
{
    atomic_fetch_add(&node_of(from)->batches, 1);
}

static void go_on(struct sender *sender);

static void on_kick(struct soft_qp *qp)
{
    struct sender *sender = container_of(qp, struct sender, qp);

    atomic_fetch_add(&sender->kicks, 1);
    go_on(sender);
}

static bool is_expected(const struct soft_stream *from)
{
    return atomic_load(&node_of(from)->expects);
}

static const struct soft_fabric_user user = {on_request, on_response, on_batch, on_kick, is_expected};

struct node *node_open_at(const union ibv_gid gids[2], uint16_t port)
{
    struct node *node = calloc(1, sizeof(*node));

    REQUIRE(node != NULL);
    node->next = nodes;
    nodes = node;
    memcpy(node->device.gids, gids, sizeof(node->device.gids));
    if (port) /* the second GID requests_of to TCP */
        node->device.address = (struct soft_address){AF_INET, port, {127, 0, 0, 1}};
    REQUIRE_EQ(soft_fabric_new(&node->device, &user), 0);
    soft_fabric_configure(&node->device, &settings);
    return node;
}

struct node *node_open(void)
{
    union ibv_gid gids[2] = {0};

    REQUIRE_EQ(getrandom(gids, sizeof(gids), 0), sizeof(gids));
    gids[0].raw[0] = 0xfe;
    gids[0].raw[1] = 0x80;
    memset(gids[1].raw, 0, 10);
    gids[1].raw[10] = gids[1].raw[11] = 0xff;
    gids[1].raw[12] = 127;
    return node_open_at(gids, 0);
}

uint16_t free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    REQUIRE_EQ(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    REQUIRE_EQ(getsockname(fd, (struct sockaddr *)&address, &size), 0);
    close(fd);
    return ntohs(address.sin_port);
}

struct node *node_with_port(uint16_t port)
{
    union ibv_gid gids[2] = {{.raw = {0xfe, 0x80, [8] = 2}}, {.raw = {[10] = 0xff, 0xff, 127, 0, 0, 1}}};

    gids[0].raw[14] = gids[1].raw[8] = (uint8_t)(port >> 8);
    gids[0].raw[15] = gids[1].raw[9] = (uint8_t)port;
    return node_open_at(gids, port);
}

void node_close(struct node *node)
{
    soft_fabric_stop(&node->device);
}

static char home[64];
struct soft_settings settings;

void set_directory(const char *path)
{
    REQUIRE(strlen(path) < sizeof(settings.directory));
    strcpy(settings.directory, path);
}

void new_directory(void)
{
    strcpy(home, "/tmp/aioverbs-test-XXXXXX");
    REQUIRE(mkdtemp(home) != NULL);
    soft_settings_default(&settings);
    settings.rings = !getenv("AIOVERBS_SOFT_RINGS") || strcmp(getenv("AIOVERBS_SOFT_RINGS"), "0");
    set_directory(home);
}

const char *directory(void)
{
    return home;
}

struct soft_fabric_stats stats_of(struct node *node)
{
    struct soft_fabric_stats stats;

    soft_fabric_get_stats(&node->device, &stats);
    return stats;
}

bool last_reason_is(struct node *node, const char *part)
{
    struct soft_fabric_stats stats = stats_of(node);

    return stats.events && strstr(stats.event[stats.events - 1].reason, part);
}

/* ---- Senders --------------------------------------------------------------------------------------------- */

struct soft_frame request_frame(enum ibv_wr_opcode opcode, uint32_t number, uint32_t psn, uint32_t size)
{
    bool read = opcode == IBV_WR_RDMA_READ;

    return (struct soft_frame){
        .kind = SOFT_FRAME_REQUEST,
        .opcode = (uint8_t)opcode,
        .flags = SOFT_FRAME_FIRST | SOFT_FRAME_LAST,
        .transport = IBV_QPT_RC,
        .size = read ? 0 : size,
        .to = 77,
        .from = number,
        .psn = psn,
        .packets = size ? (size + 4095) / 4096 : 1,
        .total = size,
        .part = size,
        .reads = read,
    };
}

static void go_on(struct sender *sender)
{
    static _Thread_local uint8_t data[SOFT_FRAGMENT];
    int error = 0;

    soft_lock_take(&sender->qp.sq_lock);
    while (!error && atomic_load(&sender->sent) < sender->wanted) {
        uint32_t psn = atomic_load(&sender->sent) & SOFT_PSN_MASK;
        struct soft_frame frame = request_frame(sender->opcode, sender->qp.qp.qp_num, psn, sender->size);
        struct iovec pieces[2] = {{data, frame.size / 3}, {data + frame.size / 3, frame.size - frame.size / 3}};

        fill_pattern(data, frame.size, psn);
        error = soft_link_send(sender->link, &sender->qp, &frame, pieces, 2);
        atomic_store(&sender->error, error);
        if (!error)
            atomic_fetch_add(&sender->sent, 1);
    }
    soft_lock_give(&sender->qp.sq_lock);
}

void sender_open(struct sender *sender, struct node *node, const union ibv_gid *to, uint32_t number)
{
    memset(sender, 0, sizeof(*sender));
    sender->qp.qp.qp_num = number;
    soft_lock_init(&sender->qp.sq_lock, SOFT_RANK_SQ);
    sender->link = soft_link_get(&node->device, to);
    REQUIRE(sender->link != NULL);
}

void sender_close(struct sender *sender)
{
    soft_link_forget(sender->link, &sender->qp);
    grace_wait();
    soft_link_put(sender->link);
}

void sender_want(struct sender *sender, enum ibv_wr_opcode opcode, unsigned int more, uint32_t size)
{
    soft_lock_take(&sender->qp.sq_lock);
    sender->opcode = opcode;
    sender->size = size;
    sender->wanted += more;
    soft_lock_give(&sender->qp.sq_lock);
    go_on(sender);
}

bool sender_finish(struct sender *sender)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;

    while (atomic_load(&sender->sent) < sender->wanted && now_ns() < end) {
        sleep_us(500);
        if (atomic_load(&sender->error) == EHOSTUNREACH)
            go_on(sender);
    }
    return atomic_load(&sender->sent) == sender->wanted;
}

/* ---- A peer that is none --------------------------------------------------------------------------------- */

static void *keep(void *argument)
{
    struct keeper *keeper = argument;

    soft_mutex_take(&keeper->fabric->progress);
    atomic_store(&keeper->kept, true);
    EVENTUALLY(atomic_load(&keeper->over));
    soft_mutex_give(&keeper->fabric->progress);
    return NULL;
}

void keep_from_reading(struct soft_fabric *fabric, struct keeper *keeper)
{
    keeper->fabric = fabric;
    atomic_init(&keeper->kept, false);
    atomic_init(&keeper->over, false);
    REQUIRE_EQ(pthread_create(&keeper->thread, NULL, keep, keeper), 0);
    EVENTUALLY(atomic_load(&keeper->kept));
}

void let_read(struct keeper *keeper)
{
    atomic_store(&keeper->over, true);
    pthread_join(keeper->thread, NULL);
}

unsigned int open_descriptors(void)
{
    DIR *listing = opendir("/proc/self/fd");
    unsigned int count = 0;

    REQUIRE(listing != NULL);
    while (readdir(listing))
        count++;
    closedir(listing);
    return count;
}

int raw_connect(const struct node *node)
{
    struct timeval limit = {.tv_sec = WAIT_S}; /* for a place in the backlog */
    struct sockaddr_un address;
    int fd;

    REQUIRE_EQ(soft_directory_find(&settings, &node->device.gids[0], &address), 0);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0);
    REQUIRE_EQ(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)), 0);
    REQUIRE_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

int listen_by_hand(const struct node *node, struct soft_directory_entry *entry)
{
    char why[256];

    REQUIRE_EQ(soft_directory_register(&settings, node->device.gids, entry, why, sizeof(why)), 0);
    return entry->fd;
}

int accept_by_hand(int listener, uint8_t hello[SOFT_HELLO_SIZE])
{
    int fd;

    REQUIRE(wait_readable(listener));
    fd = accept(listener, NULL, NULL);
    REQUIRE(fd >= 0);
    REQUIRE(raw_read(fd, hello, SOFT_HELLO_SIZE));
    return fd;
}

void raw_hello(int fd, const struct node *to, uint8_t bytes[SOFT_HELLO_SIZE])
{
    struct soft_hello hello = {.flags = 0};

    memset(hello.gids, 7, sizeof(hello.gids));
    memcpy(hello.wanted, &to->device.gids[0], sizeof(hello.wanted));
    soft_hello_pack(&hello, bytes);
    CHECK_EQ(send(fd, bytes, SOFT_HELLO_SIZE, MSG_NOSIGNAL), SOFT_HELLO_SIZE);
}

bool raw_read(int fd, void *to, size_t size)
{
    struct pollfd readable = {.fd = fd, .events = POLLIN};

    while (size) {
        ssize_t got = poll(&readable, 1, WAIT_S * 1000) == 1 ? read(fd, to, size) : -1;

        if (got <= 0)
            return false;
        to = (char *)to + got;
        size -= (size_t)got;
    }
    return true;
}

bool raw_is_closed(int fd)
{
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    char data[4096];
    ssize_t got;

    do
        got = poll(&readable, 1, WAIT_S * 1000) == 1 ? read(fd, data, sizeof(data)) : 1;
    while (got > 0 && readable.revents);
    return got == 0 || (got < 0 && errno == ECONNRESET);
}

int raw_open(const struct node *to)
{
    uint8_t hello[SOFT_HELLO_SIZE], welcome[SOFT_WELCOME_SIZE], proof[SOFT_PROOF_SIZE];
    static const uint8_t none[SOFT_DIGEST];
    struct soft_welcome answer;
    int fd = raw_connect(to);

    raw_hello(fd, to, hello);
    REQUIRE(raw_read(fd, welcome, sizeof(welcome)));
    REQUIRE(!soft_welcome_parse(welcome, &answer));
    soft_proof_pack(none, proof);
    REQUIRE_EQ(send(fd, proof, sizeof(proof), MSG_NOSIGNAL), SOFT_PROOF_SIZE);
    return fd;
}
