"""Fixtures for tests of the storage server example, on an open device and with either backing."""

import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT
from tests.devices import device, device_name
from tests.sockets import directory_of_sockets, short_path

__all__ = ["backing", "device", "device_name", "directory_of_sockets", "short_path"]

# The example's dependencies are missing in sessions that do not test the example.
collect_ignore_glob = [] if find_spec("prometheus_client") and find_spec("msgspec") else ["test_*.py"]
if str(ROOT / "examples") not in sys.path:
    sys.path.append(str(ROOT / "examples"))


@pytest.fixture
def backing(request: pytest.FixtureRequest) -> str:
    """Backing for tests that are not parametrized with both: "mapped" for inline execution, else "cached"."""
    return "mapped" if request.node.callspec.params["device"] == "inline" else "cached"
