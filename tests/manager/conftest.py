"""Fixtures: an open device, a device's name, and helper threads that a test holds."""

import pytest

from aioverbs._core.software import software
from tests.devices import device, device_name
from tests.manager.held_verbs import helpers

__all__ = ["device", "device_name", "helpers"]


@pytest.fixture(scope="session", autouse=True)
def _reserved() -> None:
    """Open the software device once, before tests count descriptors.

    From the first open to the end of the process the device keeps a socket that reserves its GID.
    """
    software.Context.open().destroy()
