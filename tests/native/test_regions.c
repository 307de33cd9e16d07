/* Tests of memory regions: keys, rights and bounds, checked at registration and at every access. */
#include "support.h"
#include "support_kernel.h"

#include <sys/mman.h>
#include <unistd.h>

static void registration(void)
{
    static char memory[64];
    static const struct {
        int access, error;
    } accesses[] = {
        {0, 0},
        {IBV_ACCESS_LOCAL_WRITE, 0},
        {IBV_ACCESS_REMOTE_READ, 0},
        {IBV_ACCESS_REMOTE_WRITE, EINVAL}, /* remote write requires local write */
        {IBV_ACCESS_REMOTE_ATOMIC, EINVAL},
        {ACCESS_ALL, 0},
        {ACCESS_ALL | IBV_ACCESS_RELAXED_ORDERING, 0},
        {ACCESS_ALL | IBV_ACCESS_OPTIONAL_RANGE, 0},
        {IBV_ACCESS_MW_BIND, 0},
        {IBV_ACCESS_ZERO_BASED, EOPNOTSUPP},
        {IBV_ACCESS_ON_DEMAND, EOPNOTSUPP},
        {1 << 12, EINVAL},
        {1 << 30, EINVAL},
    };
    struct home home;
    size_t i;

    home_open(&home);
    for (i = 0; i < COUNT_OF(accesses); i++) {
        struct ibv_mr *mr;

        if (accesses[i].error) {
            CHECK_REFUSED(soft_verbs.reg_mr(home.base, memory, 64, accesses[i].access), accesses[i].error);
            continue;
        }
        mr = soft_verbs.reg_mr(home.base, memory, 64, accesses[i].access);
        REQUIRE(mr != NULL);
        CHECK(mr->context == home.context && mr->pd == home.base);
        CHECK(mr->addr == memory && mr->length == 64);
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    }
    CHECK_REFUSED(soft_verbs.reg_mr(home.base, memory, 0, 0), EINVAL);
    CHECK_REFUSED(soft_verbs.reg_mr(home.base, memory, SIZE_MAX, 0), EINVAL);
    home_close(&home);
}

/* Unmapped memory cannot be registered: a NIC pins pages. */
static void unmapped_memory(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ibv_mr *mr;
    struct home home;

    REQUIRE(memory != MAP_FAILED);
    REQUIRE_EQ(munmap(memory + 2 * page, page), 0);
    home_open(&home);
    mr = soft_verbs.reg_mr(home.base, memory + 10, 2 * page - 10, 0);
    REQUIRE(mr != NULL);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    if (kernel_tells_what_is_mapped()) {
        CHECK_REFUSED(soft_verbs.reg_mr(home.base, memory + 10, 2 * page - 9, 0), EFAULT);
        CHECK_REFUSED(soft_verbs.reg_mr(home.base, memory + 2 * page, 1, 0), EFAULT);
    }
    home_close(&home);
    munmap(memory, 2 * page);
}

/* Registration checks page protection: read-only memory cannot be registered for writes. */
static void protected_memory(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct ibv_mr *mr;
    struct home home;

    REQUIRE(memory != MAP_FAILED);
    home_open(&home);
    mr = soft_verbs.reg_mr(home.base, memory, page, IBV_ACCESS_REMOTE_READ);
    REQUIRE(mr != NULL);
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    if (kernel_tells_what_is_mapped()) {
        CHECK_REFUSED(soft_verbs.reg_mr(home.base, memory, page, IBV_ACCESS_LOCAL_WRITE), EFAULT);
        REQUIRE_EQ(mprotect(memory, page, PROT_NONE), 0);
        CHECK_REFUSED(soft_verbs.reg_mr(home.base, memory, page, 0), EFAULT);
    }
    home_close(&home);
    munmap(memory, page);
}

/* Make one write to the given target, which either works or is refused as an access error. */
static void try_write(uint64_t address, uint32_t rkey, uint32_t length, bool works)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    sge = span(&pair.a, 0, length);
    wr = request(IBV_WR_RDMA_WRITE, 1, &sge, 1);
    wr.wr.rdma.remote_addr = address;
    wr.wr.rdma.rkey = rkey;
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, works ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
    pair_close(&pair);
}

/* The same with the region's pair: `offset` is relative to the peer's region. */
static void try_remote(enum ibv_wr_opcode opcode, int64_t offset, uint32_t length, bool works)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    sge = span(&pair.a, 0, length);
    wr = request_to(opcode, 1, &sge, 1, &pair.b, (size_t)offset);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, works ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
    pair_close(&pair);
}

