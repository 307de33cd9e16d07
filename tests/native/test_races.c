/* Tests of objects that are destroyed while other threads use them, and of threads that use objects of other threads:
 * only expected results occur. */
#include "support.h"
#include "support_threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

/* ---- Memory that is deregistered under fire ---------------------------------------------------------------- */

/* One thread registers memory, publishes its key, deregisters and frees it at any time. The other one writes to it, or
 * reads into it, and finds its queue pair broken now and then. */
struct range {
    struct home shared; /* of the memory, and of the writer's queue pairs */
    struct pair pair;   /* the writer's, both ends */
    bool reads;         /* the memory is the local side of reads; else the remote side of writes */
    pthread_mutex_t lock;
    uint64_t address; /* under the lock, like the key; 0: none yet */
    uint32_t key;
    atomic_bool stop;
    uint64_t good, refused;
};

struct shooter {
    struct range *range;
    bool owns_the_memory;
};

#define RANGE 4096u

static void replace_memory(struct range *range)
{
    unsigned int seed = 7, i;
    size_t j;

    for (i = 0; i < SCALED(300u); i++) {
        uint8_t *memory = malloc(RANGE);
        struct ibv_mr *mr;

        if (!CHECK(memory != NULL))
            break;
        memset(memory, 0, RANGE);
        mr = soft_verbs.reg_mr(range->shared.base, memory, RANGE, ACCESS_ALL);
        if (!CHECK(mr != NULL))
            break;
        pthread_mutex_lock(&range->lock);
        range->address = (uintptr_t)memory;
        range->key = mr->rkey;
        pthread_mutex_unlock(&range->lock);
        sleep_us(next_random(&seed, 600));
        CHECK_EQ(soft_verbs.dereg_mr(mr), 0);
        memset(memory, 0xaa, RANGE); /* not accessed from here on */
        if (i % 8 == 0)
            sleep_us(50);
        for (j = 0; j < RANGE; j++)
            if (memory[j] != 0xaa && !CHECK(!"memory was written after it was deregistered"))
                break;
        free(memory);
    }
    atomic_store(&range->stop, true);
}

