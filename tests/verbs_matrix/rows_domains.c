/* Protection, thread, parent, shared and XRC domains. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "probe.h"

#include <fcntl.h>
#include <unistd.h>

#include "soft/api/device.h"
#include "soft/objects/pd_share.h"

#define FD_AND_FLAGS (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS)

ROW(import_device, "over the context's own descriptor")
{
    REPORT_OBJECT(verbs->import_device(context->cmd_fd));
}

ROW(import_pd, "the context's own")
{
    REPORT_OBJECT(verbs->import_pd(context, domain()->handle));
}

ROW(unimport_pd, "an allocated one, which survives")
{
    struct ibv_pd *pd = domain();

    verbs->unimport_pd(pd);
    REPORT_INT(verbs->dealloc_pd(pd));
}

ROW(alloc_pd, "two of one context")
{
    REPORT_OBJECT(verbs->alloc_pd(context));
    REPORT_OBJECT(verbs->alloc_pd(context));
}

ROW(dealloc_pd, "without users")
{
    REPORT_INT(verbs->dealloc_pd(domain()));
}

ROW(dealloc_pd, "with a region")
{
    region(0);
    REPORT_INT(verbs->dealloc_pd(domain()));
}

ROW(dealloc_pd, "with a memory window")
{
    REQUIRE_OBJECT(verbs_alloc_mw(domain(), IBV_MW_TYPE_1));
    REPORT_INT(verbs->dealloc_pd(domain()));
}

ROW(dealloc_pd, "with a queue pair")
{
    make_end(&a, IBV_QPT_RC);
    REQUIRE_INT(verbs->dereg_mr(a.mr));
    REPORT_INT(verbs->dealloc_pd(domain()));
}

ROW(dealloc_pd, "with a shared receive queue")
{
    shared_queue(4);
    REPORT_INT(verbs->dealloc_pd(domain()));
}

ROW(dealloc_pd, "with an address handle")
{
    handle_to_self();
    REPORT_INT(verbs->dealloc_pd(domain()));
}

/* ---- Thread and parent domains ---------------------------------------------------------------------------- */

ROW(alloc_td, "without attributes")
{
    struct ibv_td_init_attr attr = {0};

    REPORT_OBJECT(verbs_alloc_td(context, &attr));
}

ROW(alloc_td, "an unknown bit in comp_mask")
{
    struct ibv_td_init_attr attr = {.comp_mask = 1u << 31};

    REPORT_OBJECT(verbs_alloc_td(context, &attr));
}

static struct ibv_td *thread_domain(void)
{
    struct ibv_td_init_attr attr = {0};

    return REQUIRE_OBJECT(verbs_alloc_td(context, &attr));
}

ROW(dealloc_td, "without users")
{
    REPORT_INT(verbs_dealloc_td(thread_domain()));
}

ROW(dealloc_td, "with a parent domain")
{
    struct ibv_parent_domain_init_attr attr = {.pd = domain(), .td = thread_domain()};

    REQUIRE_OBJECT(verbs_alloc_parent_domain(context, &attr));
    REPORT_INT(verbs_dealloc_td(attr.td));
}

static void *allocate(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t resource_type)
{
    (void)pd, (void)alignment, (void)resource_type;
    if (pd_context)
        return NULL;
    return pages(size);
}

static void *use_default(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t resource_type)
{
    (void)pd, (void)pd_context, (void)size, (void)alignment, (void)resource_type;
    return IBV_ALLOCATOR_USE_DEFAULT;
}

static void deallocate(struct ibv_pd *pd, void *pd_context, void *memory, uint64_t resource_type)
{
    (void)pd, (void)pd_context, (void)memory, (void)resource_type;
}

ROW(alloc_parent_domain, "of a protection domain")
{
    struct ibv_parent_domain_init_attr attr = {.pd = domain()};

    REPORT_OBJECT(verbs_alloc_parent_domain(context, &attr));
}

ROW(alloc_parent_domain, "with a thread domain")
{
    struct ibv_parent_domain_init_attr attr = {.pd = domain(), .td = thread_domain()};

    REPORT_OBJECT(verbs_alloc_parent_domain(context, &attr));
}

ROW(alloc_parent_domain, "without a protection domain")
{
    struct ibv_parent_domain_init_attr attr = {0};

    REPORT_OBJECT(verbs_alloc_parent_domain(context, &attr));
}

ROW(alloc_parent_domain, "of a parent domain")
{
    struct ibv_parent_domain_init_attr attr = {.pd = domain()};

    attr.pd = REQUIRE_OBJECT(verbs_alloc_parent_domain(context, &attr));
    REPORT_OBJECT(verbs_alloc_parent_domain(context, &attr));
}

ROW(alloc_parent_domain, "an allocator with one of its two functions")
{
    struct ibv_parent_domain_init_attr attr = {
        .pd = domain(), .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS, .alloc = allocate};

    REPORT_OBJECT(verbs_alloc_parent_domain(context, &attr));
}

ROW(alloc_parent_domain, "an unknown bit in comp_mask")
{
    struct ibv_parent_domain_init_attr attr = {.pd = domain(), .comp_mask = 1u << 31};

    REPORT_OBJECT(verbs_alloc_parent_domain(context, &attr));
}

static void report_queue_on(void *(*alloc)(struct ibv_pd *, void *, size_t, size_t, uint64_t), void *pd_context)
{
    struct ibv_parent_domain_init_attr attr = {
        .pd = domain(),
        .comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        .alloc = alloc,
        .free = deallocate,
        .pd_context = pd_context,
    };
    struct ibv_pd *parent = REQUIRE_OBJECT(verbs_alloc_parent_domain(context, &attr));
    struct ibv_qp_init_attr qp = qp_attr(IBV_QPT_RC);

    REPORT_OBJECT(verbs->create_qp(parent, &qp));
}

