#define _GNU_SOURCE
#include "soft/fabric/directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "soft/base/address.h"
#include "soft/base/fork_fds.h"
#include "soft/base/settings.h"

/* A path in the directory. The settings leave room for a GID's name, which is the longest. */
static void directory_path(const struct soft_settings *settings, const char *name, char path[SOFT_MAX_PATH])
{
    size_t length = strlen(settings->directory), more = strlen(name);

    memcpy(path, settings->directory, length);
    path[length] = '/';
    memcpy(path + length + 1, name, more + 1);
}

/* Whether nobody but us could have put something there; or, where it is shared with others, replaced what is ours. */
static int directory_check(const struct soft_settings *settings, const struct stat *found, char *why, size_t size)
{
    if (!S_ISDIR(found->st_mode)) {
        snprintf(why, size, "%s is no directory: remove it, or name another by AIOVERBS_SOFT_DIRECTORY",
                 settings->directory);
        return ENOTDIR;
    }
    if (settings->user_count) { /* its owner is the users' affair, and whether all of them may write there */
        if (!(found->st_mode & 022) || found->st_mode & S_ISVTX)
            return 0;
        snprintf(why, size, "%s has no sticky bit, so that its users could replace each other's sockets: chmod +t it",
                 settings->directory);
        return EACCES;
    }
    if (found->st_uid != geteuid()) {
        snprintf(why, size, "%s is another user's: name one of your own by AIOVERBS_SOFT_DIRECTORY",
                 settings->directory);
        return EACCES;
    }
    if (found->st_mode & 022) {
        snprintf(why, size, "%s can be written by others: chmod 0700 it", settings->directory);
        return EACCES;
    }
    return 0;
}

static int directory_open(const struct soft_settings *settings, char *why, size_t size)
{
    struct stat found;

    if (!lstat(settings->directory, &found))
        return directory_check(settings, &found, why, size);
    snprintf(why, size, "%s: %s", settings->directory, strerror(errno));
    return errno;
}

static int directory_make(const struct soft_settings *settings, char *why, size_t size)
{
    if (mkdir(settings->directory, 0700) && errno != EEXIST) {
        snprintf(why, size, "%s cannot be made: %s", settings->directory, strerror(errno));
        return errno;
    }
    return directory_open(settings, why, size);
}

/* Whether somebody listens there. Where it cannot be told, somebody does. */
static bool is_alive(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    bool alive;
    int fd;

    strcpy(address.sun_path, path);
    soft_descriptors_hold();
    fd = soft_descriptor_own(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    soft_descriptors_release();
    alive = fd < 0 || !connect(fd, (struct sockaddr *)&address, sizeof(address)) ||
            (errno != ECONNREFUSED && errno != ENOENT);
    soft_descriptor_close_socket(fd); /* who listens there may have sent something by now */
    return alive;
}

/* Takes away what a process that is gone has left. Another one may put its own there at any moment: so it is taken
 * aside and looked at once more. 0, or EADDRINUSE. */
static int directory_clear_stale(const struct soft_settings *settings, const char *path)
{
    char name[SOFT_GID_NAME], aside[SOFT_MAX_PATH];

    if (is_alive(path))
        return EADDRINUSE;
    snprintf(name, sizeof(name), ".stale.%x", (unsigned int)getpid());
    directory_path(settings, name, aside);
    if (rename(path, aside))
        return errno == ENOENT ? 0 : errno;
    if (is_alive(aside) && !link(aside, path)) {
        unlink(aside);
        return EADDRINUSE;
    }
    unlink(aside);
    return 0;
}

/* Gives the socket at `from` the name `to`, which nobody who lives may have. */
static int link_name(const struct soft_settings *settings, const char *from, const char *to)
{
    int attempts, error = EADDRINUSE;

    for (attempts = 0; attempts < 4; attempts++) {
        if (!link(from, to))
            return 0;
        if (errno != EEXIST)
            return errno;
        error = directory_clear_stale(settings, to);
        if (error)
            return error;
    }
    return EADDRINUSE;
}

/* The file of the socket that `fd` leads to, by O_PATH: no name is looked up again, as the directory's owner may put
 * something else in its place at any moment. EEXIST: he has. */
static int check_socket_file(int fd, mode_t mode, struct soft_directory_entry *entry)
{
    struct stat made;
    char name[32];

    if (fstat(fd, &made))
        return errno;
    if (!S_ISSOCK(made.st_mode) || made.st_uid != geteuid())
        return EEXIST;
    snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
    if ((made.st_mode & 07777) != mode && chmod(name, mode)) /* the umask took something away */
        return errno;
    entry->device = made.st_dev;
    entry->inode = made.st_ino;
    return 0;
}

static int listen_at(const char *path, mode_t mode, struct soft_directory_entry *entry)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd, error;

    strcpy(address.sun_path, path);
    unlink(path); /* of an earlier process with our number */
    /* The file gets the mode that the socket has. */
    if (fchmod(entry->fd, mode) || bind(entry->fd, (struct sockaddr *)&address, sizeof(address)))
        return errno;
    soft_descriptors_hold();
    fd = soft_descriptor_own(open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC));
    error = fd < 0 ? errno : 0;
    soft_descriptors_release();
    if (!error)
        error = check_socket_file(fd, mode, entry);
    soft_descriptor_close(fd);
    if (!error && listen(entry->fd, SOMAXCONN))
        error = errno;
    return error;
}

