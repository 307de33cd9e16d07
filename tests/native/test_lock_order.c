/* Tests of the checks of lock order and lock ownership: a violation ends the process, and names both locks. */
#include "support.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/base/epoch.h"
#include "soft/base/lock_order.h"

#ifdef NDEBUG
#error "without assertions nothing is checked"
#endif

static struct soft_mutex domains, progress, links, other_links;
static struct soft_lock sq, rq;
static struct soft_half halves[2], queue_pair;

/* Prepare a ring of locks. */
static void prepare(void)
{
    size_t i;

    REQUIRE(grace_ready());
    CHECK_EQ(soft_mutex_init(&domains, SOFT_RANK_XRCD), 0);
    CHECK_EQ(soft_mutex_init(&progress, SOFT_RANK_PROGRESS), 0);
    CHECK_EQ(soft_mutex_init(&links, SOFT_RANK_LINKS), 0);
    CHECK_EQ(soft_mutex_init(&other_links, SOFT_RANK_LINKS), 0);
    soft_lock_init(&sq, SOFT_RANK_SQ);
    soft_lock_init(&rq, SOFT_RANK_RQ);
    for (i = 0; i < COUNT_OF(halves); i++)
        CHECK_EQ(soft_half_init(&halves[i], NULL, SOFT_RANK_CQ_HALF, "completion queue", 1, NULL), 0);
    CHECK_EQ(soft_half_init(&queue_pair, NULL, SOFT_RANK_HALF, "queue pair", 1, NULL), 0);
}

/* Call the function in a child, which must abort with this message; NULL: it must not abort. */
static void check_end(void (*function)(void), const char *text, struct check_place place)
{
    char printed[1024] = "";
    size_t size = 0;
    ssize_t got;
    int pipes[2], status = 0;
    pid_t child;

    REQUIRE_EQ(pipe(pipes), 0);
    fflush(stdout);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        const struct rlimit none = {0, 0};

        setrlimit(RLIMIT_CORE, &none);
        signal(SIGABRT, SIG_DFL);
        dup2(pipes[1], STDERR_FILENO);
        close(pipes[1]);
        function();
        _exit(0);
    }
    close(pipes[1]);
    while (size < sizeof(printed) - 1 && (got = read(pipes[0], printed + size, sizeof(printed) - 1 - size)) > 0)
        size += (size_t)got;
    close(pipes[0]);
    REQUIRE_EQ(waitpid(child, &status, 0), child);
    if (text)
        check_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && strstr(printed, text), place, text);
    else
        check_true(WIFEXITED(status) && !WEXITSTATUS(status), place, printed);
}
#define CHECK_ABORTS(function, text) check_end(function, text, HERE)
#define CHECK_ENDS(function) check_end(function, NULL, HERE)

static void in_order(void)
{
    unsigned int times;

    for (times = 0; times < 2; times++) {
        CHECK_EQ(soft_half_enter(&halves[1], "poll_cq"), 0); /* the application may open poll sessions in any order */
        CHECK_EQ(soft_half_enter(&halves[0], "poll_cq"), 0);
        CHECK_EQ(soft_half_enter(&queue_pair, "post_send"), 0);
        soft_mutex_take(&progress);
        grace_leave(grace_enter());
        grace_wait();
        soft_lock_take(&sq);
        soft_lock_take(&rq);
        soft_mutex_take(&links);
        assert_held(&links);
        assert_held(&sq);
        soft_lock_give(&sq); /* in any order */
        CHECK(soft_mutex_try(&other_links));
        soft_mutex_give(&links);
        soft_mutex_give(&other_links);
        soft_lock_give(&rq);
        soft_mutex_give(&progress);
        soft_half_leave(&queue_pair);
        soft_half_leave(&halves[1]);
        soft_half_leave(&halves[0]);
    }
    _exit(check_failures() != 0);
}

static void against_order(void)
{
    soft_lock_take(&rq);
    soft_lock_take(&sq);
}

static void two_of_a_rank(void)
{
    soft_mutex_take(&links);
    soft_mutex_take(&other_links);
}

static void half_under_half(void)
{
    soft_half_enter(&queue_pair, "post_send");
    soft_half_enter(&halves[0], "poll_cq");
}

static void domains_under_progress(void)
{
    soft_mutex_take(&progress);
    soft_mutex_take(&domains);
}

static void twice(void)
{
    soft_lock_take(&sq);
    soft_lock_take(&sq);
}

static void waiting_in_a_section(void)
{
    grace_enter();
    soft_mutex_take(&progress);
}

static void sections_under_a_lock(void)
{
    soft_lock_take(&sq);
    grace_wait();
}

static void not_held(void)
{
    soft_lock_take(&sq);
    assert_held(&rq);
}

static void giving_what_one_has_not(void)
{
    soft_mutex_give(&links);
}

static void order(void)
{
    prepare();
    CHECK_ENDS(in_order);
    CHECK_ABORTS(against_order, "waiting for qp->sq_lock while holding qp->rq_lock");
    CHECK_ABORTS(two_of_a_rank, "waiting for fabric->links while holding fabric->links");
    CHECK_ABORTS(half_under_half,
                 "waiting for the driver half of a completion queue while holding the driver half of a queue");
    CHECK_ABORTS(domains_under_progress, "waiting for device->xrcd_lock while holding fabric->progress");
    CHECK_ABORTS(twice, "waiting for qp->sq_lock while holding qp->sq_lock");
    CHECK_ABORTS(waiting_in_a_section, "waiting for fabric->progress while holding a grace section");
    CHECK_ABORTS(sections_under_a_lock, "waiting for a grace section while holding qp->sq_lock");
    CHECK_ABORTS(not_held, "not_held() needs qp->rq_lock");
    CHECK_ABORTS(giving_what_one_has_not, "fabric->links is released by a thread that does not hold it");
}

CHECK_MAIN_ONCE(CASE(order))