ROW(alloc_parent_domain, "a queue pair in an allocator's memory")
{
    report_queue_on(allocate, NULL);
}

ROW(alloc_parent_domain, "a queue pair when the allocator defers to the provider")
{
    report_queue_on(use_default, NULL);
}

ROW(alloc_parent_domain, "a queue pair when the allocator fails")
{
    report_queue_on(allocate, &context);
}

ROW(dealloc_pd, "of a parent domain with a queue pair")
{
    struct ibv_parent_domain_init_attr attr = {.pd = domain()};
    struct ibv_pd *parent = REQUIRE_OBJECT(verbs_alloc_parent_domain(context, &attr));
    struct ibv_qp_init_attr qp = qp_attr(IBV_QPT_RC);

    REQUIRE_OBJECT(verbs->create_qp(parent, &qp));
    REPORT_INT(verbs->dealloc_pd(parent));
    REPORT_INT(verbs->dealloc_pd(domain()));
}

/* ---- XRC domains ------------------------------------------------------------------------------------------ */

static struct ibv_xrcd *open_domain(uint32_t comp_mask, int fd, int oflags)
{
    struct ibv_xrcd_init_attr attr = {.comp_mask = comp_mask, .fd = fd, .oflags = oflags};

    errno = 0;
    return verbs_open_xrcd(context, &attr);
}

static int file(void)
{
    char name[] = "/tmp/aioverbs-probe-XXXXXX";
    int fd = mkstemp(name);

    unlink(name);
    return fd;
}

ROW(open_xrcd, "without an inode")
{
    report_object(open_domain(FD_AND_FLAGS, -1, O_CREAT));
}

ROW(open_xrcd, "without an inode and without O_CREAT")
{
    report_object(open_domain(FD_AND_FLAGS, -1, 0));
}

ROW(open_xrcd, "one of the two bits of comp_mask")
{
    report_object(open_domain(IBV_XRCD_INIT_ATTR_FD, -1, O_CREAT));
}

ROW(open_xrcd, "an unknown bit in comp_mask")
{
    report_object(open_domain(FD_AND_FLAGS | 1u << 31, -1, O_CREAT));
}

ROW(open_xrcd, "an inode: O_CREAT, then without, then O_EXCL")
{
    int fd = file();

    require_object(open_domain(FD_AND_FLAGS, fd, O_CREAT));
    report_object(open_domain(FD_AND_FLAGS, fd, 0));
    report_object(open_domain(FD_AND_FLAGS, fd, O_CREAT | O_EXCL));
}

ROW(open_xrcd, "an inode without a domain, without O_CREAT")
{
    report_object(open_domain(FD_AND_FLAGS, file(), 0));
}

ROW(open_xrcd, "a closed descriptor")
{
    report_object(open_domain(FD_AND_FLAGS, 999, O_CREAT));
}

ROW(close_xrcd, "without users")
{
    REPORT_INT(verbs_close_xrcd(require_object(open_domain(FD_AND_FLAGS, -1, O_CREAT))));
}

ROW(close_xrcd, "with a shared receive queue")
{
    struct ibv_xrcd *xrcd = require_object(open_domain(FD_AND_FLAGS, -1, O_CREAT));
    struct ibv_srq_init_attr_ex attr = {
        .attr = {.max_wr = 4, .max_sge = 1},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = domain(),
        .xrcd = xrcd,
        .cq = queue(16),
    };

    REQUIRE_OBJECT(verbs_create_srq_ex(context, &attr));
    REPORT_INT(verbs_close_xrcd(xrcd));
}

/* ---- Shared protection domains, which libibverbs never adopted
 * ------------------------------------------------------ */

static bool shares(void)
{
    if (verbs == &soft_verbs)
        return true;
    report("absent");
    return false;
}

ROW(alloc_shpd, "of a protection domain, twice")
{
    uint32_t share;

    if (!shares())
        return;
    REPORT_INT(soft_alloc_shpd(domain(), 7, &share));
    REPORT_INT(soft_alloc_shpd(domain(), 7, &share));
}

ROW(alloc_shpd, "of a parent domain")
{
    struct ibv_parent_domain_init_attr attr;
    uint32_t share;

    if (!shares())
        return;
    attr = (struct ibv_parent_domain_init_attr){.pd = domain()};
    REPORT_INT(soft_alloc_shpd(REQUIRE_OBJECT(verbs_alloc_parent_domain(context, &attr)), 7, &share));
}

ROW(share_pd, "with its key, and with another one, and of another identifier")
{
    uint32_t share = 0;

    if (!shares())
        return;
    REQUIRE_INT(soft_alloc_shpd(domain(), 7, &share));
    REPORT_OBJECT(soft_share_pd(context, share, 7));
    REPORT_OBJECT(soft_share_pd(context, share, 8));
    REPORT_OBJECT(soft_share_pd(context, share + 1, 7));
}

ROW(share_pd, "memory of one context by a queue pair of another one")
{
    struct ibv_context *other;
    struct ibv_mr *mr;
    uint32_t share = 0;

    if (!shares())
        return;
    REQUIRE_INT(soft_alloc_shpd(domain(), 7, &share));
    other = require_object(open_again());
    pair_pd_of_b = REQUIRE_OBJECT(soft_share_pd(other, share, 7));
    mr = REQUIRE_OBJECT(verbs->reg_mr(pair_pd_of_b, pages(4096), 4096, ALL_ACCESS));
    pair_pd_of_b = NULL;
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    wr->wr.rdma.remote_addr = (uintptr_t)mr->addr;
    wr->wr.rdma.rkey = mr->rkey;
    REPORT_INT(post(&a, wr));
    report_statuses(a.send_cq, 1);
}
