/* Tests of XRC domains between processes: an inode has one domain, until the last process has closed it or exited. */
#include "support.h"
#include "support_fabric.h"
#include "support_fork.h"

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    LIMIT_S = 60, /* limit for a child that is not ended */
    ANOTHER = 65534,
};

/* Memory that a case and its children share. */
struct shared {
    atomic_uint step;
    atomic_int grandchild;
    atomic_uint tries[2], over[2]; /* of the two that contend */
    atomic_int owner;
};

static struct shared *shared;
static struct check_variant like;
static int file;

/* Make a directory with this mode. */
static void begin(mode_t mode)
{
    new_directory();
    REQUIRE_EQ(chmod(directory(), mode), 0);
    like = *variant;
    like.options.settings = &settings;
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    file = memfd_create("xrcd", MFD_CLOEXEC);
    REQUIRE(file >= 0);
}

static void finish(void)
{
    char path[80];

    snprintf(path, sizeof(path), "%s/locks", directory());
    unlink(path);
    CHECK_EQ(rmdir(directory()), 0); /* nothing else is there */
    munmap(shared, sizeof(*shared));
    close(file);
}

/* Start a child, before the case has threads. The child ends itself, or is killed. */
static pid_t start(void (*function)(void))
{
    unsigned int before = check_failures();
    pid_t child;

    fflush(stdout);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        alarm(LIMIT_S);
        function();
        fflush(stdout);
        _exit(check_failures() != before);
    }
    return child;
}

static void reach(unsigned int step)
{
    atomic_store(&shared->step, step);
}

static void await(unsigned int step)
{
    EVENTUALLY(atomic_load(&shared->step) >= step);
}

static struct ibv_xrcd *try_open(struct ibv_context *context, int oflags)
{
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        .fd = file,
        .oflags = oflags,
    };

    return verbs_open_xrcd(context, &attr);
}

static void expect_one(struct ibv_context *context, struct check_place place)
{
    struct ibv_xrcd *found;

    errno = 0;
    check_true(!try_open(context, O_CREAT | O_EXCL) && errno == EINVAL, place, "O_EXCL is refused: there is a domain");
    found = try_open(context, 0);
    if (check_true(found != NULL, place, "the domain is found"))
        CHECK_EQ(verbs_close_xrcd(found), 0);
}

static void expect_none(struct ibv_context *context, struct check_place place)
{
    struct ibv_xrcd *made;

    errno = 0;
    check_true(!try_open(context, 0) && errno == EAGAIN, place, "no domain is found");
    made = try_open(context, O_CREAT | O_EXCL);
    if (check_true(made != NULL, place, "O_EXCL makes one"))
        CHECK_EQ(verbs_close_xrcd(made), 0);
}

/* ---- Life ---------------------------------------------------------------------------------------------------- */

static void find_and_keep(void)
{
    struct ibv_xrcd *found;
    struct home home;

    await(1);
    home_open_like(&home, &like);
    expect_one(home.context, HERE);
    found = try_open(home.context, 0);
    REQUIRE(found != NULL);
    reach(2);
    await(3);
    CHECK_EQ(verbs_close_xrcd(found), 0);
    reach(4);
    home_close(&home);
}

static void the_last_close_ends_the_domain(void)
{
    struct ibv_xrcd *made;
    struct home home;
    int status = -1;
    pid_t child;

    begin(0700);
    child = start(find_and_keep);
    home_open_like(&home, &like);
    made = try_open(home.context, O_CREAT | O_EXCL);
    REQUIRE(made != NULL);
    reach(1);
    await(2);
    CHECK_EQ(verbs_close_xrcd(made), 0);
    expect_one(home.context, HERE); /* the child's */
    reach(3);
    await(4);
    expect_none(home.context, HERE);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
    home_close(&home);
    finish();
}

/* Open a domain, and fork a child that inherits it. */
static void open_and_fork(void)
{
    struct home home;
    pid_t child;

    home_open_like(&home, &like);
    REQUIRE(try_open(home.context, O_CREAT) != NULL);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        alarm(LIMIT_S);
        reach(1);
    } else {
        atomic_store(&shared->grandchild, child);
    }
    for (;;)
        pause();
}

static void a_killed_process_releases_the_domain(void)
{
    struct home home;
    pid_t child;

    begin(0700);
    child = start(open_and_fork);
    home_open_like(&home, &like);
    EVENTUALLY(shared->step == 1 && shared->grandchild);
    expect_one(home.context, HERE);
    CHECK_EQ(kill(child, SIGKILL), 0);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    expect_none(home.context, HERE); /* whatever a child has that it left */
    CHECK_EQ(kill(shared->grandchild, SIGKILL), 0);
    home_close(&home);
    finish();
}

/* ---- Both at once -------------------------------------------------------------------------------------------- */

