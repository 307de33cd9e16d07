"""A pyverbs whose objects have another memory layout is refused before any memory is read."""

import sys
import types
from typing import Any

import pytest

from aioverbs import LibraryNotFoundError, devices, open_device
from aioverbs._core.handles import pyverbs_bridge
from aioverbs._providers import hardware
from tests.manager.pyverbs_objects import laid_out

NAME = "mlx5_9"


class Listed:
    name = NAME.encode()


def make(base: Any) -> Any:
    class Context(base):  # type: ignore[misc]
        closed = 0

        def __init__(self, *, name: str) -> None:
            self.name = name
            self.pointer = 0xDEAD000

        def close(self) -> None:
            Context.closed += 1

    return Context


@pytest.fixture(params=[laid_out(3), laid_out(4, weak_references=1)], ids=["too small", "weak references elsewhere"])
def context_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`pyverbs.device.Context`."""
    device: Any = types.ModuleType("pyverbs.device")
    device.__file__ = "pyverbs/device.so"
    device.Context = make(request.param)
    device.get_device_list = lambda: [Listed()]
    error: Any = types.ModuleType("pyverbs.pyverbs_error")
    error.PyverbsError = type("PyverbsError", (Exception,), {})
    for module in (types.ModuleType("pyverbs"), device, error):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(hardware, "_pyverbs_device", lambda: device)
    return device.Context


def test_the_bridge_refuses_another_layout(context_type: Any) -> None:
    with pytest.raises(RuntimeError, match=r"this pyverbs \(pyverbs/device\.so\) has an unknown object layout"):
        pyverbs_bridge.context_capsule(context_type(name=NAME))


async def test_devices_of_another_layout_cannot_be_opened(context_type: Any) -> None:
    with pytest.raises(
        LibraryNotFoundError, match=r"pyverbs cannot be loaded.*unknown object layout.*aioverbs supports 44 to 65"
    ):
        await open_device(NAME).open()
    assert context_type.closed == 1
    (found, soft) = devices()
    assert (found.name, found.provider, found.active, found.ports) == (NAME, "hardware", False, ())
    assert "unknown object layout" in (found.problem or "")
    assert (soft.name, soft.problem) == ("soft0", None)
    assert context_type.closed == 2


async def test_the_software_device_is_opened_instead(
    context_type: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    async with open_device() as device:
        assert device.name == "soft0"
    assert "unknown object layout" in caplog.text
