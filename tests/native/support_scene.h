/* Scene: a program that calls every verb of the device but close_device, with the same calls each time, whenever
 * completions come. */
#ifndef AIOVERBS_TESTS_SUPPORT_SCENE_H
#define AIOVERBS_TESTS_SUPPORT_SCENE_H

#include "support_home.h"

enum { SCENE_MADE = 32, SCENE_PIECES = 32 };

/* Memory that an allocator returned. Each piece is freed once, with its own type, and not after its domain. */
struct scene_piece {
    void *memory;
    uint64_t type;
    bool freed;
};

struct scene_made {
    void *object;
    int (*give_back)(void *);
};

/* Objects of a scene: one of each kind, as far as it got. */
struct scene {
    struct ibv_context *context;
    struct scene_made made[SCENE_MADE];
    unsigned int made_count;
    struct scene_piece pieces[SCENE_PIECES];
    unsigned int piece_count, pieces_live;
    bool domain_gone;

    struct ibv_pd *base, *domain, *instance;
    struct ibv_td *td;
    struct ibv_xrcd *xrcd;
    struct ibv_mr *mr;
    struct ibv_mw *window, *second_window;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_cq_ex *ex;
    struct ibv_srq *srq, *xrc_srq;
    uint32_t xrc_number;
    struct ibv_qp *qp, *ud, *from, *to; /* connected to itself; for datagrams; two ends of XRC */
    struct ibv_ah *ah;
    uint8_t memory[256];
};

/* Create and use one object of each kind, up to the first verb that fails. Return its errno, or 0. */
int scene_run(struct scene *scene);

#endif
