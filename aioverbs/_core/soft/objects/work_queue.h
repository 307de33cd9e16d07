/* Work requests, and the rings in which they are posted. */
#ifndef AIOVERBS_SOFT_OBJECTS_WORK_QUEUE_H
#define AIOVERBS_SOFT_OBJECTS_WORK_QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/objects/limits.h"

/* A send work request in the queue's memory; scatter/gather entries or inline bytes follow it. */
struct soft_wqe {
    uint64_t wr_id;
    uint8_t opcode, flags, num_sge;
    bool ah_refused;      /* a datagram: its address handle is of another protection domain */
    uint32_t imm_data;    /* or the key to invalidate; of a bind: the lkey of the region */
    uint64_t remote_addr; /* of a datagram: the peer's number; of a bind: where the window begins */
    uint32_t rkey;        /* of a datagram: the Q_Key; of a bind: the window's new key */
    uint32_t inline_length;
    union {
        struct {
            uint64_t compare_add, swap;
        };
        struct {
            uint64_t length, access;
        } bind;
        union ibv_gid dgid; /* of a datagram */
    };
    uint64_t due_ns; /* thread mode: not to be executed before */
    union {
        uint32_t remote_srqn;
        struct {
            uint32_t flow_label;
            uint8_t sgid_index, hop_limit, traffic_class;
        } path; /* of a datagram */
    };
};
_Static_assert(sizeof(struct soft_wqe) == 64, "a work request's head is a cache line");
_Static_assert(SOFT_MAX_SGE < 256, "num_sge is one byte");

/* One at a time: compilers make of a memcpy with a known limit a string instruction, which costs as much as all the
 * rest of posting, and nearly all lists have one element. */
static inline void soft_copy_sges(struct ibv_sge *to, const struct ibv_sge *from, unsigned int count)
{
    while (count--)
        *to++ = *from++;
}

struct soft_rwqe {
    uint64_t wr_id;
    uint64_t num_sge;
};

/* Counters of a ring run freely; an index is a counter masked. */
struct soft_ring {
    uint8_t *entries;         /* const */
    uint32_t stride, mask;    /* const */
    uint32_t depth, max_sge;  /* const; 0 where the ring was not asked for */
    _Atomic uint32_t *posted; /* doorbell record: written by the driver half with release, read by the device half */
    uint32_t consumed;        /* rq lock: how far the device half is; of a send queue its window says so */
    _Atomic uint32_t reaped;  /* written by whoever polls (the CQ's driver half), release: slots free again */
};

static inline void *soft_ring_entry(const struct soft_ring *ring, uint32_t counter)
{
    return ring->entries + (size_t)(counter & ring->mask) * ring->stride;
}

#endif
