/* Home: a context with the domains on which queues are created. */
#ifndef AIOVERBS_TESTS_SUPPORT_HOME_H
#define AIOVERBS_TESTS_SUPPORT_HOME_H

#include "support_check.h"

struct home {
    struct ibv_context *context;
    struct ibv_pd *base; /* for memory regions */
    struct ibv_td *td;   /* or NULL */
    struct ibv_pd *pd;   /* for queues: a parent domain if there is a thread domain, else `base` */
};

/* Open a home in variant `like`; home_open() uses the running variant. */
void home_open_like(struct home *home, const struct check_variant *like);
void home_open(struct home *home);

/* Close a home, and check that no object is left in it. */
void home_close(struct home *home);

/* Create a basic completion queue, on the thread domain if there is one. */
struct ibv_cq *home_cq(const struct home *home, int cqe, struct ibv_comp_channel *channel);

/* Create an extended completion queue with all fields of struct ibv_wc. */
struct ibv_cq_ex *home_cq_ex(const struct home *home, int cqe, struct ibv_comp_channel *channel);

/* Create a parent domain of `home->base` on a thread domain, which may be NULL. */
struct ibv_pd *home_parent(const struct home *home, struct ibv_td *td);

static inline struct ibv_cq *cq_of(struct ibv_cq_ex *ex)
{
    return (struct ibv_cq *)(void *)ex;
}

#endif
