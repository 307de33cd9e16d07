/* Baselines in C for the software fabric: two processes with a Unix stream.
 *
 *     fabric_baseline spins LENGTH PLACES OPERATIONS      messages back and forth, with both ends polling
 *     fabric_baseline streams LENGTH PLACES OPERATIONS    messages one after the other in one direction
 *     fabric_baseline moves LENGTH PLACES OPERATIONS      from the memory of the other process: process_vm_readv
 *     fabric_baseline copies LENGTH PLACES OPERATIONS     no other process: memcpy
 *
 * Each end has memory for PLACES messages, and cycles through it. The program prints the nanoseconds for an
 * operation. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "baseline.h"

static size_t length;
static int64_t place_count;

static void send_all(int fd, const char *bytes, int flags)
{
    size_t done = 0;

    while (done < length) {
        ssize_t sent = send(fd, bytes + done, length - done, flags | MSG_NOSIGNAL);

        check(sent > 0 || errno == EAGAIN, "send");
        done += sent > 0 ? (size_t)sent : 0;
    }
}

static void receive_all(int fd, char *bytes, int flags)
{
    size_t done = 0;

    while (done < length) {
        ssize_t received = recv(fd, bytes + done, length - done, flags);

        check(received > 0 || (received < 0 && errno == EAGAIN), "recv");
        done += received > 0 ? (size_t)received : 0;
    }
}

static void ask(int fd, char *memory, bool spins, int64_t operations)
{
    int64_t at;

    for (at = 0; at < operations; at++) {
        char *place = memory + (size_t)(at % place_count) * length;

        send_all(fd, place, spins ? MSG_DONTWAIT : 0);
        if (spins)
            receive_all(fd, place, MSG_DONTWAIT);
    }
    if (!spins)
        check(recv(fd, memory, 1, 0) == 1, "recv"); /* all data has arrived */
}

static void answer(int fd, char *memory, bool spins, int64_t operations)
{
    int64_t at;

    for (at = 0; at < operations; at++) {
        char *place = memory + (size_t)(at % place_count) * length;

        receive_all(fd, place, spins ? MSG_DONTWAIT : 0);
        if (spins)
            send_all(fd, place, MSG_DONTWAIT);
    }
    if (!spins)
        check(send(fd, memory, 1, MSG_NOSIGNAL) == 1, "send");
}

static int64_t copies(char *from, char *to, int64_t operations)
{
    int64_t began = now_ns(), at;

    for (at = 0; at < operations; at++) {
        size_t place = (size_t)(at % place_count) * length;

        memcpy(to + place, from + place, length);
        __asm__ volatile("" ::: "memory");
    }
    return now_ns() - began;
}

static int64_t moves(pid_t from_process, char *from, char *to, int64_t operations)
{
    int64_t began = now_ns(), at;

    for (at = 0; at < operations; at++) {
        size_t place = (size_t)(at % place_count) * length;
        struct iovec there = {from + place, length}, here = {to + place, length};

        check(process_vm_readv(from_process, &here, 1, &there, 1, 0) == (ssize_t)length, "process_vm_readv");
    }
    return now_ns() - began;
}

static char *places(void)
{
    void *memory = NULL;

    check(!posix_memalign(&memory, 4096, (size_t)place_count * length), "posix_memalign");
    memset(memory, 1, (size_t)place_count * length);
    return memory;
}

/* The other process only provides memory. */
static int64_t from_other(int64_t operations)
{
    char *from = places(), *to = places();
    int64_t took;
    int fds[2];
    pid_t other;

    check(!socketpair(AF_UNIX, SOCK_STREAM, 0, fds), "socketpair");
    check((other = fork()) >= 0, "fork");
    if (!other) {
        close(fds[0]);
        memset(from, 2, (size_t)place_count * length); /* a private copy from here on */
        check(send(fds[1], from, 1, MSG_NOSIGNAL) == 1, "send");
        _exit(recv(fds[1], from, 1, 0) != 0); /* until the parent is done */
    }
    close(fds[1]);
    check(recv(fds[0], to, 1, 0) == 1, "recv");
    moves(other, from, to, operations / 10 + 1);
    took = moves(other, from, to, operations);
    close(fds[0]);
    check(waitpid(other, NULL, 0) == other, "waitpid");
    return took;
}

static int64_t between(bool spins, int64_t operations)
{
    char *memory = places();
    int64_t began;
    int fds[2], status = 0;
    pid_t other;

    check(!socketpair(AF_UNIX, SOCK_STREAM, 0, fds), "socketpair");
    check((other = fork()) >= 0, "fork");
    if (!other) {
        close(fds[0]);
        answer(fds[1], memory, spins, operations / 10 + 1);
        answer(fds[1], memory, spins, operations);
        _exit(0);
    }
    close(fds[1]);
    ask(fds[0], memory, spins, operations / 10 + 1);
    began = now_ns();
    ask(fds[0], memory, spins, operations);
    began = now_ns() - began;
    check(waitpid(other, &status, 0) == other && !status, "waitpid");
    return began;
}

int main(int argc, char **argv)
{
    int64_t operations, took;

    if (argc != 5) {
        fprintf(stderr, "usage: %s spins|streams|moves|copies LENGTH PLACES OPERATIONS\n", argv[0]);
        return 2;
    }
    length = strtoul(argv[2], NULL, 10);
    place_count = strtoll(argv[3], NULL, 10);
    operations = strtoll(argv[4], NULL, 10);
    if (!strcmp(argv[1], "copies")) {
        char *from = places(), *to = places();

        copies(from, to, operations / 10 + 1);
        took = copies(from, to, operations);
    } else if (!strcmp(argv[1], "moves")) {
        took = from_other(operations);
    } else {
        took = between(!strcmp(argv[1], "spins"), operations);
    }
    printf("%f\n", (double)took / (double)operations);
    return 0;
}
