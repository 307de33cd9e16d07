/* Tests of many threads that use objects correctly: each on a thread domain of its own, or together on objects with
 * locks. */
#include "support.h"
#include "support_threads.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define DEPTH 16u

/* ---- Loops of their own ------------------------------------------------------------------------------------ */

/* Each thread has queues of its own and writes to its neighbour in the ring, over contexts with both execution
 * modes. */
struct worker {
    struct home home;
    struct end left, right; /* towards the one before, and the one after */
    struct end *target;     /* the neighbour's end that `right` is connected to */
    unsigned int number;
};

#define WORK SCALED(2000u)

static void work(void *argument)
{
    struct worker *worker = argument;
    struct end *end = &worker->right;
    uint64_t sent = 0, done = 0;
    struct ibv_wc wc;

    memset(end->memory, (int)worker->number + 1, 64);
    while (done < WORK) {
        while (sent < WORK && sent - done < DEPTH) {
            struct ibv_sge sge = span(end, 0, 64), old = span(end, 64, 8);
            struct ibv_send_wr add, write;

            write = request_to(IBV_WR_RDMA_WRITE, sent, &sge, 1, worker->target, 128);
            add = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, sent, &old, 1, worker->target, 0);
            add.wr.atomic.compare_add = worker->number + 1;
            CHECK_EQ(post(end->qp, sent % 2 ? &add : &write), 0);
            sent++;
        }
        if (!CHECK(wait_completion(end->send_cq, &wc)) || !CHECK_EQ(wc.status, IBV_WC_SUCCESS) ||
            !CHECK_EQ(wc.wr_id, done))
            break;
        done++;
    }
}

static void ring_of_threads(void)
{
    enum { WORKERS = 4 };
    static const struct check_variant like[] = {
        {"inline-td", {.mode = SOFT_INLINE}, true},
        {"thread-td", {.mode = SOFT_THREAD}, true},
        {"thread", {.mode = SOFT_THREAD}, false},
    };
    const struct pair_options options = {.cap = {DEPTH, DEPTH, 1, 1, 0}, .memory = 4096};
    struct worker workers[WORKERS];
    uint64_t sum = 0;
    size_t i;

    for (i = 0; i < WORKERS; i++) {
        workers[i].number = (unsigned int)i;
        /* The running variant, with one of the others after it. */
        home_open_like(&workers[i].home, i % 2 ? &like[i % COUNT_OF(like)] : variant);
        end_open(&workers[i].left, &workers[i].home, &options);
        end_open(&workers[i].right, &workers[i].home, &options);
    }
    for (i = 0; i < WORKERS; i++) {
        struct worker *next = &workers[(i + 1) % WORKERS];

        workers[i].target = &next->left;
        qp_connect(workers[i].right.qp, &default_link, next->left.qp->qp_num);
        qp_connect(next->left.qp, &default_link, workers[i].right.qp->qp_num);
    }
    run_threads(WORKERS, work, workers, sizeof(workers[0]));
    for (i = 0; i < WORKERS; i++) {
        memcpy(&sum, workers[i].target->memory, 8);
        CHECK_EQ(sum, WORK / 2 * (i + 1));
        CHECK_EQ(workers[i].target->memory[128], i + 1);
        CHECK_EQ(workers[i].target->memory[191], i + 1);
    }
    for (i = 0; i < WORKERS; i++) {
        end_close(&workers[i].left);
        end_close(&workers[i].right);
    }
    for (i = 0; i < WORKERS; i++)
        home_close(&workers[i].home);
}

/* ---- Many to one ------------------------------------------------------------------------------------------- */

/* All threads add to one word, over queue pairs of their own: no addition is lost. */
struct adder {
    struct pair pair;
    const struct end *target;
};

static void add_up(void *argument)
{
    struct adder *adder = argument;
    struct ibv_sge old = span(&adder->pair.a, 0, 8);
    struct ibv_send_wr wr = request_to(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &old, 1, adder->target, 0);
    uint64_t seen, last = 0;
    unsigned int i;

    wr.wr.atomic.compare_add = 1;
    for (i = 0; i < SCALED(1000u); i++) {
        CHECK_EQ(post(adder->pair.a.qp, &wr), 0);
        EXPECT(adder->pair.a.send_cq, 1, IBV_WC_SUCCESS);
        memcpy(&seen, adder->pair.a.memory, 8);
        CHECK(i == 0 || seen > last);
        last = seen;
    }
}

