/* Checks in a child process. */
#ifndef AIOVERBS_TESTS_SUPPORT_FORK_H
#define AIOVERBS_TESTS_SUPPORT_FORK_H

/* Runs `function` in a child and checks that no check failed there. ThreadSanitizer cannot start threads in the
 * child of a process that has some: with it, `variant` is an inline one there. */
void in_child(void (*function)(void *), void *argument);

/* For a thread that is there while another one forks: a name of its own says that it has begun, and memory is
 * allocated between these two. */
void allocating_begin(void);
void allocating_end(void);

#endif
