"""Two software devices that reach each other as those of two processes do, though both are of this one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from aioverbs import Device, open_device
from tests.devices import remote_devices
from tests.listening import own_address
from tests.sockets import direct, directory_of_sockets, short_path

__all__ = ["device", "direct", "directory_of_sockets", "pytest_itemcollected", "short_path"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have tests that run in every way take the loops in turn: see `tests.ways`."""
    item.add_marker("loops_in_turn")


# One name for all tests, for a device's number tables stay with the process.
_NEAR, _FAR = f"soft0@{own_address()}:7474", f"soft0@{own_address()}:7475"


# How bytes come over: moved by the peer, through a Unix socket, through TCP; and who executes.
@pytest_asyncio.fixture(params=["direct-inline", "socket-thread", "tcp-inline"])
async def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> AsyncIterator[Device]:
    """The near one; the far one is its `remote_device`."""
    way, _, execution = request.param.partition("-")
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", "1" if way == "direct" else "0")
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(_folder(short_path, "near")))
    # Over TCP both need an address: without one only processes of this host find a device.
    async with open_device(_NEAR if way == "tcp" else "soft0", execution=execution) as near:
        if way == "tcp":  # then no Unix socket is found
            monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(_folder(short_path, "far")))
        async with open_device(_FAR, execution=execution) as far:
            remote_devices[near] = far
            try:
                yield near
            finally:
                del remote_devices[near]
                near.faults.set_port(True)
                far.faults.set_port(True)


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir(mode=0o700, exist_ok=True)
    return path
