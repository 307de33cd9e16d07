/* Named cases and checks. Each case runs once in every variant: with requests executed inline, and by the worker thread
 * with and without a delay; each with locked queues and with queues on a thread domain. */
#ifndef AIOVERBS_TESTS_SUPPORT_CHECK_H
#define AIOVERBS_TESTS_SUPPORT_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "soft/api/device.h"
#include "soft/fault/fault.h"
#include "soft/objects/pd_share.h"

struct check_variant {
    const char *name;
    struct soft_options options;
    bool thread_domain;
};

/* Variant of the running case. */
extern const struct check_variant *variant;

struct check_case {
    const char *name;
    void (*run)(void);
};

#define CASE(function) {#function, function}

/* Run the cases that the command line selects (`--case NAME`, `--variant NAME`, `-v`). Return the exit status. */
int check_main(int argc, char **argv, const struct check_case *cases, size_t count, bool once);

#define CHECK_MAIN_OF(once, ...)                                                      \
    int main(int argc, char **argv)                                                   \
    {                                                                                 \
        static const struct check_case cases[] = {__VA_ARGS__};                       \
                                                                                      \
        return check_main(argc, argv, cases, sizeof(cases) / sizeof(cases[0]), once); \
    }
#define CHECK_MAIN(...) CHECK_MAIN_OF(false, __VA_ARGS__)

/* The same for cases that open no context: each runs in one variant. */
#define CHECK_MAIN_ONCE(...) CHECK_MAIN_OF(true, __VA_ARGS__)

/* Source line of a check, for helpers that check on behalf of their caller. */
struct check_place {
    const char *file;
    int line;
};

#define HERE ((struct check_place){__FILE__, __LINE__})

bool check_true(bool holds, struct check_place place, const char *what);
bool check_equal(long long actual, long long expected, struct check_place place, const char *actual_text,
                 const char *expected_text);
bool check_refused(const void *made, int error, int expected, struct check_place place, const char *what);

/* End the case: its thread, if that is not the main one; the process, if it is a child or has no cases. */
_Noreturn void check_stop(void);

/* Return the number of failed checks of this process; a child of fork() counts on from its parent's. */
unsigned int check_failures(void);

/* A failed CHECK is reported and the case goes on; a failed REQUIRE ends the case. */
#define CHECK(condition) check_true(condition, HERE, #condition)
#define CHECK_EQ(actual, expected) check_equal((long long)(actual), (long long)(expected), HERE, #actual, #expected)
#define REQUIRE(condition)     \
    do {                       \
        if (!CHECK(condition)) \
            check_stop();      \
    } while (0)
#define REQUIRE_EQ(actual, expected)     \
    do {                                 \
        if (!CHECK_EQ(actual, expected)) \
            check_stop();                \
    } while (0)

/* Check that a verb that creates an object returns NULL with this errno. */
#define CHECK_REFUSED(pointer, expected)                       \
    do {                                                       \
        const void *made_;                                     \
                                                               \
        errno = 0;                                             \
        made_ = (pointer);                                     \
        check_refused(made_, errno, expected, HERE, #pointer); \
    } while (0)

#ifdef __SANITIZE_THREAD__
#define UNDER_TSAN 1
#else
#define UNDER_TSAN 0
#endif

#endif
