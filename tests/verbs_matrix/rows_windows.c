/* Memory windows: type 1 by its own verb, type 2 by work requests. */
#include "probe.h"

static struct ibv_mw *window(enum ibv_mw_type type)
{
    return REQUIRE_OBJECT(verbs_alloc_mw(domain(), type));
}

static int bind_1(struct ibv_mw *mw, uint64_t length, unsigned int access)
{
    struct ibv_mw_bind bind = {
        .wr_id = 300,
        .send_flags = IBV_SEND_SIGNALED,
        .bind_info = {.mr = b.mr, .addr = (uintptr_t)b.memory, .length = length, .mw_access_flags = access},
    };

    errno = 0;
    return verbs_bind_mw(b.qp, mw, &bind);
}

/* Like ibv_inc_rkey: changes the eight bits that belong to the user. */
static uint32_t next_key(uint32_t rkey)
{
    return (rkey & ~0xffu) | ((rkey + 1) & 0xff);
}

static struct ibv_send_wr *bind_2(struct ibv_mw *mw, uint64_t length, unsigned int access)
{
    struct ibv_send_wr *wr = request(IBV_WR_BIND_MW, &b, NULL, 0);

    wr->bind_mw.mw = mw;
    wr->bind_mw.rkey = next_key(mw->rkey);
    wr->bind_mw.bind_info =
        (struct ibv_mw_bind_info){.mr = b.mr, .addr = (uintptr_t)b.memory, .length = length, .mw_access_flags = access};
    return wr;
}

/* Posts a type 2 binding, and waits for it; returns the new key. */
static uint32_t bound_2(struct ibv_mw *mw)
{
    struct ibv_send_wr *wr = bind_2(mw, 4096, ALL_REMOTE);

    REQUIRE_INT(post(&b, wr));
    require_success(b.send_cq, 1);
    return wr->bind_mw.rkey;
}

static struct ibv_send_wr *write_by(uint32_t rkey, size_t offset)
{
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);

    wr->wr.rdma.rkey = rkey;
    wr->wr.rdma.remote_addr += offset;
    return wr;
}

ROW(alloc_mw, "type 1 and type 2")
{
    REPORT_OBJECT(verbs_alloc_mw(domain(), IBV_MW_TYPE_1));
    REPORT_OBJECT(verbs_alloc_mw(domain(), IBV_MW_TYPE_2));
}

ROW(alloc_mw, "an invalid type")
{
    REPORT_OBJECT(verbs_alloc_mw(domain(), (enum ibv_mw_type)3));
}

ROW(dealloc_mw, "never bound")
{
    REPORT_INT(verbs_dealloc_mw(window(IBV_MW_TYPE_1)));
}

