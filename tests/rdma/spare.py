"""A soft-RoCE device on an interface of its own, which a test may take down and remove without affecting others."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from aioverbs._providers import hardware
from aioverbs._verbs.ports import gid_table
from tests.pace import patience

__all__ = ["SpareDevice", "spare_device"]

_INTERFACE, _DEVICE, _ADDRESS = "spare0", "rxe_spare", "10.78.0.1/24"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(10), check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@dataclass(frozen=True)
class SpareDevice:
    """Names of the device and of its interface."""

    name: str
    interface: str

    def set_link(self, state: str) -> None:
        """Set the interface ``"up"`` or ``"down"``."""
        _run("ip", "link", "set", self.interface, state)

    def delete_command(self) -> tuple[str, ...]:
        """Return the command that removes the device."""
        return ("rdma", "link", "delete", self.name)


def _wait_for_its_address(name: str) -> None:
    """Wait for the GID of the address, which appears slightly later than the device."""
    end = time.monotonic() + patience(5)
    while True:
        context = hardware.open_context(name)
        try:
            if any(each.ipv4 for each in gid_table(context, 1)):
                return
        finally:
            context.destroy()
        assert time.monotonic() < end, f"{name} has no GID of {_ADDRESS}"
        time.sleep(0.02)


@contextlib.contextmanager
def spare_device() -> Iterator[SpareDevice]:
    """Create a spare device in the virtual machine of `vm.py`; elsewhere, skip the test.

    Only devices created here may be removed; others may be in use.
    """
    if "AIOVERBS_RESULTS" not in os.environ:
        pytest.skip("needs the virtual machine of tests/rdma/vm.py, where devices may be removed")
    _run("ip", "link", "add", _INTERFACE, "type", "dummy")
    try:
        _run("ip", "address", "add", _ADDRESS, "dev", _INTERFACE)
        _run("ip", "link", "set", _INTERFACE, "up")
        _run("rdma", "link", "add", _DEVICE, "type", "rxe", "netdev", _INTERFACE)
        _wait_for_its_address(_DEVICE)
        yield SpareDevice(_DEVICE, _INTERFACE)
    finally:
        _run("ip", "link", "delete", _INTERFACE)  # removes the device, too, if it is still there
