/* A request to a responder, and its reply. */
#ifndef AIOVERBS_SOFT_TRANSPORT_REQUEST_H
#define AIOVERBS_SOFT_TRANSPORT_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"

struct soft_qp;
struct soft_segment;
struct soft_wqe;

struct soft_request {
    struct soft_qp *from; /* local sender, its sq_lock held; NULL: a remote sender */
    const struct soft_wqe *wqe;
    uint32_t src_qp;              /* number of the sending queue pair */
    const union ibv_gid *sgid;    /* GID of a datagram's sender */
    struct soft_carrier *carrier; /* copies the bytes of a remote request; NULL: `local` is in this process */
    uint32_t total, offset;       /* bytes of the message; offset of this part */
    uint32_t psn, packets;
    uint32_t reads; /* read or atomic: number that the requester would have in flight, with this one */
    /* A repeated read of a remote peer: it was executed in its order before, and the response was lost. */
    bool again;
    uint32_t length;
    const struct soft_segment *local; /* data to send, or memory for the response; checked */
    uint32_t local_count;
};

struct soft_reply {
    enum {
        SOFT_ACK,
        SOFT_NAK,    /* refused for good, with `status` */
        SOFT_RNR,    /* no receive was posted: to be repeated after `rnr_ns` */
        SOFT_SILENT, /* no response */
    } kind;
    enum ibv_wc_status status;
    uint64_t rnr_ns;
    struct soft_qp *broken; /* local queue pair that went to ERR and must be kicked, or NULL */
};

/* Functions that copy bytes of a remote request that are not in the received frame. */
struct soft_carrier {
    /* Copy `length` bytes to or from local memory, which was checked. Return 0, or ESTALE: the peer gave the request
     * up; or another errno: the copy failed. */
    int (*read)(struct soft_carrier *carrier, const struct soft_segment *to, uint32_t length);
    int (*write)(struct soft_carrier *carrier, const struct soft_segment *from, uint32_t length);
};

#endif
