/* Tests of XRC domains: one for each inode, however it is opened, until its last handle is closed. */
#include "support.h"
#include "support_fork.h"
#include "support_srq.h"
#include "support_threads.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "soft/objects/xrcd.h"

/* Open a domain; return NULL and errno as the verb does. */
static struct ibv_xrcd *try_open(struct ibv_context *context, int fd, int oflags)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        .fd = fd,
        .oflags = oflags,
    };

    return verbs_open_xrcd(context, &attr);
}

static struct ibv_xrcd *must_open(struct ibv_context *context, int fd, int oflags)
{
    struct ibv_xrcd *xrcd = try_open(context, fd, oflags);

    REQUIRE(xrcd != NULL);
    return xrcd;
}

/* Create a file in memory. */
static int make_file(void)
{
    int fd = memfd_create("xrcd", MFD_CLOEXEC);

    REQUIRE(fd >= 0);
    return fd;
}

static bool same_domain(struct ibv_xrcd *a, struct ibv_xrcd *b)
{
    return to_soft_xrcd(a)->shared == to_soft_xrcd(b)->shared;
}

static uint32_t count_domains(struct ibv_context *context)
{
    struct soft_counts counts;

    soft_get_counts(context, &counts);
    return counts.xrcds;
}

/* ---- Opening ------------------------------------------------------------------------------------------------ */

static void wrong_attributes(void)
{
    struct ibv_xrcd_init_attr attr = {.oflags = O_CREAT};
    int file = make_file(), path, closed;
    struct home home;

    home_open(&home);
    attr.fd = file;
    CHECK_REFUSED(verbs_open_xrcd(home.context, &attr), EINVAL);
    attr.comp_mask = IBV_XRCD_INIT_ATTR_FD;
    CHECK_REFUSED(verbs_open_xrcd(home.context, &attr), EINVAL);
    attr.comp_mask = IBV_XRCD_INIT_ATTR_OFLAGS;
    CHECK_REFUSED(verbs_open_xrcd(home.context, &attr), EINVAL);
    attr.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS | IBV_XRCD_INIT_ATTR_RESERVED;
    CHECK_REFUSED(verbs_open_xrcd(home.context, &attr), EOPNOTSUPP);

    CHECK_REFUSED(try_open(home.context, file, O_CREAT | O_TRUNC), EINVAL);
    CHECK_REFUSED(try_open(home.context, file, O_CREAT | O_RDWR), EINVAL);
    CHECK_REFUSED(try_open(home.context, -1, 0), EINVAL);
    CHECK_REFUSED(try_open(home.context, -1, O_EXCL), EINVAL);
    CHECK_REFUSED(try_open(home.context, -2, O_CREAT), EBADF);
    closed = dup(file);
    close(closed);
    CHECK_REFUSED(try_open(home.context, closed, O_CREAT), EBADF);
    path = open("/", O_PATH | O_CLOEXEC);
    REQUIRE(path >= 0);
    CHECK_REFUSED(try_open(home.context, path, O_CREAT), EBADF);
    close(path);
    close(file);
    CHECK_EQ(count_domains(home.context), 0);
    home_close(&home);
}

static void flags(void)
{
    struct ibv_xrcd *first, *second;
    int file = make_file();
    struct home home;

    home_open(&home);
    CHECK_REFUSED(try_open(home.context, file, 0), EAGAIN);
    CHECK_REFUSED(try_open(home.context, file, O_EXCL), EAGAIN);
    first = must_open(home.context, file, O_CREAT | O_EXCL);
    CHECK(first->context == home.context);
    CHECK_REFUSED(try_open(home.context, file, O_CREAT | O_EXCL), EINVAL);
    CHECK_REFUSED(try_open(home.context, file, O_EXCL), EINVAL);
    second = must_open(home.context, file, 0);
    CHECK(second != first && same_domain(first, second));
    CHECK_EQ(verbs_close_xrcd(first), 0);
    first = must_open(home.context, file, O_CREAT);
    CHECK(same_domain(first, second));
    CHECK_EQ(count_domains(home.context), 2);
    CHECK_EQ(soft_verbs.close_device(home.context), EBUSY);
    CHECK_EQ(verbs_close_xrcd(second), 0);
    CHECK_REFUSED(try_open(home.context, file, O_CREAT | O_EXCL), EINVAL); /* not the last yet */
    CHECK_EQ(verbs_close_xrcd(first), 0);
    CHECK_REFUSED(try_open(home.context, file, 0), EAGAIN);
    close(file);
    home_close(&home);
}

