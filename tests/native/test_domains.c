/* Tests of protection, thread and parent domains; a parent object cannot be destroyed while it has children. */
#include "support.h"

/* One object of each kind, with a thread domain in all variants. */
struct tree {
    struct ibv_context *context;
    struct ibv_pd *pd, *parent;
    struct ibv_td *td;
    struct ibv_mr *mr, *parent_mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq, *parent_cq;
    struct ibv_qp *qp, *parent_qp;
    char memory[64];
};

static struct ibv_qp *make_qp_on(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq)
{
    struct ibv_qp_init_attr attr = {
        .send_cq = send_cq,
        .recv_cq = recv_cq,
        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };

    return soft_verbs.create_qp(pd, &attr);
}

static void plant(struct tree *tree)
{
    struct ibv_td_init_attr td_attr = {0};
    struct ibv_parent_domain_init_attr parent_attr = {0};
    struct ibv_cq_init_attr_ex cq_attr = {.cqe = 4, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD};

    memset(tree, 0, sizeof(*tree));
    tree->context = soft_open(&variant->options);
    REQUIRE(tree->context != NULL);
    tree->pd = soft_verbs.alloc_pd(tree->context);
    tree->td = verbs_alloc_td(tree->context, &td_attr);
    REQUIRE(tree->pd && tree->td);
    parent_attr.pd = tree->pd;
    parent_attr.td = tree->td;
    tree->parent = verbs_alloc_parent_domain(tree->context, &parent_attr);
    REQUIRE(tree->parent != NULL);
    tree->mr = soft_verbs.reg_mr(tree->pd, tree->memory, 64, 0);
    tree->parent_mr = soft_verbs.reg_mr(tree->parent, tree->memory, 64, 0);
    tree->channel = soft_verbs.create_comp_channel(tree->context);
    REQUIRE(tree->mr && tree->parent_mr && tree->channel);
    tree->cq = soft_verbs.create_cq(tree->context, 4, NULL, tree->channel, 0);
    cq_attr.parent_domain = tree->parent;
    tree->parent_cq = cq_of(verbs_create_cq_ex(tree->context, &cq_attr));
    REQUIRE(tree->cq && tree->parent_cq);
    tree->qp = make_qp_on(tree->pd, tree->cq, tree->parent_cq);
    tree->parent_qp = make_qp_on(tree->parent, tree->parent_cq, tree->cq);
    REQUIRE(tree->qp && tree->parent_qp);
}

enum node { PD, TD, PARENT, MR, PARENT_MR, CHANNEL, CQ, PARENT_CQ, QP, PARENT_QP, CONTEXT, NODES };

/* For each node, the nodes that must be destroyed before. */
#define BIT(node) (1u << (node))
static const unsigned int children[NODES] = {
    [PD] = BIT(PARENT) | BIT(MR) | BIT(QP),
    [TD] = BIT(PARENT),
    [PARENT] = BIT(PARENT_MR) | BIT(PARENT_CQ) | BIT(PARENT_QP),
    [CHANNEL] = BIT(CQ),
    [CQ] = BIT(QP) | BIT(PARENT_QP),
    [PARENT_CQ] = BIT(QP) | BIT(PARENT_QP),
    [CONTEXT] = BIT(CONTEXT) - 1,
};

static int fell(struct tree *tree, enum node node)
{
    switch (node) {
    case PD:
        return soft_verbs.dealloc_pd(tree->pd);
    case TD:
        return verbs_dealloc_td(tree->td);
    case PARENT:
        return soft_verbs.dealloc_pd(tree->parent);
    case MR:
        return soft_verbs.dereg_mr(tree->mr);
    case PARENT_MR:
        return soft_verbs.dereg_mr(tree->parent_mr);
    case CHANNEL:
        return soft_verbs.destroy_comp_channel(tree->channel);
    case CQ:
        return soft_verbs.destroy_cq(tree->cq);
    case PARENT_CQ:
        return soft_verbs.destroy_cq(tree->parent_cq);
    case QP:
        return soft_verbs.destroy_qp(tree->qp);
    case PARENT_QP:
        return soft_verbs.destroy_qp(tree->parent_qp);
    default:
        return soft_verbs.close_device(tree->context);
    }
}

/* Try to destroy all objects again and again, each time from a different start: an attempt fails with EBUSY exactly
 * while a child exists. */
static void busy_in_every_order(void)
{
    unsigned int start, stride;

    for (start = 0; start < NODES; start++) {
        for (stride = 1; stride < NODES; stride++) { /* NODES is a prime */
            unsigned int alive = BIT(NODES) - 1, at = start;
            struct tree tree;

            plant(&tree);
            for (; alive; at = (at + stride) % NODES) {
                enum node node = (enum node)at;
                bool busy = alive & children[node];

                if (!(alive & BIT(node)))
                    continue;
                REQUIRE_EQ(fell(&tree, node), busy ? EBUSY : 0);
                if (!busy)
                    alive &= ~BIT(node);
            }
        }
    }
}

