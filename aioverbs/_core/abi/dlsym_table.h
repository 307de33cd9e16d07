/* Fills a table of functions from what a shared library exports: a struct of nothing but pointers to functions. */
#ifndef AIOVERBS_EXPORTS_H
#define AIOVERBS_EXPORTS_H

#include <dlfcn.h>
#include <stddef.h>

/* NULL, or why it cannot be: text of the dynamic linker, valid until the thread's next call to it. The library stays
 * open for the process, as what it made lives as long; also where it lacks a function, for closing it would free the
 * text. */
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
