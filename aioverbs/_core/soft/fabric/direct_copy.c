/* Direct copies: data goes from the memory of one process to that of another in one copy. The owner of the memory
 * region makes the copy, after its own checks, by process_vm_readv and process_vm_writev. */
#define _GNU_SOURCE
#include "soft/fabric/direct_copy.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "soft/base/fork_fds.h"
#include "soft/base/lock_order.h"
#include "soft/fabric/copy_token.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/fabric/stream.h"

/* ---- Processes ----------------------------------------------------------------------------------------------- */

int soft_process_open(uint32_t pid)
{
    int fd = -1;

    if (!pid) /* the process is of another namespace */
        return -1;
    soft_descriptors_hold();
#ifdef SYS_pidfd_open
    fd = soft_descriptor_own((int)syscall(SYS_pidfd_open, (pid_t)pid, 0));
#endif
    soft_descriptors_release();
    return fd;
}

bool soft_process_has_exited(int pidfd)
{
    struct pollfd ended = {.fd = pidfd, .events = POLLIN};

    return pidfd >= 0 && poll(&ended, 1, 0) > 0;
}

/* ---- Finding out what works ---------------------------------------------------------------------------------- */

/* Allow any process to trace this one: Yama allows only ancestors by default. */
void soft_direct_allow_ptrace(void)
{
    char scope = '0';
    int fd = open("/proc/sys/kernel/yama/ptrace_scope", O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return;
    if (read(fd, &scope, 1) == 1 && scope == '1')
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    close(fd);
}

static void set_not_direct(struct soft_stream *stream, const char *what, int error)
{
    atomic_store(&stream->direct, false);
    snprintf(stream->why_not_direct, sizeof(stream->why_not_direct), "%s%s%s", what, error ? ": " : "",
             error ? strerror(error) : "");
}

/* Write HELLO's nonce to the gate. Return 0 or an errno. The gate is a mapping of its own, so that its access rights
 * can always be removed. */
static int put_nonce(struct soft_link *link, const uint8_t nonce[SOFT_NONCE])
{
    struct soft_gate *gate;
    int error = 0;

    soft_mutex_take(&link->stream.tx);
    gate = link->gate;
    if (link->overdue)
        error = EPERM;
    else if (!gate)
        gate = mmap(NULL, sizeof(*gate), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!error && gate == MAP_FAILED)
        error = errno;
    if (!error) {
        memcpy(gate->probe, nonce, SOFT_NONCE);
        link->gate = gate;
    }
    soft_mutex_give(&link->stream.tx);
    return error;
}

bool soft_direct_has_probed(struct soft_link *link, const uint8_t nonce[SOFT_NONCE])
{
    bool found;

    soft_mutex_take(&link->stream.tx);
    found = link->gate && !link->overdue && !memcmp(link->gate->probe, nonce, SOFT_NONCE);
    soft_mutex_give(&link->stream.tx);
    return found;
}

void soft_direct_close_gate(struct soft_link *link)
{
    if (link->gate)
        mprotect(link->gate, sizeof(*link->gate), PROT_NONE);
}

/* Unmap the gate, unless it was closed and the peer's process still exists: then the peer may still come to that
 * address, so nothing else may be mapped there. */
void soft_direct_destroy(struct soft_link *link)
{
    if (link->gate && (!link->overdue || soft_process_has_exited(link->stream.pidfd)))
        munmap(link->gate, sizeof(*link->gate));
    link->gate = NULL;
}

void soft_direct_offer(struct soft_link *link, struct soft_hello *hello)
{
    struct soft_stream *stream = &link->stream;
    int error;

    if (!stream->is_unix) {
        set_not_direct(stream, "the connection is over TCP", 0);
        return;
    }
    if (!stream->fabric->settings.direct) {
        set_not_direct(stream, "AIOVERBS_SOFT_DIRECT is 0", 0);
        return;
    }
    if (stream->uid != geteuid()) {
        set_not_direct(stream, "the peer runs as another user", 0);
        return;
    }
    if (soft_copy_tokens_are_overdue(link)) {
        set_not_direct(stream, "the peer did not end a copy within 2 s", 0);
        return;
    }
    error = soft_copy_tokens_create(link);
    if (!error)
        error = put_nonce(link, hello->nonce);
    if (error) {
        set_not_direct(stream, "no memory for copy tokens", error);
        return;
    }
    soft_direct_allow_ptrace();
    hello->flags |= SOFT_HELLO_DIRECT;
    hello->pid = (uint32_t)getpid();
    hello->probe = (uintptr_t)link->gate->probe;
}

/* Read HELLO's nonce from the peer's memory, and write `nonce` there. Return NULL, or what failed. The process number
 * comes from the kernel, not from the peer. */
static const char *probe(struct soft_stream *stream, const struct soft_hello *hello, const uint8_t *nonce)
{
    uint8_t found[SOFT_NONCE];
    struct iovec here = {found, sizeof(found)}, there = {(void *)(uintptr_t)hello->probe, sizeof(found)};
    pid_t pid = (pid_t)stream->pid;

    errno = 0;
    if (process_vm_readv(pid, &here, 1, &there, 1, 0) != (ssize_t)sizeof(found))
        return "process_vm_readv";
    errno = 0;
    if (memcmp(found, hello->nonce, sizeof(found)))
        return "the peer's probe does not contain its nonce";
    here.iov_base = (void *)(uintptr_t)nonce;
    if (process_vm_writev(pid, &here, 1, &there, 1, 0) != (ssize_t)sizeof(found))
        return "process_vm_writev";
    return NULL;
}

void soft_direct_probe(struct soft_stream *stream, const struct soft_hello *hello, const uint8_t nonce[SOFT_NONCE])
{
    const char *why;

    if (!(hello->flags & SOFT_HELLO_DIRECT)) {
        set_not_direct(stream, "the peer does not offer direct copies", 0);
        return;
    }
    if (!stream->is_unix || !stream->fabric->settings.direct) {
        set_not_direct(stream, stream->is_unix ? "AIOVERBS_SOFT_DIRECT is 0" : "the connection is over TCP", 0);
        return;
    }
    /* A process with more rights than the peer could copy on behalf of a peer that may not. */
    if (stream->uid != geteuid()) {
        set_not_direct(stream, "the peer runs as another user", 0);
        return;
    }
    stream->pidfd = soft_process_open(stream->pid);
    if (stream->pidfd < 0) {
        set_not_direct(stream, "the peer's process is not visible from this one", stream->pid ? errno : 0);
        return;
    }
    why = soft_copy_tokens_map(stream);
    errno = 0;
    if (!why)
        why = probe(stream, hello, nonce);
    if (why) {
        set_not_direct(stream, why, errno);
        soft_descriptor_close(stream->pidfd);
        stream->pidfd = -1;
        return;
    }
    stream->gate = hello->probe + offsetof(struct soft_gate, byte);
    atomic_store(&stream->direct, true);
    stream->why_not_direct[0] = 0;
}

bool soft_link_direct(const struct soft_link *link)
{
    return atomic_load_explicit(&link->stream.direct, memory_order_relaxed);
}

/* ---- Copying ------------------------------------------------------------------------------------------------- */

/* Skip the bytes that were copied. */
static void advance(struct iovec **at, unsigned int *count, size_t moved)
{
    while (*count && moved >= (*at)->iov_len) {
        moved -= (*at)->iov_len;
        ++*at;
        --*count;
    }
    if (*count) {
        (*at)->iov_base = (char *)(*at)->iov_base + moved;
        (*at)->iov_len -= moved;
    }
}

/* Copy `left` bytes. The system call may stop at a missing page, and then go on or fail. The requester's gate comes
 * first, at here[-1] and there[-1], each time: the kernel accesses memory in this order, and stops where it may not. So
 * if the gate is closed when a system call begins, that call copies nothing, however long ago the caller decided to
 * make it. */
static int copy_through_gate(struct soft_stream *stream, struct iovec *here, unsigned int here_count,
                             struct iovec *there, unsigned int there_count, size_t left, bool is_read)
{
    pid_t pid = (pid_t)stream->pid;
    uint8_t byte = 0;

    while (left) {
        ssize_t moved;

        here[-1] = (struct iovec){&byte, sizeof(byte)};
        there[-1] = (struct iovec){(void *)(uintptr_t)stream->gate, sizeof(byte)};
        moved = is_read ? process_vm_readv(pid, here - 1, here_count + 1, there - 1, there_count + 1, 0)
                        : process_vm_writev(pid, here - 1, here_count + 1, there - 1, there_count + 1, 0);
        if (moved <= (ssize_t)sizeof(byte))
            return moved < 0 && errno ? errno : EFAULT;
        moved -= (ssize_t)sizeof(byte);
        left -= (size_t)moved;
        advance(&here, &here_count, (size_t)moved);
        advance(&there, &there_count, (size_t)moved);
    }
    return 0;
}

int soft_direct_move(struct soft_stream *stream, const struct soft_frame *frame, const uint8_t *payload,
                     const struct iovec *local, unsigned int count, bool is_read)
{
    uint8_t list[SOFT_FRAME_SEGMENTS * SOFT_SEGMENT_SIZE]; /* a copy: what is checked does not change any more */
    struct soft_frame_segment segments[SOFT_FRAME_SEGMENTS];
    struct iovec here_and_gate[1 + SOFT_FRAME_SEGMENTS + 1], there_and_gate[1 + SOFT_FRAME_SEGMENTS];
    struct iovec *here = here_and_gate + 1, *there = there_and_gate + 1;
    const char *wrong = "a frame asks for a direct copy, which was not negotiated";
    size_t left = frame->part;
    unsigned int i;
    int error;

    if (atomic_load(&stream->direct)) {
        memcpy(list, payload, frame->size);
        wrong = soft_segments_parse(frame, list, segments);
    }
    if (wrong) {
        soft_stream_refuse(stream, wrong);
        return EPROTO;
    }
    for (i = 0; i < frame->segments; i++)
        there[i] = (struct iovec){(void *)(uintptr_t)segments[i].address, segments[i].length};
    for (i = 0; i < count && i < SOFT_FRAME_SEGMENTS + 1 && left; i++) {
        here[i] = (struct iovec){local[i].iov_base, local[i].iov_len < left ? local[i].iov_len : left};
        left -= here[i].iov_len;
    }
    if (left)
        return EMSGSIZE;
    /* The number of a process that exited may be reused. */
    if (soft_process_has_exited(stream->pidfd) ||
        !soft_copy_token_enter(stream->copy_tokens, frame->copy_token, frame->serial))
        return ESTALE;
    error = copy_through_gate(stream, here, i, there, frame->segments, frame->part, is_read);
    soft_copy_token_leave(stream->copy_tokens, frame->copy_token, frame->serial);
    return error;
}
