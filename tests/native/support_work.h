/* Helpers for work requests. */
#ifndef AIOVERBS_TESTS_SUPPORT_WORK_H
#define AIOVERBS_TESTS_SUPPORT_WORK_H

#include "support_pair.h"

/* Make an entry for bytes of an end's own memory. */
struct ibv_sge span(const struct end *end, size_t offset, uint32_t length);

/* Make a signalled request. */
struct ibv_send_wr request(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count);

/* The same, with the target's memory as the remote side; also for atomics. */
struct ibv_send_wr request_to(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count,
                              const struct end *target, size_t offset);

/* Post one request or a chain. Return the verb's result. */
int post(struct ibv_qp *qp, struct ibv_send_wr *wr);

/* Post a signalled SEND of the first `length` bytes. */
int post_send(struct end *from, uint64_t wr_id, uint32_t length);

/* Post a signalled RDMA WRITE of the first `length` bytes to the same place of the target. */
int post_write(struct end *from, const struct end *to, uint64_t wr_id, uint32_t length);

/* Post a signalled RDMA WRITE of no bytes, which needs no memory. */
int post_nothing(struct ibv_qp *qp, uint64_t wr_id);

/* Post a receive for the first `length` bytes of the end's memory, or for a list. */
int post_receive(struct end *end, uint64_t wr_id, uint32_t length);
int post_receive_list(struct end *end, uint64_t wr_id, struct ibv_sge *list, int count);

#endif
