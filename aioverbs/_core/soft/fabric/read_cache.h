/* Licences: reads of another process's memory that its device is not asked about again.
 *
 * Who owns memory and answers a read says beside the data from where to where the key leads, for this queue pair: a
 * licence. The requester may read there by itself, by what the kernel lets processes of one user read of each other, as
 * long as nothing was taken back. Whatever may take something back (a region or window that goes, a queue pair that
 * changes, a port that goes down, a fault plan) counts a word of a page up that the owner shows his peers. The requester
 * notes the words before he asks; a read counts where they are still the same after the last byte was copied. Else what
 * was copied is worth nothing, and the owner is asked, who answers, or refuses, as ever.
 *
 * Why that is enough: words are counted up after nobody can be given that licence any more, and before the verb returns
 * that takes it back, so before the memory becomes anything else. A licence is given for words that were noted before
 * the request left. So where the words are the same after the copy, all of the copy was made while the owner's answer
 * held. The page says nothing else, and only its owner can write it; who reads memory of a peer who lies about it reads
 * what that peer could have answered as well. */
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

#define SOFT_CACHED_READ_BYTES (16u << 10) /* of a read: larger data is moved by its owner, in one copy */
#define SOFT_CACHED_RUN_BYTES (128u << 10) /* of several that are done together */
enum { SOFT_CACHED_RUN_READS = 32, SOFT_CACHED_RUN_PIECES = 64 }; /* likewise */

/* ---- The requester, in a grace section ----------------------------------------------------------------------- */

/* Notes the words for `key` and the queue pair that it is told to, before the owner is asked. False: the link has no
 * licences. */
bool soft_read_cache_note(const struct soft_link *link, uint32_t key, uint32_t qp_num,
                          struct soft_read_cache_entry *entry);

struct soft_read_cache_read {
    const struct soft_read_cache_entry *entry; /* which covers it */
    uint64_t address;
    uint32_t length;
};

/* Reads into the pieces, one read after the other. False: a licence does not hold any more, and the pieces may have any
 * content. */
bool soft_read_cache_copy(const struct soft_link *link, uint32_t qp_num, const struct soft_read_cache_read *reads,
                          unsigned int count, const struct iovec *pieces, unsigned int piece_count);

/* ---- The owner ----------------------------------------------------------------------------------------------- */

/* From where to where the key leads for a peer who was just allowed to read there. Under rq_lock, and the lock of the
 * key's window. False: no licence is given. */
bool soft_read_cache_grant(const struct soft_qp *qp, uint32_t key, uint64_t *address, uint64_t *length);

/* What was allowed by the key (its number), by the queue pair, or at all, is not any more. After that has become so:
 * nobody is allowed it any more, and who was asked has answered. Any locks may be held. */
void soft_read_cache_invalidate_key(struct soft_device *device, uint32_t number);
void soft_read_cache_invalidate_qp(const struct soft_qp *qp);
void soft_read_cache_invalidate_all(struct soft_device *device);

/* ---- From the inside of the fabric, under progress ------------------------------------------------------------ */

/* Served: the page's descriptor, to be shown with WELCOME, or -1. */
int soft_read_cache_offer(struct soft_stream *stream);
/* When the last context is closed: nobody is left who could take something back. */
void soft_read_cache_destroy(struct soft_fabric *fabric);

/* Link: what came with WELCOME; the stream counts as silent, or not any more; what is not used any more is given back,
 * or all is (outside of grace sections). */
void soft_read_cache_accept(struct soft_link *link);
void soft_read_cache_suspend(struct soft_link *link, bool suspend);
bool soft_read_cache_is_outdated(const struct soft_link *link);
void soft_read_cache_drop(struct soft_link *link, bool all);

#endif