ROW(dealloc_mw, "bound; then its key")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_1);
    REQUIRE_INT(bind_1(mw, 4096, ALL_REMOTE));
    require_success(b.send_cq, 1);
    uint32_t rkey = mw->rkey;
    REPORT_INT(verbs_dealloc_mw(mw));
    REQUIRE_INT(post(&a, write_by(rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(bind_mw, "type 1, and a write through it")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_1);
    uint32_t before = mw->rkey;
    REPORT_INT(bind_1(mw, 4096, ALL_REMOTE));
    report_completions(b.send_cq, 1);
    report("%s", mw->rkey != before ? "another key" : "the same key");
    REQUIRE_INT(post(&a, write_by(mw->rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(bind_mw, "type 1, and a write beyond it")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_1);
    REQUIRE_INT(bind_1(mw, 16, ALL_REMOTE));
    require_success(b.send_cq, 1);
    REQUIRE_INT(post(&a, write_by(mw->rkey, 12)));
    report_statuses(a.send_cq, 1);
}

ROW(bind_mw, "type 1 for reading only, and a write")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_1);
    REQUIRE_INT(bind_1(mw, 4096, IBV_ACCESS_REMOTE_READ));
    require_success(b.send_cq, 1);
    REQUIRE_INT(post(&a, write_by(mw->rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(bind_mw, "type 1 again elsewhere, and a write by the first key")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_1);
    REQUIRE_INT(bind_1(mw, 4096, ALL_REMOTE));
    require_success(b.send_cq, 1);
    uint32_t rkey = mw->rkey;
    REQUIRE_INT(bind_1(mw, 64, ALL_REMOTE));
    require_success(b.send_cq, 1);
    REQUIRE_INT(post(&a, write_by(rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(bind_mw, "type 1, no bytes: unbinds")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_1);
    REQUIRE_INT(bind_1(mw, 4096, ALL_REMOTE));
    require_success(b.send_cq, 1);
    REPORT_INT(bind_1(mw, 0, 0));
    report_statuses(b.send_cq, 1);
    REQUIRE_INT(post(&a, write_by(mw->rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(bind_mw, "type 1 beyond its region")
{
    make_pair(IBV_QPT_RC);
    REPORT_INT(bind_1(window(IBV_MW_TYPE_1), MEMORY_BYTES + 1, ALL_REMOTE));
    report_statuses(b.send_cq, 1);
}

ROW(bind_mw, "type 1 to a region without MW_BIND")
{
    make_pair(IBV_QPT_RC);
    b.mr = REQUIRE_OBJECT(verbs->reg_mr(domain(), b.memory, 4096, ALL_ACCESS));
    REPORT_INT(bind_1(window(IBV_MW_TYPE_1), 4096, ALL_REMOTE));
    report_statuses(b.send_cq, 1);
}

ROW(bind_mw, "type 1 for remote writes to a region without LOCAL_WRITE")
{
    make_pair(IBV_QPT_RC);
    b.mr = REQUIRE_OBJECT(verbs->reg_mr(domain(), b.memory, 4096, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND));
    REPORT_INT(bind_1(window(IBV_MW_TYPE_1), 4096, IBV_ACCESS_REMOTE_WRITE));
    report_statuses(b.send_cq, 1);
}

ROW(bind_mw, "type 1 of another protection domain")
{
    make_pair(IBV_QPT_RC);
    struct ibv_pd *other = REQUIRE_OBJECT(verbs->alloc_pd(context));
    REPORT_INT(bind_1(REQUIRE_OBJECT(verbs_alloc_mw(other, IBV_MW_TYPE_1)), 4096, ALL_REMOTE));
    report_statuses(b.send_cq, 1);
}

ROW(bind_mw, "type 1 zero-based")
{
    make_pair(IBV_QPT_RC);
    REPORT_INT(bind_1(window(IBV_MW_TYPE_1), 4096, ALL_REMOTE | IBV_ACCESS_ZERO_BASED));
    report_statuses(b.send_cq, 1);
}

ROW(bind_mw, "type 2 by the verb of type 1")
{
    make_pair(IBV_QPT_RC);
    REPORT_INT(bind_1(window(IBV_MW_TYPE_2), 4096, ALL_REMOTE));
}

ROW(bind_mw, "on a datagram queue pair")
{
    make_pair(IBV_QPT_UD);
    REPORT_INT(bind_1(window(IBV_MW_TYPE_1), 4096, ALL_REMOTE));
}

ROW(dereg_mr, "with a window bound to it")
{
    make_pair(IBV_QPT_RC);
    REQUIRE_INT(bind_1(window(IBV_MW_TYPE_1), 4096, ALL_REMOTE));
    require_success(b.send_cq, 1);
    REPORT_INT(verbs->dereg_mr(b.mr));
}

ROW(post_send, "BIND_MW of type 2, and a write through it")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    struct ibv_send_wr *wr = bind_2(mw, 4096, ALL_REMOTE);
    REPORT_INT(post(&b, wr));
    report_completions(b.send_cq, 1);
    REQUIRE_INT(post(&a, write_by(wr->bind_mw.rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(post_send, "BIND_MW of type 2, already bound")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    uint32_t rkey = bound_2(mw);
    struct ibv_send_wr *wr = bind_2(mw, 4096, ALL_REMOTE);
    wr->bind_mw.rkey = next_key(rkey);
    REPORT_INT(post(&b, wr));
    report_statuses(b.send_cq, 1);
}

ROW(post_send, "BIND_MW of type 1")
{
    make_pair(IBV_QPT_RC);
    REPORT_INT(post(&b, bind_2(window(IBV_MW_TYPE_1), 4096, ALL_REMOTE)));
    report_statuses(b.send_cq, 1);
}

ROW(post_send, "BIND_MW of type 2, no bytes")
{
    make_pair(IBV_QPT_RC);
    REPORT_INT(post(&b, bind_2(window(IBV_MW_TYPE_2), 0, ALL_REMOTE)));
    report_statuses(b.send_cq, 1);
}

ROW(post_send, "LOCAL_INV of a window, and a write through it")
{
    make_pair(IBV_QPT_RC);
    uint32_t rkey = bound_2(window(IBV_MW_TYPE_2));
    struct ibv_send_wr *wr = request(IBV_WR_LOCAL_INV, &b, NULL, 0);
    wr->invalidate_rkey = rkey;
    REPORT_INT(post(&b, wr));
    report_completions(b.send_cq, 1);
    REQUIRE_INT(post(&a, write_by(rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(post_send, "LOCAL_INV of a region's key")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_LOCAL_INV, &b, NULL, 0);
    wr->invalidate_rkey = b.mr->rkey;
    REPORT_INT(post(&b, wr));
    report_statuses(b.send_cq, 1);
}

ROW(post_send, "SEND_WITH_INV of a window, and a write through it")
{
    make_pair(IBV_QPT_RC);
    uint32_t rkey = bound_2(window(IBV_MW_TYPE_2));
    struct ibv_send_wr *wr = request(IBV_WR_SEND_WITH_INV, &a, &b, 8);
    wr->invalidate_rkey = rkey;
    REQUIRE_INT(post_receive(&b, 64));
    REPORT_INT(post(&a, wr));
    report_completions(a.send_cq, 1);
    report_completions(b.recv_cq, 1);
    REQUIRE_INT(post(&a, write_by(rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(post_send, "SEND_WITH_INV of an invalid key")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_SEND_WITH_INV, &a, &b, 8);
    wr->invalidate_rkey = b.mr->rkey + 0x500000;
    REQUIRE_INT(post_receive(&b, 64));
    REPORT_INT(post(&a, wr));
    report_statuses(a.send_cq, 1);
    report_statuses(b.recv_cq, 1);
}

ROW(post_send, "a write through a type 2 window bound on another queue pair")
{
    struct end c;

    make_pair(IBV_QPT_RC);
    uint32_t rkey = bound_2(window(IBV_MW_TYPE_2));
    c = b;
    make_end(&b, IBV_QPT_RC);
    REQUIRE_INT(step(a.qp, IBV_QPS_RESET, 0));
    move_to_state(a.qp, IBV_QPS_RTS, b.qp->qp_num);
    move_to_state(b.qp, IBV_QPS_RTS, a.qp->qp_num);
    b.memory = c.memory;
    REQUIRE_INT(post(&a, write_by(rkey, 0)));
    report_statuses(a.send_cq, 1);
}

ROW(destroy_qp, "with a type 2 window bound on it; then the window is deallocated")
{
    make_pair(IBV_QPT_RC);
    struct ibv_mw *mw = window(IBV_MW_TYPE_2);
    bound_2(mw);
    REPORT_INT(verbs->destroy_qp(b.qp));
    REPORT_INT(verbs_dealloc_mw(mw));
}
