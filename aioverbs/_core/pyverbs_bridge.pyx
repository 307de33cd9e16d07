# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""C pointers out of pyverbs objects.

pyverbs ships no declarations, and its own properties for these pointers corrupt them. The pointer stands behind the
head that all of its objects share; this reads it there, after checking that the object looks as expected. Importing
this module imports pyverbs, which is why it stands by itself.
"""

from cpython.pycapsule cimport PyCapsule_New

import pyverbs.device

from aioverbs._core.verbs cimport ibv_context


cdef extern from *:
    """
    #include <stddef.h>
    /* How Cython lays out a pyverbs object: what its base class declares, the method table of the class that first
     * has one, then that class's own fields, of which the C pointer is the first. The same from pyverbs 44 to 65. */
    typedef struct {
        PyObject_HEAD
        PyObject *weak_references;
        PyObject *logger;
        void *method_table;
        void *pointer;
    } aioverbs_pyverbs_object;
    #define PYVERBS_WEAK_REFERENCES ((Py_ssize_t)offsetof(aioverbs_pyverbs_object, weak_references))
    """
    ctypedef struct aioverbs_pyverbs_object:
        void *pointer
    Py_ssize_t PYVERBS_WEAK_REFERENCES


def context_capsule(context):
    """The ``struct ibv_context`` of an open `pyverbs.device.Context`, as a capsule "ibv_context".

    :raises TypeError: it is something else.
    :raises RuntimeError: this pyverbs lays its objects out in another way; nothing was read.
    :raises ValueError: the context is closed.
    """
    cdef ibv_context *pointer
    if not isinstance(context, pyverbs.device.Context):
        raise TypeError(f"a pyverbs.device.Context is needed, not {type(context).__name__}")
    kind = pyverbs.device.Context
    if kind.__weakrefoffset__ != PYVERBS_WEAK_REFERENCES or kind.__basicsize__ < sizeof(aioverbs_pyverbs_object):
        raise RuntimeError(
            f"this pyverbs ({pyverbs.device.__file__}) lays its objects out in an unknown way "
            f"(weak references at {kind.__weakrefoffset__}, size {kind.__basicsize__}): aioverbs knows 44 to 65"
        )
    pointer = <ibv_context *>(<aioverbs_pyverbs_object *><void *>context).pointer
    if pointer == NULL:
        raise ValueError("the pyverbs context is closed")
    # A first look at what it points to: libibverbs' mark of an extended context, and the device's name.
    if <size_t>pointer.abi_compat != <size_t>-1 or pointer.device.name.decode(errors="replace") != _text(context.name):
        raise RuntimeError("what this pyverbs context points to is not the context of its device")
    return PyCapsule_New(pointer, "ibv_context", NULL)


def _text(name):
    return name.decode() if isinstance(name, bytes) else name
