"""An open device, or the name of one; processes find each other in a folder of the test's own."""

from tests.devices import device, device_name
from tests.sockets import directory_of_sockets, short_path

__all__ = ["device", "device_name", "directory_of_sockets", "short_path"]
