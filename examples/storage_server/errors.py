"""What clients are told when something cannot be done: one class of errors for each code of the protocol."""

import enum

__all__ = [
    "BusyError",
    "ChangedError",
    "Code",
    "DiskError",
    "ExistsError",
    "InvalidError",
    "NoRoomError",
    "RefusedError",
    "StorageError",
    "UnknownVolumeError",
    "error_of",
]


class Code(enum.IntEnum):
    """Why a request failed, as it is told."""

    UNKNOWN = 1
    EXISTS = 2
    REFUSED = 3
    INVALID = 4
    CHANGED = 5
    NO_ROOM = 6
    DISK = 7
    BUSY = 8


class StorageError(Exception):
    """The server did not do what was asked for; its text says why."""

    code: Code


class UnknownVolumeError(StorageError):
    """There is no such volume."""

    code = Code.UNKNOWN


class ExistsError(StorageError):
    """There is one of that name already."""

    code = Code.EXISTS


class RefusedError(StorageError):
    """The client has no right to do that."""

    code = Code.REFUSED


class InvalidError(StorageError):
    """It makes no sense: a size, a name, an offset."""

    code = Code.INVALID


class ChangedError(StorageError):
    """The volume was resized or deleted, or the right to it taken back, while it was open: it may be opened again."""

    code = Code.CHANGED


class NoRoomError(StorageError):
    """The server has no room for it, on its disk or in its memory."""

    code = Code.NO_ROOM


class DiskError(StorageError):
    """The server's disk failed. What was flushed before is there; what was not may be lost."""

    code = Code.DISK


class BusyError(StorageError):
    """Somebody who uses the volume does not let go of it."""

    code = Code.BUSY


_OF_CODES: dict[int, type[StorageError]] = {
    each.code: each
    for each in (
        UnknownVolumeError,
        ExistsError,
        RefusedError,
        InvalidError,
        ChangedError,
        NoRoomError,
        DiskError,
        BusyError,
    )
}


def error_of(code: int, text: str) -> StorageError:
    """The error that was told by its code."""
    return _OF_CODES[code](text)
