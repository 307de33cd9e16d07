"""PURE: what client and server say to each other.

The server speaks first, with a `Challenge`; the client proves in its `Hello` that it knows its key, which does not go
over the wire. After that each request has one answer, in whichever order they are ready. An `Open` that succeeds comes
with a grant of the volume's memory, by which data goes one-sidedly: what is said here is all the rest.

In bytes a message is the number of the request that it is or answers, and its kind and fields in MessagePack. Each has
one form only, and whatever is not exactly that is a `ProtocolError`: what is parsed packs to the same bytes again.
"""

import enum
import hmac
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from storage_server.ranges import RANGES_MOST

VERSION = 1
DATA_MOST = 1 << 20  # bytes that a message carries of a volume
TEXT_MOST = 512  # characters
MESSAGE_MOST = DATA_MOST + 64
_NUMBER = 4  # bytes

UInt16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
UInt32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
UInt64 = Annotated[int, Meta(ge=0)]  # MessagePack has none that are larger
Text = Annotated[str, Meta(max_length=TEXT_MOST)]
Bytes = Annotated[bytes, Meta(max_length=DATA_MOST)]
Ranges = Annotated[tuple[tuple[UInt64, UInt64], ...], Meta(max_length=RANGES_MOST)]
OpenMode = Annotated[int, Meta(ge=1, le=2)]


class ProtocolError(Exception):
    """The other end said something that has no meaning."""


def proof_of(key: bytes, nonce: bytes) -> bytes:
    """What only somebody who knows the key can say to a nonce."""
    return hmac.digest(key, b"aioverbs storage " + bytes([VERSION]) + nonce, "sha256")


class Mode(enum.IntEnum):
    """What a client may do with a volume. Each may do what those before it may."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


class VolumeInfo(NamedTuple):
    """A volume in a list."""

    name: Text
    size: UInt64
    read_only: bool


class _Message(msgspec.Struct, array_like=True):
    """Base of all messages. The tag is the kind."""


# ---- The greetings


class Challenge(_Message, tag=1):
    """The first word: the versions that are spoken begin and end with this one."""

    version: UInt16
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(_Message, tag=2):
    """Who the client is."""

    version: UInt16
    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]
    name: Text


# ---- Requests


class ListVolumes(_Message, tag=10):
    """Which volumes are there, of those that the client may read? `Listing`."""


class Create(_Message, tag=11):
    """Make a volume of zeros. `Done`."""

    size: UInt64
    name: Text


class Copy(_Message, tag=12):
    """Make a volume that is as another one is now: to be written to, or a snapshot. `Done`."""

    read_only: bool
    source: Text
    name: Text


class Resize(_Message, tag=13):
    """Give a volume another size. `Done`."""

    size: UInt64
    name: Text


class Delete(_Message, tag=14):
    """Take a volume away. `Done`."""

    name: Text


class Open(_Message, tag=15):
    """Use a volume. A grant of its memory, and `Opened`."""

    mode: OpenMode
    name: Text


class Reopen(_Message, tag=16):
    """The grant was taken back: go on, where the volume is still what it was. A grant, and `Opened`."""

    volume: UInt32


class Close(_Message, tag=17):
    """Use it no more. `Done`."""

    volume: UInt32


class Read(_Message, tag=18):
    """Bytes by message, with their CRC-32 where that is wanted. `Data`."""

    volume: UInt32
    offset: UInt64
    length: UInt32
    checked: bool


class Write(_Message, tag=19):
    """Bytes by message, with their CRC-32 where that is to be checked, or 0. `Done`."""

    volume: UInt32
    offset: UInt64
    checked: bool
    checksum: UInt32
    data: Bytes


class Checksum(_Message, tag=20):
    """The CRC-32 of bytes, wherever they are. `Data` without bytes."""

    volume: UInt32
    offset: UInt64
    length: UInt32


class Flush(_Message, tag=21):
    """Make durable what was written; `Done` comes after that.

    Who writes one-sidedly where `Opened` asks for it says what it wrote: ranges in order and apart, none empty.
    """

    volume: UInt32
    written: Ranges

    def __post_init__(self) -> None:
        before = -1
        for start, end in self.written:
            if not before < start < end:
                raise ValueError("ranges are not empty, and stand in order and apart")
            before = end


# ---- Answers


class Done(_Message, tag=30):
    """It is done."""


class Failed(_Message, tag=31):
    """It is not, by the code of one of the errors, and why."""

    code: Annotated[int, Meta(ge=1, le=8)]
    text: Text


class Listing(_Message, tag=32):
    """Volumes."""

    volumes: tuple[VolumeInfo, ...]


class Opened(_Message, tag=33):
    """A volume that is open, by its number on this connection; its memory by the grant with that key."""

    volume: UInt32
    size: UInt64
    mode: OpenMode
    tell: bool  # what was written one-sidedly
    rkey: UInt32


class Data(_Message, tag=34):
    """Bytes, and their CRC-32 or 0."""

    checksum: UInt32
    data: Bytes


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
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder[Message](Message).decode


def _head(number: int, short: Message, size: int) -> bytes:
    """What comes before a message's data: large data is copied where it is packed, and not where its form is checked.

    :param short: the message without its data, which is the last field.
    :param size: bytes of the data.
    """
    head = number.to_bytes(_NUMBER, "little") + _encode(short)
    if not size:
        return head
    kind, width = (0xC4, 1) if size < 1 << 8 else (0xC5, 2) if size < 1 << 16 else (0xC6, 4)
    return head[:-2] + bytes([kind]) + size.to_bytes(width, "big")  # in the place of that of no data


def _split(message: Message) -> tuple[Message, bytes]:
    data: bytes = getattr(message, "data", b"")
    return (msgspec.structs.replace(message, data=b"") if data else message), data


def pack(number: int, message: Message) -> bytes:
    """A message in bytes.

    :param number: of the request, from 0 to 2**32 - 1.
    :raises ValueError: the other end would not take it: a text or the data is too long, or a number too large.
    """
    short, data = _split(message)
    try:
        _decode(_encode(short))
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(data) > DATA_MOST:
        raise ValueError(f"a {type(message).__name__} cannot be sent: {len(data):,} bytes, of {DATA_MOST:,} at most")
    return _head(number, short, len(data)) + data


def parse(data: bytes) -> tuple[int, Message]:
    """The number and the message that these bytes are.

    :raises ProtocolError: they are none.
    """
    try:
        message = _decode(memoryview(data)[_NUMBER:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # the last of arrays in arrays
        raise ProtocolError(f"{len(data)} bytes are no message: {error}") from error
    number = int.from_bytes(data[:_NUMBER], "little")
    short, carried = _split(message)
    head = _head(number, short, len(carried))
    if not data.startswith(head) or len(data) != len(head) + len(carried):
        raise ProtocolError(f"a {type(message).__name__} is not written as it should be")
    return number, message
