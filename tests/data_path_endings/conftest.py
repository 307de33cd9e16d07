"""Fixtures for an open device and for the name of a device."""

from tests.devices import device, device_name

__all__ = ["device", "device_name"]
