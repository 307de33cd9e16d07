/* What tells one run of an event loop from another, without a call into asyncio.
 *
 * Up to CPython 3.11 asyncio keeps an object in the thread state's dictionary that it makes anew for each run of a loop:
 * whoever holds a reference to it and finds it there again is in the same run. Before that, the dictionary's version
 * tells that nothing in it has changed: no two states of any dictionaries have the same one. Later versions of CPython
 * have nothing of that kind, and need nothing: asking them which loop runs is cheap. */
#ifndef AIOVERBS_RUNNING_LOOP_H
#define AIOVERBS_RUNNING_LOOP_H

/* Python.h comes before: every file that Cython makes begins with it. */

#if PY_VERSION_HEX < 0x030C0000

static PyObject *running_loop_key;

static int running_loop_prepare(void)
{
    running_loop_key = PyUnicode_InternFromString("__asyncio_running_event_loop__");
    return running_loop_key ? 0 : -1;
}

/* Borrowed; NULL where no loop ever ran in this thread. An error is as good as that: the caller asks asyncio then. */
static inline PyObject *running_loop_run(void)
{
    PyObject *state = PyThreadState_GetDict();
    PyObject *run = state ? PyDict_GetItemWithError(state, running_loop_key) : NULL;

    if (!run && PyErr_Occurred())
        PyErr_Clear();
    return run;
}

/* Of the calling thread's dictionary; 0 where it has none. */
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
