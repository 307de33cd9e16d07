"""The pointer of a pyverbs context is found; another memory layout is refused before any memory is read."""

import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from aioverbs import Device, ResourceState
from aioverbs._core.handles import pyverbs_bridge
from tests.core.children import in_child
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


@pytest.mark.parametrize(
    ("module", "name", "words", "capsule"),
    [
        ("pyverbs.device", "Context", 4, pyverbs_bridge.context_capsule),
        ("pyverbs.pd", "PD", 4, pyverbs_bridge.pd_capsule),
        ("pyverbs.mr", "MR", 6, pyverbs_bridge.mr_capsule),
    ],
)
@pytest.mark.parametrize("number", [1, 0xDEAD000, (1 << 64) - 8])
def test_a_number_in_the_place_of_the_pointer_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, words: int, capsule: Callable[[Any], object], number: int
) -> None:
    """A later pyverbs may have another field there."""
    attributes = {"name": "mlx5_9", "handle": 1, "lkey": 1, "rkey": 1, "length": 1}
    kind = type(name, (laid_out(words),), attributes)
    pyverbs: Any = types.ModuleType(module)
    pyverbs.__dict__.update({name: kind, "ParentDomain": type("ParentDomain", (), {})})
    monkeypatch.setitem(sys.modules, module, pyverbs)
    theirs: Any = kind()
    theirs.pointer = number

    def adopt() -> None:
        with pytest.raises(RuntimeError, match="point"):
            capsule(theirs)

    in_child(adopt)
