"""Two software devices that reach each other as those of two processes do, though both are of this one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from aioverbs import Device, open_device
from tests.devices import far_devices
from tests.listening import own_address
from tests.sockets import direct, directory_of_sockets, short_path

__all__ = ["device", "direct", "directory_of_sockets", "pytest_collection_modifyitems", "short_path"]

# What a loop has to do with frames that a network loses is not much, and waiting for repetitions takes its time: there
# each way goes with one loop, and the first one with both.
_FEWER = (("asyncio", "tcp-inline"), ("uvloop", "socket-engine"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those out."""
    left_out = [
        item
        for item in items
        if item.path.name == "test_frames.py" and any(loop in item.name and way in item.name for loop, way in _FEWER)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


# One name for all tests, for a device's number tables stay with the process.
_NEAR, _FAR = f"soft0@{own_address()}:7474", f"soft0@{own_address()}:7475"


# How bytes come over: moved by the peer, through a Unix socket, through TCP; and who executes.
@pytest_asyncio.fixture(params=["direct-inline", "socket-engine", "tcp-inline"])
async def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> AsyncIterator[Device]:
    """The near one; the far one is its `far_device`."""
    way, _, execution = request.param.partition("-")
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", "1" if way == "direct" else "0")
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(_folder(short_path, "near")))
    # Over TCP both need an address: without one only processes of this host find a device.
    async with open_device(_NEAR if way == "tcp" else "soft0", engine_mode=execution == "engine") as near:
        if way == "tcp":  # then no Unix socket is found
            monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(_folder(short_path, "far")))
        async with open_device(_FAR, engine_mode=execution == "engine") as far:
            far_devices[near] = far
            try:
                yield near
            finally:
                del far_devices[near]
                near.faults.set_port(True)
                far.faults.set_port(True)


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir(mode=0o700, exist_ok=True)
    return path
