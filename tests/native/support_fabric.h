/* Nodes: devices that have only a fabric, several in one process, each with a user that answers frames. */
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

/* A node. Never freed, as devices are not. Its user answers requests with ACK, and reads with bytes of
 * fill_pattern(). */
struct node {
    struct node *next;
    struct soft_device device;
    /* Received requests and responses; requests with other data than their sender's */
    atomic_uint requests, responses, batches, wrong;
    atomic_ullong bytes;
    atomic_ullong address;        /* of the last request */
    atomic_bool deaf;             /* requests are not answered */
    atomic_bool expects;          /* is_connected_to_peer() returns true */
    unsigned int requests_of[64]; /* written under progress: requests from each queue pair number below 64 */
    unsigned int lead; /* largest difference between two of `requests_of` so far, of the first `of` senders */
    unsigned int of;
};

struct node *node_open(void);
struct node *node_open_at(const union ibv_gid gids[2], uint16_t port);
struct node *node_with_port(uint16_t port); /* at 127.0.0.1, which is in the second GID */
void node_close(struct node *node);         /* stop the node, which may listen again */

uint16_t free_port(void); /* return a TCP port of this host that is free now */

/* Settings of nodes that are opened from here on; new_directory() makes a fresh directory, and resets the others to
 * their defaults. With AIOVERBS_SOFT_RINGS=0 frames go through sockets. */
extern struct soft_settings settings;
void new_directory(void);
void set_directory(const char *path);
const char *directory(void);

/* Sender: sends requests of one size one after the other, as fast as the link takes them. */
struct sender {
    struct soft_qp qp; /* its queue pair number is in the frames */
    struct soft_link *link;
    enum ibv_wr_opcode opcode;
    uint32_t size;
    atomic_uint sent, kicks;
    unsigned int wanted;
    atomic_int error; /* errno of the last attempt */
};

void sender_open(struct sender *sender, struct node *node, const union ibv_gid *to, uint32_t number);
void sender_close(struct sender *sender);
void sender_want(struct sender *sender, enum ibv_wr_opcode opcode, unsigned int more, uint32_t size);

/* Send until all requests are sent, retrying while there is no connection. Return false after the deadline. */
bool sender_finish(struct sender *sender);

void fill_pattern(uint8_t *data, uint32_t size, uint32_t seed);
struct soft_frame request_frame(enum ibv_wr_opcode opcode, uint32_t number, uint32_t psn, uint32_t size);

/* Return the statistics; return whether the last refusal's reason contains `text`. */
struct soft_fabric_stats stats_of(struct node *node);
bool last_reason_is(struct node *node, const char *part);

/* Wait until the condition is true. Fail after the deadline. */
#define EVENTUALLY(condition)                                               \
    do {                                                                    \
        uint64_t end_ = now_ns() + WAIT_S * 1000000000ull;                  \
        bool is_true_;                                                      \
                                                                            \
        while (!(is_true_ = (condition)) && now_ns() < end_)                \
            sleep_us(200);                                                  \
        check_true(is_true_, HERE, #condition); /* it may be false again */ \
    } while (0)

/* ---- A peer that is none ----------------------------------------------------------------------------------- */

/* Return a socket that is connected to a node's Unix socket, or -1 and errno. */
int raw_connect(const struct node *node);

/* Return a listener under a node's GIDs: the test itself answers HELLO. */
int listen_by_hand(const struct node *node, struct soft_directory_entry *entry);
int accept_by_hand(int listener, uint8_t hello[SOFT_HELLO_SIZE]);

/* Send HELLO like an honest peer of these GIDs, without an offer of direct copies. */
void raw_hello(int fd, const struct node *to, uint8_t hello[SOFT_HELLO_SIZE]);

/* Read `size` bytes. Return false if the other side closed the connection before, or no bytes come. */
bool raw_read(int fd, void *to, size_t size);
bool raw_is_closed(int fd); /* wait for that within the deadline */

/* Connect and complete the handshake, without a secret. Return the socket. */
int raw_open(const struct node *to);

/* Thread that holds the progress lock of a fabric, so that no other thread reads there. */
struct keeper {
    pthread_t thread;
    struct soft_fabric *fabric;
    atomic_bool kept, over;
};

void keep_from_reading(struct soft_fabric *fabric, struct keeper *keeper);
void let_read(struct keeper *keeper);

unsigned int open_descriptors(void); /* return the number of descriptors of this process, plus a constant */

#endif