static void atomics_of_many(void)
{
    enum { ADDERS = 4 };
    struct adder adders[ADDERS];
    uint64_t sum;
    struct home home; /* of the memory: its domain must be that of the queue pairs */
    size_t i;

    home_open(&home);
    for (i = 0; i < ADDERS; i++) {
        PAIR_OPEN(&adders[i].pair, .homes = {&home, &home}, .memory = 64);
        adders[i].target = &adders[0].pair.b;
    }
    if (variant->thread_domain) { /* one domain is one thread's: this is for the locked queues */
        add_up(&adders[0]);
        memcpy(&sum, adders[0].pair.b.memory, 8);
        CHECK_EQ(sum, SCALED(1000u));
    } else {
        run_threads(ADDERS, add_up, adders, sizeof(adders[0]));
        memcpy(&sum, adders[0].pair.b.memory, 8);
        CHECK_EQ(sum, ADDERS * SCALED(1000u));
    }
    for (i = 0; i < ADDERS; i++)
        pair_close(&adders[i].pair);
    home_close(&home);
}

/* ---- One queue pair for all -------------------------------------------------------------------------------- */

#define POSTS SCALED(3000u)

struct crowd {
    struct home home;
    struct pair pair;
    atomic_uint seen[4][POSTS]; /* by thread and number: how often its completion came */
    atomic_uint done;
    unsigned int threads;
};

struct member {
    struct crowd *crowd;
    unsigned int number;
};

/* Post on the shared queue pair, and poll for all; also query and change harmless attributes. */
static void crowd_in(void *argument)
{
    struct member *member = argument;
    struct crowd *crowd = member->crowd;
    unsigned int sent = 0, total = crowd->threads * POSTS;
    uint64_t end = now_ns() + WAIT_S * 1000000000ull;
    struct ibv_wc wcs[4];
    int i, n;

    while (atomic_load(&crowd->done) < total && now_ns() < end) {
        if (sent < POSTS) {
            uint64_t id = (uint64_t)member->number << 32 | sent;
            int error = post_write(&crowd->pair.a, &crowd->pair.b, id, 0);

            CHECK(error == 0 || error == ENOMEM);
            sent += !error;
        }
        n = verbs_poll_cq(crowd->pair.a.send_cq, 4, wcs);
        CHECK(n >= 0);
        for (i = 0; i < n; i++) {
            unsigned int who = (unsigned int)(wcs[i].wr_id >> 32);
            unsigned int what = (unsigned int)wcs[i].wr_id;

            CHECK_EQ(wcs[i].status, IBV_WC_SUCCESS);
            if (CHECK(who < crowd->threads && what < POSTS))
                atomic_fetch_add(&crowd->seen[who][what], 1);
            atomic_fetch_add(&crowd->done, 1);
        }
        if (sent % 64 == 0)
            CHECK_EQ(qp_state(crowd->pair.a.qp), IBV_QPS_RTS);
        if (!n)
            sched_yield();
    }
}

static void shared_queue_pair(void)
{
    static const struct check_variant locked[2] = {
        {"inline", {.mode = SOFT_INLINE}, false},
        {"thread", {.mode = SOFT_THREAD}, false},
    };
    struct crowd *crowd = calloc(1, sizeof(*crowd));
    struct member members[4];
    struct soft_counts counts;
    unsigned int i, j;

    REQUIRE(crowd != NULL);
    home_open_like(&crowd->home, &locked[variant->options.mode == SOFT_THREAD]);
    PAIR_OPEN(&crowd->pair, .homes = {&crowd->home, &crowd->home}, .cap = {8, 8, 1, 1, 0});
    crowd->threads = 4;
    for (i = 0; i < crowd->threads; i++)
        members[i] = (struct member){crowd, i};
    run_threads(crowd->threads, crowd_in, members, sizeof(members[0]));
    CHECK_EQ(atomic_load(&crowd->done), crowd->threads * POSTS);
    for (i = 0; i < crowd->threads; i++)
        for (j = 0; j < POSTS; j++)
            if (atomic_load(&crowd->seen[i][j]) != 1)
                REQUIRE(!"a completion was lost or came twice");
    soft_get_counts(crowd->home.context, &counts);
    CHECK_EQ(counts.overlaps, 0);
    pair_close(&crowd->pair);
    home_close(&crowd->home);
    free(crowd);
}