/* The process that creates the domain keeps it until the other one has tried to. */
static void make_again_and_again(unsigned int self)
{
    unsigned int other = 1 - self, i, seen;
    struct ibv_xrcd *made;
    struct home home;

    home_open_like(&home, &like);
    for (i = 0; i < 30; i++) {
        atomic_fetch_add(&shared->tries[self], 1);
        made = try_open(home.context, O_CREAT | O_EXCL);
        if (!made) {
            CHECK_EQ(errno, EINVAL);
            continue;
        }
        CHECK_EQ(atomic_exchange(&shared->owner, 1), 0);
        seen = atomic_load(&shared->tries[other]);
        EVENTUALLY(atomic_load(&shared->tries[other]) != seen || atomic_load(&shared->over[other]));
        atomic_store(&shared->owner, 0);
        CHECK_EQ(verbs_close_xrcd(made), 0);
    }
    atomic_store(&shared->over[self], 1);
    home_close(&home);
}

static void make_in_child(void)
{
    make_again_and_again(1);
}

static void one_of_two_processes_creates_the_domain(void)
{
    int status = -1;
    pid_t child;

    begin(0700);
    child = start(make_in_child);
    make_again_and_again(0);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
    finish();
}

/* ---- Where the locks are --------------------------------------------------------------------------------------- */

static void find_in_child(void *unused)
{
    struct home home;

    (void)unused;
    home_open_like(&home, &like);
    expect_one(home.context, HERE);
    home_close(&home);
}

static void find_none_in_child(void *unused)
{
    struct home home;

    (void)unused;
    home_open_like(&home, &like);
    expect_none(home.context, HERE);
    home_close(&home);
}

static void open_here(void (*in_the_child)(void *))
{
    struct ibv_xrcd *made;
    struct home home;

    home_open_like(&home, &like);
    made = try_open(home.context, O_CREAT | O_EXCL);
    REQUIRE(made != NULL);
    expect_one(home.context, HERE);
    in_child(in_the_child, NULL);
    CHECK_EQ(verbs_close_xrcd(made), 0);
    home_close(&home);
}

/* Other users may read the directory, and lock it; the lock file is for its owner alone. */
static void other_users_cannot_lock(void)
{
    mode_t mask = umask(0777);
    struct stat found;
    int looking;
    char path[80];

    begin(0755);
    looking = open(directory(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    REQUIRE(looking >= 0);
    CHECK_EQ(flock(looking, LOCK_EX | LOCK_NB), 0);
    open_here(find_in_child);
    umask(mask);
    snprintf(path, sizeof(path), "%s/locks", directory());
    REQUIRE_EQ(stat(path, &found), 0);
    CHECK(S_ISREG(found.st_mode) && !found.st_size);
    CHECK_EQ(found.st_mode & 07777, 0600);
    close(looking);
    finish();
}

/* Open the domain as another user, if this one may change users. */
static void find_as_another(void *unused)
{
    if (!geteuid()) {
        settings.users[0] = 0;
        REQUIRE_EQ(setresgid(ANOTHER, ANOTHER, ANOTHER), 0);
        REQUIRE_EQ(setresuid(ANOTHER, ANOTHER, ANOTHER), 0);
        prctl(PR_SET_DUMPABLE, 1); /* otherwise /proc/self belongs to another user */
    }
    find_in_child(unused);
}

/* If several users can write to the directory, no lock file is used. */
static void several_users(void)
{
    char path[80];

    begin(01777);
    settings.users[settings.user_count++] = ANOTHER;
    snprintf(path, sizeof(path), "%s/locks", directory());
    REQUIRE_EQ(symlink("elsewhere", path), 0);
    open_here(find_as_another);
    CHECK_EQ(unlink(path), 0);
    finish();
}

/* A process has a device for each address. */
static void another_device(void)
{
    struct ibv_xrcd *made, *found;
    struct home homes[2];

    begin(0700);
    home_open_like(&homes[0], &like);
    like.options.address = (struct soft_address){AF_INET, free_port(), {127, 0, 0, 1}};
    home_open_like(&homes[1], &like);
    made = try_open(homes[0].context, O_CREAT | O_EXCL);
    REQUIRE(made != NULL);
    expect_one(homes[1].context, HERE);
    found = try_open(homes[1].context, 0);
    REQUIRE(found != NULL);
    CHECK_EQ(verbs_close_xrcd(made), 0);
    expect_one(homes[0].context, HERE);
    CHECK_EQ(verbs_close_xrcd(found), 0);
    expect_none(homes[0].context, HERE);
    home_close(&homes[1]);
    home_close(&homes[0]);
    finish();
}

/* Without a directory a process knows only its own domains. */
static void without_a_directory(void)
{
    char path[80];

    begin(0700);
    snprintf(path, sizeof(path), "%s/not/there", directory());
    set_directory(path);
    open_here(find_none_in_child);
    set_directory(directory());
    CHECK_EQ(chmod(directory(), 0777), 0); /* which is not to be trusted */
    open_here(find_none_in_child);
    finish();
}

CHECK_MAIN_ONCE(CASE(the_last_close_ends_the_domain), CASE(a_killed_process_releases_the_domain),
                CASE(one_of_two_processes_creates_the_domain), CASE(other_users_cannot_lock), CASE(several_users),
                CASE(another_device), CASE(without_a_directory))
