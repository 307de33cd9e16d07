/* Files without a name and with a sealed size: a process that maps such a file of a peer never loses pages by
 * truncation. */
#ifndef AIOVERBS_SOFT_BASE_MEMFD_H
#define AIOVERBS_SOFT_BASE_MEMFD_H

#include <fcntl.h>
#include <stdbool.h>
#include <sys/types.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* since Linux 5.1 */
#endif

/* Create a file of `bytes` zero bytes, which neither shrinks nor grows. `more`: further seals, such as F_SEAL_SEAL,
 * which forbids later ones. Return an owned descriptor, or -1 and errno. */
int soft_sealed_create(const char *name, off_t bytes, int more);

/* Return the size of a sealed file in bytes; -1 for any other file, or one of huge pages, which may run out on access.
 */
off_t soft_sealed_bytes(int fd);

/* Return whether a sealed file has few pages, and gets no more: its last close frees them all, which takes time. */
bool soft_sealed_is_small(int fd);

#endif
