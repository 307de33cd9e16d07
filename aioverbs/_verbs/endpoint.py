"""PURE: endpoints, the addressing information that two queue pairs exchange to connect."""

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
    """Addressing information that a peer needs to connect to a queue pair or to send datagrams to it.

    :param gid: GID of the port, 16 bytes.
    :param qp_num: queue pair number, 0..2**24-1.
    :param psn: sequence number of the first packet that the queue pair sends, 0..2**24-1.
    :param mtu: active MTU of the port.
    :param qp_type: type of the queue pair. XRC_SEND and XRC_RECV connect to each other, other types to the same type.
    :param max_rd_atomic: maximum number of reads and atomics that the queue pair can have in flight, 0..255.
    :param max_dest_rd_atomic: maximum number of the peer's reads and atomics that the queue pair can respond to at
        once, 0..255.
    :param qkey: key that datagrams to a UD queue pair must carry, 0..2**32-1.
    :param lid: LID of the port on InfiniBand, 0..2**16-1; 0 over Ethernet.
    :raises ValueError: a value is out of range.
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
        """Check the values of all fields.

        :raises ValueError: a value is out of range.
        """
        if len(self.gid) != 16:
            raise ValueError(f"`gid` must have 16 bytes, got {len(self.gid)}")
        for name, bits in _BITS.items():
            if not 0 <= getattr(self, name) < 1 << bits:
                raise ValueError(f"`{name}` must fit in {bits} bits, got {getattr(self, name)}")
        if not Mtu(self.mtu):
            raise ValueError("`mtu` must be that of a port which has one, got Mtu.NONE")
        QpType(self.qp_type)

    def __bytes__(self) -> bytes:
        """Return the endpoint encoded as 35 bytes in network byte order; the first byte is the encoding's version."""
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
        """Decode an endpoint.

        :param data: the 35 bytes that ``bytes(endpoint)`` returned.
        :returns: the endpoint, equal to the encoded one.
        :raises ValueError: the version or the length of `data` is wrong, or a value is out of range.
        """
        view = memoryview(data).cast("B")
        if len(view) and view[0] != _VERSION:
            raise ValueError(
                f"an encoded endpoint must have version {_VERSION}, got {view[0]}: use one release on both ends"
            )
        if len(view) != _WIRE.size:
            raise ValueError(f"an encoded endpoint must have {_WIRE.size} bytes, got {len(view)}")
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
        """Return the path from this endpoint to a remote one, to be passed to `QueuePair.to_rtr` as ``av``.

        Over Ethernet, and between InfiniBand subnets, the path contains the remote GID. Within an InfiniBand subnet, it
        contains only the remote LID.

        :param remote: endpoint that the path leads to.
        :param port_num: number of the local port, from 1.
        :param sgid_index: index of this endpoint's GID in the GID table of the local port.
        :returns: the path as an `AddressVector`.
        :raises ValueError: one endpoint is on InfiniBand and the other on Ethernet, or the path is over
            Ethernet and `remote` has no GID.
        """
        if bool(self.lid) != bool(remote.lid):
            raise ValueError(f"one endpoint has a LID (InfiniBand), the other has none (Ethernet): {self}, {remote}")
        if not self.lid and not any(remote.gid):
            raise ValueError(f"{remote} has no GID, which a path over Ethernet requires")
        near = self.lid and (remote.gid[:8] == self.gid[:8] or not any(remote.gid))
        dgid = b"" if near else remote.gid
        return AddressVector(dgid=dgid, sgid_index=sgid_index, port_num=port_num, dlid=remote.lid)


publish(__name__)
