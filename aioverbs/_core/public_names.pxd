"""Public module names of compiled classes."""

from cpython.object cimport Py_TPFLAGS_HEAPTYPE, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.unicode cimport PyUnicode_AsUTF8

cdef extern from "Python.h":
    bint PyType_HasFeature(PyTypeObject *type, unsigned long feature)


cdef inline int publish(list names, dict module) except -1:
    """Set the module name of the exported classes of a compiled module, as `aioverbs._exports.publish` does for others.

    The module of a static type is part of its ``tp_name`` and cannot be assigned in Python.
    """
    for name in names:
        value = module[name]
        if not isinstance(value, type):
            continue
        if PyType_HasFeature(<PyTypeObject *>value, Py_TPFLAGS_HEAPTYPE):
            value.__module__ = "aioverbs"
            continue
        full = f"aioverbs.{name}"
        Py_INCREF(full)  # kept forever, as is the type
        (<PyTypeObject *>value).tp_name = PyUnicode_AsUTF8(full)
    return 0
