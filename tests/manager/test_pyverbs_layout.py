"""A pyverbs whose objects have another memory layout is refused before any memory is read."""

import sys
import types
from typing import Any

import pytest

from aioverbs import Device, ResourceState
from tests.manager.pyverbs_objects import laid_out


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
