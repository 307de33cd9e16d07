#include "support.h"

#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#define CASE_LIMIT_S (UNDER_TSAN ? 200u : 100u)
#define DELAY_NS 200000u

static const struct check_variant variants[] = {
    {"inline", {.mode = SOFT_INLINE}, false},
    {"inline-td", {.mode = SOFT_INLINE}, true},
    {"thread", {.mode = SOFT_THREAD}, false},
    {"thread-td", {.mode = SOFT_THREAD}, true},
    {"delayed", {.mode = SOFT_THREAD, .delay_ns = DELAY_NS}, false},
    {"delayed-td", {.mode = SOFT_THREAD, .delay_ns = DELAY_NS}, true},
};

const struct check_variant *variant = &variants[0];

static const char *case_name = "";
static atomic_uint failures;
static bool has_cases; /* a benchmark has no cases */
static pthread_t main_thread;
static pid_t main_process; /* a child of the case runs no further cases */
static jmp_buf case_end;

static bool fail(struct check_place place, const char *text)
{
    atomic_fetch_add(&failures, 1);
    printf("%s:%d: %s [%s]: %s\n", place.file, place.line, case_name, variant->name, text);
    fflush(stdout);
    return false;
}

bool check_true(bool holds, struct check_place place, const char *what)
{
    return holds || fail(place, what);
}

bool check_equal(long long actual, long long expected, struct check_place place, const char *actual_text,
                 const char *expected_text)
{
    char text[512];

    if (actual == expected)
        return true;
    snprintf(text, sizeof(text), "%s is %lld, not %s (%lld)", actual_text, actual, expected_text, expected);
    return fail(place, text);
}

bool check_refused(const void *made, int error, int expected, struct check_place place, const char *what)
{
    char text[512];

    if (!made && error == expected)
        return true;
    snprintf(text, sizeof(text), "%s made %s with errno %d, not %d", what, made ? "an object" : "nothing", error,
             expected);
    return fail(place, text);
}

void check_stop(void)
{
    if (!has_cases)
        exit(1);
    if (!pthread_equal(pthread_self(), main_thread))
        pthread_exit(NULL);
    if (getpid() != main_process)
        _exit(1);
    longjmp(case_end, 1);
}

unsigned int check_failures(void)
{
    return atomic_load(&failures);
}

/* Limit the time of a case: a hanging case fails under its own name, instead of at the time limit of the whole
 * program. */
static void on_alarm(int number)
{
    static const char text[] = ": hangs\n";

    (void)number;
    if (write(STDOUT_FILENO, case_name, strlen(case_name)) < 0 || write(STDOUT_FILENO, " ", 1) < 0 ||
        write(STDOUT_FILENO, variant->name, strlen(variant->name)) < 0 ||
        write(STDOUT_FILENO, text, sizeof(text) - 1) < 0)
        _exit(3);
    _exit(2);
}

static bool run_case(const struct check_case *one)
{
    unsigned int before = check_failures();

    case_name = one->name;
    alarm(CASE_LIMIT_S);
    if (!setjmp(case_end))
        one->run();
    alarm(0);
    return check_failures() == before;
}

int check_main(int argc, char **argv, const struct check_case *cases, size_t count, bool once)
{
    const char *only_case = NULL, *only_variant = NULL;
    unsigned int passed = 0, failed = 0;
    bool verbose = false;
    size_t i, v;
    int arg;

    for (arg = 1; arg < argc; arg++) {
        if (!strcmp(argv[arg], "-v"))
            verbose = true;
        else if (!strcmp(argv[arg], "--case") && arg + 1 < argc)
            only_case = argv[++arg];
        else if (!strcmp(argv[arg], "--variant") && arg + 1 < argc)
            only_variant = argv[++arg];
        else
            return fprintf(stderr, "usage: %s [-v] [--case NAME] [--variant NAME]\n", argv[0]), 2;
    }
    has_cases = true;
    main_thread = pthread_self();
    main_process = getpid();
    signal(SIGALRM, on_alarm);
    for (i = 0; i < count; i++) {
        for (v = 0; v < (once ? 1 : COUNT_OF(variants)); v++) {
            bool good;

            if ((only_case && strcmp(only_case, cases[i].name)) ||
                (only_variant && strcmp(only_variant, variants[v].name)))
                continue;
            variant = &variants[v];
            good = run_case(&cases[i]);
            if (good)
                passed++;
            else
                failed++;
            if (verbose || !good)
                printf("%s %s [%s]\n", good ? "ok    " : "FAILED", cases[i].name, variant->name);
        }
    }
    printf("%u passed, %u failed\n", passed, failed);
    return failed || !passed;
}
