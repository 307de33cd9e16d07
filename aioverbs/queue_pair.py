"""Queue pairs, and what is awaited on them."""

import asyncio
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio

from aioverbs._core import engine
from aioverbs.affinity import Affinity
from aioverbs.attributes import AddressVector, QpAttributes, QpCapabilities
from aioverbs.completion import CompletionQueue, Placement, Work
from aioverbs.errors import ConcurrentAccessError, VerbsError
from aioverbs.memory import MemoryRegion, RegionSlice, RemoteRegion
from aioverbs.resource import Resource
from aioverbs.types import AccessFlags, Mtu, QpState, QpType, SendFlags, SendOpcode

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["QueuePair", "QueuePairAddress"]

_WIRE = struct.Struct(">16sIIB")
_FLUSH_S = 10.0  # the longest that hardware is given to flush what is under way
_TRIES = 1000  # of a verb that met another thread inside of its domain


@dataclass(frozen=True)
class QueuePairAddress:
    """What a peer needs to connect to a queue pair.

    :param gid: of its port, 16 bytes.
    :param qp_num: its number, 24 bits.
    :param psn: the first packet sequence number that it sends, 24 bits.
    :param mtu: the largest packet that its port takes.
    """

    gid: bytes
    qp_num: int
    psn: int
    mtu: Mtu

    def __post_init__(self) -> None:
        if len(self.gid) != 16:
            raise ValueError(f"a GID has 16 bytes, not {len(self.gid)}")
        for name, value in (("qp_num", self.qp_num), ("psn", self.psn)):
            if not 0 <= value < 1 << 24:
                raise ValueError(f"{name} has 24 bits, and {value} is none of those numbers")
        Mtu(self.mtu)

    def __bytes__(self) -> bytes:
        """Its wire form, 25 bytes in network order: GID, number, sequence number, MTU."""
        return _WIRE.pack(self.gid, self.qp_num, self.psn, self.mtu)

    @classmethod
    def from_bytes(cls, data: "Buffer") -> Self:
        """From its wire form.

        :raises ValueError: it is none.
        """
        view = memoryview(data).cast("B")
        if len(view) != _WIRE.size:
            raise ValueError(f"the address of a queue pair is {_WIRE.size} bytes on the wire, not {len(view)}")
        gid, qp_num, psn, mtu = _WIRE.unpack(view)
        return cls(gid, qp_num, psn, Mtu(mtu))


