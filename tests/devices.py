"""The fixture of an open device, for the folders that import it.

Each test runs on the software device, in each way of execution; `pytest -m rdma` runs it on the RDMA device that
AIOVERBS_DEVICE names, or the first that is here. What it needs that not every device has, it says: see
`tests.capabilities`.
"""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from aioverbs._verbs.device import Device, open_device
from tests.capabilities import skip_where_missing
from tests.rdma.seam import rdma_devices

__all__ = ["device", "device_name", "far_device", "far_devices"]

# What the far ends of connections are made on, where that is another device than the near ends': see tests/fabric.
far_devices: dict[Device, Device] = {}


def far_device(device: Device) -> Device:
    """Where the far end of a connection goes whose near end is there."""
    return far_devices.get(device, device)


_RDMA = pytest.param("rdma", marks=pytest.mark.rdma)
# `nox -s rdma` has none but these collected: an emulated machine takes a minute for the others.
_ONLY_RDMA = os.environ.get("AIOVERBS_TEST_DEVICES") == "rdma"
_MODES = [_RDMA] if _ONLY_RDMA else ["inline", "engine", _RDMA]


@pytest.fixture(params=[_RDMA] if _ONLY_RDMA else ["soft0", _RDMA])
def device_name(request: pytest.FixtureRequest) -> str:
    """The name of a device, for tests that open it themselves."""
    name: str = rdma_devices()[0] if request.param == "rdma" else request.param
    skip_where_missing(request, name)
    return name


@pytest_asyncio.fixture(params=_MODES)
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """What the test leaves open on it is a warning, and so a failure."""
    name = rdma_devices()[0] if request.param == "rdma" else "soft0"
    skip_where_missing(request, name)
    async with open_device(name, engine_mode=request.param == "engine") as device:
        yield device
        if device.software:
            device.faults.set_port(True)  # the port is the device's, and so the next test's, too