static void remote_bounds(void)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    const int64_t size = PAIR_MEMORY;
    size_t i;

    for (i = 0; i < COUNT_OF(opcodes); i++) {
        try_remote(opcodes[i], 0, 1, true);
        try_remote(opcodes[i], size - 1, 1, true);
        try_remote(opcodes[i], 0, PAIR_MEMORY, true);
        try_remote(opcodes[i], -1, 1, false);
        try_remote(opcodes[i], -1, 2, false);
        try_remote(opcodes[i], size, 1, false);
        try_remote(opcodes[i], size - 1, 2, false);
        try_remote(opcodes[i], 1, PAIR_MEMORY, false);
    }
    try_remote(IBV_WR_ATOMIC_FETCH_AND_ADD, size - 8, 8, true);
    try_remote(IBV_WR_ATOMIC_FETCH_AND_ADD, size, 8, false);
    try_remote(IBV_WR_ATOMIC_FETCH_AND_ADD, -8, 8, false);
}

static void wild_remote_addresses(void)
{
    struct pair pair;
    uint64_t begin;
    uint32_t rkey;

    PAIR_OPEN(&pair, 0);
    rkey = pair.b.mr->rkey;
    begin = (uintptr_t)pair.b.memory;
    try_write(begin, rkey, 16, false); /* the key of another context's domain */
    pair_close(&pair);
    try_write(0, 0, 1, false);
    try_write(UINT64_MAX, rkey, 1, false);
    try_write(UINT64_MAX - 7, rkey, 16, false); /* wraps around */
    try_write(0, UINT32_MAX, 1, false);
    try_write(begin, 0x7fffff00, 1, false);
}

/* The local side: a range that exceeds the region breaks the sender itself. */
static void try_local(int64_t offset, uint32_t length, bool works)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;

    PAIR_OPEN(&pair, .memory = 4096);
    sge = span(&pair.a, (size_t)offset, length);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair.b, 0);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, works ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR);
    CHECK_EQ(qp_state(pair.a.qp), works ? IBV_QPS_RTS : IBV_QPS_ERR);
    CHECK_EQ(qp_state(pair.b.qp), IBV_QPS_RTS);
    pair_close(&pair);
}

static void local_bounds(void)
{
    try_local(0, 4096, true);
    try_local(4095, 1, true);
    try_local(4096, 1, false);
    try_local(4095, 2, false);
    try_local(-1, 1, false);
    try_local(-1, 2, false);
    try_local(0, 4097, false);
    try_local(16, UINT32_MAX, false);
}

