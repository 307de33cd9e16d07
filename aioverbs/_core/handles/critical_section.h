/* Critical sections, which replace the GIL where there is none.
 *
 * With a GIL one thread at a time uses the objects that any thread may use, until it runs Python code or releases the
 * GIL; the objects are consistent at these points. Without a GIL a section gives the same guarantee to the threads that
 * enter it. One thread at a time holds a section. The section is released where that thread releases the GIL, where it
 * blocks, and where it enters another section that a thread holds. The holder may enter the section again. Sections are
 * left in the reverse order. With a GIL these functions do nothing. */
#ifndef AIOVERBS_CRITICAL_SECTION_H
#define AIOVERBS_CRITICAL_SECTION_H

/* Python.h, which defines whether there is a GIL, is included before: every file that Cython generates
 * begins with it. */

#include <stdbool.h>
#include <stdint.h>

#ifdef Py_GIL_DISABLED

#include <pthread.h>

#define FREE_THREADED 1

struct section {
    PyCriticalSection held;
    bool entered;
};

/* Enter the section of an object; NULL: of an object that a single thread uses, which has none. */
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

/* Lock for data that finalizers use, in whatever thread they run. Its holder drops no object, runs no Python code and
 * waits for nothing, so that any thread may wait for it anywhere, without releasing a section. */
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

/* Return a new weak reference to the object, or NULL with an exception. */
static inline PyObject *weak_reference(PyObject *object)
{
    return PyWeakref_NewRef(object, NULL);
}

/* Return a new reference to the object that `weak` refers to, or NULL where it is being freed. `object`
 * is its address. */
static inline PyObject *weak_to_strong(PyObject *weak, PyObject *object)
{
    PyObject *found = NULL;

    (void)object;
    return PyWeakref_GetRef(weak, &found) > 0 ? found : NULL;
}

/* Read a byte whose writer has written all earlier data before it, for readers in another thread. */
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

/* With a GIL a weak reference is not needed: a caller that finds the object's address finds the object alive. */
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
