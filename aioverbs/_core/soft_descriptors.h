/* File descriptors that a child of a fork must not keep: as long as it has a socket open, no peer learns that the
 * parent is gone. */
#ifndef AIOVERBS_SOFT_DESCRIPTORS_H
#define AIOVERBS_SOFT_DESCRIPTORS_H

/* Once, before the first of them: 0 or an errno. */
int soft_descriptors_watch_forks(void);

/* Around making a descriptor and soft_descriptor_own, so that no fork comes in between. Nothing in there waits. */
void soft_descriptors_hold(void);
void soft_descriptors_release(void);

/* Between these two: the descriptor, or -1 and errno, as it was given; -1 and EMFILE where its number is too large,
 * and then it is closed. */
int soft_descriptor_own(int fd);
void soft_descriptor_close(int fd); /* anywhere; nothing where it is negative */

#endif
