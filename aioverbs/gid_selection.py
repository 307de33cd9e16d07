"""PURE: which of a port's GIDs queue pairs send from where nobody says which."""

from collections.abc import Iterable
from dataclasses import dataclass

from aioverbs.types import GidType

__all__ = ["Gid", "preferred"]

_NONE = bytes(16)


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table: ``struct ibv_gid_entry``.

    :param index: where it stands in the table.
    :param gid: its 16 bytes.
    :param gid_type: what packets from it look like.
    """

    index: int
    gid: bytes
    gid_type: GidType

    @property
    def link_local(self) -> bool:
        """Whether it is of no use beyond its own link, fe80::/10."""
        return self.gid[0] == 0xFE and self.gid[1] & 0xC0 == 0x80

    @property
    def ipv4(self) -> bool:
        """Whether it is made of an IPv4 address; bytes 8 and 9 may be a port, as the software device has it there."""
        return not any(self.gid[:8]) and self.gid[10:12] == b"\xff\xff"


def preferred(gids: Iterable[Gid]) -> int | None:
    """The index of the one to send from; None where there is none.

    RoCE v2, which is routed, comes before RoCE v1, which both ends must then be on one link for; of these one of an
    IPv4 address before one of a global IPv6 address before one that is link-local; of these the first. InfiniBand's all
    are of one type, and the first of them is the port's own.
    """
    found = [each for each in gids if each.gid != _NONE]
    return min(found, key=_rank).index if found else None


def _rank(each: Gid) -> tuple[bool, bool, bool, int]:
    roce = each.gid_type is not GidType.IB
    return (
        each.gid_type is GidType.ROCE_V1,
        roce and not each.ipv4,
        roce and each.link_local,
        each.index,
    )
