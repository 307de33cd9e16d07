/* Work requests, and the rings that they are posted to. */
#ifndef AIOVERBS_SOFT_OBJECTS_WORK_QUEUE_H
#define AIOVERBS_SOFT_OBJECTS_WORK_QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi/libibverbs.h"
#include "soft/objects/limits.h"

/* Send work request in the queue's memory; scatter/gather entries or inline bytes follow it. */
struct soft_wqe {
    uint64_t wr_id;
    uint8_t opcode, flags, num_sge;
    bool ah_refused;      /* datagram: the address handle belongs to another protection domain */
    uint32_t imm_data;    /* immediate data, or the key to invalidate; bind: lkey of the region */
    uint64_t remote_addr; /* remote address; datagram: queue pair number of the peer; bind: address of the window */
    uint32_t rkey;        /* remote key; datagram: Q_Key; bind: new key of the window */
    uint32_t inline_length;
    union {
        struct {
            uint64_t compare_add, swap;
        };
        struct {
            uint64_t length, access;
        } bind;
        union ibv_gid dgid; /* datagram: destination */
    };
    uint64_t due_ns; /* thread mode: earliest time of the execution, CLOCK_MONOTONIC */
    union {
        uint32_t remote_srqn;
        struct {
            uint32_t flow_label;
            uint8_t sgid_index, hop_limit, traffic_class;
        } path; /* datagram: path */
    };
};
_Static_assert(sizeof(struct soft_wqe) == 64, "a work request's head is a cache line");
_Static_assert(SOFT_MAX_SGE < 256, "num_sge is one byte");

/* Copy entries one at a time: compilers turn a memcpy with a known limit into a string instruction, which costs as much
 * as the rest of posting, and nearly all lists have one entry. */
static inline void soft_copy_sges(struct ibv_sge *to, const struct ibv_sge *from, unsigned int count)
{
    while (count--)
        *to++ = *from++;
}

/* Head of a receive work request in the queue's memory; its scatter/gather entries follow. */
struct soft_rwqe {
    uint64_t wr_id;
    uint64_t num_sge;
};

/* Ring of work requests. Counters run freely; an index is a masked counter. */
struct soft_ring {
    uint8_t *entries;         /* const */
    uint32_t stride, mask;    /* const */
    uint32_t depth, max_sge;  /* const; 0 if the ring was not requested */
    _Atomic uint32_t *posted; /* doorbell record: written by the driver half with release, read by the device half */
    /* rq lock: requests that the device half has taken; a send queue has its window instead */
    uint32_t consumed;
    /* requests whose slots are free again; written by polling (the CQ's driver half), release */
    _Atomic uint32_t reaped;
};

/* Return the entry of a counter. */
static inline void *soft_ring_entry(const struct soft_ring *ring, uint32_t counter)
{
    return ring->entries + (size_t)(counter & ring->mask) * ring->stride;
}

#endif
