/* Read cache: reads of another process's memory that the requester makes without asking the owner again.
 *
 * The owner of memory that answers a read may grant more: which range the key leads to, for this queue pair. While the
 * grant holds, the requester reads there by itself, since the kernel lets processes of one user read each other's
 * memory. An event that may end a grant (a region or window is deregistered, a queue pair changes, a port goes down, a
 * fault plan becomes active) increments a version in a page that the owner shares with its peers. The requester notes
 * the versions before it asks. A read is valid if the versions are still the same after the last byte was copied.
 * Otherwise the copied data is discarded, and the owner is asked, and answers or refuses as usual.
 *
 * Why that suffices: a version is incremented after the grant cannot be given any more, and before the verb that ends
 * it returns, so before the memory is used for anything else. A grant is stored with versions that were noted before
 * the request was sent. So if the versions are the same after the copy, all of the copy was made while the owner's
 * answer held. The page contains nothing else, and only its owner can write it; a peer that lies in the page lets the
 * requester read memory of which that peer could have sent anything as well.
 *
 * The owner may also say that the range is the begin of a memory file (soft_make_file_mr), and by which of its
 * descriptors. The requester gets that file from the owner's process, without its help (pidfd_getfd), and maps it: then
 * a read is a memcpy, which makes no system call. The descriptor may be another file's by then, if the region was
 * deregistered meanwhile; then the grant is not valid either, and the descriptor is closed and used for nothing else. A
 * file that is not sealed, or large, is not used: so no read faults, and unmapping takes no longer than freeing 4 MiB.
 * What a file contains is the owner's business. */
#ifndef AIOVERBS_SOFT_FABRIC_READ_CACHE_H
#define AIOVERBS_SOFT_FABRIC_READ_CACHE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "soft/objects/read_cache_entry.h"

struct soft_device;
struct soft_fabric;
struct soft_link;
struct soft_qp;
struct soft_stream;

#define SOFT_CACHED_READ_BYTES (16u << 10) /* bytes of one read: larger data is copied by its owner, in one copy */
#define SOFT_MAPPED_READ_BYTES (4u << 20)  /* the same where the memory is mapped here */
#define SOFT_CACHED_RUN_BYTES (128u << 10) /* bytes of several reads that are copied together */
enum { SOFT_CACHED_RUN_READS = 32, SOFT_CACHED_RUN_PIECES = 64 }; /* limits of reads that are copied together */

/* ---- The requester, in a grace section ----------------------------------------------------------------------- */

/* Note the versions for `key` and the queue pair `qp_num`, before the owner is asked. Return false if the link has no
 * page of the read cache. */
bool soft_read_cache_note(const struct soft_link *link, uint32_t key, uint32_t qp_num,
                          struct soft_read_cache_entry *entry);

struct soft_read_cache_read {
    const struct soft_read_cache_entry *entry; /* entry that covers the read */
    uint64_t address;
    uint32_t length;
};

/* Copy the reads into the pieces, one after the other. Return false if an entry is not valid any more; the pieces may
 * have any content then. */
bool soft_read_cache_copy(const struct soft_link *link, uint32_t qp_num, const struct soft_read_cache_read *reads,
                          unsigned int count, const struct iovec *pieces, unsigned int piece_count);

/* Map the range of a new entry, which the owner says to be the begin of the memory file that is its descriptor
 * `number`. If that is not possible, reads go on without. */
void soft_read_cache_map(const struct soft_link *link, struct soft_read_cache_entry *entry, uint32_t number);

/* Clear the entries of a queue pair whose mapped memory cannot be read any more. Under sq_lock. */
void soft_read_cache_clear_invalid(const struct soft_link *link, uint32_t qp_num,
                                   struct soft_read_cache_entry *entries);

/* Clear entries of a queue pair, and unmap their memory. Under sq_lock. */
void soft_read_cache_clear(struct soft_read_cache_entry *entries, unsigned int count);

/* ---- The owner ----------------------------------------------------------------------------------------------- */

struct soft_read_cache_grant {
    uint64_t address, length; /* range that the key leads to */
    int file;                 /* descriptor of the memory file that begins with the range; -1: none */
};

/* Make a grant for a peer that was just allowed to read by `key`. Under rq_lock, and the lock of the key's window.
 * Return false if no grant is given. */
bool soft_read_cache_grant(const struct soft_qp *qp, uint32_t key, struct soft_read_cache_grant *grant);

/* End grants: those of a key (by its number), of a queue pair, or all. Call after the change: when no new grant can be
 * given, and every request that was allowed before is answered. Any locks may be held. */
void soft_read_cache_invalidate_key(struct soft_device *device, uint32_t number);
void soft_read_cache_invalidate_qp(const struct soft_qp *qp);
void soft_read_cache_invalidate_all(struct soft_device *device);

/* ---- From the inside of the fabric, under progress ------------------------------------------------------------ */

/* Served stream: return the page's descriptor, to be sent with WELCOME, or -1. */
int soft_read_cache_offer(struct soft_stream *stream);
/* Free the page, when the last context is closed and nothing is left that could end a grant. */
void soft_read_cache_destroy(struct soft_fabric *fabric);

/* Link: accept the page that came with WELCOME; suspend or resume its use, while the stream counts as silent; return
 * whether pages of earlier connections are left; free these, or all (outside of grace sections). */
void soft_read_cache_accept(struct soft_link *link);
void soft_read_cache_suspend(struct soft_link *link, bool suspend);
bool soft_read_cache_is_outdated(const struct soft_link *link);
void soft_read_cache_drop(struct soft_link *link, bool all);

#endif
