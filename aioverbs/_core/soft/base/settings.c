#include "soft/base/settings.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

void soft_settings_default(struct soft_settings *settings)
{
    memset(settings, 0, sizeof(*settings));
    snprintf(settings->directory, sizeof(settings->directory), "/tmp/aioverbs-%u", (unsigned int)geteuid());
    settings->direct = true;
    settings->rings = true;
    settings->spin_ns = 50000;
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
