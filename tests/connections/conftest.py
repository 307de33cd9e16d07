"""Fixtures: an open device, or the name of one. Processes find each other in a directory of the test."""

from tests.devices import device, device_name
from tests.sockets import directory_of_sockets, short_path

__all__ = ["device", "device_name", "directory_of_sockets", "short_path"]
