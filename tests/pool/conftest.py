"""Fixtures: an open device, and pools on it: of threads for each test, of processes for all tests of a module.

A worker process takes a third of a second to start. So tests that leave the workers running, or replace them, share a
process pool. Tests that close, block or break a pool use one of their own. Tests with the shared pool run on the event
loop of the module:

    pytestmark = pytest.mark.asyncio(loop_scope="module")
"""

import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType

import pytest
import pytest_asyncio

from aioverbs import Device, open_device
from aioverbs._pool.pool import WorkerPool
from tests.devices import device_name
from tests.pool.processes import other_loop

__all__ = ["device", "device_name", "loop_name", "pool", "process_pool"]


@pytest.fixture(autouse=True, scope="package")
def _no_main_module() -> Iterator[None]:
    """Keep worker processes from importing the main module, which is the test runner.

    The import takes as long as that of aioverbs. Imports of main modules are tested with separate programs in
    test_main_modules.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        yield


@pytest.fixture(params=["asyncio", "uvloop"], ids=["on asyncio", "on uvloop"])
def loop_name(request: pytest.FixtureRequest) -> str:
    """Type of the workers' event loops."""
    name: str = request.param
    return name


@pytest_asyncio.fixture
async def device(device_name: str) -> AsyncIterator[Device]:
    async with open_device(device_name) as device:
        yield device


@pytest_asyncio.fixture
async def pool(device: Device, loop_name: str) -> AsyncIterator[WorkerPool]:
    """Open pool of three threads."""
    async with WorkerPool(device, 3, loop=loop_name) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process_pool() -> AsyncIterator[WorkerPool]:
    """Open pool of two processes, whose event loops have another type than that of the tests."""
    async with open_device("soft0") as device, WorkerPool(device, 2, processes=True, loop=other_loop()) as pool:
        yield pool
