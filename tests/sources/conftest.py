"""Fixtures of an open device and of a device's name."""

from tests.devices import device, device_name

__all__ = ["device", "device_name"]
