/* Memory regions. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "probe.h"

#include <sys/mman.h>

static struct ibv_mr *report_region(void *address, size_t length, int access)
{
    return REPORT_OBJECT(verbs->reg_mr(domain(), address, length, access));
}

#define ACCESS_ROW(asked, access)                 \
    ROW(reg_mr, asked)                            \
    {                                             \
        report_region(pages(4096), 4096, access); \
    }

ACCESS_ROW("access: none", 0)
ACCESS_ROW("access: LOCAL_WRITE", IBV_ACCESS_LOCAL_WRITE)
ACCESS_ROW("access: REMOTE_READ alone", IBV_ACCESS_REMOTE_READ)
ACCESS_ROW("access: REMOTE_WRITE without LOCAL_WRITE", IBV_ACCESS_REMOTE_WRITE)
ACCESS_ROW("access: REMOTE_ATOMIC without LOCAL_WRITE", IBV_ACCESS_REMOTE_ATOMIC)
ACCESS_ROW("access: all of LOCAL_WRITE and REMOTE_...", ALL_ACCESS)
ACCESS_ROW("access: MW_BIND alone", IBV_ACCESS_MW_BIND)
ACCESS_ROW("access: ZERO_BASED", IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED)
ACCESS_ROW("access: ON_DEMAND", IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND)
ACCESS_ROW("access: HUGETLB, of ordinary pages", IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_HUGETLB)
ACCESS_ROW("access: RELAXED_ORDERING, which is optional", IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING)
ACCESS_ROW("access: an unknown optional bit", IBV_ACCESS_LOCAL_WRITE | 1 << 28)
ACCESS_ROW("access: an unknown bit", IBV_ACCESS_LOCAL_WRITE | 1 << 15)

ROW(reg_mr, "no bytes")
{
    report_region(pages(4096), 0, IBV_ACCESS_LOCAL_WRITE);
}

ROW(reg_mr, "a range that leaves the address space")
{
    report_region(pages(4096), SIZE_MAX - 4096, IBV_ACCESS_LOCAL_WRITE);
}

ROW(reg_mr, "memory that is not mapped")
{
    uint8_t *memory = pages(8192);

    munmap(memory, 8192);
    report_region(memory, 4096, IBV_ACCESS_LOCAL_WRITE);
}

ROW(reg_mr, "read-only memory for LOCAL_WRITE")
{
    uint8_t *memory = pages(4096);

    mprotect(memory, 4096, PROT_READ);
    report_region(memory, 4096, IBV_ACCESS_LOCAL_WRITE);
}

ROW(reg_mr, "at odd addresses and twice the same memory")
{
    uint8_t *memory = pages(8192);
    struct ibv_mr *one = report_region(memory + 1, 4097, ALL_ACCESS), *other = report_region(memory + 1, 4097, 0);

    report("%s", one && other && one->lkey != other->lkey ? "other keys" : "the same key");
}

ROW(dereg_mr, "without users")
{
    REPORT_INT(verbs->dereg_mr(region(ALL_ACCESS)));
}

ROW(dereg_mr, "before requests that use it are executed")
{
    struct ibv_sge sge = {.length = 16};

    make_pair(IBV_QPT_RC);
    struct ibv_mr *mr = REQUIRE_OBJECT(verbs->reg_mr(domain(), b.memory, 4096, IBV_ACCESS_LOCAL_WRITE));
    sge.addr = (uintptr_t)b.memory;
    sge.lkey = mr->lkey;
    REQUIRE_INT(post_receive_list(&b, &sge, 1));
    REPORT_INT(verbs->dereg_mr(mr));
    REQUIRE_INT(post(&a, request(IBV_WR_SEND, &a, &b, 8)));
    report_statuses(a.send_cq, 1);
    report_statuses(b.recv_cq, 1);
}

ROW(dereg_mr, "then its key in a request")
{
    make_pair(IBV_QPT_RC);
    struct ibv_send_wr *wr = request(IBV_WR_RDMA_WRITE, &a, &b, 8);
    REPORT_INT(verbs->dereg_mr(b.mr));
    REQUIRE_INT(post(&a, wr));
    report_statuses(a.send_cq, 1);
}

/* ---- Verbs outside of the library's table, or missing
 * --------------------------------------------------------------- */

ROW(rereg_mr, "other access")
{
    int (*rereg)(struct ibv_mr *, int, struct ibv_pd *, void *, size_t, int);

    *(void **)&rereg = find_libibverbs_function("ibv_rereg_mr");
    if (!rereg) {
        report("absent");
        return;
    }
    /* Error results are numbers from -1 to -5; errno has the reason. */
    errno = 0;
    report_int(rereg(region(ALL_ACCESS), IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) ? -1 : 0);
}

ROW(reg_dmabuf_mr, "an invalid descriptor")
{
    struct ibv_mr *(*reg)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);

    *(void **)&reg = find_libibverbs_function("ibv_reg_dmabuf_mr");
    if (!reg) {
        report("absent");
        return;
    }
    REPORT_OBJECT(reg(domain(), 0, 4096, 0, 999, IBV_ACCESS_LOCAL_WRITE));
}

ROW(alloc_null_mr, "one")
{
    REPORT_OBJECT(CALL_OP(NULL, alloc_null_mr, domain()));
}

ROW(advise_mr, "a prefetch")
{
    struct ibv_mr *mr = region(ALL_ACCESS);
    struct ibv_sge sge = {.addr = (uintptr_t)mr->addr, .length = 4096, .lkey = mr->lkey};

    REPORT_INT(CALL_OP(EOPNOTSUPP, advise_mr, domain(), IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1));
}

ROW(alloc_dm, "a page")
{
    struct ibv_alloc_dm_attr attr = {.length = 4096};

    REPORT_OBJECT(CALL_OP(NULL, alloc_dm, context, &attr));
}
