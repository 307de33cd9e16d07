"""Where the devices of these processes find each other, and how data goes."""

from tests.sockets import direct, directory_of_sockets, short_path

__all__ = ["direct", "directory_of_sockets", "short_path"]
