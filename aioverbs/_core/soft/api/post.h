/* Posting work requests. */
#ifndef AIOVERBS_SOFT_API_POST_H
#define AIOVERBS_SOFT_API_POST_H

#include "abi/libibverbs.h"

int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

#endif
