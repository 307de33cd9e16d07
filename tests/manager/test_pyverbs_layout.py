"""The pointer of a pyverbs context is found; another memory layout is refused before any memory is read."""

import ctypes
import sys
import types
from typing import Any

import pytest

from aioverbs import Device, ResourceState
from aioverbs._core.handles import pyverbs_bridge
from tests.core.contexts import opened
from tests.manager.pyverbs_objects import laid_out


def test_the_bridge_finds_the_context_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context(laid_out(4)):  # type: ignore[misc]
        __slots__ = ("name",)

    pyverbs_device: Any = types.ModuleType("pyverbs.device")
    pyverbs_device.Context = Context
    monkeypatch.setitem(sys.modules, "pyverbs.device", pyverbs_device)
    place_of = ctypes.pythonapi.PyCapsule_GetPointer
    place_of.restype, place_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    with opened("inline") as context:
        theirs = Context()
        theirs.name, theirs.pointer = context.name, context.verbs_pointer
        place = place_of(pyverbs_bridge.context_capsule(theirs), b"ibv_context *")
        assert ctypes.c_void_p.from_address(place).value == context.verbs_pointer
        theirs.name = b"mlx5_0"
        with pytest.raises(RuntimeError, match="does not point to the context of its device"):
            pyverbs_bridge.context_capsule(theirs)
        theirs.pointer = 0
        assert ctypes.c_void_p.from_address(place).value is None
        with pytest.raises(ValueError, match="the pyverbs context is closed"):
            pyverbs_bridge.context_capsule(theirs)


@pytest.mark.parametrize(
    "layout", [laid_out(3), laid_out(4, weak_references=1)], ids=["too small", "weak references elsewhere"]
)
async def test_a_context_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch, layout: Any) -> None:
    pyverbs_device: Any = types.ModuleType("pyverbs.device")
    pyverbs_device.__file__ = "pyverbs/device.so"
    pyverbs_device.Context = type("Context", (layout,), {"name": "mlx5_9"})
    monkeypatch.setitem(sys.modules, "pyverbs.device", pyverbs_device)
    context = pyverbs_device.Context()
    context.pointer = 0xDEAD000
    device = Device.from_pyverbs(context)
    with pytest.raises(
        RuntimeError,
        match=r"this pyverbs \(pyverbs/device\.so\) has an unknown object layout.*aioverbs supports 44 to 65",
    ):
        await device.open()
    assert device.state is ResourceState.NEW
    assert context.pointer == 0xDEAD000
