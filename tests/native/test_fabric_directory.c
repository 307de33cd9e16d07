/* Tests of finding devices: the directory, its names, foreign files in it, and TCP. */
#include "support.h"
#include "support_fabric.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "soft/base/address.h"
#include "soft/fabric/directory.h"
#include "soft/fabric/stream.h"

static unsigned int files_in(const char *path)
{
    DIR *listing = opendir(path);
    unsigned int count = 0;

    REQUIRE(listing != NULL);
    while (readdir(listing))
        count++;
    closedir(listing);
    return count - 2; /* itself and its parent */
}

static void expect_no_entry(int error, const char *part, struct check_place place)
{
    struct node *node = node_open();
    char why[256];

    check_equal(soft_fabric_listen(&node->device), error, place, "soft_fabric_listen", "the error");
    soft_fabric_error(&node->device, why, sizeof(why));
    check_true(strstr(why, part) != NULL, place, why);
    check_true(!stats_of(node).listening, place, "it does not listen");
    check_true(fcntl(STDIN_FILENO, F_GETFD) >= 0, place, "nothing of the process is closed");
    node_close(node);
}

static void the_directory_is_made_and_left_empty(void)
{
    char path[100];
    struct node *node;
    struct stat found;

    new_directory();
    snprintf(path, sizeof(path), "%s/made", directory());
    set_directory(path);
    node = node_open();
    CHECK_EQ(stat(path, &found), -1);
    REQUIRE_EQ(soft_fabric_listen(&node->device), 0);
    REQUIRE_EQ(stat(path, &found), 0);
    CHECK_EQ(found.st_mode & 07777, 0700);
    CHECK_EQ(files_in(path), 2);
    CHECK_EQ(soft_fabric_listen(&node->device), 0); /* again as often as one likes */
    CHECK_EQ(files_in(path), 2);
    REQUIRE_EQ(stat(stats_of(node).path, &found), 0);
    CHECK(S_ISSOCK(found.st_mode));
    CHECK_EQ(found.st_mode & 07777, 0600);
    node_close(node);
    CHECK_EQ(files_in(path), 0);
    CHECK_EQ(rmdir(path), 0);
    CHECK_EQ(rmdir(directory()), 0);
}

static void directories_that_others_can_write(void)
{
    struct node *shared;
    struct stat found;
    char path[100];
    FILE *file;

    new_directory();
    CHECK_EQ(chmod(directory(), 0770), 0);
    expect_no_entry(EACCES, "chmod 0700", HERE);
    CHECK_EQ(chmod(directory(), 0702), 0);
    expect_no_entry(EACCES, "chmod 0700", HERE);
    CHECK_EQ(chmod(directory(), 0755), 0); /* others may look */
    snprintf(path, sizeof(path), "%s/link", directory());
    CHECK_EQ(symlink(directory(), path), 0);
    set_directory(path);
    expect_no_entry(ENOTDIR, "not a directory", HERE);
    CHECK_EQ(unlink(path), 0);
    file = fopen(path, "w");
    REQUIRE(file != NULL);
    fclose(file);
    expect_no_entry(ENOTDIR, "not a directory", HERE);
    CHECK_EQ(unlink(path), 0);
    snprintf(path, sizeof(path), "%s/not/there", directory());
    set_directory(path);
    expect_no_entry(ENOENT, "cannot be created", HERE);
    if (!geteuid()) {
        set_directory(directory());
        CHECK_EQ(chown(directory(), 1, 1), 0);
        expect_no_entry(EACCES, "another user", HERE);
        settings.users[settings.user_count++] = 1; /* another user may have it */
        shared = node_open();
        CHECK_EQ(soft_fabric_listen(&shared->device), 0);
        CHECK_EQ(stat(stats_of(shared).path, &found), 0);
        CHECK_EQ(found.st_mode & 07777, 0666);
        node_close(shared);
    }
    CHECK_EQ(rmdir(directory()), 0);
}