/* ---- Posting while polling, against resets ------------------------------------------------------------------ */

/* A poll session holds its queue, and its thread may post; a reset needs both: they must not deadlock. */
struct tangle {
    struct home home;
    struct ibv_cq_ex *cq;
    struct ibv_qp *qp;
    atomic_bool stop;
};

struct hand {
    struct tangle *tangle;
    bool resets;
};

static void entangle(void *argument)
{
    struct hand *hand = argument;
    struct tangle *tangle = hand->tangle;
    struct ibv_poll_cq_attr attr = {0};
    unsigned int i;

    if (hand->resets) {
        for (i = 0; i < SCALED(1000u); i++) {
            CHECK_EQ(qp_to(tangle->qp, IBV_QPS_RESET), 0);
            qp_connect(tangle->qp, &default_link, tangle->qp->qp_num);
        }
        atomic_store(&tangle->stop, true);
        return;
    }
    while (!atomic_load(&tangle->stop)) {
        int error = tangle->cq->start_poll(tangle->cq, &attr);

        if (error) {
            CHECK_EQ(error, ENOENT);
            error = post_nothing(tangle->qp, 1);
            CHECK(error == 0 || error == EINVAL || error == ENOMEM);
            continue;
        }
        CHECK_EQ(tangle->cq->wr_id, 1);
        error = post_nothing(tangle->qp, 1);
        CHECK(error == 0 || error == EINVAL || error == ENOMEM);
        tangle->cq->end_poll(tangle->cq);
    }
}

static void resets_against_polling(void)
{
    struct check_variant locked = *variant;
    struct tangle tangle = {0};
    struct hand hands[2] = {{&tangle, false}, {&tangle, true}};

    locked.thread_domain = false;
    home_open_like(&tangle.home, &locked);
    tangle.cq = home_cq_ex(&tangle.home, 16, NULL);
    tangle.qp = make_loop(tangle.home.pd, cq_of(tangle.cq), 8);
    run_threads(2, entangle, hands, sizeof(hands[0]));
    CHECK_EQ(soft_verbs.destroy_qp(tangle.qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq_of(tangle.cq)), 0);
    home_close(&tangle.home);
}

/* ---- Events ------------------------------------------------------------------------------------------------ */

#define EVENT_SENDERS 3u
#define EVENT_MESSAGES SCALED(1000u)

/* One thread sleeps on a channel while others send to it; a lost wakeup would hang the test. */
struct party {
    struct home home;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct end senders[EVENT_SENDERS];
    struct home sender_homes[EVENT_SENDERS];
    struct ibv_qp *receivers[EVENT_SENDERS];
};

struct guest {
    struct party *party;
    unsigned int number; /* the last one receives */
};

static void receive_event(struct party *party, unsigned int *received)
{
    struct ibv_wc wcs[8];
    int i, n;

    while ((n = verbs_poll_cq(party->cq, 8, wcs)) > 0) {
        for (i = 0; i < n; i++) {
            struct ibv_recv_wr recv = {.wr_id = wcs[i].wr_id}, *bad;

            CHECK_EQ(wcs[i].status, IBV_WC_SUCCESS);
            CHECK_EQ(verbs_post_recv(party->receivers[wcs[i].wr_id], &recv, &bad), 0);
        }
        *received += (unsigned int)n;
    }
    CHECK_EQ(n, 0);
}

static void receive_all(struct party *party)
{
    unsigned int received = 0, unacknowledged = 0;
    struct ibv_cq *cq;
    void *context;

    for (;;) {
        CHECK_EQ(verbs_req_notify_cq(party->cq, 0), 0);
        receive_event(party, &received); /* what came before it was armed */
        if (received == EVENT_SENDERS * EVENT_MESSAGES)
            break;
        if (!CHECK(wait_readable(party->channel->fd)))
            break;
        while (!soft_verbs.get_cq_event(party->channel, &cq, &context)) {
            CHECK(cq == party->cq);
            unacknowledged++;
        }
        CHECK_EQ(errno, EAGAIN);
    }
    while (!soft_verbs.get_cq_event(party->channel, &cq, &context))
        unacknowledged++;
    soft_verbs.ack_cq_events(party->cq, unacknowledged);
}

