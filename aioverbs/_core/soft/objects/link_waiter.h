/* Place of a queue pair in the queue of a link. */
#ifndef AIOVERBS_SOFT_OBJECTS_LINK_WAITER_H
#define AIOVERBS_SOFT_OBJECTS_LINK_WAITER_H

#include <stdint.h>

struct soft_link;

/* Embedded in struct soft_qp. Under the tx lock of the link for which the queue pair waits. */
struct soft_waiter {
    struct soft_link *link; /* link for which the queue pair waits, or NULL */
    struct soft_waiter *next, *before;
    uint64_t ticket;   /* place in the queue of the link; valid until the turn is over; 0: none */
    int64_t allowance; /* bytes that the queue pair may still send in its turn */
    /* Number of the link's first attempt to connect after the queue pair asked for one; 0: it asked for none. */
    uint64_t attempt;
    /* When a connection may be requested again; 0: the attempt was made, and failed. Under sq_lock. */
    uint64_t retry_at;
};

#endif
