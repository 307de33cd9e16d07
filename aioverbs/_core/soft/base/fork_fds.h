/* File descriptors that the child of a fork must not keep: as long as a child has a socket open, no peer notices that
 * the parent has ended. */
#ifndef AIOVERBS_SOFT_BASE_FORK_FDS_H
#define AIOVERBS_SOFT_BASE_FORK_FDS_H

#include <stdbool.h>
#include <sys/types.h>

/* Watch for forks, before the first owned descriptor: return 0 or an errno. May be called again. */
int soft_descriptors_watch_forks(void);

/* Hold off forks between creating a descriptor and soft_descriptor_own. No call in between may block. */
void soft_descriptors_hold(void);
void soft_descriptors_release(void);

/* Own a descriptor, between these two calls. Return `fd`: the descriptor, or -1 and errno, as passed. A descriptor with
 * too large a number is closed: -1 and EMFILE. */
int soft_descriptor_own(int fd);
void soft_descriptor_close(int fd); /* Close an owned descriptor; ignore a negative one. May be called anywhere. */

enum { SOFT_MEMORY_FILES = 2 }; /* most descriptors that a message of a peer may carry */

/* ---- Descriptors sent by untrusted peers ---------------------------------------------------------------------- */

/* The last close of a file takes as long as the file's creator likes: a TCP socket lingers for the time that was set
 * for it, a FUSE file waits for its server. So descriptors of an untrusted peer are closed by a thread of their own.
 * The reading thread never closes one, nor may the kernel do so in the reading thread: the reader peeks at a message
 * before taking it, and does not take a message with descriptors unless it has them already. */

/* Prepare a Unix socket for reading: out-of-band data stays in the stream, where the kernel would drop it otherwise. */
void soft_descriptors_prepare_socket(int fd);

/* Receive from a Unix socket, as recv(fd, to, size, MSG_DONTWAIT) does. Memory files may come, whose close takes only
 * as long as freeing their pages: they are stored in `memory_fds`, `most` of them at most. Where other
 * descriptors come, or more, or there is no room for them, nothing is taken and `*unwanted` becomes true: the caller
 * can only close the socket, and the memory files that it got. */
ssize_t soft_descriptors_receive(int fd, void *to, size_t size, int *memory_fds, unsigned int most, bool *unwanted);

/* Receive in one system call from a peer that is trusted, and could stop this process anyway: descriptors are discarded
 * as far as there is room for them, and closed by the kernel at once otherwise. A child that is forked meanwhile may
 * keep them. */
ssize_t soft_descriptors_receive_discarding(int fd, void *to, size_t size, bool *unwanted);

/* Have the closing thread close a descriptor. A child that is forked while the descriptor is being closed keeps it. */
void soft_descriptor_discard(int fd);

/* Have the closing thread close a descriptor of a file that another process uses, too, which it leaves as it is: it
 * shuts no socket down and reads nothing from it. (As with each close, locks by fcntl() that this process has on that
 * file end.) */
void soft_descriptor_return(int fd);

/* Close a Unix socket to an untrusted peer. Nothing is sent or received afterwards. */
void soft_descriptor_close_socket(int fd);

/* Return whether too many descriptors wait to be closed to accept more: the thread is blocked in one close. */
bool soft_descriptors_are_stuck(void);

#endif