class QueuePair(Resource):
    """A queue pair of type RC: ``ibv_create_qp``. Made by the `queue_pair` of a domain.

    :param send_cq: where what it sends completes.
    :param recv_cq: where what it receives completes; None: there, too.
    :param capabilities: the depths that are needed.
    """

    def __init__(
        self,
        domain: Resource,
        placement: Placement,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue | None = None,
        capabilities: QpCapabilities | None = None,
        *,
        port: int = 1,
        gid_index: int = 1,
    ) -> None:
        recv_cq = recv_cq if recv_cq is not None else send_cq
        super().__init__(*dict.fromkeys((domain, send_cq, recv_cq)))
        self._placement = placement
        self._send_cq = send_cq
        self._recv_cq = recv_cq
        self._wanted = capabilities
        self._port = port
        self._gid_index = gid_index
        self._psn = random.getrandbits(24)
        self._handle: engine.QueuePair | None = None
        self._posted: _Posted | None = None

    def _owner(self) -> Affinity | None:
        return self._placement.owner

    def _open(self) -> None:
        handle = engine.QueuePair(
            self._placement.pd,
            self._send_cq.handle,
            self._recv_cq.handle,
            self._wanted,
            qp_type=QpType.RC,
            affinity=self._placement.owner,
        )
        self._handle = handle
        self._life.label = str(handle.qp_num)
        self._posted = _Posted(handle, self._send_cq)
        self._life.hold(self._posted)
        self._life.hold(handle)
        self._life.drain = self._posted.flush

    @property
    def handle(self) -> engine.QueuePair:
        """The verbs object.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._handle is not None
        return self._handle

    @property
    def label(self) -> str:
        """Its number, as text."""
        return self._life.label

    @property
    def qp_num(self) -> int:
        """Its number."""
        return self.handle.qp_num

    @property
    def capabilities(self) -> QpCapabilities:
        """The depths that it was given."""
        return self.handle.capabilities

    @property
    def address(self) -> QueuePairAddress:
        """What a peer needs to connect to it."""
        context = self.handle.context
        gid, mtu = context.query_gid(self._port, self._gid_index), context.query_port(self._port).active_mtu
        return QueuePairAddress(gid, self.qp_num, self._psn, mtu)

    def query(self) -> QpAttributes:
        """Its state and attributes: ``ibv_query_qp``."""
        return self.handle.query()

    def connect(
        self,
        peer: QueuePairAddress,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        *,
        timeout: int = 14,
        retry_cnt: int = 6,
        rnr_retry: int = 6,
        min_rnr_timer: int = 12,
        max_rd_atomic: int = 1,
    ) -> None:
        """Connect it: ``ibv_modify_qp`` to INIT, RTR and RTS. The peer does the same with this one's `address`.

        :param access: what the peer may do through it: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``.
        :param timeout: how long an answer may take: 4.096 us * 2**timeout.
        :param retry_cnt: how often a request is repeated that was not answered, 0 to 7.
        :param rnr_retry: how often one is repeated that found no receive, 0 to 6; 7: without end.
        :param min_rnr_timer: the code, 0 to 31, of how long the peer waits before that.
        :param max_rd_atomic: reads and atomics that may be under way at once, in either direction.
        :raises VerbsError: a value is out of range, or it is connected already.
        """
        handle = self.handle
        handle.modify(QpState.INIT, pkey_index=0, port_num=self._port, qp_access_flags=access)
        handle.modify(
            QpState.RTR,
            path_mtu=min(peer.mtu, handle.context.query_port(self._port).active_mtu),
            dest_qp_num=peer.qp_num,
            rq_psn=peer.psn,
            max_dest_rd_atomic=max_rd_atomic,
            min_rnr_timer=min_rnr_timer,
            av=AddressVector(dgid=peer.gid, sgid_index=self._gid_index, port_num=self._port),
        )
        handle.modify(
            QpState.RTS,
            timeout=timeout,
            retry_cnt=retry_cnt,
            rnr_retry=rnr_retry,
            sq_psn=self._psn,
            max_rd_atomic=max_rd_atomic,
        )

    async def write(self, local: RegionSlice | MemoryRegion, remote: RemoteRegion) -> None:
        """Write local memory to a peer's: RDMA WRITE. It is done when the peer's device has it.

        Where this is cancelled the write goes on, and `local` stays registered until it is done.

        :raises ValueError: the two differ in length.
        :raises WorkCompletionError: it failed, and the queue pair is in the error state; or that was closed meanwhile.
        :raises BrokenResourceError: the queue pair was closed and did not flush it, or the completion queue broke.
        :raises VerbsError: it was not posted, with ENOMEM where the send queue is full.
        """
        part = local[:] if isinstance(local, MemoryRegion) else local
        if len(part) != len(remote):
            raise ValueError(
                f"{len(part)} bytes do not fill the {len(remote)} of {remote!r}: give it slices of one length"
            )
        self._check_open()
        assert self._posted is not None
        work = Work(self._posted, [part.region])
        self._send_cq.add(work)
        try:
            # Asked for again: who closes looks at what is under way after it has said that it closes.
            self.handle.post_send(
                SendOpcode.RDMA_WRITE,
                [part.sge],
                wr_id=work.number,
                flags=SendFlags.SIGNALED,
                remote_addr=remote.address,
                rkey=remote.rkey,
            )
        except BaseException:
            self._send_cq.withdraw(work)
            raise
        await work.future


class _Posted:
    """What a queue pair has under way, and how that ends. Its life keeps this, and not the user's object."""

    def __init__(self, handle: engine.QueuePair, cq: CompletionQueue) -> None:
        self._handle = handle
        self._cq = cq

    def __repr__(self) -> str:
        return repr(self._handle)

    async def flush(self) -> None:
        """Have what is under way completed with an error; what cannot be ends with the queue pair."""
        if self._cq.under_way(self) and await self._to_error():
            with anyio.move_on_after(_FLUSH_S, shield=True):
                await self._cq.settled(self)

    async def _to_error(self) -> bool:
        for _ in range(_TRIES):
            try:
                self._handle.modify(QpState.ERR)
            except ConcurrentAccessError:  # another thread is inside of a domain that any may use
                await asyncio.sleep(0)
            except VerbsError:  # as where the device is lost
                return False
            else:
                return self._cq.watched
        return False

    def destroy(self) -> None:
        """The queue pair was destroyed: what is left completes no more. Until then it had its memory."""
        self._cq.abandon(self)
