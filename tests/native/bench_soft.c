/* Benchmark of the software device, as JSON lines. Variants are measured in turns, in many short rounds, and reported
 * as medians, since machines differ and are shared. */
#include "support.h"

#include <pthread.h>
#include <unistd.h>

#define ROUNDS 301
#define MEBIBYTE (1u << 20)

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(const double *values, size_t count)
{
    double *sorted = malloc(count * sizeof(*sorted)), middle;

    REQUIRE(sorted != NULL);
    memcpy(sorted, values, count * sizeof(*sorted));
    qsort(sorted, count, sizeof(*sorted), compare);
    middle = sorted[count / 2];
    free(sorted);
    return middle;
}

static double median_ratio(const double *a, const double *b, size_t count)
{
    double *ratios = malloc(count * sizeof(*ratios)), middle;
    size_t i;

    REQUIRE(ratios != NULL);
    for (i = 0; i < count; i++)
        ratios[i] = a[i] / b[i];
    middle = median(ratios, count);
    free(ratios);
    return middle;
}

/* Glibc leaves locked instructions out while a process has one thread: a program that uses domains has more. */
static void *idle(void *argument)
{
    pause();
    return argument;
}

/* ---- One write ---------------------------------------------------------------------------------------------- */

static const struct check_variant with_domain = {"inline-td", {.mode = SOFT_INLINE}, true};
static const struct check_variant locked = {"inline", {.mode = SOFT_INLINE}, false};
static const struct check_variant threaded = {"thread-td", {.mode = SOFT_THREAD}, true};

/* Posts one signalled write and polls until it is done, over and over; nanoseconds for each. */
static double write_and_poll(struct pair *pair, uint32_t length, unsigned int count)
{
    struct ibv_sge sge = span(&pair->a, 0, length);
    struct ibv_send_wr wr = request_to(IBV_WR_RDMA_WRITE, 1, &sge, 1, &pair->b, 0), *bad;
    uint64_t begin = now_ns();
    struct ibv_wc wc;
    unsigned int i;
    int n;

    for (i = 0; i < count; i++) { /* without checks that call something */
        if (verbs_post_send(pair->a.qp, &wr, &bad))
            break;
        while (!(n = verbs_poll_cq(pair->a.send_cq, 1, &wc)))
            ;
        if (n < 0 || wc.status != IBV_WC_SUCCESS)
            break;
    }
    REQUIRE_EQ(i, count);
    return (double)(now_ns() - begin) / count;
}

/* Several pairs of each kind, since where memory happens to lie costs as much as what is compared. */
#define PLACES 6

static void small_writes(void)
{
    static double domain_ns[ROUNDS], locked_ns[ROUNDS];
    struct home homes[2 * PLACES]; /* in turns */
    struct pair pairs[2 * PLACES];
    size_t i, j;

    for (j = 0; j < 2 * PLACES; j++) {
        home_open_like(&homes[j], j % 2 ? &locked : &with_domain);
        PAIR_OPEN(&pairs[j], .homes = {&homes[j], &homes[j]});
        write_and_poll(&pairs[j], 8, 10000); /* to warm up */
    }
    for (i = 0; i < ROUNDS; i++) {
        for (j = 0; j < 2 * PLACES; j++) {
            size_t at = (i + j) % (2 * PLACES);
            double *sum = at % 2 ? &locked_ns[i] : &domain_ns[i];

            *sum += write_and_poll(&pairs[at], 8, 1000) / PLACES;
        }
    }
    printf("{\"name\": \"soft_write_8\", \"thread_domain_ns\": %.1f, \"locked_ns\": %.1f, "
           "\"thread_domain_to_locked\": %.3f}\n",
           median(domain_ns, ROUNDS), median(locked_ns, ROUNDS), median_ratio(domain_ns, locked_ns, ROUNDS));
    for (j = 0; j < 2 * PLACES; j++) {
        pair_close(&pairs[j]);
        home_close(&homes[j]);
    }
}

/* ---- A large write ------------------------------------------------------------------------------------------ */

static double copy(struct pair *pair, unsigned int count)
{
    uint64_t begin = now_ns();
    unsigned int i;

    for (i = 0; i < count; i++) {
        memcpy(pair->b.memory, pair->a.memory, MEBIBYTE);
        __asm__ volatile("" : : "r"(pair->b.memory) : "memory"); /* it is wanted */
    }
    return (double)(now_ns() - begin) / count;
}

