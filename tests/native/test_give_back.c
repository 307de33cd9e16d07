/* Tests of giving pages back: those of posted receives and of unused memory, and no others. */
#include "support.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "soft/api/give_back.h"

#define RECEIVES 4
#define PAGES 16

static uint8_t *memory;
static size_t page;

/* Map memory, and touch all of it. */
static void begin(void)
{
    page = (size_t)sysconf(_SC_PAGESIZE);
    memory = mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    memset(memory, 'x', PAGES * page);
}

/* Check which pages are kept, and unmap them. */
static void end(unsigned int kept)
{
    unsigned int i, found = 0;

    for (i = 0; i < PAGES; i++)
        found |= (memory[i * page] == 'x' ? 1u : 0u) << i;
    CHECK_EQ(found, kept);
    CHECK_EQ(munmap(memory, PAGES * page), 0);
}

static int post_at(struct ibv_qp *qp, const struct ibv_mr *mr, size_t at, size_t length)
{
    struct ibv_sge sge = {(uintptr_t)memory + at, (uint32_t)length, mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;

    return verbs_post_recv(qp, &wr, &bad);
}

static void posted_receives_lose_their_pages(void)
{
    struct pair pair;
    struct ibv_mr *mr;

    begin();
    PAIR_OPEN(&pair);
    mr = soft_verbs.reg_mr(pair.own.base, memory, PAGES * page, ACCESS_ALL);
    REQUIRE(mr != NULL);
    memset(memory, 'x', PAGES * page);
    CHECK_EQ(post_at(pair.b.qp, mr, 0, 2 * page), 0); /* taken by a message */
    CHECK_EQ(post_at(pair.b.qp, mr, 2 * page, page), 0);
    CHECK_EQ(post_at(pair.b.qp, mr, 3 * page, page + page / 2), 0);
    CHECK_EQ(post_at(pair.b.qp, mr, 4 * page + page / 2, page / 2), 0); /* the rest of a page */
    CHECK_EQ(post_at(pair.b.qp, mr, 8 * page + 1, 2 * page), 0);
    CHECK_EQ(post_at(pair.b.qp, mr, 12 * page, page - 1), 0);
    memset(pair.a.memory, 'x', 8);
    CHECK_EQ(post_send(&pair.a, 1, 8), 0);
    EXPECT(pair.a.send_cq, 1, IBV_WC_SUCCESS);
    soft_give_back(pair.b.qp, NULL, 0);
    CHECK_EQ(qp_to(pair.b.qp, IBV_QPS_RESET), 0);
    soft_give_back(pair.b.qp, NULL, 0); /* nothing is posted */
    CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
    pair_close(&pair);
    end(0xffffu & ~(1u << 2 | 1u << 3 | 1u << 4 | 1u << 9));
}

static void unused_memory_loses_whole_pages(void)
{
    struct pair pair;

    begin();
    PAIR_OPEN(&pair);
    soft_give_back(pair.b.qp, memory, 2 * page);
    soft_give_back(pair.b.qp, memory + 3 * page + 1, 2 * page);
    soft_give_back(pair.b.qp, memory + 8 * page, page - 1);
    soft_give_back(pair.b.qp, memory + 9 * page + 1, 5);
    pair_close(&pair);
    end(0xffffu & ~(1u << 0 | 1u << 1 | 1u << 4));
}

static void locked_pages_are_kept(void)
{
    struct pair pair;

    begin();
    PAIR_OPEN(&pair);
    if (!syscall(SYS_mlock, memory, page)) { /* sanitizers replace mlock() */
        soft_give_back(pair.b.qp, memory, page);
        CHECK_EQ(memory[0], 'x');
    }
    pair_close(&pair);
    end(0xffff);
}

/* The receives of a shared queue belong to nobody until a message takes one. */
static void queue_pair_without_receives(void)
{
    struct pair pair;
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_send_sge = 1}};
    struct ibv_qp *qp;

    PAIR_OPEN(&pair);
    attr.send_cq = attr.recv_cq = pair.a.send_cq;
    qp = soft_verbs.create_qp(pair.own.pd, &attr);
    REQUIRE(qp != NULL);
    soft_give_back(qp, NULL, 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    pair_close(&pair);
}

CHECK_MAIN(CASE(posted_receives_lose_their_pages), CASE(unused_memory_loses_whole_pages), CASE(locked_pages_are_kept),
           CASE(queue_pair_without_receives))
