/* A context with the domains that queues are made on. */
#ifndef AIOVERBS_TESTS_SUPPORT_HOME_H
#define AIOVERBS_TESTS_SUPPORT_HOME_H

#include "support_check.h"

struct home {
    struct ibv_context *context;
    struct ibv_pd *base; /* for memory regions */
    struct ibv_td *td;   /* or NULL */
    struct ibv_pd *pd;   /* for queues: a parent domain where there is a thread domain, else `base` */
};

/* As `like` says; home_open is as the running variant says. */
void home_open_like(struct home *home, const struct check_variant *like);
void home_open(struct home *home);

/* Checks that nothing is left in it. */
void home_close(struct home *home);

/* A basic completion queue, or one on the thread domain. */
struct ibv_cq *home_cq(const struct home *home, int cqe, struct ibv_comp_channel *channel);

/* An extended completion queue with all that struct ibv_wc has, too. */
struct ibv_cq_ex *home_cq_ex(const struct home *home, int cqe, struct ibv_comp_channel *channel);

/* A parent domain of `home->base` on a thread domain (may be NULL). */
struct ibv_pd *home_parent(const struct home *home, struct ibv_td *td);

static inline struct ibv_cq *cq_of(struct ibv_cq_ex *ex)
{
    return (struct ibv_cq *)(void *)ex;
}

#endif