static void large_writes(void)
{
    static double write_ns[ROUNDS], copy_ns[ROUNDS];
    struct home home;
    struct pair pair;
    size_t i;

    home_open_like(&home, &with_domain);
    PAIR_OPEN(&pair, .homes = {&home, &home}, .memory = MEBIBYTE);
    memset(pair.a.memory, 1, MEBIBYTE);
    write_and_poll(&pair, MEBIBYTE, 50);
    for (i = 0; i < ROUNDS; i++) {
        if (i % 2)
            copy_ns[i] = copy(&pair, 8);
        write_ns[i] = write_and_poll(&pair, MEBIBYTE, 8);
        if (!(i % 2))
            copy_ns[i] = copy(&pair, 8);
    }
    printf("{\"name\": \"soft_write_1mib\", \"write_gb_per_s\": %.2f, \"memcpy_gb_per_s\": %.2f, "
           "\"bandwidth_to_memcpy\": %.3f}\n",
           MEBIBYTE / median(write_ns, ROUNDS), MEBIBYTE / median(copy_ns, ROUNDS),
           median_ratio(copy_ns, write_ns, ROUNDS));
    pair_close(&pair);
    home_close(&home);
}

/* ---- Many pairs --------------------------------------------------------------------------------------------- */

#define PAIRS 10000u
#define PAIR_DEPTH 16u

static uint64_t resident_bytes(void)
{
    unsigned long size, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    REQUIRE(file && fscanf(file, "%lu %lu", &size, &resident) == 2);
    fclose(file);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void many_pairs(void)
{
    static struct ibv_qp *qps[PAIRS][2];
    static double pair_ns[PAIRS];
    uint64_t before, all;
    struct ibv_cq *cq;
    struct home home;
    size_t i;

    home_open_like(&home, &with_domain);
    cq = home_cq(&home, 4096, NULL);
    memset(qps, 0, sizeof(qps)); /* our own pages count before */
    memset(pair_ns, 0, sizeof(pair_ns));
    before = resident_bytes();
    all = now_ns();
    for (i = 0; i < PAIRS; i++) {
        uint64_t begin = now_ns();

        qps[i][0] = make_qp(home.pd, cq, PAIR_DEPTH);
        qps[i][1] = make_qp(home.pd, cq, PAIR_DEPTH);
        qp_connect(qps[i][0], &default_link, qps[i][1]->qp_num);
        qp_connect(qps[i][1], &default_link, qps[i][0]->qp_num);
        pair_ns[i] = (double)(now_ns() - begin);
    }
    all = now_ns() - all;
    printf("{\"name\": \"soft_pairs\", \"pairs\": %u, \"depth\": %u, \"first_1000_us\": %.2f, "
           "\"last_1000_us\": %.2f, \"last_to_first\": %.2f, \"mean_us\": %.2f, "
           "\"bytes_per_pair\": %llu}\n",
           PAIRS, PAIR_DEPTH, median(pair_ns, 1000) / 1e3, median(pair_ns + PAIRS - 1000, 1000) / 1e3,
           median(pair_ns + PAIRS - 1000, 1000) / median(pair_ns, 1000), (double)all / PAIRS / 1e3,
           (unsigned long long)((resident_bytes() - before) / PAIRS));
    for (i = 0; i < PAIRS; i++) {
        CHECK_EQ(soft_verbs.destroy_qp(qps[i][0]), 0);
        CHECK_EQ(soft_verbs.destroy_qp(qps[i][1]), 0);
    }
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

/* ---- By the worker thread ------------------------------------------------------------------------------------- */

static void threaded_round_trips(void)
{
    static double trip_ns[ROUNDS];
    struct home home;
    struct pair pair;
    size_t i;

    home_open_like(&home, &threaded);
    PAIR_OPEN(&pair, .homes = {&home, &home});
    write_and_poll(&pair, 8, 1000);
    for (i = 0; i < ROUNDS; i++)
        trip_ns[i] = write_and_poll(&pair, 8, 50);
    printf("{\"name\": \"soft_engine_write_8\", \"round_trip_us\": %.2f}\n", median(trip_ns, ROUNDS) / 1e3);
    pair_close(&pair);
    home_close(&home);
}

int main(void)
{
    pthread_t thread;

    REQUIRE_EQ(pthread_create(&thread, NULL, idle, NULL), 0);
    many_pairs(); /* first: they are to find no memory that was freed before */
    small_writes();
    large_writes();
    threaded_round_trips();
    return check_failures() > 0;
}
