"""An open device, or the name of one."""

from tests.devices import device, device_name

__all__ = ["device", "device_name"]
