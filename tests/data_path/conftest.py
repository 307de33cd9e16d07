"""An open device in each way of execution."""

from tests.devices import device

__all__ = ["device"]
