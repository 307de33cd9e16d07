/* Run a command, and count the system calls of its threads while these run in turns.
 *
 *     system_calls 3 python -m tests.costs.scenes asyncio 3
 *
 * 3 is a descriptor of a file of sizeof(struct counts) bytes, which the command maps, too.
 *
 * A thread of the command sends itself SIGUSR1, which is not delivered: from then on the threads run one at a time. The
 * running thread goes on until it sleeps; a thread that is woken meanwhile waits for its turn. This order makes the
 * counts reproducible. A thread that is marked as held gets no turn. A call is counted before the kernel executes it,
 * so a thread that reads the counts finds all of its own calls. SIGUSR2 ends the turns. Before and after, the command
 * runs freely.
 *
 * Exit with 126 if this process may not trace another one. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 64, CALLS = 512, UNABLE = 126 };

struct counts {
    struct {
        uint64_t thread; /* thread ID; 0: unused, or the thread has ended */
        uint64_t held;   /* written by the command */
        uint64_t calls[CALLS];
    } threads[THREADS];
};

static struct {
    bool sleeps; /* in a system call that waits */
    bool rests;  /* likewise, except poll(), in which threads of the device stay only for a moment */
    bool ready;  /* woken, and stopped until its turn */
} states[THREADS];
static struct counts *counts;
static int starter = -1; /* thread that sent SIGUSR1; stopped until all others rest */
static int runner = -1;  /* thread that has the turn */
static bool in_turns;

static pid_t thread_of(int at)
{
    return (pid_t)counts->threads[at].thread;
}

static _Noreturn void unable(const char *what)
{
    perror(what);
    exit(UNABLE); /* kills the command: PTRACE_O_EXITKILL */
}

static int place_of(pid_t thread)
{
    int at;

    for (at = 0; at < THREADS; at++)
        if (thread_of(at) == thread)
            return at;
    for (at = 0; at < THREADS; at++)
        if (!thread_of(at)) {
            memset(&counts->threads[at], 0, sizeof(counts->threads[at]));
            memset(&states[at], 0, sizeof(states[at]));
            counts->threads[at].thread = (uint64_t)thread;
            return at;
        }
    fputs("system_calls: too many threads\n", stderr);
    exit(UNABLE);
}

static void resume(int at, int signal_number)
{
    states[at].ready = false;
    ptrace(in_turns ? PTRACE_SYSCALL : PTRACE_CONT, thread_of(at), 0, signal_number);
}

/* Give the turn to a thread that was woken, unless a thread has it. */
static void next_turn(void)
{
    int at;

    for (at = 0; runner < 0 && at < THREADS; at++)
        if (states[at].ready && !counts->threads[at].held)
            resume(runner = at, 0);
}

static void begin(int at)
{
    int other;

    in_turns = true;
    starter = runner = at;
    for (other = 0; other < THREADS; other++)
        if (other != at && thread_of(other))
            ptrace(PTRACE_INTERRUPT, thread_of(other), 0, 0); /* resumes, and stops at system calls */
}

static void go_on_when_others_rest(void)
{
    int at;

    for (at = 0; at < THREADS; at++)
        if (at != starter && thread_of(at) && !states[at].rests)
            return;
    at = starter;
    starter = -1;
    resume(at, 0);
}

static void end(int at)
{
    in_turns = false;
    runner = -1;
    memset(&states[at], 0, sizeof(states[at]));
    resume(at, 0);
    for (at = 0; at < THREADS; at++) {
        states[at].sleeps = states[at].rests = false;
        if (states[at].ready)
            resume(at, 0);
    }
}

static bool is_poll(uint64_t number)
{
#ifdef SYS_poll
    if (number == SYS_poll)
        return true;
#endif
    return number == SYS_ppoll;
}

static bool waits(uint64_t number, const uint64_t *arguments)
{
    switch (number) {
#ifdef SYS_epoll_wait
    case SYS_epoll_wait:
#endif
    case SYS_epoll_pwait:
        return arguments[3];
#ifdef SYS_poll
    case SYS_poll:
        return arguments[2];
#endif
    case SYS_ppoll:
#ifdef SYS_epoll_pwait2
    case SYS_epoll_pwait2:
#endif
        return true;
    case SYS_futex:
        arguments++;
        return (*arguments & FUTEX_CMD_MASK) == FUTEX_WAIT || (*arguments & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
    default:
        return false;
    }
}

static void called(int at)
{
    struct __ptrace_syscall_info info;
    bool woken = states[at].sleeps;

    if (ptrace(PTRACE_GET_SYSCALL_INFO, thread_of(at), sizeof(info), &info) < 0) {
        if (errno == ESRCH) /* the thread was killed */
            return;
        unable("system_calls: PTRACE_GET_SYSCALL_INFO");
    }
    states[at].sleeps = states[at].rests = false;
    if (!in_turns) {
        resume(at, 0);
    } else if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
        if (info.entry.nr < CALLS)
            counts->threads[at].calls[info.entry.nr]++;
        states[at].sleeps = waits(info.entry.nr, info.entry.args);
        states[at].rests = states[at].sleeps && !is_poll(info.entry.nr);
        resume(at, 0);
        if (states[at].sleeps && at == runner) {
            runner = -1;
            next_turn();
        }
    } else if (woken && starter < 0) {
        states[at].ready = true;
        next_turn();
    } else {
        resume(at, 0);
    }
}

static void ended(int at)
{
    counts->threads[at].thread = 0;
    memset(&states[at], 0, sizeof(states[at]));
    if (at == runner) {
        runner = -1;
        next_turn();
    }
}

static void stopped(int at, int status)
{
    int signal_number = WSTOPSIG(status), event = status >> 16;

    if (signal_number == (SIGTRAP | 0x80))
        called(at);
    else if (!event && signal_number == SIGUSR1)
        begin(at);
    else if (!event && signal_number == SIGUSR2)
        end(at);
    else if (event == PTRACE_EVENT_STOP && signal_number != SIGTRAP)
        ptrace(PTRACE_LISTEN, thread_of(at), 0, 0); /* until SIGCONT */
    else
        resume(at, event ? 0 : signal_number);
}

static _Noreturn void run(char **command)
{
    raise(SIGSTOP);
    execvp(command[0], command);
    perror(command[0]);
    _exit(127);
}

int main(int count, char **arguments)
{
    const long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
    pid_t child;
    int status;

    if (count < 3)
        return 2;
    counts = mmap(NULL, sizeof(*counts), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(arguments[1]), 0);
    if (counts == MAP_FAILED)
        unable("system_calls: mmap");
    child = fork();
    if (!child)
        run(arguments + 2);
    waitpid(child, &status, WUNTRACED);
    if (ptrace(PTRACE_SEIZE, child, 0, options) < 0) {
        kill(child, SIGKILL);
        unable("system_calls: PTRACE_SEIZE");
    }
    kill(child, SIGCONT);
    for (;;) {
        pid_t thread = waitpid(-1, &status, __WALL);

        if (thread < 0)
            unable("system_calls: waitpid");
        if (WIFSTOPPED(status))
            stopped(place_of(thread), status);
        else if (thread == child)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        else
            ended(place_of(thread));
        if (starter >= 0)
            go_on_when_others_rest();
    }
}