/* Rights of a region for remote access. The queue pairs allow everything. */
static void remote_rights(void)
{
    static const struct {
        enum ibv_wr_opcode opcode;
        int access;
        bool works;
    } table[] = {
        {IBV_WR_RDMA_WRITE, 0, false},
        {IBV_WR_RDMA_WRITE, IBV_ACCESS_LOCAL_WRITE, false},
        {IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_READ, false},
        {IBV_WR_RDMA_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC, false},
        {IBV_WR_RDMA_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, true},
        {IBV_WR_RDMA_READ, 0, false},
        {IBV_WR_RDMA_READ, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, false},
        {IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ, true},
        {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, false},
        {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC, true},
        {IBV_WR_ATOMIC_CMP_AND_SWP, IBV_ACCESS_REMOTE_READ, false},
        {IBV_WR_ATOMIC_CMP_AND_SWP, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC, true},
    };
    size_t i;

    for (i = 0; i < COUNT_OF(table); i++) {
        static const uint8_t zeros[8];
        struct ibv_send_wr wr;
        struct ibv_sge sge;
        struct pair pair;

        PAIR_OPEN(&pair, 0);
        CHECK_EQ(soft_verbs.dereg_mr(pair.b.mr), 0);
        pair.b.mr = soft_verbs.reg_mr(pair.own.base, pair.b.memory, 64, table[i].access);
        REQUIRE(pair.b.mr != NULL);
        memset(pair.a.memory, 7, 8);
        sge = span(&pair.a, 0, 8);
        wr = request_to(table[i].opcode, 1, &sge, 1, &pair.b, 0);
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        EXPECT(pair.a.send_cq, 1, table[i].works ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
        if (!table[i].works) { /* nothing happened on either side */
            CHECK(!memcmp(pair.b.memory, zeros, 8));
            CHECK_EQ(pair.a.memory[0], 7);
        }
        pair_close(&pair);
    }
}

/* A request that the queue pair does not allow is an invalid request, whatever the key allows and however long it
 * is. */
static void queue_pair_rights(void)
{
    static const enum ibv_wr_opcode opcodes[] = {
        IBV_WR_RDMA_WRITE,         IBV_WR_RDMA_WRITE_WITH_IMM,  IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
    };
    static const unsigned int bits[] = {
        IBV_ACCESS_REMOTE_WRITE,  IBV_ACCESS_REMOTE_WRITE,  IBV_ACCESS_REMOTE_READ,
        IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_ATOMIC,
    };
    size_t i, allowed, empty;

    for (i = 0; i < COUNT_OF(opcodes); i++) {
        for (allowed = 0; allowed < 2; allowed++) {
            for (empty = 0; empty < (i < 3 ? 2u : 1u); empty++) {
                struct ibv_qp_attr link = default_link;
                struct ibv_send_wr wr;
                struct ibv_sge sge;
                struct pair pair;

                link.qp_access_flags = allowed ? bits[i] : REMOTE_ALL & ~bits[i];
                PAIR_OPEN(&pair, .link = &link);
                CHECK_EQ(post_receive(&pair.b, 2, 8), 0);
                sge = span(&pair.a, 0, empty ? 0 : 8);
                wr = request_to(opcodes[i], 1, &sge, 1, &pair.b, 0);
                CHECK_EQ(post(pair.a.qp, &wr), 0);
                EXPECT(pair.a.send_cq, 1, allowed ? IBV_WC_SUCCESS : IBV_WC_REM_INV_REQ_ERR);
                pair_close(&pair);
            }
        }
    }
}

/* Data written to local memory needs the local write right. */
static void local_rights(void)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
                                                 IBV_WR_ATOMIC_FETCH_AND_ADD};
    size_t i;

    for (i = 0; i < COUNT_OF(opcodes); i++) {
        bool lands = i >= 2;
        struct ibv_send_wr wr;
        struct ibv_sge sge;
        struct pair pair;

        PAIR_OPEN(&pair, 0);
        CHECK_EQ(soft_verbs.dereg_mr(pair.a.mr), 0);
        pair.a.mr = soft_verbs.reg_mr(pair.own.base, pair.a.memory, 64, IBV_ACCESS_REMOTE_READ);
        REQUIRE(pair.a.mr != NULL);
        CHECK_EQ(post_receive(&pair.b, 2, 8), 0);
        sge = span(&pair.a, 0, 8);
        wr = request_to(opcodes[i], 1, &sge, 1, &pair.b, 0);
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        EXPECT(pair.a.send_cq, 1, lands ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS);
        pair_close(&pair);
    }
}

/* The receive's memory must be writable: the receiver gets a protection error, the sender a remote error. */
static void receive_rights(void)
{
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    CHECK_EQ(soft_verbs.dereg_mr(pair.b.mr), 0);
    pair.b.mr = soft_verbs.reg_mr(pair.own.base, pair.b.memory, 64, IBV_ACCESS_REMOTE_READ);
    REQUIRE(pair.b.mr != NULL);
    CHECK_EQ(post_receive(&pair.b, 2, 8), 0);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    EXPECT(pair.b.recv_cq, 2, IBV_WC_LOC_PROT_ERR);
    EXPECT(pair.a.send_cq, 1, IBV_WC_REM_OP_ERR);
    pair_close(&pair);
}

/* A region serves the queue pairs of its own domain only. */
static void foreign_domain(void)
{
    struct ibv_mr *foreign;
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct ibv_pd *pd;
    struct pair pair;
    int local;

    for (local = 0; local < 3; local++) {
        PAIR_OPEN(&pair, 0);
        pd = soft_verbs.alloc_pd(pair.own.context);
        REQUIRE(pd != NULL);
        foreign = soft_verbs.reg_mr(pd, pair.b.memory, 64, ACCESS_ALL);
        REQUIRE(foreign != NULL);
        sge = span(&pair.a, 0, 8);
        wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair.b, 0);
        if (local == 0) {
            wr.wr.rdma.rkey = foreign->rkey;
        } else if (local == 1) {
            sge.lkey = foreign->lkey;
            sge.addr = (uintptr_t)pair.b.memory;
        } else {
            struct ibv_sge target = {(uintptr_t)pair.b.memory, 8, foreign->lkey};

            wr.opcode = IBV_WR_SEND;
            CHECK_EQ(post_receive_list(&pair.b, 2, &target, 1), 0);
        }
        CHECK_EQ(post(pair.a.qp, &wr), 0);
        EXPECT(pair.a.send_cq, 1,
               local == 0   ? IBV_WC_REM_ACCESS_ERR
               : local == 1 ? IBV_WC_LOC_PROT_ERR
                            : IBV_WC_REM_OP_ERR);
        if (local == 2)
            EXPECT(pair.b.recv_cq, 2, IBV_WC_LOC_PROT_ERR);
        CHECK_EQ(soft_verbs.dereg_mr(foreign), 0);
        CHECK_EQ(soft_verbs.dealloc_pd(pd), 0);
        pair_close(&pair);
    }
}

