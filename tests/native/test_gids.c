/* Tests of GIDs of devices without an address: few random bits, and yet unique on the host. */
#define _GNU_SOURCE
#include "support.h"

#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/objects/device.h"
#include "soft/objects/gids.h"
#include "soft/base/fork_fds.h"

/* Random bytes to return: one byte for all of a call, then real ones. */
static const uint8_t *script;
static bool is_forbidden; /* by a sandbox */

int getentropy(void *to, size_t size)
{
    static uint8_t next = 100;

    if (is_forbidden) {
        errno = EPERM;
        return -1;
    }
    memset(to, script && *script ? *script++ : next++, size);
    return 0;
}

static uint8_t draw(struct soft_device *device, const uint8_t *bytes)
{
    script = bytes;
    CHECK_EQ(soft_gids_init(device), 0);
    script = NULL;
    CHECK_EQ(device->gids[1].raw[12], 127);
    return device->gids[1].raw[13];
}

static void gids_of_one_process(void)
{
    struct soft_device first = {0}, second = {0}, third = {0};

    CHECK_EQ(draw(&first, (const uint8_t[]){9, 5, 0}), 5);
    CHECK_EQ(draw(&second, (const uint8_t[]){9, 5, 5, 6, 0}), 6);
    soft_descriptor_close(first.gid_socket);
    CHECK_EQ(draw(&third, (const uint8_t[]){9, 5, 0}), 5); /* the other process has exited */
    soft_descriptor_close(second.gid_socket);
    soft_descriptor_close(third.gid_socket);
}

static void gids_of_two_processes(void)
{
    struct soft_device ours = {0}, theirs = {0};
    int status;
    pid_t child;

    CHECK_EQ(draw(&ours, (const uint8_t[]){9, 7, 0}), 7);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) /* what was inherited is closed; the parent has its own */
        _exit(draw(&theirs, (const uint8_t[]){9, 7, 8, 0}) != 8);
    REQUIRE_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(soft_gid_reserve(&ours.gids[1]), -1);
    CHECK_EQ(errno, EADDRINUSE);
    soft_descriptor_close(ours.gid_socket);
}

static void all_gids_in_use(void)
{
    struct soft_device first = {0}, second = {0};
    uint8_t same[80];

    memset(same, 11, sizeof(same));
    same[79] = 0;
    draw(&first, same);
    script = same;
    CHECK_EQ(soft_gids_init(&second), EADDRINUSE);
    script = NULL;
    soft_descriptor_close(first.gid_socket);
}

static void a_sandbox_after_the_device_was_opened(void)
{
    struct ibv_qp_attr reset = {.qp_state = IBV_QPS_RESET};
    struct ibv_qp_init_attr attr;
    struct home home;
    struct ibv_cq *cq;
    struct ibv_qp *qp;

    home_open(&home);
    cq = home_cq(&home, 4, NULL);
    attr = (struct ibv_qp_init_attr){.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap.max_send_wr = 1};
    qp = soft_verbs.create_qp(home.pd, &attr);
    REQUIRE(qp != NULL);
    is_forbidden = true;
    CHECK(!soft_verbs.create_qp(home.pd, &attr));
    CHECK_EQ(errno, EPERM);
    CHECK_EQ(soft_verbs.modify_qp(qp, &reset, IBV_QP_STATE), EPERM);
    is_forbidden = false;
    CHECK_EQ(soft_verbs.modify_qp(qp, &reset, IBV_QP_STATE), 0);
    CHECK_EQ(soft_verbs.destroy_qp(qp), 0);
    CHECK_EQ(soft_verbs.destroy_cq(cq), 0);
    home_close(&home);
}

CHECK_MAIN_ONCE(CASE(a_sandbox_after_the_device_was_opened), CASE(gids_of_one_process), CASE(gids_of_two_processes),
                CASE(all_gids_in_use))