/* Domains without an inode are each their own. */
static void without_an_inode(void)
{
    struct ibv_xrcd *first, *second;
    struct home home;

    home_open(&home);
    first = must_open(home.context, -1, O_CREAT);
    second = must_open(home.context, -1, O_CREAT | O_EXCL);
    CHECK(!same_domain(first, second));
    CHECK_EQ(verbs_close_xrcd(first), 0);
    CHECK_EQ(verbs_close_xrcd(second), 0);
    home_close(&home);
}

/* The inode identifies a domain, not the descriptor, the name or the context. */
static void one_domain_per_inode(void)
{
    char name[] = "/tmp/xrcdXXXXXX", link_name[40];
    int fds[4], i, stranger = make_file();
    struct ibv_xrcd *xrcds[4], *other;
    struct home homes[2];

    home_open(&homes[0]);
    home_open(&homes[1]);
    fds[0] = mkostemp(name, O_CLOEXEC);
    REQUIRE(fds[0] >= 0);
    snprintf(link_name, sizeof(link_name), "%s-too", name);
    REQUIRE_EQ(link(name, link_name), 0);
    fds[1] = dup(fds[0]);
    fds[2] = open(name, O_RDONLY | O_CLOEXEC);
    fds[3] = open(link_name, O_WRONLY | O_CLOEXEC);
    unlink(name);
    unlink(link_name);
    for (i = 0; i < 4; i++) {
        REQUIRE(fds[i] >= 0);
        xrcds[i] = must_open(homes[i % 2].context, fds[i], i ? 0 : O_CREAT);
        CHECK(same_domain(xrcds[0], xrcds[i]));
        close(fds[i]); /* the domain is the inode's, not the descriptor's */
    }
    CHECK_REFUSED(try_open(homes[0].context, stranger, 0), EAGAIN);
    other = must_open(homes[1].context, stranger, O_CREAT);
    CHECK(!same_domain(other, xrcds[0]));
    CHECK_EQ(verbs_close_xrcd(other), 0);
    for (i = 0; i < 4; i++)
        CHECK_EQ(verbs_close_xrcd(xrcds[i]), 0);
    close(stranger);
    home_close(&homes[0]);
    home_close(&homes[1]);
}

/* ---- What a domain holds ------------------------------------------------------------------------------------ */

/* The domain keeps its inode, so that no other file can get the same number. */
static void inode_stays(void)
{
    char name[] = "/tmp/xrcdXXXXXX";
    struct ibv_xrcd *xrcd;
    struct stat first, next;
    struct home home;
    int fd, i;

    home_open(&home);
    fd = mkostemp(name, O_CLOEXEC);
    REQUIRE(fd >= 0 && fstat(fd, &first) == 0);
    xrcd = must_open(home.context, fd, O_CREAT);
    close(fd);
    unlink(name);
    for (i = 0; i < 50; i++) {
        strcpy(name, "/tmp/xrcdXXXXXX");
        fd = mkostemp(name, O_CLOEXEC);
        REQUIRE(fd >= 0 && fstat(fd, &next) == 0);
        CHECK(next.st_ino != first.st_ino);
        CHECK_REFUSED(try_open(home.context, fd, 0), EAGAIN);
        close(fd);
        unlink(name);
    }
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    home_close(&home);
}

