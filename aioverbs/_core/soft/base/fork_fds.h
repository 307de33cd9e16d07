/* File descriptors that a child of a fork must not keep: as long as it has a socket open, no peer learns that the
 * parent is gone. */
#ifndef AIOVERBS_SOFT_BASE_FORK_FDS_H
#define AIOVERBS_SOFT_BASE_FORK_FDS_H

#include <stdbool.h>
#include <sys/types.h>

/* Once, before the first of them: 0 or an errno. */
int soft_descriptors_watch_forks(void);

/* Around making a descriptor and soft_descriptor_own, so that no fork comes in between. Nothing in there waits. */
void soft_descriptors_hold(void);
void soft_descriptors_release(void);

/* Between these two: the descriptor, or -1 and errno, as it was given; -1 and EMFILE where its number is too large,
 * and then it is closed. */
int soft_descriptor_own(int fd);
void soft_descriptor_close(int fd); /* anywhere; nothing where it is negative */

/* ---- What strangers send -------------------------------------------------------------------------------------- */

/* The last close of a file takes as long as who made it likes: a TCP socket lingers for the time that was set for it, a
 * file of FUSE waits for its server. So a stranger's descriptor is closed by a thread that has nothing else to do, and
 * never in the thread that reads, by the kernel neither: that one looks at a message before it takes it, and leaves one
 * with descriptors where it is, unless it has them itself by then. */

/* Before the first look at a Unix socket: what comes out of band waits in line, where the kernel would else drop it. */
void soft_descriptors_prepare_socket(int fd);

/* As recv(fd, to, size, MSG_DONTWAIT) of a Unix socket. One descriptor may come, where `*kept` is -1 and it is a memory
 * file, whose close takes as long as giving its pages back: it goes to `*kept`. Where others come, or that one finds no room, nothing is taken
 * and `*unwanted` becomes true: nothing is left to do with the socket than to hang up. None may come where `memory_fd` is
 * NULL. */
ssize_t soft_descriptors_receive(int fd, void *to, size_t size, int *memory_fd, bool *unwanted);

/* The same in one system call, of who is no stranger any more and could stop this process as well: those that come are
 * discarded, as far as they find room, and closed by the kernel at once beyond that. A child that is forked meanwhile
 * may keep them. */
ssize_t soft_descriptors_receive_discarding(int fd, void *to, size_t size, bool *unwanted);

/* Closes one by that thread, some time. A child that is forked while it is being closed keeps it. */
void soft_descriptor_discard(int fd);

/* Closes a Unix socket to a stranger. Nothing is sent or comes any more after it. */
void soft_descriptor_close_socket(int fd);

/* Whether so many wait to be closed that no more should come: the thread waits for one of them. */
bool soft_descriptors_are_stuck(void);

#endif
