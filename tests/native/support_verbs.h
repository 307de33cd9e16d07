/* Each verb of the device, called with what it needs. */
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

/* Calls the verb once: 0, or the errno that it answers in its manner. What it makes is destroyed; what it is to
 * destroy is made before, and where it refuses that, it is asked again and must not. */
int call_verb(struct world *world, enum soft_verb verb);

/* Whether it destroys something. */
bool verb_destroys(enum soft_verb verb);

#endif
