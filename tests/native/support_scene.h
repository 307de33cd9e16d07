/* A program that calls every verb of the device but close_device: the same calls each time, whenever completions come.
 */
#ifndef AIOVERBS_TESTS_SUPPORT_SCENE_H
#define AIOVERBS_TESTS_SUPPORT_SCENE_H

#include "support_home.h"

enum { SCENE_MADE = 32, SCENE_PIECES = 32 };

/* What an allocator gave; each piece comes back once, by its own type, and not after its domain. */
struct scene_piece {
    void *memory;
    uint64_t type;
    bool freed;
};

struct scene_made {
    void *object;
    int (*give_back)(void *);
};

/* A program with one of everything, as far as it got. */
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
    struct ibv_qp *qp, *ud, *from, *to; /* one connected to itself, one for datagrams, two ends of XRC */
    struct ibv_ah *ah;
    uint8_t memory[256];
};

/* Makes one of everything and uses it, up to the first verb that fails: its errno, or 0. */
int scene_run(struct scene *scene);

#endif
