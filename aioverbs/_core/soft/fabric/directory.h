/* The directory in which devices of one host find each other: a Unix socket for each, by the names of its GIDs. */
#ifndef AIOVERBS_SOFT_FABRIC_DIRECTORY_H
#define AIOVERBS_SOFT_FABRIC_DIRECTORY_H

#include <sys/stat.h>
#include <sys/un.h>

#include "soft/base/settings.h"
#include "abi/libibverbs.h"

struct soft_directory_entry {
    int fd; /* the listening socket; -1: there is no entry */
    char names[2][SOFT_MAX_PATH];
    dev_t device; /* of the socket's file, like the next one: what else has its name is not ours to remove */
    ino_t inode;
};

/* Makes the directory where it is missing, and a listening socket in it. 0 or an errno, which `why` explains:
 * EADDRINUSE: another device that lives has one of the GIDs; EACCES: others could replace what is ours in the directory;
 * EEXIST: another file took the place of the socket. */
int soft_directory_register(const struct soft_settings *settings, const union ibv_gid gids[2],
                            struct soft_directory_entry *entry, char *why, size_t size);
void soft_directory_unregister(struct soft_directory_entry *entry);

/* Whether a device of this user may say that it has the GID: not where the directory lists it for another user's. That
 * is the file's owner, whom the system names and nobody chooses; who lives or not is not looked at. */
bool soft_directory_permits(const struct soft_settings *settings, const union ibv_gid *gid, uid_t user);

/* Where a device with this GID would listen. 0, or ENOENT: it does not, or the directory is not to be trusted. */
int soft_directory_find(const struct soft_settings *settings, const union ibv_gid *gid, struct sockaddr_un *address);

/* What those who use the directory can lock: a file in it that is only for the one user who can write there; or, with
 * several users, the directory itself, since a file could be put there by anybody. Whoever can open that one for reading
 * can lock it. An owned descriptor, or -1 and errno: also where the directory cannot be made, or is not to be trusted. */
int soft_directory_locks(const struct soft_settings *settings);

#endif