/* A directory that several users can write to must be sticky. */
static void a_shared_directory_keeps_each_users_sockets(void)
{
    mode_t masks[] = {0, 022, 077, 0777};
    struct sockaddr_un address;
    struct node *node;
    struct stat found;
    size_t i;

    new_directory();
    settings.users[settings.user_count++] = geteuid() + 1;
    CHECK_EQ(chmod(directory(), 0777), 0);
    expect_no_entry(EACCES, "chmod +t", HERE);
    CHECK_EQ(chmod(directory(), 0770), 0);
    expect_no_entry(EACCES, "chmod +t", HERE);
    CHECK_EQ(chmod(directory(), 01777), 0);
    for (i = 0; i < COUNT_OF(masks); i++) {
        mode_t before = umask(masks[i]);

        node = node_open();
        CHECK_EQ(soft_fabric_listen(&node->device), 0);
        umask(before);
        CHECK_EQ(stat(stats_of(node).path, &found), 0);
        CHECK_EQ(found.st_mode & 07777, 0666); /* whatever the umask is */
        CHECK_EQ(soft_directory_find(&settings, &node->device.gids[0], &address), 0);
        CHECK_EQ(chmod(directory(), 0777), 0);
        CHECK_EQ(soft_directory_find(&settings, &node->device.gids[0], &address), ENOENT);
        CHECK_EQ(chmod(directory(), 01777), 0);
        node_close(node);
    }
    CHECK_EQ(rmdir(directory()), 0);
}

/* Another user replaces the socket's file by this link, right after bind(). */
static const char *replaced_by;

int bind(int fd, const struct sockaddr *address, socklen_t size)
{
    const char *path = ((const struct sockaddr_un *)(const void *)address)->sun_path;

    if (syscall(SYS_bind, fd, address, size))
        return -1;
    if (replaced_by && address->sa_family == AF_UNIX && path[0]) {
        CHECK_EQ(unlink(path), 0);
        CHECK_EQ(symlink(replaced_by, path), 0);
    }
    return 0;
}

static void a_link_in_the_sockets_place_is_not_followed(void)
{
    char path[100];
    struct stat found;
    FILE *file;

    new_directory();
    snprintf(path, sizeof(path), "%s/private", directory());
    file = fopen(path, "w");
    REQUIRE(file != NULL);
    fclose(file);
    CHECK_EQ(chmod(path, 0640), 0);
    replaced_by = path;
    expect_no_entry(EEXIST, "another file replaced the socket", HERE);
    settings.users[settings.user_count++] = geteuid() + 1;
    CHECK_EQ(chmod(directory(), 01777), 0);
    expect_no_entry(EEXIST, "another file replaced the socket", HERE);
    replaced_by = NULL;
    CHECK_EQ(stat(path, &found), 0);
    CHECK_EQ(found.st_mode & 07777, 0640);
    CHECK_EQ(files_in(directory()), 1);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(rmdir(directory()), 0);
}

static void leave_stale(const union ibv_gid *gid, char path[SOFT_MAX_PATH]);

/* Return whether a peer that claims this GID is accepted. */
static bool is_welcome(const struct node *node, const union ibv_gid *gid)
{
    struct soft_hello said = {.flags = 0};
    uint8_t hello[SOFT_HELLO_SIZE], bytes[SOFT_WELCOME_SIZE];
    struct soft_welcome welcome;
    const char *wrong;
    int fd = raw_connect(node);

    memcpy(said.gids[1], gid, sizeof(said.gids[1]));
    memcpy(said.wanted, &node->device.gids[0], sizeof(said.wanted));
    soft_hello_pack(&said, hello);
    CHECK_EQ(send(fd, hello, sizeof(hello), MSG_NOSIGNAL), SOFT_HELLO_SIZE);
    REQUIRE(raw_read(fd, bytes, sizeof(bytes)));
    close(fd);
    wrong = soft_welcome_parse(bytes, &welcome);
    CHECK(!wrong || wrong == soft_refusal_text(SOFT_REFUSED_CLAIM));
    return !wrong;
}

/* The kernel reports a peer's user: a GID that is listed for one user cannot be claimed by another. */
static void a_gid_of_another_user_cannot_be_claimed(void)
{
    union ibv_gid gid = {.raw = {0xfe, 0x80, [15] = 77}};
    char path[SOFT_MAX_PATH];
    struct node *node;

    new_directory();
    settings.users[settings.user_count++] = geteuid() + 1;
    CHECK_EQ(chmod(directory(), 01777), 0);
    node = node_open();
    REQUIRE_EQ(soft_fabric_listen(&node->device), 0);
    CHECK(is_welcome(node, &gid));
    CHECK(!is_welcome(node, &node->device.gids[0]) && !is_welcome(node, &node->device.gids[1]));
    leave_stale(&gid, path);
    CHECK(is_welcome(node, &gid)); /* that user's own file */
    if (!geteuid()) {
        CHECK_EQ(chown(path, geteuid() + 1, 0), 0);
        CHECK(!is_welcome(node, &gid));
        CHECK(last_reason_is(node, "another device"));
    }
    CHECK_EQ(unlink(path), 0);
    node_close(node);
    CHECK_EQ(rmdir(directory()), 0);
}