/* Each child alone keeps each of its parents. */
static void busy_for_one_child(void)
{
    unsigned int parent, child;

    for (parent = 0; parent < NODES; parent++) {
        for (child = 0; child < NODES; child++) {
            unsigned int gone = 0, left = BIT(NODES) - 1, tries;
            struct tree tree;

            if (!(children[parent] & BIT(child)))
                continue;
            plant(&tree);
            /* All that neither is `child` nor needed by it goes first, whatever order that takes. */
            for (tries = 0; tries < NODES; tries++) {
                unsigned int node;

                for (node = 0; node < NODES; node++)
                    if (node != child && node != parent && !(gone & BIT(node)) && !(children[node] & left) &&
                        fell(&tree, (enum node)node) == 0) {
                        gone |= BIT(node);
                        left &= ~BIT(node);
                    }
            }
            REQUIRE_EQ(fell(&tree, (enum node)parent), EBUSY);
            for (tries = 0; left && tries < NODES; tries++) {
                unsigned int node;

                for (node = 0; node < NODES; node++)
                    if ((left & BIT(node)) && !(children[node] & left)) {
                        REQUIRE_EQ(fell(&tree, (enum node)node), 0);
                        left &= ~BIT(node);
                    }
            }
            REQUIRE_EQ(left, 0);
        }
    }
}

static void thread_domain_attributes(void)
{
    struct ibv_td_init_attr attr = {.comp_mask = 1};
    struct home home;

    home_open(&home);
    CHECK_REFUSED(verbs_alloc_td(home.context, &attr), EINVAL);
    home_close(&home);
}

static void parent_domain_attributes(void)
{
    struct ibv_parent_domain_init_attr attr = {0};
    struct ibv_td_init_attr td_attr = {0};
    struct ibv_pd *parent, *bare, *nested;
    struct home home, other;
    struct ibv_td *other_td;

    home_open(&home);
    home_open(&other);
    other_td = verbs_alloc_td(other.context, &td_attr);

    CHECK_REFUSED(verbs_alloc_parent_domain(home.context, &attr), EINVAL); /* no domain to extend */
    attr.pd = other.base;
    CHECK_REFUSED(verbs_alloc_parent_domain(home.context, &attr), EINVAL);
    attr.pd = home.base;
    attr.td = other_td;
    CHECK_REFUSED(verbs_alloc_parent_domain(home.context, &attr), EINVAL);
    attr.td = NULL;
    attr.comp_mask = 1 << 2;
    CHECK_REFUSED(verbs_alloc_parent_domain(home.context, &attr), EINVAL);
    attr.comp_mask = 0;

    bare = verbs_alloc_parent_domain(home.context, &attr); /* with nothing but the domain */
    REQUIRE(bare != NULL);
    CHECK_EQ(bare->handle, home.base->handle);
    CHECK(bare->context == home.context);
    attr.pd = bare;
    nested = verbs_alloc_parent_domain(home.context, &attr); /* a parent domain is as good as its protection domain */
    REQUIRE(nested != NULL);
    CHECK_EQ(nested->handle, home.base->handle);
    CHECK_EQ(soft_verbs.dealloc_pd(bare), 0); /* of which nothing else is kept */
    CHECK_EQ(soft_verbs.dealloc_pd(home.base), EBUSY);

    /* Refusals have left no references behind. */
    parent = home_parent(&home, home.td);
    REQUIRE(parent != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(parent), 0);
    CHECK_EQ(soft_verbs.dealloc_pd(nested), 0);
    CHECK_EQ(verbs_dealloc_td(other_td), 0);
    home_close(&other);
    home_close(&home);
}

/* One domain, many loops: what one parent domain's regions allow serves the queues of all over the same base. */
static void parents_share_the_base(void)
{
    struct home second;
    struct pair pair;
    struct end end;
    struct home home;

    home_open(&home);
    second = home;
    second.pd = home_parent(&home, NULL);
    REQUIRE(second.pd != NULL);
    PAIR_OPEN(&pair, .homes = {&home, &second});
    memcpy(pair.a.memory, "one domain", 11);
    CHECK_EQ(post_write(&pair.a, &pair.b, 1, 11), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.b.memory, "one domain", 11));

    /* A region of the other parent domain, from this queue pair. */
    end = pair.a;
    end.memory = malloc(64);
    memcpy(end.memory, "another", 8);
    end.mr = soft_verbs.reg_mr(second.pd, end.memory, 64, 0);
    REQUIRE(end.mr != NULL);
    CHECK_EQ(post_write(&end, &pair.b, 2, 8), 0);
    EXPECT(pair.a.send_cq, 2, IBV_WC_SUCCESS);
    CHECK(!memcmp(pair.b.memory, "another", 8));
    CHECK_EQ(soft_verbs.dereg_mr(end.mr), 0);
    free(end.memory);
    pair_close(&pair);
    CHECK_EQ(soft_verbs.dealloc_pd(second.pd), 0);
    home_close(&home);
}

static void one_thread_domain_many_parents(void)
{
    struct ibv_td_init_attr attr = {0};
    struct ibv_pd *parents[5];
    struct ibv_td *td;
    struct home home;
    size_t i;

    home_open(&home);
    td = verbs_alloc_td(home.context, &attr);
    REQUIRE(td && td->context == home.context);
    for (i = 0; i < COUNT_OF(parents); i++)
        REQUIRE((parents[i] = home_parent(&home, td)) != NULL);
    for (i = 0; i < COUNT_OF(parents); i++) {
        CHECK_EQ(verbs_dealloc_td(td), EBUSY);
        CHECK_EQ(soft_verbs.dealloc_pd(home.base), EBUSY);
        CHECK_EQ(soft_verbs.dealloc_pd(parents[i]), 0);
    }
    CHECK_EQ(verbs_dealloc_td(td), 0);
    home_close(&home);
}

CHECK_MAIN(CASE(busy_in_every_order), CASE(busy_for_one_child), CASE(thread_domain_attributes),
           CASE(parent_domain_attributes), CASE(parents_share_the_base), CASE(one_thread_domain_many_parents))