static void check_record_lock(void *argument)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int fd = *(int *)argument;

    CHECK_EQ(fcntl(fd, F_GETLK, &lock), 0);
    CHECK_EQ(lock.l_type, F_WRLCK); /* the parent's */
}

/* The domain does not keep the file open: pipes end and locks are released when their owner closes them. */
static void keeps_no_file_open(void)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int file = make_file(), again, pipes[2];
    struct ibv_xrcd *xrcd, *second;
    struct home home;
    char path[40], c;

    home_open(&home);
    REQUIRE_EQ(pipe(pipes), 0);
    xrcd = must_open(home.context, pipes[1], O_CREAT);
    close(pipes[1]);
    CHECK(wait_readable(pipes[0]));
    CHECK_EQ(read(pipes[0], &c, 1), 0); /* no process writes any more */
    close(pipes[0]);
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);

    snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
    again = open(path, O_RDWR | O_CLOEXEC);
    REQUIRE(again >= 0);
    CHECK_EQ(flock(file, LOCK_EX), 0);
    xrcd = must_open(home.context, file, O_CREAT);
    CHECK_EQ(flock(again, LOCK_EX | LOCK_NB), -1);
    close(file);
    CHECK_EQ(flock(again, LOCK_EX | LOCK_NB), 0);

    REQUIRE_EQ(fcntl(again, F_SETLK, &lock), 0);
    second = must_open(home.context, again, 0);
    in_child(check_record_lock, &again);
    CHECK_EQ(verbs_close_xrcd(second), 0);
    CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    in_child(check_record_lock, &again);
    close(again);
    home_close(&home);
}

/* Without a free descriptor opening fails, and nothing is left. */
static void no_descriptors_left(void)
{
    struct rlimit usual, none;
    int file = make_file();
    struct home home;

    home_open(&home);
    REQUIRE_EQ(getrlimit(RLIMIT_NOFILE, &usual), 0);
    none = usual;
    none.rlim_cur = 0;
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    CHECK_REFUSED(try_open(home.context, file, O_CREAT), EMFILE);
    REQUIRE_EQ(setrlimit(RLIMIT_NOFILE, &usual), 0);
    CHECK_REFUSED(try_open(home.context, file, 0), EAGAIN);
    CHECK_EQ(count_domains(home.context), 0);
    close(file);
    home_close(&home);
}

/* ---- What holds a domain ------------------------------------------------------------------------------------- */

/* A handle is busy with objects created by it, and by no other handle. */
static void busy_handles(void)
{
    struct ibv_qp_init_attr_ex qp_attr = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD};
    struct ibv_xrcd *first, *second;
    int file = make_file();
    struct ibv_srq *srq;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct home home;

    home_open(&home);
    first = must_open(home.context, file, O_CREAT);
    second = must_open(home.context, file, 0);
    cq = home_cq(&home, 4, NULL);
    srq = try_xrc_srq(&home, first, cq, 4);
    qp_attr.xrcd = first;
    qp = verbs_create_qp_ex(home.context, &qp_attr);
    REQUIRE(srq && qp);
    CHECK_EQ(verbs_close_xrcd(first), EBUSY);
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(verbs_close_xrcd(first), EBUSY);
    CHECK_EQ(verbs_close_xrcd(second), 0);
    CHECK_REFUSED(try_open(home.context, file, O_CREAT | O_EXCL), EINVAL); /* it is still there */
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(verbs_close_xrcd(first), 0);
    CHECK_REFUSED(try_open(home.context, file, 0), EAGAIN);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    close(file);
    home_close(&home);
}

/* ---- Messages ------------------------------------------------------------------------------------------------ */

/* Line: an initiator in one context, a target in another, whose queue pair and receives are created by different
 * handles. */
struct line {
    struct home homes[2];
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_qp *initiator, *target;
    uint8_t memory[64];
    struct ibv_mr *mr;
};

