/* What a device's user says of it and its fabric. Python reads the latter from the environment: SoftSettings in soft_settings.py. */
#ifndef AIOVERBS_SOFT_BASE_SETTINGS_H
#define AIOVERBS_SOFT_BASE_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SOFT_PORT 7470u /* of TCP, where no other one is said */

/* Where other hosts find a device. */
struct soft_address {
    int family; /* AF_INET or AF_INET6; 0: nowhere */
    uint16_t port;
    uint8_t bytes[16]; /* of IPv4 the first 4; network byte order */
};

enum { SOFT_MAX_USERS = 64, SOFT_MAX_SECRET = 256, SOFT_MAX_PATH = 108 };

enum soft_mode {
    SOFT_INLINE, /* a request is executed in the call that posts it */
    SOFT_THREAD, /* a C thread of the context executes it, not before `delay_ns` after it was posted */
};

struct soft_settings {
    char directory[SOFT_MAX_PATH];   /* where devices of this host find each other; 33 bytes of it stay free */
    uid_t users[SOFT_MAX_USERS];     /* who else may connect, and be reached */
    unsigned int user_count;         /* with any, the directory is theirs, too */
    uint8_t secret[SOFT_MAX_SECRET]; /* what a peer has to know */
    size_t secret_size;              /* 0: there is none */
    bool direct;                     /* data may go from memory to memory */
    uint32_t spin_ns;                /* how long the thread looks before it sleeps */
};

/* Where nobody says anything: a directory of this user's in /tmp, no other users, no secret. */
void soft_settings_default(struct soft_settings *settings);

/* Whether a process of this user may be a peer. */
bool soft_settings_allow(const struct soft_settings *settings, uid_t user);

#endif