static void join_party(void *argument)
{
    struct guest *guest = argument;
    struct party *party = guest->party;
    struct end *end;
    uint64_t i;

    if (guest->number == EVENT_SENDERS) {
        receive_all(party);
        return;
    }
    end = &party->senders[guest->number];
    for (i = 0; i < EVENT_MESSAGES; i++) {
        CHECK_EQ(post_send(end, i, 0), 0);
        EXPECT(end->send_cq, i, IBV_WC_SUCCESS);
        if (i % 16 == 0)
            sleep_us(50); /* so that the receiver falls asleep now and then */
    }
}

static void events_wake_the_sleeper(void)
{
    struct guest guests[EVENT_SENDERS + 1];
    struct party *party = calloc(1, sizeof(*party));
    const struct pair_options options = {.memory = 64};
    unsigned int i, j;

    REQUIRE(party != NULL);
    home_open(&party->home);
    party->channel = soft_verbs.create_comp_channel(party->home.context);
    REQUIRE(party->channel && fcntl(party->channel->fd, F_SETFL, O_NONBLOCK) == 0);
    party->cq = home_cq(&party->home, 64, party->channel);
    for (i = 0; i < EVENT_SENDERS; i++) {
        home_open(&party->sender_homes[i]);
        end_open(&party->senders[i], &party->sender_homes[i], &options);
        party->receivers[i] = make_qp(party->home.pd, party->cq, 4);
        qp_connect(party->receivers[i], &default_link, party->senders[i].qp->qp_num);
        qp_connect(party->senders[i].qp, &default_link, party->receivers[i]->qp_num);
        for (j = 0; j < 4; j++) {
            struct ibv_recv_wr recv = {.wr_id = i}, *bad;

            CHECK_EQ(verbs_post_recv(party->receivers[i], &recv, &bad), 0);
        }
    }
    for (i = 0; i <= EVENT_SENDERS; i++)
        guests[i] = (struct guest){party, i};
    run_threads(EVENT_SENDERS + 1, join_party, guests, sizeof(guests[0]));
    CHECK(!is_readable(party->channel->fd));
    for (i = 0; i < EVENT_SENDERS; i++) {
        CHECK_EQ(soft_verbs.destroy_qp(party->receivers[i]), 0);
        end_close(&party->senders[i]);
        home_close(&party->sender_homes[i]);
    }
    CHECK_EQ(soft_verbs.destroy_cq(party->cq), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(party->channel), 0);
    home_close(&party->home);
    free(party);
}

/* ---- Contexts that come and go ------------------------------------------------------------------------------ */

static void come_and_go(void *argument)
{
    unsigned int i, *number = argument;

    for (i = 0; i < SCALED(60u); i++) {
        struct pair pair;

        PAIR_OPEN(&pair, .memory = 256, .one_cq = i % 2);
        CHECK_EQ(post_receive(&pair.b, *number, 64), 0);
        CHECK_EQ(post_send(&pair.a, i, 64), 0);
        EXPECT(pair.a.send_cq, i, IBV_WC_SUCCESS);
        EXPECT(pair.b.recv_cq, *number, IBV_WC_SUCCESS);
        if (i % 3 == 0) /* with the C thread of inline mode, too */
            CHECK_EQ(post_send(&pair.a, i, 64), 0);
        pair_close(&pair);
    }
}

static void contexts_come_and_go(void)
{
    unsigned int numbers[4] = {1001, 1002, 1003, 1004};

    run_threads(COUNT_OF(numbers), come_and_go, numbers, sizeof(numbers[0]));
}

CHECK_MAIN(CASE(ring_of_threads), CASE(atomics_of_many), CASE(shared_queue_pair), CASE(resets_against_polling),
           CASE(events_wake_the_sleeper), CASE(contexts_come_and_go))
