"""The storage server of examples, on an open device, with either backing; processes meet in a folder of their own."""

import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT
from tests.devices import device, device_name
from tests.sockets import directory_of_sockets, short_path

__all__ = ["backing", "device", "device_name", "directory_of_sockets", "short_path"]

# What the example needs is installed where it is tested, and not in each session.
collect_ignore_glob = [] if find_spec("prometheus_client") and find_spec("msgspec") else ["test_*.py"]
if str(ROOT / "examples") not in sys.path:
    sys.path.append(str(ROOT / "examples"))


@pytest.fixture
def backing(request: pytest.FixtureRequest) -> str:
    """What stands between files and clients, where a test is not parametrized with both: the one, or the other."""
    return "mapped" if request.node.callspec.params["device"] == "inline" else "cached"
