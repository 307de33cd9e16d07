"""PURE: encoding of the 32 bits of immediate data that each message of a connection carries.

    bits   0 to 15: number of a grant, for the kinds that concern one
          16 to 25: credits returned
          26 to 28: flags
          29 to 31: kind

Flags: FIRST and LAST mark the first and the last fragment of a message. HAS_IMMEDIATE says that the first fragment
begins with 32 bits of the user's immediate data. If the first fragment is not also the last one, the length of the
whole message, 64 bits, precedes all of that. An ANNOUNCE, too, has HAS_IMMEDIATE if it begins with such 32 bits.

In MESSAGES, the length of each message, 32 bits, precedes it.
"""

import enum
import struct
from typing import NamedTuple

from aioverbs.types import AccessFlags

__all__ = [
    "CREDITS_AT",
    "FIRST",
    "HAS_IMMEDIATE",
    "IMMEDIATE",
    "LAST",
    "MAX_READ_PARTS",
    "TOTAL",
    "WHOLE",
    "AnnouncedPart",
    "FrameKind",
    "GrantNotice",
    "announcement_size",
    "header",
    "pack_announcement",
    "parse_announcement",
    "parse_header",
]

CREDITS_AT = 16
_FLAGS_AT, _KIND_AT = 26, 29

FIRST = 1 << _FLAGS_AT
LAST = 2 << _FLAGS_AT
HAS_IMMEDIATE = 4 << _FLAGS_AT

IMMEDIATE = struct.Struct("!I")
TOTAL = struct.Struct("!Q")
_GRANT = struct.Struct("!QQII")
_COUNT = struct.Struct("!H")
_PART = struct.Struct("!QQI?")
_GRANTABLE = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


class FrameKind(enum.IntEnum):
    """Kinds of messages."""

    MESSAGES = 0
    """One or several whole user messages without immediate data."""

    DATA = 1
    """A fragment of a user's message."""

    CREDITS = 2
    """Returns credits and carries nothing else."""

    GRANT = 3
    """Grants access to memory; the bytes are a `GrantNotice`."""

    REVOKE = 4
    """Asks the peer to stop using a grant."""

    REVOKED = 5
    """Acknowledges REVOKE, or says that an announced message was read, or dropped because the end closes; all earlier
    accesses are done."""

    END = 6
    """No more user messages or grants follow."""

    ANNOUNCE = 7
    """Announces a user message, which the receiver reads from the sender's memory. The number is like that of a grant:
    REVOKE withdraws the message, REVOKED ends the access. The bytes are those of `pack_announcement`."""


WHOLE = FrameKind.DATA << _KIND_AT | FIRST | LAST
"""Header of a message in one fragment without immediate data, credits left out."""


def header(kind: FrameKind, flags: int = 0, returned: int = 0, number: int = 0) -> int:
    """Return the header of a message, encoded as 32-bit immediate data. The arguments are not checked.

    :param kind: kind of the message.
    :param flags: any of FIRST, LAST and HAS_IMMEDIATE.
    :param returned: number of credits that the message returns, 0..1023.
    :param number: number of the grant, 0..65535.
    """
    return kind << _KIND_AT | flags | returned << CREDITS_AT | number


class GrantNotice(NamedTuple):
    """Payload of a GRANT message: address, length, key and access of the memory."""

    address: int
    length: int
    rkey: int
    access: AccessFlags

    def pack(self) -> bytes:
        """Return the notice encoded as bytes, the payload of a GRANT message."""
        return _GRANT.pack(self.address, self.length, self.rkey, self.access)

    @classmethod
    def parse(cls, data: bytes) -> "GrantNotice":
        """Decode a notice that the peer sent.

        :param data: payload of a GRANT message.
        :returns: the notice.
        :raises ValueError: the data has the wrong length, the range of memory is empty or impossible, or the access
            flags cannot be granted.
        """
        if len(data) != _GRANT.size:
            raise ValueError(f"the peer sent GRANT with {len(data)} bytes, expected {_GRANT.size}")
        address, length, rkey, access = _GRANT.unpack(data)
        if not length or address + length > 1 << 64 or not access or access & ~_GRANTABLE:
            raise ValueError(
                f"the peer sent GRANT with invalid values: {length} bytes at {address:#x} for access {access:#x}"
            )
        return cls(address, length, rkey, AccessFlags(access))