int soft_directory_register(const struct soft_settings *settings, const union ibv_gid gids[2],
                            struct soft_directory_entry *entry, char *why, size_t size)
{
    char name[SOFT_GID_NAME], path[SOFT_MAX_PATH];
    int error, i;

    memset(entry, 0, sizeof(*entry));
    entry->fd = -1;
    error = directory_make(settings, why, size);
    if (error)
        return error;
    soft_descriptors_hold();
    entry->fd = soft_descriptor_own(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    error = entry->fd < 0 ? errno : 0;
    soft_descriptors_release();
    /* Nobody sees it under its names before it listens. */
    snprintf(name, sizeof(name), ".new.%x.%02x%02x", (unsigned int)getpid(), gids[0].raw[14], gids[0].raw[15]);
    directory_path(settings, name, path);
    if (!error)
        error = listen_at(path, settings->user_count ? 0666 : 0600, entry);
    for (i = 0; i < 2 && !error; i++) {
        char to[SOFT_MAX_PATH];

        soft_gid_name(&gids[i], name);
        directory_path(settings, name, to);
        error = link_name(settings, path, to);
        if (!error)
            strcpy(entry->names[i], to);
    }
    unlink(path);
    if (error) {
        snprintf(why, size,
                 error == EADDRINUSE ? "%s: another device of this host has the GID %s"
                 : error == EEXIST   ? "%s/%s: another file took its place: name a directory whose owner is trusted"
                                     : "%s/%s: %s",
                 settings->directory, name, strerror(error));
        soft_directory_unregister(entry);
    }
    return error;
}

/* Those that connected and were not accepted: what they sent is not the kernel's to close, either, in this thread.
 * Where no descriptors are left to accept them by, another thread closes them with the listener. */
static void close_listener(int listener)
{
    int fd;

    if (listener < 0)
        return;
    shutdown(listener, SHUT_RDWR); /* nobody connects any more */
    do {
        soft_descriptors_hold();
        fd = soft_descriptor_own(accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
        soft_descriptors_release();
        soft_descriptor_close_socket(fd);
    } while (fd >= 0);
    if (errno == EMFILE || errno == ENFILE)
        soft_descriptor_discard(listener);
    else
        soft_descriptor_close(listener);
}

void soft_directory_unregister(struct soft_directory_entry *entry)
{
    struct stat found;
    int i;

    for (i = 0; i < 2; i++)
        if (entry->names[i][0] && !lstat(entry->names[i], &found) && found.st_dev == entry->device &&
            found.st_ino == entry->inode)
            unlink(entry->names[i]);
    close_listener(entry->fd);
    memset(entry, 0, sizeof(*entry));
    entry->fd = -1;
}

bool soft_directory_permits(const struct soft_settings *settings, const union ibv_gid *gid, uid_t user)
{
    char name[SOFT_GID_NAME], path[SOFT_MAX_PATH];
    struct stat found;

    if (!settings->user_count) /* nobody else could have put something there */
        return true;
    soft_gid_name(gid, name);
    directory_path(settings, name, path);
    return lstat(path, &found) ? errno == ENOENT : found.st_uid == user;
}

int soft_directory_find(const struct soft_settings *settings, const union ibv_gid *gid, struct sockaddr_un *address)
{
    char name[SOFT_GID_NAME], why[256];

    memset(address, 0, sizeof(*address));
    address->sun_family = AF_UNIX;
    soft_gid_name(gid, name);
    directory_path(settings, name, address->sun_path);
    if (directory_open(settings, why, sizeof(why)) || access(address->sun_path, F_OK))
        return ENOENT;
    return 0;
}

/* An owned descriptor, or -1 and errno. */
static int open_at(int directory, const char *name, int flags)
{
    int fd, error;

    soft_descriptors_hold();
    fd = soft_descriptor_own(openat(directory, name, flags | O_NOFOLLOW | O_CLOEXEC, 0600));
    error = errno;
    soft_descriptors_release();
    errno = error;
    return fd;
}

int soft_directory_locks(const struct soft_settings *settings)
{
    int directory, fd = -1, error = 0;
    struct stat found;
    char why[256];

    if (mkdir(settings->directory, 0700) && errno != EEXIST)
        return -1;
    directory = open_at(AT_FDCWD, settings->directory, O_RDONLY | O_DIRECTORY);
    if (directory < 0 || fstat(directory, &found)) /* what was opened is looked at: the name may be another's by now */
        error = errno;
    if (!error)
        error = directory_check(settings, &found, why, sizeof(why));
    if (!error && found.st_mode & 022)
        return directory;
    if (!error) {
        fd = open_at(directory, "locks", O_RDWR | O_CREAT);
        error = fd < 0 || fchmod(fd, 0600) ? errno : 0; /* the umask may have taken something away */
    }
    if (error) {
        soft_descriptor_close(fd);
        fd = -1;
    }
    soft_descriptor_close(directory);
    errno = error;
    return fd;
}
