"""The fixture of an open device, for the folders that import it.

Each test runs on the software device, in each way of execution. With AIOVERBS_TEST_DEVICES=rdma, which `nox -s rdma`
sets, it runs on the RDMA device that AIOVERBS_DEVICE names, or the first that is here, and on nothing else. What it
needs that not every device has, it says: see `tests.capabilities`.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from aioverbs._verbs.device import Device, open_device
from tests.capabilities import skip_where_missing
from tests.rdma.seam import rdma_devices
from tests.ways import ONLY_RDMA

__all__ = ["MODES", "device", "device_name", "name_of", "remote_device", "remote_devices"]

# What the far ends of connections are made on, where that is another device than the near ends': see tests/fabric.
remote_devices: dict[Device, Device] = {}


def remote_device(device: Device) -> Device:
    """Where the far end of a connection goes whose near end is there."""
    return remote_devices.get(device, device)


_RDMA = pytest.param("rdma", marks=pytest.mark.rdma)
# The parameters of tests that open a device themselves; `name_of` tells its name.
MODES = [_RDMA] if ONLY_RDMA else ["inline", "thread"]


def name_of(mode: str) -> str:
    """The name of the device that is meant by one of `MODES`."""
    return rdma_devices()[0] if mode == "rdma" else "soft0"


@pytest.fixture(params=[_RDMA] if ONLY_RDMA else ["soft0"])
def device_name(request: pytest.FixtureRequest) -> str:
    """The name of a device, for tests that open it themselves."""
    name = name_of(request.param)
    skip_where_missing(request, name)
    return name


@pytest_asyncio.fixture(params=MODES)
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """What the test leaves open on it is a warning, and so a failure."""
    name = name_of(request.param)
    skip_where_missing(request, name)
    async with open_device(name, execution="thread" if request.param == "thread" else "inline") as device:
        yield device
        if device.software:
            device.faults.set_port(True)  # the port is the device's, and so the next test's, too
