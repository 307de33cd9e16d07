"""PURE: what client and server say to each other; how that is said in bytes is `protocol`'s.

The server speaks first, with a `Challenge`; the client proves in its `Hello` that it knows its key, which does not go
over the wire. After that each request has one answer, in whichever order they are ready. An `Open` that succeeds comes
with a grant of the volume's memory, by which data goes one-sidedly: what is said here is all the rest.
"""

import enum
from typing import NamedTuple

__all__ = [
    "Answer",
    "Challenge",
    "Checksum",
    "Close",
    "Copy",
    "Create",
    "Data",
    "Delete",
    "Done",
    "Failed",
    "Flush",
    "Hello",
    "ListVolumes",
    "Listing",
    "Message",
    "Mode",
    "Open",
    "Opened",
    "Read",
    "Reopen",
    "Resize",
    "VolumeInfo",
    "Write",
]


class Mode(enum.IntEnum):
    """What a client may do with a volume. Each may do what those before it may."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


class VolumeInfo(NamedTuple):
    """A volume in a list."""

    name: str
    size: int
    read_only: bool


# ---- The greetings


class Challenge(NamedTuple):
    """The first word: the versions that are spoken begin and end with this one."""

    version: int
    nonce: bytes


class Hello(NamedTuple):
    """Who the client is."""

    version: int
    proof: bytes
    name: str


# ---- Requests


class ListVolumes(NamedTuple):
    """Which volumes are there, of those that the client may read? `Listing`."""


class Create(NamedTuple):
    """Make a volume of zeros. `Done`."""

    size: int
    name: str


class Copy(NamedTuple):
    """Make a volume that is as another one is now: to be written to, or a snapshot. `Done`."""

    read_only: bool
    names: tuple[str, str]  # the source's and the copy's


class Resize(NamedTuple):
    """Give a volume another size. `Done`."""

    size: int
    name: str


class Delete(NamedTuple):
    """Take a volume away. `Done`."""

    name: str


class Open(NamedTuple):
    """Use a volume. A grant of its memory, and `Opened`."""

    mode: int
    name: str


class Reopen(NamedTuple):
    """The grant was taken back: go on, where the volume is still what it was. A grant, and `Opened`."""

    volume: int


class Close(NamedTuple):
    """Use it no more. `Done`."""

    volume: int


class Read(NamedTuple):
    """Bytes by message, with their CRC-32 where that is wanted. `Data`."""

    volume: int
    offset: int
    length: int
    checked: bool


class Write(NamedTuple):
    """Bytes by message, with their CRC-32 where that is to be checked, or 0. `Done`."""

    volume: int
    offset: int
    checked: bool
    checksum: int
    data: bytes


class Checksum(NamedTuple):
    """The CRC-32 of bytes, wherever they are. `Data` without bytes."""

    volume: int
    offset: int
    length: int


class Flush(NamedTuple):
    """Make durable what was written; `Done` comes after that.

    Who writes one-sidedly where `Opened` asks for it says what it wrote.
    """

    volume: int
    written: tuple[tuple[int, int], ...]


# ---- Answers


class Done(NamedTuple):
    """It is done."""


class Failed(NamedTuple):
    """It is not, by one of `Code`, and why."""

    code: int
    text: str


class Listing(NamedTuple):
    """Volumes."""

    volumes: tuple[VolumeInfo, ...]


class Opened(NamedTuple):
    """A volume that is open, by its number on this connection; its memory by the grant with that key."""

    volume: int
    size: int
    mode: int
    tell: bool  # what was written one-sidedly
    rkey: int


class Data(NamedTuple):
    """Bytes, and their CRC-32 or 0."""

    checksum: int
    data: bytes


Answer = Done | Failed | Listing | Opened | Data
Message = (
    Answer
    | Challenge
    | Hello
    | ListVolumes
    | Create
    | Copy
    | Resize
    | Delete
    | Open
    | Reopen
    | Close
    | Read
    | Write
    | Checksum
    | Flush
)
