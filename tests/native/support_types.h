/* Ends of any type of queue pair. */
#ifndef AIOVERBS_TESTS_SUPPORT_TYPES_H
#define AIOVERBS_TESTS_SUPPORT_TYPES_H

#include "support_pair.h"

#define TEST_QKEY 0x11223344u

/* What takes a queue pair of this type from each state to the next, with IBV_QP_STATE. */
int init_mask(enum ibv_qp_type type);
int rtr_mask(enum ibv_qp_type type);
int rts_mask(enum ibv_qp_type type);

/* One change of state by this mask and `link`; TEST_QKEY is the key, GID index 1 the path. The verb's answer. */
int type_to(struct ibv_qp *qp, enum ibv_qp_state state, int mask, const struct ibv_qp_attr *link, uint32_t dest);

/* From RESET to that state, which is INIT, RTR or RTS. */
void type_raise(struct ibv_qp *qp, enum ibv_qp_state state, const struct ibv_qp_attr *link, uint32_t dest);
void type_connect(struct ibv_qp *qp, const struct ibv_qp_attr *link, uint32_t dest);

struct end_options {
    enum ibv_qp_type type;
    struct ibv_srq *srq;   /* or NULL */
    struct ibv_xrcd *xrcd; /* of an XRC target */
    struct ibv_cq *cq;     /* for both queues, and not closed with the end; NULL: two of its own */
    uint32_t depth;        /* 16 */
    int cqe;               /* 64 */
    int access;            /* of its region: ACCESS_ALL and IBV_ACCESS_MW_BIND */
};

/* An end with PAIR_MEMORY bytes, in RESET; end_close closes it. */
void typed_open(struct end *end, struct home *home, const struct end_options *options);
#define TYPED_OPEN(end, home, ...) typed_open(end, home, &(struct end_options){__VA_ARGS__})

/* Two ends of a type, connected; TYPED_OPEN's options for both. */
void typed_pair_open(struct pair *pair, const struct end_options *options, const struct ibv_qp_attr *link);
#define TYPED_PAIR_OPEN(pair, ...) typed_pair_open(pair, &(struct end_options){__VA_ARGS__}, &default_link)

/* The way to the device itself by that GID. */
struct ibv_ah *make_ah(struct ibv_pd *pd, uint8_t gid_index);

/* A signalled datagram with TEST_QKEY. */
struct ibv_send_wr datagram(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count,
                            struct ibv_ah *ah, uint32_t qp_num);

/* A receive for bytes of the end's memory; the verb's answer. */
int post_room(struct end *end, uint64_t wr_id, size_t offset, uint32_t length);
int srq_post_room(struct ibv_srq *srq, const struct end *end, uint64_t wr_id, size_t offset, uint32_t length);

/* Nothing is there now: for who knows that the device is done. */
void expect_empty_at(struct ibv_cq *cq, struct check_place place);
#define EXPECT_EMPTY(cq) expect_empty_at(cq, HERE)

#endif
