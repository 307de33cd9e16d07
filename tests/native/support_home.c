#include "support.h"

struct ibv_pd *home_parent(const struct home *home, struct ibv_td *td)
{
    struct ibv_parent_domain_init_attr attr = {.pd = home->base, .td = td};

    return verbs_alloc_parent_domain(home->context, &attr);
}

void home_open_like(struct home *home, const struct check_variant *like)
{
    struct ibv_td_init_attr td_attr = {0};

    memset(home, 0, sizeof(*home));
    home->context = soft_open(&like->options);
    REQUIRE(home->context != NULL);
    home->base = home->pd = soft_verbs.alloc_pd(home->context);
    REQUIRE(home->base != NULL);
    if (!like->thread_domain)
        return;
    home->td = verbs_alloc_td(home->context, &td_attr);
    REQUIRE(home->td != NULL);
    home->pd = home_parent(home, home->td);
    REQUIRE(home->pd != NULL);
}

void home_open(struct home *home)
{
    home_open_like(home, variant);
}

void home_close(struct home *home)
{
    if (home->td) {
        CHECK_EQ(soft_verbs.dealloc_pd(home->pd), 0);
        CHECK_EQ(verbs_dealloc_td(home->td), 0);
    }
    CHECK_EQ(soft_verbs.dealloc_pd(home->base), 0);
    CHECK_EQ(soft_verbs.close_device(home->context), 0);
    memset(home, 0, sizeof(*home));
}

struct ibv_cq_ex *home_cq_ex(const struct home *home, int cqe, struct ibv_comp_channel *channel)
{
    struct ibv_cq_init_attr_ex attr = {
        .cqe = (uint32_t)cqe,
        .channel = channel,
        .wc_flags = IBV_WC_STANDARD_FLAGS,
        .comp_mask = home->td ? IBV_CQ_INIT_ATTR_MASK_PD : 0,
        .parent_domain = home->td ? home->pd : NULL,
    };
    struct ibv_cq_ex *cq = verbs_create_cq_ex(home->context, &attr);

    REQUIRE(cq != NULL);
    return cq;
}

struct ibv_cq *home_cq(const struct home *home, int cqe, struct ibv_comp_channel *channel)
{
    struct ibv_cq *cq;

    if (home->td)
        return cq_of(home_cq_ex(home, cqe, channel));
    cq = soft_verbs.create_cq(home->context, cqe, NULL, channel, 0);
    REQUIRE(cq != NULL);
    return cq;
}