static void reconnect(struct pair *pair)
{
    struct ibv_wc wc;

    CHECK_EQ(qp_to(pair->a.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(qp_to(pair->b.qp, IBV_QPS_RESET), 0);
    CHECK_EQ(verbs_poll_cq(pair->a.send_cq, 1, &wc), 0);
    qp_connect(pair->a.qp, &default_link, pair->b.qp->qp_num);
    qp_connect(pair->b.qp, &default_link, pair->a.qp->qp_num);
}

static void fire(struct range *range)
{
    enum ibv_wc_status refusal = range->reads ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_ACCESS_ERR;
    struct pair *pair = &range->pair;

    while (!atomic_load(&range->stop)) {
        struct ibv_sge sge = span(&pair->a, 0, RANGE);
        struct ibv_send_wr wr =
            request_to(range->reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair->b, 0);
        struct ibv_wc wc;
        int i;

        pthread_mutex_lock(&range->lock);
        if (range->reads) {
            sge.addr = range->address;
            sge.lkey = range->key;
        } else {
            wr.wr.rdma.remote_addr = range->address;
            wr.wr.rdma.rkey = range->key;
        }
        pthread_mutex_unlock(&range->lock);
        if (!sge.addr || !wr.wr.rdma.remote_addr) {
            sched_yield();
            continue;
        }
        for (i = 0; i < 4; i++)
            CHECK_EQ(post(pair->a.qp, &wr), 0);
        for (i = 0; i < 4; i++) {
            if (!CHECK(wait_completion(pair->a.send_cq, &wc)))
                return;
            if (wc.status == IBV_WC_SUCCESS) {
                range->good++;
                continue;
            }
            CHECK_EQ(wc.status, refusal);
            range->refused++;
            while (++i < 4) {
                EXPECT(pair->a.send_cq, 1, IBV_WC_WR_FLUSH_ERR);
            }
            reconnect(pair);
        }
    }
}

static void shoot(void *argument)
{
    struct shooter *shooter = argument;

    if (shooter->owns_the_memory)
        replace_memory(shooter->range);
    else
        fire(shooter->range);
}

static void deregister_under_fire(bool reads)
{
    struct range range = {.reads = reads, .lock = PTHREAD_MUTEX_INITIALIZER};
    struct shooter shooters[2] = {{&range, false}, {&range, true}};

    home_open(&range.shared);
    PAIR_OPEN(&range.pair, .homes = {&range.shared, &range.shared});
    run_threads(2, shoot, shooters, sizeof(shooters[0]));
    pair_close(&range.pair);
    home_close(&range.shared);
}

static void deregistered_remote_memory(void)
{
    deregister_under_fire(false);
}

static void deregistered_local_memory(void)
{
    deregister_under_fire(true);
}

/* ---- Peers that go under fire ------------------------------------------------------------------------------ */

struct duel {
    struct home writer_home, peer_home;
    struct end writer, peer; /* the peer's queue pair is another one again and again */
    bool destroys;           /* else the peer goes to ERR and comes back */
    atomic_uint peer_number;
    atomic_bool stop;
    uint64_t good, silent;
};

struct duellist {
    struct duel *duel;
    bool is_peer;
};

static const struct ibv_qp_attr impatient = {
    .qp_access_flags = REMOTE_ALL,
    .path_mtu = IBV_MTU_1024,
    .max_rd_atomic = 1,
    .max_dest_rd_atomic = 1,
    .min_rnr_timer = 1,
    .timeout = 1, /* 8 us */
    .retry_cnt = 1,
    .rnr_retry = 1,
};

/* When a peer reconnects, the writer's sequence numbers start anew, too: it reconnects whenever it gets no response. */
static void come_anew(struct duel *duel)
{
    struct pair_options options = {.memory = 64};
    unsigned int seed = 3, i;

    for (i = 0; i < SCALED(300u); i++) {
        if (duel->destroys) {
            struct end end;

            end_open(&end, &duel->peer_home, &options);
            qp_connect(end.qp, &impatient, duel->writer.qp->qp_num);
            CHECK_EQ(post_receive(&end, 5, 64), 0);
            atomic_store(&duel->peer_number, end.qp->qp_num);
            sleep_us(next_random(&seed, 100));
            end_close(&end);
        } else {
            CHECK_EQ(post_receive(&duel->peer, 5, 64), 0);
            sleep_us(next_random(&seed, 100));
            CHECK_EQ(qp_to(duel->peer.qp, IBV_QPS_ERR), 0);
            CHECK_EQ(qp_to(duel->peer.qp, IBV_QPS_RESET), 0);
            qp_connect(duel->peer.qp, &impatient, duel->writer.qp->qp_num);
        }
    }
    atomic_store(&duel->stop, true);
}

static void keep_writing(struct duel *duel)
{
    struct end *writer = &duel->writer;
    uint64_t i = 0;

    while (!atomic_load(&duel->stop)) {
        struct ibv_sge sge = span(writer, 0, 8);
        struct ibv_send_wr write = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &duel->peer, 0);
        struct ibv_send_wr send = request(IBV_WR_SEND, 1, &sge, 1);
        struct ibv_wc wc = {0};

        if (qp_state(writer->qp) != IBV_QPS_RTS) {
            CHECK_EQ(qp_to(writer->qp, IBV_QPS_RESET), 0);
            qp_connect(writer->qp, &impatient, atomic_load(&duel->peer_number));
        }
        CHECK_EQ(post(writer->qp, i++ % 16 == 15 ? &send : &write), 0);
        if (!CHECK(wait_completion(writer->send_cq, &wc)))
            return;
        if (wc.status == IBV_WC_SUCCESS)
            duel->good++;
        else
            duel->silent++;
        CHECK(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_RETRY_EXC_ERR ||
              wc.status == IBV_WC_RNR_RETRY_EXC_ERR);
    }
}

static void fight(void *argument)
{
    struct duellist *duellist = argument;

    if (duellist->is_peer)
        come_anew(duellist->duel);
    else
        keep_writing(duellist->duel);
}

static void fight_with_a_peer(bool destroys)
{
    const struct pair_options options = {.memory = 64};
    struct duel duel = {.destroys = destroys};
    struct duellist duellists[2] = {{&duel, false}, {&duel, true}};

    home_open(&duel.writer_home);
    home_open(&duel.peer_home);
    end_open(&duel.writer, &duel.writer_home, &options);
    end_open(&duel.peer, &duel.peer_home, &options);
    qp_connect(duel.peer.qp, &impatient, duel.writer.qp->qp_num);
    qp_connect(duel.writer.qp, &impatient, duel.peer.qp->qp_num);
    atomic_store(&duel.peer_number, duel.peer.qp->qp_num);
    run_threads(2, fight, duellists, sizeof(duellists[0]));
    end_close(&duel.writer);
    end_close(&duel.peer);
    home_close(&duel.writer_home);
    home_close(&duel.peer_home);
}

static void destroyed_peers(void)
{
    fight_with_a_peer(true);
}

static void peers_in_error(void)
{
    fight_with_a_peer(false);
}

/* ---- Misuse ------------------------------------------------------------------------------------------------ */

/* Several threads use one thread domain at once, which is forbidden: a refused call has done nothing, and an accepted
 * one is executed once. */
#define OFFENDERS 3u
#define OFFENCES SCALED(20000u)

struct crime {
    struct home home;
    struct ibv_cq_ex *cq;
    struct ibv_qp *qps[2]; /* each its own peer */
    atomic_uint accepted, completed, refused;
    atomic_uint running;
    atomic_uchar seen[OFFENDERS][OFFENCES];
};

struct offender {
    struct crime *crime;
    unsigned int number;
};

static void note_completion(struct crime *crime, uint64_t wr_id, enum ibv_wc_status status)
{
    unsigned int who = (unsigned int)(wr_id >> 32), what = (unsigned int)wr_id;

    CHECK_EQ(status, IBV_WC_SUCCESS);
    if (CHECK(who < OFFENDERS && what < OFFENCES))
        CHECK_EQ(atomic_fetch_add(&crime->seen[who][what], 1), 0);
    atomic_fetch_add(&crime->completed, 1);
}

static void poll_some(struct crime *crime, bool extended)
{
    struct ibv_poll_cq_attr attr = {0};
    struct ibv_wc wcs[4];
    int i, n;

    if (extended) {
        n = crime->cq->start_poll(crime->cq, &attr);
        CHECK(n == 0 || n == ENOENT || n == EBUSY);
        atomic_fetch_add(&crime->refused, n == EBUSY);
        if (n)
            return;
        do {
            note_completion(crime, crime->cq->wr_id, crime->cq->status);
        } while (!crime->cq->next_poll(crime->cq));
        crime->cq->end_poll(crime->cq);
        return;
    }
    n = verbs_poll_cq(cq_of(crime->cq), 4, wcs);
    CHECK(n >= 0 || n == -EBUSY);
    atomic_fetch_add(&crime->refused, n == -EBUSY);
    for (i = 0; i < n; i++)
        note_completion(crime, wcs[i].wr_id, wcs[i].status);
}

static void ask_and_change(struct crime *crime, struct ibv_qp *qp)
{
    struct ibv_qp_init_attr init_attr;
    struct ibv_qp_attr attr;
    int error = soft_verbs.query_qp(qp, &attr, IBV_QP_STATE, &init_attr);

    CHECK(error == 0 || error == EBUSY);
    atomic_fetch_add(&crime->refused, error == EBUSY);
    attr.qp_access_flags = REMOTE_ALL;
    error = soft_verbs.modify_qp(qp, &attr, IBV_QP_ACCESS_FLAGS);
    CHECK(error == 0 || error == EBUSY);
    atomic_fetch_add(&crime->refused, error == EBUSY);
}

static void offend(void *argument)
{
    struct offender *offender = argument;
    struct crime *crime = offender->crime;
    unsigned int seed = offender->number, sent = 0;
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;

    while (sent < OFFENCES && now_ns() < end) {
        struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, (uint64_t)offender->number << 32 | sent, NULL, 0);
        struct ibv_qp *qp = crime->qps[next_random(&seed, 2)];
        int error = post(qp, &wr);

        CHECK(error == 0 || error == EBUSY || error == ENOMEM);
        atomic_fetch_add(&crime->refused, error == EBUSY);
        atomic_fetch_add(&crime->accepted, error == 0);
        if (error != EBUSY) {
            sent++; /* a number is used once, even where there was no room */
            end = now_ns() + WAIT_S * 1000000000ull;
        }
        poll_some(crime, next_random(&seed, 2));
        if (next_random(&seed, 16) == 0)
            ask_and_change(crime, qp);
        if (error == ENOMEM)
            sched_yield();
    }
    CHECK_EQ(sent, OFFENCES);
    atomic_fetch_sub(&crime->running, 1);
}

