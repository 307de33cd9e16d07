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

/* Build a path in the directory. The settings leave room for the name of a GID, which is the longest name. */
static void directory_path(const struct soft_settings *settings, const char *name, char path[SOFT_MAX_PATH])
{
    size_t length = strlen(settings->directory), more = strlen(name);

    memcpy(path, settings->directory, length);
    path[length] = '/';
    memcpy(path + length + 1, name, more + 1);
}

/* Check that no other user could have put a file into the directory; or, if it is shared, that no other user could have
 * replaced a file of this one. Return 0, or an errno, which `why` explains. */
static int directory_check(const struct soft_settings *settings, const struct stat *found, char *why, size_t size)
{
    if (!S_ISDIR(found->st_mode)) {
        snprintf(why, size, "%s is not a directory: remove it, or set AIOVERBS_SOFT_DIRECTORY to another path",
                 settings->directory);
        return ENOTDIR;
    }
    if (settings->user_count) { /* its owner, and whether all users may write there, are up to them */
        if (!(found->st_mode & 022) || found->st_mode & S_ISVTX)
            return 0;
        snprintf(why, size, "%s has no sticky bit, so that its users could replace each other's sockets: chmod +t it",
                 settings->directory);
        return EACCES;
    }
    if (found->st_uid != geteuid()) {
        snprintf(why, size, "%s belongs to another user: set AIOVERBS_SOFT_DIRECTORY to a directory of your own",
                 settings->directory);
        return EACCES;
    }
    if (found->st_mode & 022) {
        snprintf(why, size, "%s is writable by other users: chmod 0700 it", settings->directory);
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
        snprintf(why, size, "%s cannot be created: %s", settings->directory, strerror(errno));
        return errno;
    }
    return directory_open(settings, why, size);
}

/* Return whether a process listens at the path; true if that cannot be found out. */
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
    soft_descriptor_close_socket(fd); /* the listener may have sent descriptors by now */
    return alive;
}

/* Remove the socket of a process that has exited. Another process may put its own socket there at any moment: so the
 * file is renamed first, and then checked once more. Return 0 or an errno: EADDRINUSE if a process listens there. */
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

/* Link the socket at `from` to the name `to`, unless a running device has that name. Return 0 or an errno. */
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

/* Check the socket's file, set its mode and note its identity. `fd` was opened with O_PATH: names are not looked up
 * again, since the directory's owner may replace the file at any moment. Return 0 or an errno: EEXIST if the file was
 * replaced. */
static int check_socket_file(int fd, mode_t mode, struct soft_directory_entry *entry)
{
    struct stat made;
    char name[32];

    if (fstat(fd, &made))
        return errno;
    if (!S_ISSOCK(made.st_mode) || made.st_uid != geteuid())
        return EEXIST;
    snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
    if ((made.st_mode & 07777) != mode && chmod(name, mode)) /* the umask removed some bits */
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
    unlink(path); /* left by an earlier process with this process number */
    /* The file gets the mode of the socket. */
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
    /* Peers must not see the socket under its names before it listens. */
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
                 : error == EEXIST
                     ? "%s/%s: another file replaced the socket: set AIOVERBS_SOFT_DIRECTORY to a trusted directory"
                     : "%s/%s: %s",
                 settings->directory, name, strerror(error));
        soft_directory_unregister(entry);
    }
    return error;
}

/* Close the listener and the connections that were not accepted. Descriptors that these peers sent must not be closed
 * by the kernel in this thread, either. If no descriptors are left to accept the connections, another thread closes
 * them with the listener. */
static void close_listener(int listener)
{
    int fd;

    if (listener < 0)
        return;
    shutdown(listener, SHUT_RDWR); /* no further connections */
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

    if (!settings->user_count) /* no other user can write there */
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

/* Open a file in a directory. Return an owned descriptor, or -1 and errno. */
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
    if (directory < 0 || fstat(directory, &found)) /* the open file is checked: the name may lead elsewhere by now */
        error = errno;
    if (!error)
        error = directory_check(settings, &found, why, sizeof(why));
    if (!error && found.st_mode & 022)
        return directory;
    if (!error) {
        fd = open_at(directory, "locks", O_RDWR | O_CREAT);
        error = fd < 0 || fchmod(fd, 0600) ? errno : 0; /* the umask may have removed some bits */
    }
    if (error) {
        soft_descriptor_close(fd);
        fd = -1;
    }
    soft_descriptor_close(directory);
    errno = error;
    return fd;
}
