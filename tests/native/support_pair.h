/* Pair: two queue pairs that are connected to each other, with queues and memory. */
#ifndef AIOVERBS_TESTS_SUPPORT_PAIR_H
#define AIOVERBS_TESTS_SUPPORT_PAIR_H

#include "support_home.h"

#define REMOTE_ALL (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define ACCESS_ALL (IBV_ACCESS_LOCAL_WRITE | REMOTE_ALL)

#define MASK_INIT (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define MASK_RTR                                                                                                \
    (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | \
     IBV_QP_MIN_RNR_TIMER)
#define MASK_RTS \
    (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)

/* Attributes for connecting a queue pair, except state and destination. */
extern const struct ibv_qp_attr default_link;

/* Return the path to the device itself, by GID index 1. */
struct ibv_ah_attr path_to_self(struct ibv_context *context);

/* Change the state once, with exactly the required attributes. Return the verb's result. */
int qp_to_init(struct ibv_qp *qp, const struct ibv_qp_attr *link);
int qp_to_rtr(struct ibv_qp *qp, const struct ibv_qp_attr *link, uint32_t dest_qp_num);
int qp_to_rts(struct ibv_qp *qp, const struct ibv_qp_attr *link);
int qp_to(struct ibv_qp *qp, enum ibv_qp_state state);

/* Move a queue pair from RESET to RTS. */
void qp_connect(struct ibv_qp *qp, const struct ibv_qp_attr *link, uint32_t dest_qp_num);

enum ibv_qp_state qp_state(struct ibv_qp *qp);

/* Create a queue pair for `depth` requests each way, with both queues on `cq`. */
struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t depth);

/* The same, connected to itself. */
struct ibv_qp *make_loop(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t depth);

struct end {
    struct home *home;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_qp *qp;
    uint8_t *memory;
    struct ibv_mr *mr;
};

struct pair {
    struct home own; /* created if no other was given */
    struct end a, b;
};

/* Options of a pair. A field that is 0 stands for the default. */
struct pair_options {
    struct home *homes[2];
    struct ibv_qp_cap cap;          /* 16 requests each way, 4 entries, 64 bytes inline */
    int cqe;                        /* 64 */
    size_t memory;                  /* bytes of each end */
    const struct ibv_qp_attr *link; /* default_link */
    bool sig_all;
    bool one_cq; /* capacities of each end, for sends and receives */
    bool unconnected;
};

#define PAIR_MEMORY (64u << 10)

void pair_open(struct pair *pair, const struct pair_options *options);
void pair_close(struct pair *pair);

#define PAIR_OPEN(pair, ...) pair_open(pair, &(struct pair_options){__VA_ARGS__})

void end_open(struct end *end, struct home *home, const struct pair_options *options);
void end_close(struct end *end);

#endif
