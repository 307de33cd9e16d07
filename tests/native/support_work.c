#include "support.h"

struct ibv_sge span(const struct end *end, size_t offset, uint32_t length)
{
    return (struct ibv_sge){(uintptr_t)end->memory + offset, length, end->mr->lkey};
}

struct ibv_send_wr request(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count)
{
    return (struct ibv_send_wr){
        .wr_id = wr_id,
        .sg_list = list,
        .num_sge = count,
        .opcode = opcode,
        .send_flags = IBV_SEND_SIGNALED,
    };
}

struct ibv_send_wr request_to(enum ibv_wr_opcode opcode, uint64_t wr_id, struct ibv_sge *list, int count,
                              const struct end *target, size_t offset)
{
    struct ibv_send_wr wr = request(opcode, wr_id, list, count);
    uint64_t address = (uintptr_t)target->memory + offset;

    if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = address;
        wr.wr.atomic.rkey = target->mr->rkey;
    } else {
        wr.wr.rdma.remote_addr = address;
        wr.wr.rdma.rkey = target->mr->rkey;
    }
    return wr;
}

int post(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad;

    return verbs_post_send(qp, wr, &bad);
}

int post_send(struct end *from, uint64_t wr_id, uint32_t length)
{
    struct ibv_sge sge = span(from, 0, length);
    struct ibv_send_wr wr = request(IBV_WR_SEND, wr_id, &sge, 1);

    return post(from->qp, &wr);
}

int post_write(struct end *from, const struct end *to, uint64_t wr_id, uint32_t length)
{
    struct ibv_sge sge = span(from, 0, length);
    struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, wr_id, &sge, 1, to, 0);

    return post(from->qp, &wr);
}

int post_nothing(struct ibv_qp *qp, uint64_t wr_id)
{
    struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, wr_id, NULL, 0);

    return post(qp, &wr);
}

int post_receive_list(struct end *end, uint64_t wr_id, struct ibv_sge *list, int count)
{
    struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = list, .num_sge = count};
    struct ibv_recv_wr *bad;

    return verbs_post_recv(end->qp, &wr, &bad);
}

int post_receive(struct end *end, uint64_t wr_id, uint32_t length)
{
    struct ibv_sge sge = span(end, 0, length);

    return post_receive_list(end, wr_id, &sge, 1);
}
