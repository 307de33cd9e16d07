/* Set the `am_send` slot of a type with `__await__`, so that an await is one call in C: Cython has no name for it. */
#ifndef AIOVERBS_AM_SEND_H
#define AIOVERBS_AM_SEND_H

/* Python.h is included before: every file that Cython generates begins with it. */

typedef int (*send_function)(PyObject *, PyObject *, PyObject **);

static int set_am_send(PyTypeObject *type, send_function function)
{
    if (!type->tp_as_async) {
        PyErr_SetString(PyExc_SystemError, "a type without __await__");
        return -1;
    }
    type->tp_as_async->am_send = (sendfunc)(void (*)(void))function;
    return 0;
}

#endif
