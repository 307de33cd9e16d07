/* Tell one run of an event loop from another without a call into asyncio.
 *
 * Up to CPython 3.11 asyncio stores an object in the thread state's dictionary, a new one for each run of a loop: a
 * caller that holds a reference to the object and finds it there again is in the same run. Before that lookup, the
 * version of the dictionary shows whether anything in it has changed: no two states of any dictionaries have the same
 * version. Later versions of CPython have nothing like it and need nothing: asking them for the running
 * loop is cheap. */
#ifndef AIOVERBS_RUNNING_LOOP_H
#define AIOVERBS_RUNNING_LOOP_H

/* Python.h is included before: every file that Cython generates begins with it. */

#if PY_VERSION_HEX < 0x030C0000

static PyObject *running_loop_key;

static int running_loop_prepare(void)
{
    running_loop_key = PyUnicode_InternFromString("__asyncio_running_event_loop__");
    return running_loop_key ? 0 : -1;
}

/* Return the object of the current run, borrowed; NULL where no loop has run in this thread. An error counts as NULL:
 * the caller then asks asyncio. */
static inline PyObject *running_loop_run(void)
{
    PyObject *state = PyThreadState_GetDict();
    PyObject *run = state ? PyDict_GetItemWithError(state, running_loop_key) : NULL;

    if (!run && PyErr_Occurred())
        PyErr_Clear();
    return run;
}

/* Return the version of the calling thread's dictionary; 0 without one. */
static inline uint64_t running_loop_version(void)
{
    PyObject *state = _PyThreadState_UncheckedGet()->dict;

    return state ? ((PyDictObject *)state)->ma_version_tag : 0;
}

#else

static int running_loop_prepare(void)
{
    return 0;
}

static inline PyObject *running_loop_run(void)
{
    return NULL;
}

static inline uint64_t running_loop_version(void)
{
    return 0;
}

#endif

#endif
