# cython: language_level=3, freethreading_compatible=True, embedsignature=False
"""Access to the C pointers of pyverbs objects.

pyverbs ships no Cython declarations, and its Python properties for these pointers corrupt them. In all pyverbs objects,
the pointer follows a common head. This module checks the object's layout, reads the pointer there, checks that there is
memory at its address, and then compares the object that it refers to with the pyverbs object's attributes. The result
is a capsule that contains the address of the pointer; pyverbs stores NULL there when the object is closed. This module
does not import pyverbs: code that has a pyverbs object has imported it.
"""

import os
import sys

from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from posix.unistd cimport write

from aioverbs._core.abi.libibverbs cimport ibv_context, ibv_mr, ibv_pd


cdef extern from *:
    """
    #include <stddef.h>
    /* How Cython lays out a pyverbs object: what its base class declares, the method table of the class that first
     * has one, then that class's own fields. The same from pyverbs 44 to 65. */
    #define AIOVERBS_PYVERBS_HEAD PyObject_HEAD PyObject *weak_references; PyObject *logger; void *method_table;
    typedef struct {
        AIOVERBS_PYVERBS_HEAD
        void *pointer;
    } aioverbs_pyverbs_object;
    typedef struct {
        AIOVERBS_PYVERBS_HEAD
        PyObject *pd;
        PyObject *cmid;
        void *pointer;
    } aioverbs_pyverbs_region;
    #define PYVERBS_WEAK_REFERENCES ((Py_ssize_t)offsetof(aioverbs_pyverbs_object, weak_references))
    """
    ctypedef struct aioverbs_pyverbs_object:
        void *pointer
    ctypedef struct aioverbs_pyverbs_region:
        PyObject *pd
        PyObject *cmid
        void *pointer
    Py_ssize_t PYVERBS_WEAK_REFERENCES


def context_capsule(context):
    """Return a capsule "ibv_context *": the address at which an open pyverbs context has its ``struct ibv_context *``.

    :param context: a `pyverbs.device.Context`.
    :raises TypeError: `context` is not a `pyverbs.device.Context`.
    :raises RuntimeError: the object layout of this version of pyverbs is unknown, or the pointer does not point to the
        context of the device.
    :raises ValueError: the context is closed.
    """
    cdef ibv_context *pointer
    cdef void **place
    _check_layout(context, "pyverbs.device", "Context", sizeof(aioverbs_pyverbs_object))
    place = &(<aioverbs_pyverbs_object *><void *>context).pointer
    pointer = <ibv_context *>place[0]
    if pointer == NULL:
        raise ValueError("the pyverbs context is closed")
    # Check the object behind the pointer: libibverbs' mark of an extended context, and the device's name, which is
    # bytes or str, depending on the version of pyverbs.
    if (
        not _is_memory(pointer, sizeof(pointer[0])) or <size_t>pointer.abi_compat != <size_t>-1
        or not _is_memory(pointer.device, sizeof(pointer.device[0]))
        or os.fsdecode(pointer.device.name) != os.fsdecode(context.name)
    ):
        raise RuntimeError("this pyverbs context does not point to the context of its device")
    return PyCapsule_New(place, "ibv_context *", NULL)


def pd_capsule(pd):
    """Return a capsule "ibv_pd *": the address at which an open pyverbs protection domain has its ``struct ibv_pd *``.

    :param pd: a `pyverbs.pd.PD`.
    :raises TypeError: `pd` is not a `pyverbs.pd.PD`, or is a parent domain.
    :raises RuntimeError: the object layout of this version of pyverbs is unknown, or the pointer points to another
        protection domain.
    :raises ValueError: the protection domain is closed.
    """
    cdef void **place
    _check_layout(pd, "pyverbs.pd", "PD", sizeof(aioverbs_pyverbs_object))
    if isinstance(pd, sys.modules["pyverbs.pd"].ParentDomain):
        raise TypeError("a pyverbs.pd.ParentDomain cannot be adopted: adopt its PD, make parent domains over that")
    place = &(<aioverbs_pyverbs_object *><void *>pd).pointer
    if place[0] == NULL:  # if it is closed, its attributes must not be read
        raise ValueError("the pyverbs protection domain is closed")
    if not _is_memory(place[0], sizeof(ibv_pd)) or (<ibv_pd *>place[0]).handle != pd.handle:
        raise RuntimeError("this pyverbs protection domain points to another one")
    return PyCapsule_New(place, "ibv_pd *", NULL)


def mr_capsule(mr):
    """Return a capsule "ibv_mr *": the address at which an open pyverbs memory region has its ``struct ibv_mr *``.

    :param mr: a `pyverbs.mr.MR` of any kind.
    :raises TypeError: `mr` is not a `pyverbs.mr.MR`.
    :raises RuntimeError: the object layout of this version of pyverbs is unknown, or the pointer points to another
        memory region.
    :raises ValueError: the memory region is closed.
    """
    cdef aioverbs_pyverbs_region *region
    cdef ibv_mr *pointer
    _check_layout(mr, "pyverbs.mr", "MR", sizeof(aioverbs_pyverbs_region))
    region = <aioverbs_pyverbs_region *><void *>mr
    pointer = <ibv_mr *>region.pointer
    if pointer == NULL:  # if it is closed, its attributes must not be read
        raise ValueError("the pyverbs memory region is closed")
    if (
        not _is_memory(pointer, sizeof(pointer[0]))
        or (pointer.lkey, pointer.rkey, pointer.length) != (mr.lkey, mr.rkey, mr.length)
    ):
        raise RuntimeError("this pyverbs memory region points to another one")
    return PyCapsule_New(&region.pointer, "ibv_mr *", NULL)


cdef int _check_layout(thing, str module, str name, size_t size) except -1:
    # Check that `thing` is a pyverbs object of that class and has the known layout of at least `size` bytes. Raise
    # TypeError if it is not such an object, RuntimeError if its layout is unknown.
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None or not isinstance(thing, kind):
        raise TypeError(f"expected a {module}.{name}, got {type(thing).__name__}")
    if kind.__weakrefoffset__ != PYVERBS_WEAK_REFERENCES or kind.__basicsize__ < size:
        raise RuntimeError(
            f"this pyverbs ({sys.modules[module].__file__}) has an unknown object layout "
            f"(weak references at {kind.__weakrefoffset__}, size {kind.__basicsize__}): aioverbs supports 44 to 65"
        )
    return 0


cdef bint _is_memory(const void *place, size_t size) except -1:
    # Whether this process can read `size` bytes at `place`: in an object of an unknown layout, any number can be where
    # the pointer is expected. The kernel refuses to copy what cannot be read.
    reading, writing = os.pipe()
    try:
        return write(writing, place, size) == <ssize_t>size
    finally:
        os.close(reading)
        os.close(writing)
