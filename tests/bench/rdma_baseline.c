/* Baseline in C for the benchmarks on an RDMA device: a loop over the verbs, and nothing else.
 *
 *     rdma_baseline WHAT WAIT LENGTH WINDOW OPERATIONS GID_INDEX NEAR FAR
 *
 * WHAT is `writes`, of a queue pair on the device NEAR to one on FAR (to itself if they are the same); or `ask` or
 * `answer`, the two processes of an echo, each on NEAR, which exchange lines over their standard streams. WAIT is
 * `polls`, or `sleeps` on the completion channel. The last line has the nanoseconds for an operation, the number of
 * times that the thread slept for it, and the number of events it took. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#include "abi/verbs_ops.h"
#include "baseline.h"

#define BATCH 16 /* completions polled at once */
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
#define RECEIVE (1ull << 32) /* in a wr_id, beside the index */

struct device_list_verbs {
    struct ibv_device **(*get_device_list)(int *count);
    const char *(*get_device_name)(struct ibv_device *);
    struct ibv_context *(*open_device)(struct ibv_device *);
};

struct end {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    struct ibv_port_attr port;
    union ibv_gid gid;
};

static struct verbs_table verbs;
static bool sleeps;
static uint32_t length, window;
static int gid_index;
static int64_t events;

static int64_t slept(void)
{
    struct rusage usage;

    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

/* ---- An end of a connection -------------------------------------------------------------------------------------- */

static struct ibv_context *open_by_name(const char *name)
{
    void *library = dlopen("libibverbs.so.1", RTLD_NOW);
    struct device_list_verbs list = {0};
    struct ibv_device **devices;
    const char *missing = verbs_table_load(&verbs, "libibverbs.so.1");
    int count = 0, i;

    if (missing || !library) {
        fprintf(stderr, "%s\n", missing ? missing : dlerror());
        exit(1);
    }
    *(void **)&list.get_device_list = dlsym(library, "ibv_get_device_list");
    *(void **)&list.get_device_name = dlsym(library, "ibv_get_device_name");
    *(void **)&list.open_device = dlsym(library, "ibv_open_device");
    check(list.get_device_list && list.get_device_name && list.open_device, "libibverbs");
    devices = list.get_device_list(&count);
    for (i = 0; i < count; i++)
        if (!strcmp(list.get_device_name(devices[i]), name))
            return list.open_device(devices[i]); /* the list lives as long as the process */
    errno = ENODEV;
    return NULL;
}

/* Open memory for `places` messages, as many receives as sends, and a queue for the completions of both. */
static void begin(struct end *end, const char *device, uint32_t places)
{
    size_t size = (size_t)places * length;
    void *memory = NULL;
    struct ibv_qp_init_attr attr = {
        .cap = {.max_send_wr = places, .max_recv_wr = places, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_pd *pd;

    check((end->context = open_by_name(device)), device);
    check(!verbs_query_port(end->context, 1, &end->port), "ibv_query_port");
    check(!verbs.query_gid(end->context, 1, gid_index, &end->gid), "ibv_query_gid");
    check((pd = verbs.alloc_pd(end->context)), "ibv_alloc_pd");
    check(!posix_memalign(&memory, 4096, size), "posix_memalign");
    memset(memory, 1, size);
    check((end->mr = verbs.reg_mr(pd, memory, size, ACCESS)), "ibv_reg_mr");
    check((end->channel = verbs.create_comp_channel(end->context)), "ibv_create_comp_channel");
    check((end->cq = verbs.create_cq(end->context, (int)places * 2, NULL, end->channel, 0)), "ibv_create_cq");
    attr.send_cq = attr.recv_cq = end->cq;
    check((end->qp = verbs.create_qp(pd, &attr)), "ibv_create_qp");
}

static void to_init(struct end *end)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS};

    check(!verbs.modify_qp(end->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
          "ibv_modify_qp to INIT");
}

static void connect_to(struct end *end, uint32_t qp_num, uint16_t lid, const union ibv_gid *gid)
{
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = end->port.active_mtu,
        .dest_qp_num = qp_num,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .dlid = lid,
                    .grh = {.dgid = *gid, .sgid_index = (uint8_t)gid_index, .hop_limit = 64}},
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6, .max_rd_atomic = 1};

    check(!verbs.modify_qp(end->qp, &rtr,
                           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "ibv_modify_qp to RTR");
    check(!verbs.modify_qp(end->qp, &rts,
                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                               IBV_QP_MAX_QP_RD_ATOMIC),
          "ibv_modify_qp to RTS");
    if (sleeps)
        check(!verbs_req_notify_cq(end->cq, 0), "ibv_req_notify_cq");
}

/* Poll some completions, at least one. End the process unless all succeeded. */
static int take(struct end *end, struct ibv_wc *wcs)
{
    struct ibv_cq *cq;
    void *context;
    int found, i;

    while (!(found = verbs_poll_cq(end->cq, BATCH, wcs))) {
        if (!sleeps)
            continue;
        /* A completion after the request for notification raises an event; the next poll finds earlier ones. */
        check(!verbs.get_cq_event(end->channel, &cq, &context), "ibv_get_cq_event");
        verbs.ack_cq_events(cq, 1);
        events++;
        check(!verbs_req_notify_cq(cq, 0), "ibv_req_notify_cq");
    }
    check(found > 0, "ibv_poll_cq");
    for (i = 0; i < found; i++) {
        if (wcs[i].status != IBV_WC_SUCCESS) {
            fprintf(stderr, "completion %d has status %d\n", i, wcs[i].status);
            exit(1);
        }
    }
    return found;
}

static void send_from(const struct end *end, uint32_t place, enum ibv_wr_opcode opcode, const struct ibv_mr *to)
{
    struct ibv_sge sge = {
        .addr = (uintptr_t)end->mr->addr + (uint64_t)place * length, .length = length, .lkey = end->mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = place, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad;

    if (to) {
        wr.wr.rdma.remote_addr = (uintptr_t)to->addr + (uint64_t)place * length;
        wr.wr.rdma.rkey = to->rkey;
    }
    check(!verbs_post_send(end->qp, &wr, &bad), "ibv_post_send");
}

static void receive_into(const struct end *end, uint32_t place)
{
    struct ibv_sge sge = {
        .addr = (uintptr_t)end->mr->addr + (uint64_t)place * length, .length = length, .lkey = end->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = place | RECEIVE, .sg_list = &sge, .num_sge = 1}, *bad;

    check(!verbs_post_recv(end->qp, &wr, &bad), "ibv_post_recv");
}

/* ---- What is measured -------------------------------------------------------------------------------------------- */

static void write_all(struct end *near, const struct end *far, int64_t operations)
{
    struct ibv_wc wcs[BATCH];
    int64_t posted, done = 0;

    for (posted = 0; posted < window && posted < operations; posted++)
        send_from(near, (uint32_t)posted, IBV_WR_RDMA_WRITE, far->mr);
    while (done < operations) {
        int found = take(near, wcs), i;

        done += found;
        for (i = 0; i < found && posted < operations; i++, posted++)
            send_from(near, (uint32_t)wcs[i].wr_id, IBV_WR_RDMA_WRITE, far->mr);
    }
}

/* Send messages from the first `window` slots, and receive their echoes into as many others. */
static void ask_all(struct end *end, int64_t operations)
{
    struct ibv_wc wcs[BATCH];
    int64_t posted, sent = 0, came = 0;

    for (posted = 0; posted < window && posted < operations; posted++)
        send_from(end, (uint32_t)posted, IBV_WR_SEND, NULL);
    while (sent < operations || came < operations) {
        int found = take(end, wcs), i;

        for (i = 0; i < found; i++) {
            if (wcs[i].wr_id & RECEIVE) {
                came++;
                receive_into(end, (uint32_t)wcs[i].wr_id);
            } else {
                sent++;
            }
            if (posted < operations && posted - sent < window && posted - came < window)
                send_from(end, (uint32_t)(posted++ % window), IBV_WR_SEND, NULL);
        }
    }
}

/* Send each message back from its slot, and receive into that slot again once it is sent. */
static void answer_all(struct end *end, int64_t operations)
{
    struct ibv_wc wcs[BATCH];
    int64_t sent = 0;

    while (sent < operations) {
        int found = take(end, wcs), i;

        for (i = 0; i < found; i++) {
            uint32_t place = (uint32_t)wcs[i].wr_id;

            if (wcs[i].wr_id & RECEIVE) {
                send_from(end, place, IBV_WR_SEND, NULL);
            } else {
                sent++;
                receive_into(end, place);
            }
        }
    }
}

/* ---- The two processes of an echo -------------------------------------------------------------------------------- */

/* Send a line to the other process, and receive its line. */
static void exchange_lines(const char *line, char *answer, int size)
{
    printf("%s\n", line);
    fflush(stdout);
    check(fgets(answer, size, stdin), "the other process");
}

static void meet_and_connect(struct end *end)
{
    char line[128], answer[128];
    union ibv_gid gid = {{0}};
    uint32_t qp_num, lid, mtu, byte;
    int at, i;

    at = snprintf(line, sizeof(line), "%" PRIu32 " %u %d ", end->qp->qp_num, end->port.lid, (int)end->port.active_mtu);
    for (i = 0; i < 16; i++)
        at += snprintf(line + at, sizeof(line) - (size_t)at, "%02x", end->gid.raw[i]);
    exchange_lines(line, answer, sizeof(answer));
    check(sscanf(answer, "%" SCNu32 " %" SCNu32 " %" SCNu32 " %n", &qp_num, &lid, &mtu, &at) == 3, "the other end");
    for (i = 0; i < 16; i++) {
        check(sscanf(answer + at + 2 * i, "%2" SCNx32, &byte) == 1, "the other end's GID");
        gid.raw[i] = (uint8_t)byte;
    }
    connect_to(end, qp_num, (uint16_t)lid, &gid);
    exchange_lines("ready", answer, sizeof(answer));
}

int main(int count, char **arguments)
{
    struct end near = {0}, far = {0}, *to = &near;
    char answer[128];
    int64_t operations, began = 0, sleeps_before = 0, round;
    const char *what;
    uint32_t i;

    check(count == 9, "WHAT WAIT LENGTH WINDOW OPERATIONS GID_INDEX NEAR FAR");
    what = arguments[1];
    sleeps = !strcmp(arguments[2], "sleeps");
    length = (uint32_t)atoi(arguments[3]);
    window = (uint32_t)atoi(arguments[4]);
    operations = atoll(arguments[5]);
    gid_index = atoi(arguments[6]);
    begin(&near, arguments[7], 2 * window);
    to_init(&near);
    if (!strcmp(what, "writes")) {
        if (strcmp(arguments[7], arguments[8])) {
            begin(to = &far, arguments[8], 2 * window);
            to_init(&far);
            connect_to(&far, near.qp->qp_num, near.port.lid, &near.gid);
        }
        connect_to(&near, to->qp->qp_num, to->port.lid, &to->gid);
    } else {
        i = strcmp(what, "ask") ? 0 : window;
        for (; i < 2 * window; i++)
            receive_into(&near, i);
        meet_and_connect(&near);
    }
    /* A tenth of the operations first, as a warm-up of caches and of the new connection. */
    for (round = 0; round < 2; round++) {
        int64_t part = round ? operations : operations / 10 + 1;

        began = now_ns();
        sleeps_before = slept();
        events = 0;
        if (!strcmp(what, "writes"))
            write_all(&near, to, part);
        else if (!strcmp(what, "ask"))
            ask_all(&near, part);
        else
            answer_all(&near, part);
    }
    began = now_ns() - began;
    sleeps_before = slept() - sleeps_before;
    if (strcmp(what, "writes"))
        exchange_lines("done", answer, sizeof(answer));
    printf("%f %f %f\n", (double)began / (double)operations, (double)sleeps_before / (double)operations,
           (double)events / (double)operations);
    return 0; /* the kernel destroys the remaining objects */
}
