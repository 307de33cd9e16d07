"""PURE: selection of the default source GID of a port."""

from collections.abc import Iterable
from dataclasses import dataclass

from aioverbs.types import GidType

__all__ = ["Gid", "select_gid_index"]

_NONE = bytes(16)


@dataclass(frozen=True, slots=True)
class Gid:
    """Entry of the GID table of a port (``struct ibv_gid_entry``).

    :param index: index in the table.
    :param gid: GID, 16 bytes.
    :param gid_type: type of the GID, which decides the format of packets sent from it.
    """

    index: int
    gid: bytes
    gid_type: GidType

    @property
    def link_local(self) -> bool:
        """True if the GID is valid only on its own link, which means that it begins with fe80::/10."""
        return self.gid[0] == 0xFE and self.gid[1] & 0xC0 == 0x80

    @property
    def ipv4(self) -> bool:
        """True if the GID contains an IPv4 address. Bytes 8 and 9 may be a port number of the software device."""
        return not any(self.gid[:8]) and self.gid[10:12] == b"\xff\xff"


def select_gid_index(gids: Iterable[Gid]) -> int | None:
    """Return the index of the GID to send from, which is its `Gid.index`; None if the table contains no GID.

    RoCE v2, which is routable, is preferred to RoCE v1, which requires both ends to be on the same link. Within a
    version, the order is: IPv4 address, global IPv6 address, link-local address. Among equals, the lowest index wins.
    On InfiniBand, all GIDs have the same type, and the first one, the port GID, is chosen.

    :param gids: entries of the GID table of one port, in any order. Entries whose GID is zero are ignored.
    """
    found = [each for each in gids if each.gid != _NONE]
    return min(found, key=_rank).index if found else None


def _rank(each: Gid) -> tuple[bool, bool, bool, int]:
    """Return the sort key, a tuple, of an entry of the GID table: the entry with the lowest key is preferred."""
    roce = each.gid_type is not GidType.IB
    return (
        each.gid_type is GidType.ROCE_V1,
        roce and not each.ipv4,
        roce and each.link_local,
        each.index,
    )
