/* Settings of a device and of its fabric. Python reads the latter from the environment: SoftSettings in
 * soft_settings.py. */
#ifndef AIOVERBS_SOFT_BASE_SETTINGS_H
#define AIOVERBS_SOFT_BASE_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SOFT_PORT 7470u /* default TCP port */

/* Address at which other hosts find a device. */
struct soft_address {
    int family; /* AF_INET or AF_INET6; 0: no address */
    uint16_t port;
    uint8_t bytes[16]; /* network byte order; IPv4: the first 4 bytes */
};

enum { SOFT_MAX_USERS = 64, SOFT_MAX_SECRET = 256, SOFT_MAX_PATH = 108 };

enum soft_mode {
    SOFT_INLINE, /* the call that posts a request executes it */
    SOFT_THREAD, /* a C thread of the context executes requests, at the earliest `delay_ns` after they were posted */
};

struct soft_settings {
    /* directory where devices of this host find each other; 33 bytes of it stay unused */
    char directory[SOFT_MAX_PATH];
    uid_t users[SOFT_MAX_USERS];     /* further users whose processes may be peers */
    unsigned int user_count;         /* number of `users`; if not 0, the directory belongs to them, too */
    uint8_t secret[SOFT_MAX_SECRET]; /* secret that peers have to know */
    size_t secret_size;              /* 0: no secret */
    bool direct;                     /* whether peers may copy from memory to memory */
    bool rings;                      /* whether frames go through shared memory */
    uint32_t spin_ns;                /* how long the thread polls before it sleeps, in nanoseconds */
};

/* Set the defaults: a directory of this user in /tmp, no other users, no secret. */
void soft_settings_default(struct soft_settings *settings);

/* Return whether a process of this user may be a peer. */
bool soft_settings_allow(const struct soft_settings *settings, uid_t user);

#endif
