/* Calls of each verb of the device, with valid arguments. */
#ifndef AIOVERBS_TESTS_SUPPORT_VERBS_H
#define AIOVERBS_TESTS_SUPPORT_VERBS_H

#include "support_home.h"

/* One object of each kind. */
struct world {
    struct home home;
    struct ibv_pd *shared;
    uint32_t share;
    struct ibv_td *td;
    struct ibv_xrcd *xrcd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_cq_ex *ex;
    struct ibv_srq *srq, *xrc_srq;
    struct ibv_qp *qp;
    uint8_t memory[64];
    struct ibv_mr *mr;
    struct ibv_mw *mw;
    struct ibv_ah *ah;
};

void world_open(struct world *world);
void world_close(struct world *world);

/* Call the verb once. Return 0, or the errno that the verb reports in its own way. An object that the verb creates is
 * destroyed; an object that it is to destroy is created first, and if it refuses, it is called again and must
 * succeed. */
int call_verb(struct world *world, enum soft_verb verb);

/* Return whether the verb destroys an object. */
bool verb_destroys(enum soft_verb verb);

#endif
