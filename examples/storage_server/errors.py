"""Errors that the server reports to clients: one class for each error code of the protocol."""

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
    """Base of the errors that the server reports. The text has the reason.

    The server sends `code` and the text; the client's call then raises an error of the same class.
    """

    code: ClassVar[int]


class UnknownVolumeError(StorageError):
    """The volume or client does not exist."""

    code = 1


class ExistsError(StorageError):
    """The name is taken."""

    code = 2


class RefusedError(StorageError):
    """The client lacks the right for the request."""

    code = 3


class InvalidError(StorageError):
    """A size, name, offset or other value of the request is invalid."""

    code = 4


class ChangedError(StorageError):
    """The open volume was resized or deleted, or the client lost its right. Open the volume again."""

    code = 5


class NoRoomError(StorageError):
    """The server lacks space on its disk or in its cache."""

    code = 6


class DiskError(StorageError):
    """The server's disk failed. Data flushed before is safe; unflushed data may be lost."""

    code = 7


class BusyError(StorageError):
    """Another client does not release the volume in time."""

    code = 8


_OF_CODES = {each.code: each for each in StorageError.__subclasses__()}


def error_of(code: int, text: str) -> StorageError:
    """Return the error that belongs to a code of the protocol.

    :param code: the code, from 1 to 8.
    :param text: the reason, which becomes the error's text.
    """
    return _OF_CODES[code](text)
