/* Files without a name whose size is settled: who was handed one by a peer and has mapped it is never cut short. */
#ifndef AIOVERBS_SOFT_BASE_MEMFD_H
#define AIOVERBS_SOFT_BASE_MEMFD_H

#include <fcntl.h>
#include <stdbool.h>
#include <sys/types.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* since Linux 5.1 */
#endif

/* One of so many bytes, all zero, which neither shrinks nor grows: an owned descriptor, or -1 and errno. `more` are
 * seals besides: F_SEAL_SEAL, where none is to come later. */
int soft_sealed_create(const char *name, off_t bytes, int more);

/* How many bytes one has; -1: it is no such file, or one of huge pages, of which none may be left. */
off_t soft_sealed_bytes(int fd);

/* Whether one has few pages, and gets no more: its last close gives back all that it has, which takes as long. */
bool soft_sealed_is_small(int fd);

#endif
