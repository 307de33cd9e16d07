/* Work requests, in few words. */
#ifndef AIOVERBS_TESTS_SUPPORT_WORK_H
#define AIOVERBS_TESTS_SUPPORT_WORK_H

#include "support_pair.h"

/* Bytes of an end's own memory. */
struct ibv_sge span(const struct end *end, size_t offset, uint32_t length);

/* A signalled request. */
struct ibv_send_wr request(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count);

/* The same with the target's memory as the remote side; for atomics, too. */
struct ibv_send_wr request_to(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count,
                              const struct end *target, size_t offset);

/* Posts one request or a chain; the verb's answer. */
int post(struct ibv_qp *qp, struct ibv_send_wr *wr);

/* A signalled SEND of the first `length` bytes. */
int post_send(struct end *from, uint64_t wr_id, uint32_t length);

/* A signalled RDMA WRITE of the first `length` bytes to the same place there. */
int post_write(struct end *from, const struct end *to, uint64_t wr_id, uint32_t length);

/* A signalled RDMA WRITE of no bytes, which needs no memory. */
int post_nothing(struct ibv_qp *qp, uint64_t wr_id);

/* A receive for the first `length` bytes of the end's memory, or for a list. */
int post_receive(struct end *end, uint64_t wr_id, uint32_t length);
int post_receive_list(struct end *end, uint64_t wr_id, struct ibv_sge *list, int count);

#endif
