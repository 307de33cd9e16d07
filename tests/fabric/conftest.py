"""Two software devices of this process that reach each other as those of two processes do."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from aioverbs import Device, open_device
from tests.devices import remote_devices
from tests.listening import own_address
from tests.sockets import direct, directory_of_sockets, set_transfer, short_path

__all__ = ["device", "direct", "directory_of_sockets", "pytest_itemcollected", "short_path"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run the tests marked every_way on the event loops in turn: see `tests.ways`."""
    item.add_marker("loops_in_turn")


# One name for all tests: the number tables of a device live as long as the process.
_NEAR, _FAR = f"soft0@{own_address()}:0", f"soft0@{own_address()}:7475"


# How data is transferred (copied by the peer, through rings, a Unix socket or TCP), and where the device executes.
@pytest_asyncio.fixture(params=["direct-inline", "rings-thread", "socket-thread", "tcp-inline"])
async def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> AsyncIterator[Device]:
    """The near device; the far one is its `remote_device`."""
    transfer, _, execution = request.param.partition("-")
    set_transfer(monkeypatch, transfer)
    monkeypatch.setenv("AIOVERBS_SOFT_DIRECTORY", str(_folder(short_path, "near")))
    # TCP needs an address on both sides: without one only processes of this host find a device.
    async with open_device(_NEAR if transfer == "tcp" else "soft0", execution=execution) as near:
        if transfer == "tcp":  # different directories, so that no Unix socket is found
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
