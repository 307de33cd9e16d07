#define _GNU_SOURCE
#include "support_kernel.h"
#include "support.h"
#include "support_fabric.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

/* Since Linux 5.14; headers may be older. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum answer { NOT_ASKED, THERE, LACKS };

static bool answer_with(enum answer *answer, bool there, const char *what)
{
    *answer = there ? THERE : LACKS;
    if (!there)
        printf("skipped what needs %s\n", what);
    return there;
}

static void *new_page(void)
{
    void *page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    REQUIRE(page != MAP_FAILED);
    return page;
}

bool kernel_keeps_pages_from_children(void)
{
    static enum answer known;
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    int status = -1;
    void *page;
    pid_t child;

    if (known)
        return known == THERE;
    page = new_page();
    REQUIRE_EQ(madvise(page, size, MADV_DONTFORK), 0);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        unsigned char there;

        _exit(mincore(page, size, &there) == 0);
    }
    REQUIRE_EQ(waitpid(child, &status, 0), child);
    munmap(page, size);
    return answer_with(&known, status == 0, "madvise(MADV_DONTFORK)");
}

bool kernel_tells_what_is_mapped(void)
{
    static enum answer known;
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page;

    if (known)
        return known == THERE;
    page = new_page();
    munmap(page, size);
    return answer_with(&known, syscall(SYS_madvise, page, size, MADV_POPULATE_READ) != 0,
                       "madvise(MADV_POPULATE_READ)");
}

bool kernel_reads_other_processes(void)
{
    static enum answer known;
    char from = 1, to = 0;
    struct iovec here = {&to, 1}, there = {&from, 1};

    if (known)
        return known == THERE;
    errno = 0;
    process_vm_readv(getpid(), &here, 1, &there, 1, 0);
    return answer_with(&known, errno != ENOSYS, "process_vm_readv");
}

/* Two come, and there is room for one. */
bool kernel_closes_what_finds_no_room(void)
{
    static enum answer known;
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(2 * sizeof(int))];
    } control;
    char byte = 0;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    unsigned int before;
    int ends[2], fd;

    if (known)
        return known == THERE;
    REQUIRE_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    memset(&control, 0, sizeof(control));
    control.header =
        (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(ends))};
    memcpy(CMSG_DATA(&control.header), ends, sizeof(ends));
    REQUIRE_EQ(sendmsg(ends[0], &message, 0), 1);
    before = open_descriptors();
    message.msg_controllen = CMSG_LEN(sizeof(fd));
    REQUIRE_EQ(recvmsg(ends[1], &message, MSG_CMSG_CLOEXEC), 1);
    REQUIRE(open_descriptors() > before);
    memcpy(&fd, CMSG_DATA(&control.header), sizeof(fd));
    close(fd);
    answer_with(&known, open_descriptors() == before, "descriptors closed that recvmsg has no room for");
    close(ends[0]);
    close(ends[1]);
    return known == THERE;
}

bool kernel_takes_pages_back(void)
{
    static enum answer known;
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    char *page;

    if (known)
        return known == THERE;
    page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(page != MAP_FAILED);
    page[0] = 1;
    answer_with(&known, madvise(page, size, MADV_REMOVE) || !page[0], "madvise(MADV_REMOVE)");
    munmap(page, size);
    return known == THERE;
}

bool kernel_knows_sizes_of_pages(void)
{
    static enum answer known;
    void *there;

    if (known)
        return known == THERE;
    errno = 0;
    there = mmap(NULL, 1 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | 20 << MAP_HUGE_SHIFT, -1, 0);
    answer_with(&known, there == MAP_FAILED && errno == EINVAL, "huge pages of the size that was asked for");
    if (there != MAP_FAILED)
        munmap(there, 1 << 20);
    return known == THERE;
}
