"""PURE: messages between client and server.

The server sends a `Challenge` first. The client answers with a `Hello`, which proves knowledge of the key without
sending the key. After that, each request gets one answer; answers may come in any order. A successful `Open` comes
with a grant of the volume's memory, through which data moves by one-sided RDMA.

Encoding: the number of the request (4 bytes), then the message type and the fields in MessagePack. Each message has
exactly one encoding; any other input is a `ProtocolError`. A parsed message therefore packs to the same bytes again.
"""

import enum
import hmac
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from storage_server.ranges import MAX_RANGES

VERSION = 1
MAX_DATA = 1 << 20  # bytes of volume data in one message
MAX_TEXT = 512  # characters
MAX_MESSAGE = MAX_DATA + 64
_NUMBER = 4  # bytes

UInt16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
UInt32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
UInt64 = Annotated[int, Meta(ge=0)]  # MessagePack has no larger integers
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Bytes = Annotated[bytes, Meta(max_length=MAX_DATA)]
Ranges = Annotated[tuple[tuple[UInt64, UInt64], ...], Meta(max_length=MAX_RANGES)]
OpenMode = Annotated[int, Meta(ge=1, le=2)]


class ProtocolError(Exception):
    """The peer sent bytes that are not a valid message, or a message that is not expected now."""


def proof_of(key: bytes, nonce: bytes) -> bytes:
    """Return the 32-byte proof that an end knows `key`: an HMAC of the protocol version and a challenge's nonce."""
    return hmac.digest(key, b"aioverbs storage " + bytes([VERSION]) + nonce, "sha256")


class Mode(enum.IntEnum):
    """Access rights to a volume. Each mode includes the ones before it."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


class VolumeInfo(NamedTuple):
    """A volume in a list.

    :param name: the volume's name.
    :param size: bytes.
    :param read_only: whether it is a snapshot.
    """

    name: Text
    size: UInt64
    read_only: bool


class _Message(msgspec.Struct, array_like=True):
    """Base of all messages. The tag is the message type."""


# ---- Handshake


class Challenge(_Message, tag=1):
    """First message of a connection, from the server: the only protocol version that it supports, and a nonce."""

    version: UInt16
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(_Message, tag=2):
    """Reply to `Challenge`: the client's name and the proof that it knows its key."""

    version: UInt16
    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]
    name: Text


# ---- Requests


class ListVolumes(_Message, tag=10):
    """List the volumes that the client may read. Answer: `Listing`."""


class Create(_Message, tag=11):
    """Create a volume of zeros. Answer: `Done`."""

    size: UInt64
    name: Text


class Copy(_Message, tag=12):
    """Copy a volume in its present state, as a snapshot or as a writable clone. Answer: `Done`."""

    read_only: bool
    source: Text
    name: Text


class Resize(_Message, tag=13):
    """Change the size of a volume. Answer: `Done`."""

    size: UInt64
    name: Text


class Delete(_Message, tag=14):
    """Delete a volume. Answer: `Done`."""

    name: Text


class Open(_Message, tag=15):
    """Open a volume. Answer: a grant of its memory, and `Opened`."""

    mode: OpenMode
    name: Text


class Reopen(_Message, tag=16):
    """Request a new grant after the server revoked the last one.

    Answer: a grant, and `Opened`; or `Failed` if the volume changed.
    """

    volume: UInt32


class Close(_Message, tag=17):
    """Close a volume. Answer: `Done`."""

    volume: UInt32


class Read(_Message, tag=18):
    """Read bytes by message, with their CRC-32 if `checked`. Answer: `Data`."""

    volume: UInt32
    offset: UInt64
    length: UInt32
    checked: bool


class Write(_Message, tag=19):
    """Write bytes by message. The server compares their CRC-32 if `checked`. Answer: `Done`."""

    volume: UInt32
    offset: UInt64
    checked: bool
    checksum: UInt32
    data: Bytes


class Checksum(_Message, tag=20):
    """Compute the CRC-32 of a range of the volume. Answer: `Data` without bytes."""

    volume: UInt32
    offset: UInt64
    length: UInt32


class Flush(_Message, tag=21):
    """Make earlier writes durable. Answer: `Done`, once they are.

    If `Opened.report_writes` is set, `written` has the ranges that the client wrote one-sidedly: sorted, not empty, and
    neither overlapping nor adjacent.
    """

    volume: UInt32
    written: Ranges

    def __post_init__(self) -> None:
        before = -1
        for start, end in self.written:
            if not before < start < end:
                raise ValueError("ranges must be sorted, not empty, and neither overlap nor touch")
            before = end


# ---- Answers


class Done(_Message, tag=30):
    """The request succeeded."""


class Failed(_Message, tag=31):
    """The request failed: `code` of a `StorageError` class, and the reason."""

    code: Annotated[int, Meta(ge=1, le=8)]
    text: Text


class Listing(_Message, tag=32):
    """List of the volumes that the client may read, sorted by name."""

    volumes: tuple[VolumeInfo, ...]


class Opened(_Message, tag=33):
    """An open volume: its number on this connection, and the rkey of the grant of its memory."""

    volume: UInt32
    size: UInt64
    mode: OpenMode
    report_writes: bool  # whether `Flush` must list the ranges that were written one-sidedly
    rkey: UInt32


class Data(_Message, tag=34):
    """Bytes of a volume, and their CRC-32.

    The checksum is 0 if the request did not ask for it. The answer to `Checksum` has no bytes.
    """

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
    """Return the encoding of a message up to the bytes of its field `data`, so that large data is copied only once,
    when it is packed.

    :param number: number of the request.
    :param short: the message with an empty `data`, which is its last field.
    :param size: number of bytes of the data.
    """
    head = number.to_bytes(_NUMBER, "little") + _encode(short)
    if not size:
        return head
    kind, width = (0xC4, 1) if size < 1 << 8 else (0xC5, 2) if size < 1 << 16 else (0xC6, 4)
    return head[:-2] + bytes([kind]) + size.to_bytes(width, "big")  # replaces the two bytes of an empty `data`


def _split(message: Message) -> tuple[Message, bytes]:
    """Return a message with its `data` emptied, and the data. If the message has no such field, return it unchanged,
    and no bytes.
    """
    data: bytes = getattr(message, "data", b"")
    return (msgspec.structs.replace(message, data=b"") if data else message), data


def pack(number: int, message: Message) -> bytes:
    """Encode a message.

    :param number: number of the request, from 0 to 2**32-1.
    :param message: the message.
    :returns: the bytes to send.
    :raises ValueError: the peer would reject the message: a text or the data is too long, or a number is too large.
    """
    short, data = _split(message)
    try:
        _decode(_encode(short))
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(data) > MAX_DATA:
        raise ValueError(
            f"a {type(message).__name__} cannot be sent: {len(data):,} bytes of data exceed the limit of {MAX_DATA:,}"
        )
    return _head(number, short, len(data)) + data


def parse(data: bytes) -> tuple[int, Message]:
    """Decode a message.

    :returns: the number of the request that it belongs to, and the message.
    :raises ProtocolError: the bytes are not a valid message.
    """
    try:
        message = _decode(memoryview(data)[_NUMBER:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # RecursionError: deeply nested arrays
        raise ProtocolError(f"invalid message of {len(data)} bytes: {error}") from error
    number = int.from_bytes(data[:_NUMBER], "little")
    short, carried = _split(message)
    head = _head(number, short, len(carried))
    if not data.startswith(head) or len(data) != len(head) + len(carried):
        raise ProtocolError(f"non-canonical encoding of {type(message).__name__}")
    return number, message