MAX_READ_PARTS = 64
"""Largest number of parts of an announced message that the peer reads. Before, between and after them there may be one
part each that the announcement contains."""


class AnnouncedPart(NamedTuple):
    """Part of an announced message: memory of the sender, or bytes that the announcement itself contains.

    :param address: address of the memory; 0 for bytes of the announcement.
    :param length: length in bytes, at least 1.
    :param rkey: key of the memory; 0 for bytes of the announcement.
    :param data: bytes of the announcement; None for memory.
    """

    address: int
    length: int
    rkey: int
    data: bytes | None = None


def pack_announcement(parts: list[AnnouncedPart]) -> bytes:
    """Return the parts of an announced message encoded as bytes, the payload of ANNOUNCE after the immediate data.

    :param parts: the parts in their order, no more than `MAX_READ_PARTS` permits.
    """
    table = [_PART.pack(part.address, part.length, part.rkey, part.data is not None) for part in parts]
    return b"".join([_COUNT.pack(len(parts)), *table, *(part.data for part in parts if part.data is not None)])


def announcement_size(count: int, data_bytes: int) -> int:
    """Return the size of an encoded announcement in bytes.

    :param count: number of its parts.
    :param data_bytes: sum of the lengths of the parts that it contains itself.
    """
    return _COUNT.size + count * _PART.size + data_bytes


def parse_announcement(data: bytes) -> list[AnnouncedPart]:
    """Decode the parts of a message that the peer announced.

    :param data: payload of ANNOUNCE without immediate data.
    :returns: the parts, at least one.
    :raises ValueError: the data has the wrong length, there are no parts or too many, or the range of one is empty or
        impossible.
    """
    count = int.from_bytes(data[: _COUNT.size])
    at = announcement_size(count, 0)
    if count > 2 * MAX_READ_PARTS + 1:
        raise ValueError(f"the peer announced a message of {count} parts, more than {2 * MAX_READ_PARTS + 1}")
    if len(data) < at or not count:
        raise ValueError(f"the peer sent ANNOUNCE of {count} parts with {len(data)} bytes")
    parts = []
    for address, length, rkey, is_inline in _PART.iter_unpack(data[_COUNT.size : at]):
        if not length or address + length > 1 << 64:
            raise ValueError(f"the peer sent ANNOUNCE with invalid values: {length} bytes at {address:#x}")
        if is_inline:
            parts.append(AnnouncedPart(address, length, rkey, data[at : at + length]))
            at += length
        else:
            parts.append(AnnouncedPart(address, length, rkey))
    to_read = sum(part.data is None for part in parts)
    if to_read > MAX_READ_PARTS:
        raise ValueError(f"the peer announced a message with {to_read} parts to read, more than {MAX_READ_PARTS}")
    if len(data) != at:
        raise ValueError(f"the peer sent ANNOUNCE with {len(data)} bytes, expected {at}")
    return parts


def parse_header(immediate: int) -> tuple[int, int, int, int]:
    """Decode the header of a message. Nothing is checked.

    :param immediate: immediate data of the message, 32 bits.
    :returns: a tuple of the kind, which may be unknown, the flags, the number of credits returned and the number of the
        grant.
    """
    return (
        immediate >> _KIND_AT,
        immediate & (FIRST | LAST | HAS_IMMEDIATE),
        immediate >> CREDITS_AT & 0x3FF,
        immediate & 0xFFFF,
    )
