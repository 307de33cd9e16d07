/* What stands in the GIL's place where there is none.
 *
 * With a GIL one thread alone is at what any thread may use, until it runs Python code or gives the GIL up: then all of
 * that is whole. Without one a section does the same for those who enter it. One thread at a time has it; it is given
 * up where that thread gives the GIL up, where it waits, and where it enters another section that somebody has. Who has
 * it may enter it again. It is left in the reverse order. With a GIL none of this does anything. */
#ifndef AIOVERBS_SECTION_H
#define AIOVERBS_SECTION_H

/* Python.h, which says whether there is a GIL, comes before: every file that Cython makes begins with it. */

#include <stdbool.h>
#include <stdint.h>

#ifdef Py_GIL_DISABLED

#include <pthread.h>

#define FREE_THREADED 1

struct section {
    PyCriticalSection held;
    bool entered;
};

/* Of an object; NULL: of one that a single thread uses. */
static inline void section_enter(struct section *section, PyObject *of)
{
    section->entered = of != NULL;
    if (of)
        PyCriticalSection_Begin(&section->held, of);
}

static inline void section_leave(struct section *section)
{
    if (section->entered)
        PyCriticalSection_End(&section->held);
}

/* A lock of its own for what finalizers touch, in whatever thread those run. Nobody drops an object, runs Python code or
 * waits for anything while he has it, so that it can be waited for anywhere, and is no turn for others. */
struct finalizer_lock {
    pthread_mutex_t mutex;
};

static inline void finalizer_lock_begin(struct finalizer_lock *lock)
{
    pthread_mutex_init(&lock->mutex, NULL); /* cannot fail on Linux */
}

static inline void finalizer_lock_acquire(struct finalizer_lock *lock)
{
    pthread_mutex_lock(&lock->mutex);
}

static inline void finalizer_lock_release(struct finalizer_lock *lock)
{
    pthread_mutex_unlock(&lock->mutex);
}

/* NULL without an error, or one with it; it has to be dropped. */
static inline PyObject *weak_reference(PyObject *object)
{
    return PyWeakref_NewRef(object, NULL);
}

/* A new reference to what `weak` stands for, or NULL where that is being freed. `object` is its address. */
static inline PyObject *weak_to_strong(PyObject *weak, PyObject *object)
{
    PyObject *found = NULL;

    (void)object;
    return PyWeakref_GetRef(weak, &found) > 0 ? found : NULL;
}

/* A byte that says that all before it is written, for who reads it in another thread. */
static inline uint8_t byte_read(const uint8_t *byte)
{
    return __atomic_load_n(byte, __ATOMIC_ACQUIRE);
}

static inline void byte_write(uint8_t *byte, uint8_t value)
{
    __atomic_store_n(byte, value, __ATOMIC_RELEASE);
}

#else

#define FREE_THREADED 0

struct section {
    char nothing;
};

static inline void section_enter(struct section *section, PyObject *of)
{
    (void)section, (void)of;
}

static inline void section_leave(struct section *section)
{
    (void)section;
}

struct finalizer_lock {
    char nothing;
};

static inline void finalizer_lock_begin(struct finalizer_lock *lock)
{
    (void)lock;
}

static inline void finalizer_lock_acquire(struct finalizer_lock *lock)
{
    (void)lock;
}

static inline void finalizer_lock_release(struct finalizer_lock *lock)
{
    (void)lock;
}

/* Not needed: who finds the address of an object with the GIL finds the object. */
static inline PyObject *weak_reference(PyObject *object)
{
    (void)object;
    Py_RETURN_NONE;
}

static inline PyObject *weak_to_strong(PyObject *weak, PyObject *object)
{
    (void)weak;
    Py_INCREF(object);
    return object;
}

static inline uint8_t byte_read(const uint8_t *byte)
{
    return *byte;
}

static inline void byte_write(uint8_t *byte, uint8_t value)
{
    *byte = value;
}

#endif

#endif
