#include "support.h"
#include "support_fork.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* A sanitizer would look for what the parent has not freed yet; a coverage build is to write its counts. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LEAVE _exit
#else
#define LEAVE exit
#endif

/* glibc's allocator works in a child whatever other threads did at the moment of the fork; gcc 12's address sanitizer
 * has one that stays locked for good when a thread was inside. Threads allocate when they begin, and there is no
 * other sign that one is past that than a name of its own. While threads allocate later on, they hold this lock. */
#ifdef __SANITIZE_ADDRESS__
static pthread_mutex_t allocating = PTHREAD_MUTEX_INITIALIZER;

static bool name_of(const char *task, char *name, size_t size)
{
    char path[300];
    ssize_t got = -1;
    int fd;

    snprintf(path, sizeof(path), "/proc/self/task/%s/comm", task);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        got = read(fd, name, size - 1);
        close(fd);
    }
    name[got < 0 ? 0 : got] = 0;
    return got > 0;
}

static bool all_have_names(void)
{
    char own[32], name[32], self[16];
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *task;
    bool named = true;

    REQUIRE(tasks != NULL);
    snprintf(self, sizeof(self), "%d", (int)getpid());
    REQUIRE(name_of(self, own, sizeof(own)));
    while (named && (task = readdir(tasks)))
        if (task->d_name[0] != '.' && strcmp(task->d_name, self) && name_of(task->d_name, name, sizeof(name)))
            named = strcmp(name, own) != 0;
    closedir(tasks);
    return named;
}

void allocating_begin(void)
{
    pthread_mutex_lock(&allocating);
}

void allocating_end(void)
{
    pthread_mutex_unlock(&allocating);
}

static pid_t fork_beside_threads(void)
{
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    pid_t child;

    while (!all_have_names()) {
        REQUIRE(now_ns() < end);
        sleep_us(100);
    }
    allocating_begin();
    child = fork();
    allocating_end();
    return child;
}
#else
#define fork_beside_threads fork

void allocating_begin(void)
{
}

void allocating_end(void)
{
}
#endif

static const struct check_variant threadless = {"inline", {.mode = SOFT_INLINE}, false};

void in_child(void (*function)(void *), void *argument)
{
    unsigned int before = check_failures();
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    int status = -1;
    pid_t child;

    fflush(stdout);
    child = fork_beside_threads();
    REQUIRE(child >= 0);
    if (!child) {
        alarm(WAIT_S);
        if (UNDER_TSAN)
            variant = &threadless;
        function(argument);
        fflush(stdout);
        LEAVE(check_failures() != before);
    }
    while (!waitpid(child, &status, WNOHANG)) {
        if (now_ns() > end) {
            CHECK(!"the child hangs");
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            break;
        }
        sleep_us(500);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
