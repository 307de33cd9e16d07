"""PURE: encoding of the 32 bits of immediate data that each message of a connection carries.

    bits   0 to 15: number of a grant, for the kinds that concern one
          16 to 25: credits returned
          26 to 28: flags
          29 to 31: kind

Flags: FIRST and LAST mark the first and the last fragment of a message. HAS_IMMEDIATE says that the first fragment
begins with 32 bits of the user's immediate data. If the first fragment is not also the last one, the length of the
whole message, 64 bits, precedes all of that.
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
    "TOTAL",
    "WHOLE",
    "FrameKind",
    "GrantNotice",
    "header",
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
_GRANTABLE = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


class FrameKind(enum.IntEnum):
    """Kinds of messages."""

    DATA = 1
    """A fragment of a user's message."""

    CREDITS = 2
    """Returns credits and carries nothing else."""

    GRANT = 3
    """Grants access to memory; the bytes are a `GrantNotice`."""

    REVOKE = 4
    """Asks the peer to stop using a grant."""

    REVOKED = 5
    """Acknowledges REVOKE; all earlier accesses are done."""

    END = 6
    """No more user messages or grants follow."""


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
