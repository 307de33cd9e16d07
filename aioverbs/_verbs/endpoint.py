"""PURE: what the two ends of a connection know of each other."""

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from aioverbs._exports import publish
from aioverbs.attributes import AddressVector
from aioverbs.types import Mtu, QpType

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Endpoint"]

_VERSION = 1
_WIRE = struct.Struct(">BB16sIIIHBBB")
_BITS = {"qp_num": 24, "psn": 24, "qkey": 32, "lid": 16, "max_rd_atomic": 8, "max_dest_rd_atomic": 8}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a connection, or where datagrams go: what a peer needs to know of a queue pair.

    :param gid: of its port, 16 bytes.
    :param qp_num: its number, 24 bits.
    :param psn: the sequence number of the first packet that it sends, 24 bits.
    :param mtu: the largest packet that its port takes.
    :param qp_type: its type: those of type XRC_SEND and XRC_RECV talk to each other, any other to its like.
    :param max_rd_atomic: how many reads and atomics it can have under way.
    :param max_dest_rd_atomic: how many of its peer's it can serve at once.
    :param qkey: what datagrams to it must bear, 32 bits; of type UD.
    :param lid: of its port, on InfiniBand; 0 over Ethernet.
    """

    gid: bytes
    qp_num: int
    psn: int
    mtu: Mtu
    qp_type: QpType = field(default=QpType.RC, kw_only=True)
    max_rd_atomic: int = field(default=1, kw_only=True)
    max_dest_rd_atomic: int = field(default=1, kw_only=True)
    qkey: int = field(default=0, kw_only=True)
    lid: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if len(self.gid) != 16:
            raise ValueError(f"a GID has 16 bytes, not {len(self.gid)}")
        for name, bits in _BITS.items():
            if not 0 <= getattr(self, name) < 1 << bits:
                raise ValueError(f"{name} has {bits} bits, and {getattr(self, name)} is none of those numbers")
        Mtu(self.mtu)
        QpType(self.qp_type)

    def __bytes__(self) -> bytes:
        """Its wire form, 35 bytes in network order, of which the first is the version of that form."""
        return _WIRE.pack(
            _VERSION,
            self.qp_type,
            self.gid,
            self.qp_num,
            self.psn,
            self.qkey,
            self.lid,
            self.mtu,
            self.max_rd_atomic,
            self.max_dest_rd_atomic,
        )

    @classmethod
    def from_bytes(cls, data: "Buffer") -> Self:
        """From its wire form.

        :raises ValueError: it is none, or one of another version.
        """
        view = memoryview(data).cast("B")
        if len(view) and view[0] != _VERSION:
            raise ValueError(f"this is version {view[0]} of an endpoint's wire form, and here only {_VERSION} is known")
        if len(view) != _WIRE.size:
            raise ValueError(f"an endpoint is {_WIRE.size} bytes on the wire, not {len(view)}")
        _, kind, gid, qp_num, psn, qkey, lid, mtu, reads, served = _WIRE.unpack(view)
        return cls(
            gid,
            qp_num,
            psn,
            Mtu(mtu),
            qp_type=QpType(kind),
            max_rd_atomic=reads,
            max_dest_rd_atomic=served,
            qkey=qkey,
            lid=lid,
        )

    def path_to(self, remote: "Endpoint", *, port_num: int, sgid_index: int) -> AddressVector:
        """The way from here to another one: by GID over Ethernet and to other subnets, by LID alone within one.

        :param port_num: the port of this one.
        :param sgid_index: where its GID stands in that port's table.
        :raises ValueError: one is on InfiniBand and the other on Ethernet, or the other one has no GID.
        """
        if bool(self.lid) != bool(remote.lid):
            raise ValueError(f"one of these has a LID, as on InfiniBand, and one has none: {self}, {remote}")
        if not self.lid and not any(remote.gid):
            raise ValueError(f"{remote} has no GID: over Ethernet it needs one")
        near = self.lid and (remote.gid[:8] == self.gid[:8] or not any(remote.gid))
        dgid = b"" if near else remote.gid
        return AddressVector(dgid=dgid, sgid_index=sgid_index, port_num=port_num, dlid=remote.lid)


publish(__name__)
