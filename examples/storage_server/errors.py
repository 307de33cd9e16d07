"""What clients are told when something cannot be done: one class of errors for each code of the protocol."""

from typing import ClassVar

__all__ = [
    "BusyError",
    "ChangedError",
    "DiskError",
    "ExistsError",
    "InvalidError",
    "NoRoomError",
    "RefusedError",
    "StorageError",
    "UnknownVolumeError",
    "error_of",
]


class StorageError(Exception):
    """The server did not do what was asked for; its text says why."""

    code: ClassVar[int]


class UnknownVolumeError(StorageError):
    """There is no such volume."""

    code = 1


class ExistsError(StorageError):
    """There is one of that name already."""

    code = 2


class RefusedError(StorageError):
    """The client has no right to do that."""

    code = 3


class InvalidError(StorageError):
    """It makes no sense: a size, a name, an offset."""

    code = 4


class ChangedError(StorageError):
    """The volume was resized or deleted, or the right to it taken back, while it was open: it may be opened again."""

    code = 5


class NoRoomError(StorageError):
    """The server has no room for it, on its disk or in its memory."""

    code = 6


class DiskError(StorageError):
    """The server's disk failed. What was flushed before is there; what was not may be lost."""

    code = 7


class BusyError(StorageError):
    """Somebody who uses the volume does not let go of it."""

    code = 8


_OF_CODES = {each.code: each for each in StorageError.__subclasses__()}


def error_of(code: int, text: str) -> StorageError:
    """The error that was told by its code."""
    return _OF_CODES[code](text)