/* A key is checked when the request is executed: one that was deregistered before is refused. */
static void deregistered(void)
{
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    struct pair pair;

    PAIR_OPEN(&pair, 0);
    sge = span(&pair.a, 0, 8);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair.b, 0);
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    CHECK_EQ(soft_verbs.dereg_mr(pair.b.mr), 0);
    pair.b.mr = soft_verbs.reg_mr(pair.own.base, pair.b.memory, PAIR_MEMORY, ACCESS_ALL);
    REQUIRE(pair.b.mr != NULL);
    CHECK(wr.wr.rdma.rkey != pair.b.mr->rkey);
    CHECK_EQ(post(pair.a.qp, &wr), 0); /* the old key, the same memory */
    EXPECT(pair.a.send_cq, 1, IBV_WC_REM_ACCESS_ERR);
    pair_close(&pair);

    PAIR_OPEN(&pair, 0);
    sge = span(&pair.a, 0, 8);
    wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair.b, 0);
    CHECK_EQ(soft_verbs.dereg_mr(pair.a.mr), 0);
    pair.a.mr = NULL;
    CHECK_EQ(post(pair.a.qp, &wr), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_LOC_PROT_ERR);
    pair_close(&pair);
}

/* Many registrations in a row: no key is reused soon, even if its number is. */
static void keys_rest(void)
{
    enum { ROUNDS = 4000 };
    static uint32_t keys[ROUNDS];
    static char memory[64];
    struct ibv_mr *kept;
    struct home home;
    int i, j;

    home_open(&home);
    kept = soft_verbs.reg_mr(home.base, memory, 64, 0);
    REQUIRE(kept != NULL);
    for (i = 0; i < ROUNDS; i++) {
        struct ibv_mr *mr = soft_verbs.reg_mr(home.base, memory, 64, 0);

        REQUIRE(mr != NULL);
        keys[i] = mr->lkey;
        CHECK_EQ(mr->rkey, mr->lkey);
        CHECK(mr->lkey != kept->lkey);
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    }
    for (i = 0; i < ROUNDS; i += 7)
        for (j = i + 1; j < ROUNDS; j++)
            if (keys[i] == keys[j])
                REQUIRE(!"a key was given out twice");
    CHECK_EQ(soft_verbs.dereg_mr(kept), 0);
    home_close(&home);
}

/* More regions at a time than the table's initial size, some freed before: each has a working key of its own. */
static void many_regions(void)
{
    enum { REGIONS = 3000 };
    static struct ibv_mr *mrs[REGIONS];
    struct pair pair;
    int round, i;

    PAIR_OPEN(&pair, 0);
    for (round = 0; round < 2; round++) {
        for (i = 0; i < REGIONS; i++) {
            if (i < 700) { /* so that the row of free numbers does not begin at its beginning */
                struct ibv_mr *mr = soft_verbs.reg_mr(pair.own.base, pair.b.memory, 64, 0);

                CHECK(mr && soft_verbs.dereg_mr(mr) == 0);
            }
            mrs[i] = soft_verbs.reg_mr(pair.own.base, pair.b.memory + i, 1, ACCESS_ALL);
            REQUIRE(mrs[i] != NULL);
        }
        for (i = 0; i < REGIONS; i++) {
            struct ibv_sge sge = {(uintptr_t)pair.a.memory, 1, pair.a.mr->lkey};
            struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair.b, (size_t)i);

            if (i % 16 && i < REGIONS - 16)
                continue;
            wr.wr.rdma.rkey = mrs[i]->rkey; /* which is good for this one byte only */
            CHECK_EQ(post(pair.a.qp, &wr), 0);
            EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
        }
        for (i = 0; i < REGIONS; i++)
            CHECK_EQ(soft_verbs.dereg_mr(mrs[i]), 0);
    }
    pair_close(&pair);
}

CHECK_MAIN(CASE(registration), CASE(unmapped_memory), CASE(protected_memory), CASE(remote_bounds),
           CASE(wild_remote_addresses), CASE(local_bounds), CASE(remote_rights), CASE(queue_pair_rights),
           CASE(local_rights), CASE(receive_rights), CASE(foreign_domain), CASE(deregistered), CASE(keys_rest),
           CASE(many_regions))
