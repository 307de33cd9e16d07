/* Devices that have nothing but a fabric, several in one process, and somebody at each who answers frames. */
#ifndef AIOVERBS_TESTS_SUPPORT_FABRIC_H
#define AIOVERBS_TESTS_SUPPORT_FABRIC_H

#include <stdatomic.h>

#include "soft/fabric/fabric.h"
#include "soft/fabric/frame.h"
#include "soft/objects/device.h"
#include "soft/objects/qp.h"
#include "soft/fabric/directory.h"
#include "soft/fabric/handshake_wire.h"
#include "soft/base/settings.h"

/* Never freed, as devices are not. It answers requests with ACK, reads with bytes that fill_pattern made. */
struct node {
    struct node *next;
    struct soft_device device;
    atomic_uint requests, responses, batches, wrong; /* how many came; how many had other data than their sender's */
    atomic_ullong bytes;
    atomic_ullong address;  /* of the last request */
    atomic_bool deaf;       /* it does not answer */
    atomic_bool expects;    /* a queue pair is connected to whoever is there */
    unsigned int leads[64]; /* written under progress: how many came from each queue pair number below 64 */
    unsigned int lead;      /* the largest distance between two of `leads` below `of`, so far */
    unsigned int of;
};

struct node *node_open(void);
struct node *node_open_at(const union ibv_gid gids[2], uint16_t port);
struct node *node_with_port(uint16_t port); /* at 127.0.0.1, which its second GID tells */
void node_close(struct node *node);         /* it is stopped, and may listen again */

uint16_t free_port(void); /* of this host, which nobody has just now */

/* Of the nodes that are opened from here on; new_directory() makes a fresh directory, and the others what they are by
 * default. */
extern struct soft_settings settings;
void new_directory(void);
void set_directory(const char *path);
const char *directory(void);

/* Somebody who sends requests of one size one after the other, as fast as the link takes them. */
struct sender {
    struct soft_qp qp; /* its number is in the frames */
    struct soft_link *link;
    enum ibv_wr_opcode opcode;
    uint32_t size;
    atomic_uint sent, kicks;
    unsigned int wanted;
    atomic_int error; /* of the last attempt */
};

void sender_open(struct sender *sender, struct node *node, const union ibv_gid *to, uint32_t number);
void sender_close(struct sender *sender);
void sender_want(struct sender *sender, enum ibv_wr_opcode opcode, unsigned int more, uint32_t size);

/* Until all went out, trying again where no connection was to be had; false after the deadline. */
bool sender_finish(struct sender *sender);

void fill_pattern(uint8_t *data, uint32_t size, uint32_t seed);
struct soft_frame request_frame(enum ibv_wr_opcode opcode, uint32_t number, uint32_t psn, uint32_t size);

/* The statistics, and the reason of the last refusal. */
struct soft_fabric_stats stats_of(struct node *node);
bool last_reason_is(struct node *node, const char *part);

/* Whether the condition comes true before the deadline. */
#define EVENTUALLY(condition)                              \
    do {                                                   \
        uint64_t end_ = now_ns() + WAIT_S * 1000000000ull; \
                                                           \
        while (!(condition) && now_ns() < end_)            \
            sleep_us(200);                                 \
        CHECK(condition);                                  \
    } while (0)

/* ---- A peer that is none ----------------------------------------------------------------------------------- */

/* A socket that is connected to a node, by its first GID; -1 and errno. */
int raw_connect(const struct node *node);

/* A listener by hand, at which a node's GIDs lead: what follows HELLO is the test's to say. */
int listen_by_hand(const struct node *node, struct soft_directory_entry *entry);
int accept_by_hand(int listener, uint8_t hello[SOFT_HELLO_SIZE]);

/* Says HELLO as an honest peer of these GIDs would, without an offer to move directly. */
void raw_hello(int fd, const struct node *to, uint8_t hello[SOFT_HELLO_SIZE]);

/* Reads so many bytes; false where the other side closed the connection before, or nothing comes. */
bool raw_read(int fd, void *to, size_t size);
bool raw_is_closed(int fd); /* within the deadline */

/* All of the handshake, without a secret. */
int raw_open(const struct node *to);

unsigned int open_descriptors(void); /* of this process, and a few more, always as many */

#endif
