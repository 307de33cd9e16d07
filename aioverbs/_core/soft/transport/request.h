/* What a requester asks of a responder, and what that answers. */
#ifndef AIOVERBS_SOFT_TRANSPORT_REQUEST_H
#define AIOVERBS_SOFT_TRANSPORT_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"

struct soft_qp;
struct soft_segment;
struct soft_wqe;

struct soft_request {
    struct soft_qp *from; /* its sq_lock is held; NULL: it came from a remote one */
    const struct soft_wqe *wqe;
    uint32_t src_qp;              /* its number */
    const union ibv_gid *sgid;    /* and where it is; of a datagram */
    struct soft_carrier *carrier; /* of a remote one's: moves the bytes; NULL: `local` is in this process */
    uint32_t total, offset;       /* bytes: of the message, and where this part of it begins */
    uint32_t psn, packets;
    uint32_t reads; /* of a read or atomic: how many the requester would have in flight, with this one */
    bool again;     /* it was done before, in its order: a remote peer's read, whose answer was lost */
    uint32_t length;
    const struct soft_segment *local; /* what is sent, or where the answer goes; checked */
    uint32_t local_count;
};

struct soft_reply {
    enum {
        SOFT_ACK,
        SOFT_NAK,    /* for good, with `status` */
        SOFT_RNR,    /* no receive was posted: again after `rnr_ns` */
        SOFT_SILENT, /* nobody answers */
    } kind;
    enum ibv_wc_status status;
    uint64_t rnr_ns;
    struct soft_qp *broken; /* a peer of this process that went to ERR and is to be kicked, else NULL */
};

/* What moves the bytes of a remote peer's request that are not here already. */
struct soft_carrier {
    /* `length` bytes to or from memory here that was checked: 0, or ESTALE: the peer gave the request up; or another
     * errno: it cannot be done. */
    int (*read)(struct soft_carrier *carrier, const struct soft_segment *to, uint32_t length);
    int (*write)(struct soft_carrier *carrier, const struct soft_segment *from, uint32_t length);
};

#endif