static void line_open(struct line *line, struct ibv_xrcd *(*open_domain)(struct ibv_context *, void *), void *argument,
                      struct ibv_xrcd **of_target)
{
    struct ibv_qp_init_attr_ex attr = {
        .qp_type = IBV_QPT_XRC_SEND,
        .comp_mask = IBV_QP_INIT_ATTR_PD,
        .cap = {.max_send_wr = 8, .max_send_sge = 1},
    };

    memset(line, 0, sizeof(*line));
    home_open(&line->homes[0]);
    home_open(&line->homes[1]);
    line->send_cq = home_cq(&line->homes[0], 16, NULL);
    line->recv_cq = home_cq(&line->homes[1], 16, NULL);
    attr.pd = line->homes[0].pd;
    attr.send_cq = line->send_cq;
    line->initiator = verbs_create_qp_ex(line->homes[0].context, &attr);
    *of_target = open_domain(line->homes[1].context, argument);
    attr = (struct ibv_qp_init_attr_ex){
        .qp_type = IBV_QPT_XRC_RECV,
        .comp_mask = IBV_QP_INIT_ATTR_XRCD,
        .xrcd = *of_target,
    };
    line->target = verbs_create_qp_ex(line->homes[1].context, &attr);
    REQUIRE(line->initiator && line->target);
    line->mr = soft_verbs.reg_mr(line->homes[1].base, line->memory, sizeof(line->memory), ACCESS_ALL);
    REQUIRE(line->mr != NULL);
}

/* An XRC initiator has no attributes of a responder, and a target none of a requester. */
static void line_connect(struct line *line)
{
    struct ibv_qp_attr attr = default_link;

    REQUIRE_EQ(qp_to_init(line->initiator, &default_link), 0);
    REQUIRE_EQ(qp_to_init(line->target, &default_link), 0);
    attr.qp_state = IBV_QPS_RTR;
    attr.ah_attr = path_to_self(line->initiator->context);
    attr.dest_qp_num = line->target->qp_num;
    REQUIRE_EQ(
        soft_verbs.modify_qp(line->initiator, &attr, MASK_RTR & ~(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)),
        0);
    REQUIRE_EQ(qp_to_rtr(line->target, &default_link, line->initiator->qp_num), 0);
    REQUIRE_EQ(qp_to_rts(line->initiator, &default_link), 0);
}

