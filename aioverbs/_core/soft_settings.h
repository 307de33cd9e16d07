/* What the environment says of the fabric. */
#ifndef AIOVERBS_SOFT_SETTINGS_H
#define AIOVERBS_SOFT_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { SOFT_MAX_USERS = 64, SOFT_MAX_SECRET = 256, SOFT_MAX_PATH = 108 };

struct soft_settings {
    char directory[SOFT_MAX_PATH];   /* AIOVERBS_SOFT_DIRECTORY, else in XDG_RUNTIME_DIR, else in /tmp */
    uid_t users[SOFT_MAX_USERS];     /* AIOVERBS_SOFT_USERS, comma separated: who else may connect, and be reached */
    unsigned int user_count;         /* with any, the directory is theirs, too */
    uint8_t secret[SOFT_MAX_SECRET]; /* AIOVERBS_SOFT_SECRET: what a peer has to know */
    size_t secret_size;              /* 0: there is none */
    bool direct;                     /* AIOVERBS_SOFT_DIRECT, not 0: data may go from memory to memory */
    uint32_t spin_ns;                /* AIOVERBS_SOFT_SPIN, microseconds: how long the thread looks before it sleeps */
};

/* 0; EINVAL, ENAMETOOLONG: `why` says which variable is not to be understood, and how it should be. */
int soft_settings_read(struct soft_settings *settings, char *why, size_t size);

/* Whether a process of this user may be a peer. */
bool soft_settings_allow(const struct soft_settings *settings, uid_t user);

#endif
