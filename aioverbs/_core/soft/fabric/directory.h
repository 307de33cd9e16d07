/* Directory in which devices of one host find each other: a Unix socket for each device, under the names of its
 * GIDs. */
#ifndef AIOVERBS_SOFT_FABRIC_DIRECTORY_H
#define AIOVERBS_SOFT_FABRIC_DIRECTORY_H

#include <sys/stat.h>
#include <sys/un.h>

#include "soft/base/settings.h"
#include "abi/libibverbs.h"

struct soft_directory_entry {
    int fd; /* listening socket; -1: there is no entry */
    char names[2][SOFT_MAX_PATH];
    dev_t device; /* device and inode of the socket's file: another file of the same name is not removed */
    ino_t inode;
};

/* Create the directory if it is missing, and a listening socket in it. Return 0 or an errno, which `why` explains:
 * EADDRINUSE: another running device has one of the GIDs; EACCES: other users could replace this device's files in the
 * directory; EEXIST: another file took the place of the socket. */
int soft_directory_register(const struct soft_settings *settings, const union ibv_gid gids[2],
                            struct soft_directory_entry *entry, char *why, size_t size);
void soft_directory_unregister(struct soft_directory_entry *entry);

/* Return whether a device of this user may claim the GID: false if the directory has a file of another user for it. The
 * system sets the owner of a file, so it cannot be forged. Whether that device is running is not checked. */
bool soft_directory_permits(const struct soft_settings *settings, const union ibv_gid *gid, uid_t user);

/* Find the address at which a device with this GID would listen. Return 0, or ENOENT: there is none, or the directory
 * cannot be trusted. */
int soft_directory_find(const struct soft_settings *settings, const union ibv_gid *gid, struct sockaddr_un *address);

/* Open the file that users of the directory lock. If only one user can write to the directory, that is a file in it
 * which only that user can open; with several users, any of them could put such a file there, so it is the directory
 * itself. Every user that can open the directory for reading can lock it. Return an owned descriptor, or -1 and errno:
 * also if the directory cannot be made or cannot be trusted. */
int soft_directory_locks(const struct soft_settings *settings);

#endif
