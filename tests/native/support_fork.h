/* Helpers for checks in a child process. */
#ifndef AIOVERBS_TESTS_SUPPORT_FORK_H
#define AIOVERBS_TESTS_SUPPORT_FORK_H

/* Run `function` in a child, and check that no check failed there. ThreadSanitizer cannot start threads in the child of
 * a process with threads: with it, `variant` is an inline one there. */
void in_child(void (*function)(void *), void *argument);

/* Announce that a thread has started, before another thread forks: the thread gets a name of its own, and memory is
 * allocated between these two steps. */
void allocating_begin(void);
void allocating_end(void);

#endif
