/* Fill a table of functions from the exports of a shared library: a struct of function pointers only. */
#ifndef AIOVERBS_DLSYM_TABLE_H
#define AIOVERBS_DLSYM_TABLE_H

#include <dlfcn.h>
#include <stddef.h>

/* Return NULL, or the reason of the failure: text of the dynamic linker, valid until the thread's next call to it. The
 * library stays open for the process, since the objects that it creates live as long. It also stays open where it lacks
 * a function, since closing it would free the text. */
static inline const char *exports_load(void **slots, const char *const *names, size_t count, const char *library)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    size_t i;

    if (!handle)
        return dlerror();
    for (i = 0; i < count; i++) {
        slots[i] = dlsym(handle, names[i]);
        if (!slots[i])
            return dlerror();
    }
    return NULL;
}

#endif
