/* The place of a queue pair among those who wait for a link. */
#ifndef AIOVERBS_SOFT_OBJECTS_LINK_WAITER_H
#define AIOVERBS_SOFT_OBJECTS_LINK_WAITER_H

#include <stdint.h>

struct soft_link;

/* Embedded in struct soft_qp. Under the sending lock of the link that it waits for. */
struct soft_waiter {
    struct soft_link *link; /* or NULL: it does not wait */
    struct soft_waiter *next, *before;
    uint64_t ticket;   /* its place among those who wait; kept until its turn is over */
    int64_t allowance; /* bytes that it may still send in its turn */
    uint64_t attempt;  /* of the link to connect: the first one that begins since it asked; 0: it asks for none */
    uint64_t retry_at; /* when it may ask for one; 0: its attempt was made, and failed. Under sq_lock */
};

#endif
