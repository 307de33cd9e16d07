/* Runs the rows, and prints their results:
 *
 *     probe DEVICE [VERB]
 *
 * DEVICE is soft0, soft0:engine or a device of libibverbs. A line has the verb, the case and the result, separated
 * by tabs. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "probe.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/api/device.h"

enum { LIMIT_MS = 20000 };

struct ibv_context *context;
const struct verbs_table *verbs;
struct verbs_context *extended;

static struct row *first, **last = &first;
static const char *device_name;
static struct ibv_device *device; /* device of libibverbs */
static struct ibv_context *(*open_device)(struct ibv_device *);
static struct verbs_table libibverbs;
static int answers = STDOUT_FILENO;
static char answer[512];

void row_add(struct row *row)
{
    *last = row;
    last = &row->next;
}

bool on_soft_device(void)
{
    return !strncmp(device_name, "soft0", 5);
}

void *find_libibverbs_function(const char *name)
{
    return on_soft_device() ? NULL : dlsym(RTLD_DEFAULT, name);
}

struct ibv_context *open_again(void)
{
    const struct soft_options options = {.mode = strchr(device_name, ':') ? SOFT_THREAD : SOFT_INLINE};

    return on_soft_device() ? soft_open(&options) : open_device(device);
}

static const char *find_device(void)
{
    struct ibv_device **(*list)(int *);
    struct ibv_device **devices;

    if (on_soft_device()) {
        verbs = &soft_verbs;
        return NULL;
    }
    if (!dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL))
        return dlerror();
    *(void **)&list = dlsym(RTLD_DEFAULT, "ibv_get_device_list");
    *(void **)&open_device = dlsym(RTLD_DEFAULT, "ibv_open_device");
    if (!list || !open_device)
        return "libibverbs lacks ibv_get_device_list";
    verbs = &libibverbs;
    devices = list(NULL);
    for (int i = 0; devices && devices[i]; i++) {
        if (!strcmp(devices[i]->name, device_name))
            device = devices[i];
    }
    return device ? verbs_table_load(&libibverbs, "libibverbs.so.1") : "there is no such device";
}

void report(const char *format, ...)
{
    size_t length = strlen(answer);
    va_list arguments;

    va_start(arguments, format);
    if (length)
        length += (size_t)snprintf(answer + length, sizeof(answer) - length, ", ");
    if (length < sizeof(answer))
        vsnprintf(answer + length, sizeof(answer) - length, format, arguments);
    va_end(arguments);
}

_Noreturn void finish(void)
{
    ssize_t written = write(answers, answer, strlen(answer));

    _exit(written < 0);
}

/* Runs in the row's own process. */
static _Noreturn void run(const struct row *row)
{
    context = open_again();
    if (!context) {
        report("the device cannot be opened: errno %d", errno);
        finish();
    }
    extended = verbs_context_of(context);
    row->run();
    finish();
}

static void print_answer(const struct row *row)
{
    struct pollfd ready = {.events = POLLIN};
    int ends[2], status = 0;
    ssize_t length = 0;
    pid_t child;

    if (pipe(ends)) {
        perror("pipe");
        exit(2);
    }
    fflush(stdout);
    child = fork();
    if (!child) {
        close(ends[0]);
        answers = ends[1];
        run(row);
    }
    close(ends[1]);
    ready.fd = ends[0];
    if (poll(&ready, 1, LIMIT_MS) > 0) {
        length = read(ends[0], answer, sizeof(answer) - 1);
        waitpid(child, &status, 0);
    } else {
        kill(child, SIGKILL); /* without waiting for its end: it may be blocked in the kernel for long */
        snprintf(answer, sizeof(answer), "hangs");
    }
    close(ends[0]);
    if (length > 0)
        answer[length] = 0;
    else if (WIFSIGNALED(status))
        snprintf(answer, sizeof(answer), "dies of signal %d", WTERMSIG(status));
    printf("%s\t%s\t%s\n", row->verb, row->asked, answer);
    answer[0] = 0;
}

int main(int argc, char **argv)
{
    const char *problem;

    if (argc < 2) {
        fprintf(stderr, "probe DEVICE [VERB]\n");
        return 2;
    }
    device_name = argv[1];
    problem = find_device();
    if (problem) {
        fprintf(stderr, "probe: %s: %s\n", device_name, problem);
        return 2;
    }
    for (const struct row *row = first; row; row = row->next) {
        if (argc < 3 || !strcmp(argv[2], row->verb))
            print_answer(row);
    }
    return 0;
}
