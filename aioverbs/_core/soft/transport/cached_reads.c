/* Reads that the requester makes by itself: see soft/fabric/read_cache.h. */
#include "soft/transport/cached_reads.h"

#include <stdlib.h>

#include "soft/base/epoch.h"
#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/fabric/read_cache.h"
#include "soft/objects/context.h"
#include "soft/objects/limits.h"
#include "soft/objects/mr.h"
#include "soft/objects/qp.h"
#include "soft/objects/read_cache_entry.h"
#include "soft/objects/work_queue.h"
#include "soft/transport/loopback.h"
#include "soft/transport/request.h"
#include "soft/transport/requester.h"

/* Return the entry for a key, which may be that of another one; NULL before the first grant. */
static struct soft_read_cache_entry *cache_entry_of(struct soft_qp *qp, uint32_t key)
{
    return qp->read_cache_entries ? &qp->read_cache_entries[(key >> 8) % SOFT_READ_CACHE_ENTRIES] : NULL;
}

void soft_cached_read_ask(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t psn)
{
    struct soft_read_cache_entry *pending = &qp->req.pending_entry;

    if (wqe->opcode == IBV_WR_RDMA_READ && qp->qp.qp_type == IBV_QPT_RC && !pending->owner_serial &&
        soft_read_cache_note(qp->link, wqe->rkey, qp->attr.dest_qp_num, pending))
        pending->psn = psn;
}

void soft_cached_read_answered(struct soft_qp *qp, const struct soft_frame *frame)
{
    struct soft_read_cache_entry *pending = &qp->req.pending_entry;

    if (!pending->owner_serial || pending->psn != frame->psn)
        return;
    if (frame->flags & SOFT_FRAME_READ_CACHE) {
        pending->address = frame->address;
        pending->length = frame->compare_add;
        if (!qp->read_cache_entries)
            qp->read_cache_entries = calloc(SOFT_READ_CACHE_ENTRIES, sizeof(*qp->read_cache_entries));
        if (qp->read_cache_entries) {
            struct soft_read_cache_entry *entry = cache_entry_of(qp, pending->key);

            soft_read_cache_clear_invalid(qp->link, qp->attr.dest_qp_num, qp->read_cache_entries);
            soft_read_cache_clear(entry, 1);
            *entry = *pending;
            if (frame->imm)
                soft_read_cache_map(qp->link, entry, frame->imm - 1);
        }
    }
    pending->owner_serial = 0;
}

/* The loads of `special` and of the number of frame fault plans may be relaxed: see enum soft_special. */
bool soft_cached_read_may(struct soft_qp *qp, const struct soft_wqe *wqe, uint32_t length)
{
    const struct soft_read_cache_entry *entry = cache_entry_of(qp, wqe->rkey);
    uint64_t offset = entry ? wqe->remote_addr - entry->address : 0;

    return wqe->opcode == IBV_WR_RDMA_READ && entry && entry->owner_serial && entry->key == wqe->rkey &&
           length - 1 < (entry->memory ? SOFT_MAPPED_READ_BYTES : SOFT_CACHED_READ_BYTES) && offset <= entry->length &&
           length <= entry->length - offset && soft_port_works(qp) &&
           !atomic_load_explicit(&qp->context->special, memory_order_relaxed) && !soft_link_has_frame_faults(qp->link);
}

/* Reads that are made together. */
struct read_run {
    struct soft_read_cache_read reads[SOFT_CACHED_RUN_READS];
    struct iovec pieces[SOFT_CACHED_RUN_PIECES];
    unsigned int count, piece_count;
    uint32_t bytes;
};

static void read_run_add(struct soft_qp *qp, struct read_run *run, const struct soft_wqe *wqe,
                         const struct soft_request *request)
{
    unsigned int i;

    for (i = 0; i < request->local_count; i++)
        run->pieces[run->piece_count++] = (struct iovec){request->local[i].address, request->local[i].length};
    run->reads[run->count++] =
        (struct soft_read_cache_read){cache_entry_of(qp, wqe->rkey), wqe->remote_addr, request->length};
    run->bytes += request->length;
}

/* Add the reads behind the first one, up to the first request of another kind. */
static void read_run_add_others(struct soft_qp *qp, struct read_run *run)
{
    uint32_t at;

    for (at = qp->req.window.sent + 1; at != qp->req.window.posted && run->count < SOFT_CACHED_RUN_READS; at++) {
        const struct soft_wqe *wqe = soft_request_at(qp, at);
        struct soft_segment segments[SOFT_MAX_SGE];
        struct soft_request request = {.from = qp, .wqe = wqe};

        if (!soft_cached_read_may(qp, wqe, soft_request_length(wqe)) || (wqe->due_ns && wqe->due_ns > soft_now_ns()) ||
            run->piece_count + wqe->num_sge > SOFT_CACHED_RUN_PIECES ||
            soft_resolve(qp, wqe, segments, &request) != IBV_WC_SUCCESS ||
            run->bytes + request.length > SOFT_CACHED_RUN_BYTES)
            return;
        read_run_add(qp, run, wqe, &request);
    }
}

/* Copy reads. Return false if a grant is not valid any more. */
static bool copy_reads(struct soft_qp *qp, const struct soft_read_cache_read *reads, unsigned int count,
                       const struct iovec *pieces, unsigned int piece_count)
{
    if (soft_read_cache_copy(qp->link, qp->attr.dest_qp_num, reads, count, pieces, piece_count))
        return true;
    cache_entry_of(qp, reads->entry->key)->owner_serial = 0;
    soft_read_cache_clear_invalid(qp->link, qp->attr.dest_qp_num, qp->read_cache_entries);
    return false;
}

bool soft_cached_read(struct soft_qp *qp, const struct soft_wqe *wqe, const struct soft_request *request, int64_t *left)
{
    struct read_run run;
    unsigned int i;

    run.count = run.piece_count = run.bytes = 0;
    read_run_add(qp, &run, wqe, request);
    read_run_add_others(qp, &run);
    if (!copy_reads(qp, run.reads, run.count, run.pieces, run.piece_count))
        return false;
    if (qp->req.waiting) /* the queue pair waits for the connection: nothing is in flight */
        soft_reset_retries(qp);
    for (i = 0; i < run.count && atomic_load(&qp->state) == IBV_QPS_RTS; i++) {
        soft_end_request(qp, soft_request_at(qp, qp->req.window.finished), IBV_WC_SUCCESS, 0, run.reads[i].length, 0);
        *left -= SOFT_REQUEST_COST + (int64_t)run.reads[i].length;
    }
    return true;
}

bool soft_cached_read_now(struct soft_qp *qp, void *to, uint64_t address, uint32_t key, uint32_t length)
{
    const struct soft_wqe wqe = {.opcode = IBV_WR_RDMA_READ, .remote_addr = address, .rkey = key};
    const struct soft_read_cache_read read = {cache_entry_of(qp, key), address, length};
    const struct iovec piece = {to, length};

    return atomic_load(&qp->state) == IBV_QPS_RTS && soft_cached_read_may(qp, &wqe, length) && read.entry->memory &&
           copy_reads(qp, &read, 1, &piece, 1);
}
