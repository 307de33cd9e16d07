/* End: a queue pair of any type, with its queues and memory. */
#ifndef AIOVERBS_TESTS_SUPPORT_TYPES_H
#define AIOVERBS_TESTS_SUPPORT_TYPES_H

#include "support_pair.h"

#define TEST_QKEY 0x11223344u

/* Return the mask, with IBV_QP_STATE, that moves a queue pair of this type from each state to the next. */
int init_mask(enum ibv_qp_type type);
int rtr_mask(enum ibv_qp_type type);
int rts_mask(enum ibv_qp_type type);

/* Change the state once, by this mask and `link`; the key is TEST_QKEY, the path GID index 1. Return the verb's
 * result. */
int type_to(struct ibv_qp *qp, enum ibv_qp_state state, int mask, const struct ibv_qp_attr *link, uint32_t dest);

/* Move a queue pair from RESET to `state`: INIT, RTR or RTS. */
void type_raise(struct ibv_qp *qp, enum ibv_qp_state state, const struct ibv_qp_attr *link, uint32_t dest);
void type_connect(struct ibv_qp *qp, const struct ibv_qp_attr *link, uint32_t dest);

struct end_options {
    enum ibv_qp_type type;
    struct ibv_srq *srq;   /* or NULL */
    struct ibv_xrcd *xrcd; /* domain of an XRC target */
    struct ibv_cq *cq;     /* for both queues, and not closed with the end; NULL: two new ones */
    uint32_t depth;        /* 16 */
    int cqe;               /* 64 */
    int access;            /* access flags of its region: ACCESS_ALL and IBV_ACCESS_MW_BIND */
};

/* Create an end with PAIR_MEMORY bytes, in RESET; end_close() closes it. */
void typed_open(struct end *end, struct home *home, const struct end_options *options);
#define TYPED_OPEN(end, home, ...) typed_open(end, home, &(struct end_options){__VA_ARGS__})

/* Create two connected ends of a type; TYPED_OPEN passes options for both. */
void typed_pair_open(struct pair *pair, const struct end_options *options, const struct ibv_qp_attr *link);
#define TYPED_PAIR_OPEN(pair, ...) typed_pair_open(pair, &(struct end_options){__VA_ARGS__}, &default_link)

/* Create an address handle for the device itself by that GID. */
struct ibv_ah *make_ah(struct ibv_pd *pd, uint8_t gid_index);

/* Make a signalled datagram with TEST_QKEY. */
struct ibv_send_wr datagram(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count,
                            struct ibv_ah *ah, uint32_t qp_num);

/* Post a receive for bytes of the end's memory. Return the verb's result. */
int post_room(struct end *end, uint64_t wr_id, size_t offset, uint32_t length);
int srq_post_room(struct ibv_srq *srq, const struct end *end, uint64_t wr_id, size_t offset, uint32_t length);

/* Check that no completion is there. The caller knows that the device has finished. */
void expect_empty_at(struct ibv_cq *cq, struct check_place place);
#define EXPECT_EMPTY(cq) expect_empty_at(cq, HERE)

#endif
