"""Fixture of an open device, for the folders that import it.

Each test runs on the software device, with each execution. With AIOVERBS_TEST_DEVICES=rdma, which `nox -s rdma` sets,
each test runs only on the RDMA device named by AIOVERBS_DEVICE, or on the first one. A test declares the capabilities
it needs: see `tests.capabilities`.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from aioverbs._verbs.device import Device, open_device
from tests.capabilities import skip_where_missing
from tests.rdma.seam import rdma_devices
from tests.ways import ONLY_RDMA

__all__ = ["MODES", "device", "device_name", "name_of", "remote_device", "remote_devices"]

# The device of the peer for each local device, if these differ: see tests/fabric.
remote_devices: dict[Device, Device] = {}


def remote_device(device: Device) -> Device:
    """Return the device on which the peer of a connection from `device` is created."""
    return remote_devices.get(device, device)


_RDMA = pytest.param("rdma", marks=pytest.mark.rdma)
# Parameters of tests that open a device themselves; `name_of` returns its name.
MODES = [_RDMA] if ONLY_RDMA else ["inline", "thread"]


def name_of(mode: str) -> str:
    """Return the name of the device of one of `MODES`."""
    return rdma_devices()[0] if mode == "rdma" else "soft0"


@pytest.fixture(params=[_RDMA] if ONLY_RDMA else ["soft0"])
def device_name(request: pytest.FixtureRequest) -> str:
    """Return the name of a device, for tests that open it themselves."""
    name = name_of(request.param)
    skip_where_missing(request, name)
    return name


@pytest_asyncio.fixture(params=MODES)
async def device(request: pytest.FixtureRequest) -> AsyncIterator[Device]:
    """Yield an open device; resources that the test leaves open cause a warning, and so a failure."""
    name = name_of(request.param)
    skip_where_missing(request, name)
    async with open_device(name, execution="thread" if request.param == "thread" else "inline") as device:
        yield device
        if device.software:
            device.faults.set_port(True)  # the state of the port persists to the next test
