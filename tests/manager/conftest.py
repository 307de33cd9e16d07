"""An open device, or the name of one; helper threads that are held."""

import pytest

from aioverbs._core.software import software
from tests.devices import device, device_name
from tests.manager.held_verbs import helpers

__all__ = ["device", "device_name", "helpers"]


@pytest.fixture(scope="session", autouse=True)
def _reserved() -> None:
    """The software device keeps a socket, by which its GID is nobody else's, from its first opening until the process
    ends: whichever test comes first, it is there before descriptors are counted.
    """
    software.Context.open().destroy()