/* Without settings all devices use the same directory. */
static void defaults(void)
{
    struct soft_settings usual;
    char expected[100];

    soft_settings_default(&usual);
    snprintf(expected, sizeof(expected), "/tmp/aioverbs-%u", (unsigned int)geteuid());
    CHECK(!strcmp(usual.directory, expected));
    CHECK(usual.direct);
    CHECK_EQ(usual.spin_ns, 50000);
    CHECK_EQ(usual.secret_size, 0);
    CHECK(soft_settings_allow(&usual, geteuid()) && !soft_settings_allow(&usual, geteuid() + 1));
}

/* Leave a socket's file without a listener; return its path. */
static void leave_stale(const union ibv_gid *gid, char path[SOFT_MAX_PATH])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char name[SOFT_GID_NAME];
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    soft_gid_name(gid, name);
    snprintf(address.sun_path, sizeof(address.sun_path), "%.60s/%s", directory(), name);
    REQUIRE_EQ(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    REQUIRE_EQ(listen(fd, 1), 0);
    close(fd);
    strcpy(path, address.sun_path);
}

static void stale_sockets_are_replaced(void)
{
    struct node *first, *second, *third;
    struct sender sender;
    char path[SOFT_MAX_PATH];

    new_directory();
    first = node_open();
    leave_stale(&first->device.gids[0], path);
    leave_stale(&first->device.gids[1], path);
    second = node_open();
    sender_open(&sender, second, &first->device.gids[0], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(sender.error == EHOSTUNREACH); /* there is a file, but no listener */
    REQUIRE_EQ(soft_fabric_listen(&first->device), 0);
    CHECK_EQ(files_in(directory()), 2);
    CHECK(sender_finish(&sender));
    EVENTUALLY(second->responses == 1);

    /* The socket of a running device is not replaced. */
    third = node_open_at(first->device.gids, 0);
    CHECK_EQ(soft_fabric_listen(&third->device), EADDRINUSE);
    CHECK_EQ(files_in(directory()), 2);
    node_close(third);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(second->responses == 2);
    sender_close(&sender);
    node_close(first);
    node_close(second);
    CHECK_EQ(rmdir(directory()), 0);
}

/* A file that replaced the device's own socket is not removed. */
static void foreign_files_are_kept(void)
{
    struct node *node;
    char path[SOFT_MAX_PATH];

    new_directory();
    node = node_open();
    REQUIRE_EQ(soft_fabric_listen(&node->device), 0);
    strcpy(path, stats_of(node).path);
    CHECK_EQ(unlink(path), 0);
    leave_stale(&node->device.gids[0], path);
    node_close(node);
    CHECK_EQ(files_in(directory()), 1);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(rmdir(directory()), 0);
}

/* ---- TCP ------------------------------------------------------------------------------------------------- */

/* Devices that share no directory reach each other by their addresses. */
static void over_tcp(void)
{
    struct soft_stream_stats stream;
    struct node *near, *far, *other;
    struct sender sender;
    char first[64];

    new_directory();
    strcpy(first, directory());
    far = node_with_port(free_port());
    REQUIRE_EQ(soft_fabric_listen(&far->device), 0);
    CHECK(!strncmp(stats_of(far).address, "127.0.0.1:", 10));
    other = node_with_port(far->device.address.port);
    other->device.gids[0].raw[9] = 1;
    CHECK_EQ(soft_fabric_listen(&other->device), EADDRINUSE);
    CHECK_EQ(files_in(directory()), 2);
    new_directory();
    near = node_with_port(free_port());
    sender_open(&sender, near, &far->device.gids[1], 5);
    sender_want(&sender, IBV_WR_RDMA_WRITE, 200, SOFT_FRAGMENT);
    CHECK(sender_finish(&sender));
    EVENTUALLY(near->responses == 200);
    REQUIRE_EQ(soft_fabric_get_streams(&near->device, &stream, 1), 1);
    CHECK(stream.connected && !stream.is_unix && !stream.direct);
    CHECK(strstr(stream.why_not_direct, "TCP") != NULL);
    CHECK_EQ(far->wrong + near->wrong, 0);

    node_close(far);
    EVENTUALLY(!stats_of(near).streams);
    sender_want(&sender, IBV_WR_RDMA_WRITE, 1, 8);
    EVENTUALLY(sender.error == EHOSTUNREACH);
    REQUIRE_EQ(soft_fabric_listen(&far->device), 0); /* the port is free again at once */
    CHECK(sender_finish(&sender));
    EVENTUALLY(near->responses == 201);
    sender_close(&sender);
    node_close(near);
    node_close(far);
    node_close(other);
    CHECK_EQ(rmdir(directory()), 0);
    CHECK_EQ(rmdir(first), 0);
}

/* A GID from another peer cannot make the device connect to an arbitrary address. */
static void without_an_address_nothing_is_connected_over_tcp(void)
{
    struct node *near, *far;
    struct soft_stream_stats stream;
    struct sender sender;
    char first[64];

    new_directory();
    strcpy(first, directory());
    far = node_with_port(free_port());
    REQUIRE_EQ(soft_fabric_listen(&far->device), 0);
    new_directory();
    near = node_open();
    sender_open(&sender, near, &far->device.gids[1], 5);
    sender_want(&sender, IBV_WR_SEND, 1, 8);
    EVENTUALLY(sender.error == EHOSTUNREACH || atomic_load(&near->responses));
    CHECK_EQ(near->responses + far->requests, 0);
    CHECK_EQ(stats_of(far).accepted, 0);
    CHECK_EQ(soft_fabric_get_streams(&near->device, &stream, 1), 1);
    CHECK(strstr(stream.reason, "this device has none: set AIOVERBS_SOFT_ADDRESS") != NULL);
    sender_close(&sender);
    node_close(near);
    node_close(far);
    CHECK_EQ(rmdir(directory()), 0);
    CHECK_EQ(rmdir(first), 0);
}

/* A port in use is an error of opening; nothing is left of the attempt. */
static void an_address_is_listened_at_when_it_is_opened(void)
{
    struct soft_options options = {.address = {AF_INET, free_port(), {127, 0, 0, 1}}, .settings = &settings};
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(options.address.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct ibv_context *context;

    new_directory();
    REQUIRE_EQ(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    REQUIRE_EQ(listen(fd, 1), 0);
    CHECK_REFUSED(soft_open(&options), EADDRINUSE);
    CHECK_EQ(files_in(directory()), 0);
    close(fd);
    context = soft_open(&options);
    REQUIRE(context != NULL);
    CHECK_EQ(files_in(directory()), 2);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    close(fd);
    CHECK_EQ(soft_verbs.close_device(context), 0);
    CHECK_EQ(files_in(directory()), 0);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&address, sizeof(address)), -1);
    close(fd);
    CHECK_EQ(rmdir(directory()), 0);
    options.address.bytes[0] = 192; /* a documentation address, which no host has */
    options.address.bytes[2] = 2;
    CHECK_REFUSED(soft_open(&options), EADDRNOTAVAIL);
}

static void unknown_gids(void)
{
    static const char *const nowhere[] = {"fe80::1",        "ff02::1",          "::",         "::ffff:127.5.6.7",
                                          "::ffff:0.1.2.3", "::ffff:224.0.0.1", "febf::1:2:3"};
    struct sockaddr_storage address;
    union ibv_gid gid;
    size_t i;

    for (i = 0; i < COUNT_OF(nowhere); i++) {
        REQUIRE_EQ(inet_pton(AF_INET6, nowhere[i], gid.raw), 1);
        CHECK_EQ(soft_gid_address(&gid, 1, &address), 0);
    }
    REQUIRE_EQ(inet_pton(AF_INET6, "2001:db8::5", gid.raw), 1);
    CHECK_EQ(soft_gid_address(&gid, 77, &address), sizeof(struct sockaddr_in6));
    CHECK_EQ(ntohs(((struct sockaddr_in6 *)&address)->sin6_port), 77);
    REQUIRE_EQ(inet_pton(AF_INET6, "::ffff:10.0.0.1", gid.raw), 1);
    CHECK_EQ(soft_gid_address(&gid, 77, &address), sizeof(struct sockaddr_in));
    CHECK_EQ(ntohs(((struct sockaddr_in *)&address)->sin_port), SOFT_PORT);
    gid.raw[9] = 5;
    CHECK_EQ(soft_gid_address(&gid, 77, &address), sizeof(struct sockaddr_in));
    CHECK_EQ(ntohs(((struct sockaddr_in *)&address)->sin_port), 5);
    CHECK_EQ(ntohl(((struct sockaddr_in *)&address)->sin_addr.s_addr), 0x0a000001);
}

CHECK_MAIN_ONCE(CASE(the_directory_is_made_and_left_empty), CASE(defaults), CASE(stale_sockets_are_replaced),
                CASE(foreign_files_are_kept), CASE(over_tcp), CASE(without_an_address_nothing_is_connected_over_tcp),
                CASE(an_address_is_listened_at_when_it_is_opened), CASE(unknown_gids),
                CASE(directories_that_others_can_write), CASE(a_shared_directory_keeps_each_users_sockets),
                CASE(a_link_in_the_sockets_place_is_not_followed), CASE(a_gid_of_another_user_cannot_be_claimed))
