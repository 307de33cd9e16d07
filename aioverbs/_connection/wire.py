"""PURE: what the messages of a connection carry beside their bytes, in 32 bits of immediate data.

    bits   0 to 15: a number that goes with the kind: which grant
          16 to 25: credits that are given back
          26 to 28: flags
          29 to 31: the kind

Of the flags: the bytes are the first of a message; the last of it; before them stand 32 bits of the user's own
immediate data. Where they are the first and not the last, the length of the whole stands before all of that, 64 bits.
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
    """What a message is for."""

    DATA = 1
    """Bytes of the user's."""

    CREDITS = 2
    """Nothing but the credits that it gives back."""

    GRANT = 3
    """The peer may reach memory: a `GrantNotice`."""

    REVOKE = 4
    """The peer is to reach it no more."""

    REVOKED = 5
    """And does so: what it asked for before was done before this came."""

    END = 6
    """No more bytes come."""


WHOLE = FrameKind.DATA << _KIND_AT | FIRST | LAST
"""What a message in one piece has, but for its credits."""


def header(kind: FrameKind, flags: int = 0, returned: int = 0, number: int = 0) -> int:
    """The immediate data of a message."""
    return kind << _KIND_AT | flags | returned << CREDITS_AT | number


class GrantNotice(NamedTuple):
    """What is told of memory that the peer may reach."""

    address: int
    length: int
    rkey: int
    access: AccessFlags

    def pack(self) -> bytes:
        """Its bytes."""
        return _GRANT.pack(self.address, self.length, self.rkey, self.access)

    @classmethod
    def parse(cls, data: bytes) -> "GrantNotice":
        """The notice that these bytes are.

        :raises ValueError: they are none.
        """
        if len(data) != _GRANT.size:
            raise ValueError(f"it grants memory by {len(data)} bytes, which are to be {_GRANT.size}")
        address, length, rkey, access = _GRANT.unpack(data)
        if not length or address + length > 1 << 64 or not access or access & ~_GRANTABLE:
            raise ValueError(f"it grants {length} bytes at {address:#x} for access {access:#x}, which cannot be")
        return cls(address, length, rkey, AccessFlags(access))


def parse_header(immediate: int) -> tuple[int, int, int, int]:
    """Kind, flags, credits and number of a message."""
    return (
        immediate >> _KIND_AT,
        immediate & (FIRST | LAST | HAS_IMMEDIATE),
        immediate >> CREDITS_AT & 0x3FF,
        immediate & 0xFFFF,
    )