static void line_close(struct line *line, struct ibv_xrcd *of_target)
{
    CHECK_EQ(soft_verbs.destroy_qp(line->initiator), 0);
    CHECK_EQ(soft_verbs.destroy_qp(line->target), 0);
    CHECK_EQ(verbs_close_xrcd(of_target), 0);
    CHECK_EQ(soft_verbs.dereg_mr(line->mr), 0);
    CHECK_EQ(soft_verbs.destroy_cq(line->send_cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(line->recv_cq), 0);
    home_close(&line->homes[0]);
    home_close(&line->homes[1]);
}

static int send_to(struct line *line, uint64_t wr_id, struct ibv_srq *srq)
{
    static char text[] = "to a shared queue";
    struct ibv_sge sge = {(uintptr_t)text, sizeof(text), 0};
    struct ibv_send_wr wr = request(IBV_WR_SEND, wr_id, &sge, 1);

    wr.send_flags |= IBV_SEND_INLINE;
    CHECK_EQ(verbs_get_srq_num(srq, &wr.qp_type.xrc.remote_srqn), 0);
    return post(line->initiator, &wr);
}

static int receive_on(struct line *line, struct ibv_srq *srq, uint64_t wr_id)
{
    struct ibv_sge sge = {(uintptr_t)line->memory, sizeof(line->memory), line->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

    return verbs_post_srq_recv(srq, &wr, &bad);
}

static struct ibv_xrcd *open_file(struct ibv_context *context, void *file)
{
    return must_open(context, *(int *)file, O_CREAT);
}

static struct ibv_xrcd *open_own(struct ibv_context *context, void *unused)
{
    (void)unused;
    return must_open(context, -1, O_CREAT);
}

/* A message reaches any receive queue of the target's domain, by whichever handle it was created; it completes on that
 * queue's completion queue. */
static void message_reaches_its_domain(void)
{
    struct ibv_xrcd *of_target, *of_srqs;
    struct ibv_srq *srqs[2];
    int file = make_file();
    struct line line;
    struct ibv_wc wc;
    uint64_t i;

    line_open(&line, open_file, &file, &of_target);
    of_srqs = must_open(line.homes[1].context, file, 0);
    srqs[0] = try_xrc_srq(&line.homes[1], of_srqs, line.recv_cq, 4);
    srqs[1] = try_xrc_srq(&line.homes[1], of_target, line.recv_cq, 4);
    REQUIRE(srqs[0] && srqs[1]);
    line_connect(&line);
    for (i = 0; i < 12; i++) { /* more than the depth: polling gives back */
        CHECK_EQ(receive_on(&line, srqs[i % 2], 100 + i), 0);
        memset(line.memory, 0, sizeof(line.memory));
        CHECK_EQ(send_to(&line, i, srqs[i % 2]), 0);
        wc = EXPECT(line.recv_cq, 100 + i, IBV_WC_SUCCESS);
        CHECK_EQ(wc.qp_num, line.target->qp_num);
        CHECK(!strcmp((char *)line.memory, "to a shared queue"));
        EXPECT(line.send_cq, i, IBV_WC_SUCCESS);
    }
    CHECK_EQ(atomic_load(&to_soft_srq(srqs[0])->outstanding), 0);
    CHECK_EQ(soft_verbs.destroy_srq(srqs[0]), 0);
    CHECK_EQ(soft_verbs.destroy_srq(srqs[1]), 0);
    CHECK_EQ(verbs_close_xrcd(of_srqs), 0);
    line_close(&line, of_target);
    close(file);
}

/* Queues of another domain are not found. */
static void domains_are_apart(void)
{
    struct ibv_xrcd *of_target, *stranger;
    struct soft_receive receive;
    struct ibv_srq *srq;
    struct line line;

    line_open(&line, open_own, NULL, &of_target);
    stranger = must_open(line.homes[1].context, -1, O_CREAT);
    srq = try_xrc_srq(&line.homes[1], stranger, line.recv_cq, 4);
    REQUIRE(srq != NULL);
    line_connect(&line);
    CHECK_EQ(receive_on(&line, srq, 1), 0);
    CHECK_EQ(send_to(&line, 2, srq), 0);
    EXPECT(line.send_cq, 2, IBV_WC_REM_INV_REQ_ERR);
    EXPECT_NOTHING(line.recv_cq);
    CHECK(srq_take(srq, &receive, true)); /* it is where it was */
    CHECK_EQ(soft_verbs.destroy_srq(srq), 0);
    CHECK_EQ(verbs_close_xrcd(stranger), 0);
    line_close(&line, of_target);
}

/* Unpolled completions are removed with their queue, without waiting. */
static void unpolled_completions_go(void)
{
    struct ibv_srq *srqs[2];
    struct ibv_xrcd *of_target;
    struct line line;
    uint64_t i;

    line_open(&line, open_own, NULL, &of_target);
    for (i = 0; i < 2; i++) {
        srqs[i] = try_xrc_srq(&line.homes[1], of_target, line.recv_cq, 4);
        REQUIRE(srqs[i] != NULL);
    }
    line_connect(&line);
    for (i = 0; i < 4; i++) {
        CHECK_EQ(receive_on(&line, srqs[i % 2], 10 + i), 0);
        CHECK_EQ(send_to(&line, i, srqs[i % 2]), 0);
    }
    for (i = 0; i < 4; i++)
        EXPECT(line.send_cq, i, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.destroy_srq(srqs[0]), 0);
    EXPECT(line.recv_cq, 11, IBV_WC_SUCCESS);
    EXPECT(line.recv_cq, 13, IBV_WC_SUCCESS);
    EXPECT_NOTHING(line.recv_cq);
    CHECK_EQ(soft_verbs.destroy_srq(srqs[1]), 0);
    line_close(&line, of_target);
}

/* ---- Threads and forks --------------------------------------------------------------------------------------- */

struct opener {
    struct home home;
    int file;
    unsigned int seed;
    _Atomic(struct soft_xrc_inode *) *mine, *other; /* the domain that one surely has a handle of */
};

static void open_and_close(void *argument)
{
    static const int choices[] = {0, O_CREAT, O_CREAT | O_EXCL};
    struct opener *opener = argument;
    unsigned int i;

    for (i = 0; i < SCALED(3000u); i++) {
        int oflags = choices[next_random(&opener->seed, 3)];
        struct ibv_xrcd *xrcd = try_open(opener->home.context, opener->file, oflags);
        struct soft_xrc_inode *other;

        if (!xrcd) {
            CHECK(oflags != O_CREAT);
            CHECK_EQ(errno, oflags ? EINVAL : EAGAIN);
            continue;
        }
        atomic_store(opener->mine, to_soft_xrcd(xrcd)->shared);
        other = atomic_load(opener->other);
        CHECK(!other || other == to_soft_xrcd(xrcd)->shared);
        if (next_random(&opener->seed, 4) == 0)
            sched_yield();
        atomic_store(opener->mine, NULL);
        CHECK_EQ(verbs_close_xrcd(xrcd), 0);
    }
}

/* Two that hold a handle at the same time have the same domain. */
static void two_threads_one_inode(void)
{
    _Atomic(struct soft_xrc_inode *) held[2] = {NULL, NULL};
    struct opener openers[2];
    int file = make_file(), i;

    for (i = 0; i < 2; i++) {
        home_open(&openers[i].home);
        openers[i].file = file;
        openers[i].seed = 5 + (unsigned int)i;
        openers[i].mine = &held[i];
        openers[i].other = &held[1 - i];
    }
    run_threads(2, open_and_close, openers, sizeof(openers[0]));
    CHECK_REFUSED(try_open(openers[0].home.context, file, 0), EAGAIN);
    for (i = 0; i < 2; i++)
        home_close(&openers[i].home);
    close(file);
}

struct inherited {
    struct ibv_xrcd *xrcd;
    int file;
};

/* A child opens a device of its own, and gets the same domain for the inode as its parent. */
static void open_in_child(void *argument)
{
    struct inherited *inherited = argument;
    struct ibv_xrcd *own;
    struct home home;

    CHECK_EQ(verbs_close_xrcd(inherited->xrcd), ENODEV);
    CHECK_REFUSED(try_open(inherited->xrcd->context, inherited->file, O_CREAT), ENODEV);
    home_open(&home);
    CHECK_REFUSED(try_open(home.context, inherited->file, O_CREAT | O_EXCL), EINVAL);
    own = must_open(home.context, inherited->file, 0);
    CHECK_EQ(verbs_close_xrcd(own), 0);
    home_close(&home);
}

static void stale_after_fork(void)
{
    struct inherited inherited = {.file = make_file()};
    struct home home;

    home_open(&home);
    inherited.xrcd = must_open(home.context, inherited.file, O_CREAT);
    in_child(open_in_child, &inherited);
    CHECK_REFUSED(try_open(home.context, inherited.file, O_CREAT | O_EXCL), EINVAL);
    CHECK_EQ(verbs_close_xrcd(inherited.xrcd), 0);
    close(inherited.file);
    home_close(&home);
}

CHECK_MAIN(CASE(wrong_attributes), CASE(flags), CASE(without_an_inode), CASE(one_domain_per_inode), CASE(inode_stays),
           CASE(keeps_no_file_open), CASE(no_descriptors_left), CASE(busy_handles), CASE(message_reaches_its_domain),
           CASE(domains_are_apart), CASE(unpolled_completions_go), CASE(two_threads_one_inode), CASE(stale_after_fork))
