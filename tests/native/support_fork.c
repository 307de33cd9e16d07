#include "support.h"
#include "support_fork.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* A sanitizer would look for what the parent has not freed yet; a coverage build is to write its counts. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LEAVE _exit
#else
#define LEAVE exit
#endif

static const struct check_variant threadless = {"inline", {SOFT_INLINE, 0}, false};

void in_child(void (*function)(void *), void *argument)
{
    unsigned int before = check_failures();
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    int status = -1;
    pid_t child;

    fflush(stdout);
    child = fork();
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
