"""Two processes, where the devices of these find each other, and how data goes."""

from tests.sharing.processes import pair
from tests.sockets import direct, directory_of_sockets, short_path

__all__ = ["direct", "directory_of_sockets", "pair", "short_path"]
