"""The fixture of an open device, for the folders that import it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from aioverbs.device import Device, open_device


@pytest_asyncio.fixture(params=["inline", "engine"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """What the test leaves open on it is a warning, and so a failure."""
    async with open_device("soft0", engine_mode=request.param == "engine") as device:
        yield device
        device.handle.faults.set_port(True)  # the port is the device's, and so the next test's, too
