/* Fill a table of functions from the exports of a shared library: a struct of function pointers only. */
#ifndef AIOVERBS_DLSYM_TABLE_H
#define AIOVERBS_DLSYM_TABLE_H

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

/* Return NULL, or the reason of the failure: text of the dynamic linker, valid until the thread's next call to it.
 * errno is then ENOENT if the library cannot be loaded, or ENOSYS if it lacks a function whose slot is NULL; another
 * slot then keeps its value. The library stays open for the process, since the objects that it creates live as long.
 * It also stays open where it lacks a function, since closing it would free the text. */
static inline const char *exports_load(void **slots, const char *const *names, size_t count, const char *library)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    const char *problem = NULL;
    size_t i;

    if (!handle) {
        problem = dlerror();
        errno = ENOENT;
    }
    for (i = 0; i < count && !problem; i++) {
        void *found = dlsym(handle, names[i]);

        if (found) {
            slots[i] = found;
        } else if (!slots[i]) {
            problem = dlerror();
            errno = ENOSYS;
        }
    }
    return problem;
}

#endif
