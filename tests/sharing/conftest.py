"""Fixtures: two worker processes, the socket directory of their devices, and how payloads travel."""

from tests.sharing.processes import pair
from tests.sockets import direct, directory_of_sockets, short_path

__all__ = ["direct", "directory_of_sockets", "pair", "short_path"]