static void commit(void *argument)
{
    struct crime *crime = argument;
    struct offender offenders[OFFENDERS];
    unsigned int i;

    atomic_store(&crime->running, OFFENDERS);
    for (i = 0; i < OFFENDERS; i++)
        offenders[i] = (struct offender){crime, i};
    run_threads(OFFENDERS, offend, offenders, sizeof(offenders[0]));
}

static void thread_domain_used_by_two_threads(void)
{
    struct check_variant like = *variant;
    struct crime *crime = calloc(1, sizeof(*crime));
    struct soft_counts counts;
    uint64_t end;
    char *text;
    size_t i, lines = 0;

    REQUIRE(crime != NULL);
    like.thread_domain = true;
    home_open_like(&crime->home, &like);
    crime->cq = home_cq_ex(&crime->home, 64, NULL);
    for (i = 0; i < 2; i++)
        crime->qps[i] = make_loop(crime->home.pd, cq_of(crime->cq), 16);
    text = stderr_of(commit, crime);
    for (i = 0; text[i]; i++)
        lines += text[i] == '\n';
    CHECK(lines <= 3); /* at most one for each object */
    free(text);
    end = now_ns() + WAIT_S * 1000000000ull;
    while (atomic_load(&crime->completed) < atomic_load(&crime->accepted) && now_ns() < end)
        poll_some(crime, false);
    CHECK_EQ(atomic_load(&crime->completed), atomic_load(&crime->accepted));
    EXPECT_NOTHING(cq_of(crime->cq));
    soft_get_counts(crime->home.context, &counts);
    CHECK_EQ(counts.overlaps, atomic_load(&crime->refused));
    for (i = 0; i < 2; i++) {
        CHECK_EQ(qp_state(crime->qps[i]), IBV_QPS_RTS);
        CHECK_EQ(soft_verbs.destroy_qp(crime->qps[i]), 0);
    }
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(crime->cq)), 0);
    home_close(&crime->home);
    free(crime);
}

CHECK_MAIN(CASE(deregistered_remote_memory), CASE(deregistered_local_memory), CASE(destroyed_peers),
           CASE(peers_in_error), CASE(thread_domain_used_by_two_threads))
