"""An open device, and pools on it, of threads with each kind of event loop."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from aioverbs import Device
from aioverbs._pool.pool import WorkerPool
from tests.devices import device, device_name

__all__ = ["device", "device_name", "loop_name", "pool"]


@pytest.fixture(params=["asyncio", "uvloop"], ids=["on asyncio", "on uvloop"])
def loop_name(request: pytest.FixtureRequest) -> str:
    """What event loops workers have."""
    name: str = request.param
    return name


@pytest_asyncio.fixture
async def pool(device: Device, loop_name: str) -> AsyncIterator[WorkerPool]:
    """Three threads."""
    async with WorkerPool(device, 3, loop=loop_name) as pool:
        yield pool
