"""Stand-ins for objects of pyverbs, made by verbs of the software device without the knowledge of aioverbs.

They have the memory layout and attributes of pyverbs' objects and close like these: children first, and the pointer is
NULL afterwards. Attributes of closed objects, whose access crashes pyverbs, raise an error.
"""

import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs._core.handles import handles

_WORD = ctypes.sizeof(ctypes.c_void_p)
_NUMBER, _OFFSET = 18, 19  # T_ULONGLONG, T_PYSSIZET
_READ_ONLY, _MEMBERS, _NEW = 1, 72, 65
_BASE_TYPE = 1 << 10


class _Member(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("offset", ctypes.c_ssize_t),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


class _Slot(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("value", ctypes.c_void_p)]


class _Spec(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("size", ctypes.c_int),
        ("item_size", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.c_void_p),
    ]


_kept: list[object] = []  # buffers referenced by the created types


def laid_out(words: int, *, weak_references: int = 0) -> Any:
    """Return a base class whose instances have `words` machine words after the object header; the last is `pointer`."""
    head = object.__basicsize__
    members = (_Member * 3)(
        _Member(b"__weaklistoffset__", _OFFSET, head + weak_references * _WORD, _READ_ONLY),
        _Member(b"pointer", _NUMBER, head + (words - 1) * _WORD, 0),
    )
    new = ctypes.cast(ctypes.pythonapi.PyType_GenericNew, ctypes.c_void_p)
    slots = (_Slot * 3)(_Slot(_MEMBERS, ctypes.addressof(members)), _Slot(_NEW, new))
    flags = _BASE_TYPE
    spec = _Spec(b"pyverbs.stand_in", head + words * _WORD, 0, flags, ctypes.addressof(slots))
    _kept.extend((members, slots, spec))
    make = ctypes.pythonapi.PyType_FromSpec
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p]
    return make(ctypes.addressof(spec))


class _IbvPd(ctypes.Structure):
    _fields_ = [("context", ctypes.c_void_p), ("handle", ctypes.c_uint32)]


class _IbvMr(ctypes.Structure):
    _fields_ = [
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("addr", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    ]


def _verb(context: handles.Context, name: str, result: object, *arguments: object) -> Callable[..., Any]:
    address = ctypes.c_void_p.from_address(context.table_slot(name)).value
    assert address is not None
    return ctypes.CFUNCTYPE(result, *arguments)(address)  # type: ignore[arg-type]


class PD(laid_out(4)):  # type: ignore[misc]
    """`pyverbs.pd.PD`."""

    def __init__(self, context: handles.Context) -> None:
        self.context = context
        self.mrs: list[MR] = []
        self.pointer = _verb(context, "alloc_pd", ctypes.c_void_p, ctypes.c_void_p)(context.verbs_pointer)

    @property
    def handle(self) -> int:
        assert self.pointer
        return int(_IbvPd.from_address(self.pointer).handle)

    def close(self) -> None:
        while self.mrs:
            self.mrs.pop().close()
        if self.pointer and not self.context.closed:
            error = _verb(self.context, "dealloc_pd", ctypes.c_int, ctypes.c_void_p)(self.pointer)
            if error:
                raise OSError(error, "Failed to dealloc PD")
            self.pointer = 0


class ParentDomain(PD):
    """`pyverbs.pd.ParentDomain`."""


class MR(laid_out(6)):  # type: ignore[misc]
    """`pyverbs.mr.MR`, registered over memory of its own."""

    def __init__(self, pd: PD, length: int, access: int) -> None:
        self.context = pd.context
        memory = ctypes.create_string_buffer(length)
        self.memory = memoryview(memory).cast("B")
        register = _verb(
            pd.context, "reg_mr", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        )
        self.buf = ctypes.addressof(memory)
        self.pointer = register(pd.pointer, self.buf, length, access)
        assert self.pointer
        pd.mrs.append(self)

    def _at(self) -> _IbvMr:
        assert self.pointer
        return _IbvMr.from_address(self.pointer)

    @property
    def lkey(self) -> int:
        return int(self._at().lkey)

    @property
    def rkey(self) -> int:
        return int(self._at().rkey)

    @property
    def length(self) -> int:
        return int(self._at().length)

    def close(self) -> None:
        if self.pointer:
            error = _verb(self.context, "dereg_mr", ctypes.c_int, ctypes.c_void_p)(self.pointer)
            if error:
                raise OSError(error, "Failed to dereg MR")
            self.pointer = self.buf = 0


def install(monkeypatch: pytest.MonkeyPatch, **classes: object) -> None:
    """Install the stand-ins as pyverbs; `classes` replaces some of them."""
    kinds = {"PD": PD, "ParentDomain": ParentDomain, "MR": MR, **classes}
    for module in ("pyverbs", "pyverbs.pd", "pyverbs.mr"):
        fake = types.ModuleType(module)
        fake.__dict__.update(kinds, __file__=f"{module}.so")
        monkeypatch.setitem(sys.modules, module, fake)
