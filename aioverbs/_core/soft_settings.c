#include "soft_settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What is set to nothing is not set. */
static const char *variable(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

/* A number up to `limit`, and where it ends; NULL where there is none. */
static const char *number(const char *text, unsigned long limit, unsigned long *value)
{
    char *end;

    if (*text < '0' || *text > '9')
        return NULL;
    errno = 0;
    *value = strtoul(text, &end, 10);
    return errno || *value > limit ? NULL : end;
}

static int read_directory(struct soft_settings *settings, char *why, size_t size)
{
    const char *given = variable("AIOVERBS_SOFT_DIRECTORY"), *runtime = variable("XDG_RUNTIME_DIR");
    size_t room = sizeof(settings->directory) - 33; /* a slash and a GID come behind it */
    int length;

    if (given)
        length = snprintf(settings->directory, room, "%s", given);
    else if (runtime)
        length = snprintf(settings->directory, room, "%s/aioverbs", runtime);
    else
        length = snprintf(settings->directory, room, "/tmp/aioverbs-%u", (unsigned int)geteuid());
    if (length >= 0 && (size_t)length < room && settings->directory[0] == '/')
        return 0;
    snprintf(why, size, "%s: a path that begins with / and has %zu characters at most is needed",
             given ? "AIOVERBS_SOFT_DIRECTORY" : "XDG_RUNTIME_DIR", room - 1);
    return settings->directory[0] == '/' ? ENAMETOOLONG : EINVAL;
}

static int read_users(struct soft_settings *settings, char *why, size_t size)
{
    const char *text = variable("AIOVERBS_SOFT_USERS");
    unsigned long user;

    while (text) {
        const char *end = number(text, (uid_t)-2, &user);

        if (!end || (*end && *end != ',') || settings->user_count == SOFT_MAX_USERS) {
            snprintf(why, size, "AIOVERBS_SOFT_USERS: up to %d numbers of users are needed, with commas between them",
                     SOFT_MAX_USERS);
            return EINVAL;
        }
        settings->users[settings->user_count++] = (uid_t)user;
        text = *end ? end + 1 : NULL;
    }
    if (!settings->user_count || variable("AIOVERBS_SOFT_DIRECTORY"))
        return 0;
    snprintf(why, size, "AIOVERBS_SOFT_USERS: AIOVERBS_SOFT_DIRECTORY must name a directory that these users share");
    return EINVAL;
}

static int read_secret(struct soft_settings *settings, char *why, size_t size)
{
    const char *text = variable("AIOVERBS_SOFT_SECRET");

    if (!text)
        return 0;
    settings->secret_size = strlen(text);
    if (settings->secret_size > sizeof(settings->secret)) {
        snprintf(why, size, "AIOVERBS_SOFT_SECRET: it has %d bytes at most", SOFT_MAX_SECRET);
        return EINVAL;
    }
    memcpy(settings->secret, text, settings->secret_size);
    return 0;
}

static int read_numbers(struct soft_settings *settings, char *why, size_t size)
{
    const char *direct = variable("AIOVERBS_SOFT_DIRECT"), *spin = variable("AIOVERBS_SOFT_SPIN"), *end;
    unsigned long value;

    settings->direct = true;
    settings->spin_ns = 50000;
    if (direct) {
        end = number(direct, 1, &value);
        if (!end || *end) {
            snprintf(why, size, "AIOVERBS_SOFT_DIRECT: it is 0 or 1");
            return EINVAL;
        }
        settings->direct = value;
    }
    if (spin) {
        end = number(spin, 1000000, &value);
        if (!end || *end) {
            snprintf(why, size, "AIOVERBS_SOFT_SPIN: a number of microseconds is needed, 1000000 at most");
            return EINVAL;
        }
        settings->spin_ns = (uint32_t)value * 1000;
    }
    return 0;
}

int soft_settings_read(struct soft_settings *settings, char *why, size_t size)
{
    int error;

    memset(settings, 0, sizeof(*settings));
    *why = 0;
    error = read_directory(settings, why, size);
    if (!error)
        error = read_users(settings, why, size);
    if (!error)
        error = read_secret(settings, why, size);
    if (!error)
        error = read_numbers(settings, why, size);
    return error;
}

bool soft_settings_allow(const struct soft_settings *settings, uid_t user)
{
    unsigned int i;

    if (user == geteuid())
        return true;
    for (i = 0; i < settings->user_count; i++)
        if (settings->users[i] == user)
            return true;
    return false;
}
