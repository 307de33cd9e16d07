"""Queue pairs, and what is awaited on them."""

import asyncio
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio

from aioverbs._core import engine
from aioverbs.affinity import Affinity
from aioverbs.attributes import AddressVector, QpAttributes, QpCapabilities, SrqAttributes
from aioverbs.completion import CompletionQueue, Placement, Work
from aioverbs.errors import ConcurrentAccessError, VerbsError
from aioverbs.events import Eventful
from aioverbs.memory import MemoryRegion, RegionSlice, RemoteRegion
from aioverbs.resource import Handled, Resource, ResourceStatistics
from aioverbs.types import AccessFlags, Mtu, QpState, QpType, SendFlags, SendOpcode

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["QueuePair", "QueuePairAddress", "QueuePairStatistics", "SharedReceiveQueue"]

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


class SharedReceiveQueue(Eventful[engine.SharedReceiveQueue]):
    """A shared receive queue: ``ibv_create_srq``; ``ibv_create_srq_ex`` for XRC.

    Made by the `shared_receive_queue` of a domain.

    :param max_wr: how many receives it holds at least.
    :param max_sge: how many entries a receive's list may have.
    :param limit: raise ``EventType.SRQ_LIMIT_REACHED``, once, when fewer receives are left; 0 for never.
    :param xrc_domain: the XRC domain whose queue pairs fill it; with it goes `cq`.
    :param cq: where its receives complete.
    """

    def __init__(
        self,
        domain: Resource,
        placement: Placement,
        max_wr: int,
        max_sge: int = 1,
        limit: int = 0,
        *,
        xrc_domain: Handled[engine.XrcDomain] | None = None,
        cq: CompletionQueue | None = None,
    ) -> None:
        if (xrc_domain is None) != (cq is None):
            raise ValueError("a shared receive queue for XRC takes both xrc_domain and cq, any other neither")
        super().__init__(*(parent for parent in (domain, xrc_domain, cq) if parent is not None))
        self._placement = placement
        self._sizes = max_wr, max_sge, limit
        self._xrc_domain = xrc_domain
        self._cq = cq

    def _owner(self) -> Affinity | None:
        return self._placement.owner

    def _open(self) -> None:
        self._handle = engine.SharedReceiveQueue(
            self._placement.pd,
            *self._sizes,
            xrc_domain=self._xrc_domain.handle if self._xrc_domain is not None else None,
            cq=self._cq.handle if self._cq is not None else None,
            affinity=self._placement.owner,
        )
        self._life.hold(self._handle)

    @property
    def number(self) -> int:
        """Its number, which XRC peers need: ``ibv_get_srq_num``."""
        return self.handle.number

    def query(self) -> SrqAttributes:
        """Its sizes and its limit: ``ibv_query_srq``."""
        return self.handle.query()


@dataclass(frozen=True)
class QueuePairStatistics(ResourceStatistics):
    """What a queue pair is at.

    :param under_way: work requests that were posted and are not done.
    """

    under_way: int


class QueuePair(Eventful[engine.QueuePair]):
    """A queue pair: ``ibv_create_qp``; ``ibv_create_qp_ex`` for XRC_RECV. Made by the `queue_pair` of a domain.

    :param send_cq: where what it sends completes.
    :param recv_cq: where what it receives completes; None: there, too.
    :param capabilities: the depths that are needed.
    :param srq: where it takes receives from, instead of a queue of its own.
    :param qp_type: RC, UC, UD or XRC_SEND; those of type XRC_RECV are made by `XrcDomain.queue_pair`.
    """

    def __init__(
        self,
        domain: Resource,
        placement: Placement | None,
        send_cq: CompletionQueue | None,
        recv_cq: CompletionQueue | None = None,
        capabilities: QpCapabilities | None = None,
        *,
        qp_type: QpType = QpType.RC,
        srq: SharedReceiveQueue | None = None,
        xrc_domain: Handled[engine.XrcDomain] | None = None,
        port: int = 1,
        gid_index: int = 1,
    ) -> None:
        self.qp_type = QpType(qp_type)
        if recv_cq is None and self.qp_type not in (QpType.XRC_SEND, QpType.XRC_RECV):
            recv_cq = send_cq
        parents = dict.fromkeys(part for part in (domain, send_cq, recv_cq, srq) if part is not None)
        super().__init__(*parents)
        self._placement = placement
        self._send_cq = send_cq
        self._recv_cq = recv_cq
        self._wanted = capabilities
        self._srq = srq
        self._xrc_domain = xrc_domain
        self._port = port
        self._gid_index = gid_index
        self._psn = random.getrandbits(24)
        self._posted: _Posted | None = None

    def _owner(self) -> Affinity | None:
        return self._placement.owner if self._placement is not None else None

    def _open(self) -> None:
        handle = engine.QueuePair(
            self._placement.pd if self._placement is not None else None,
            self._send_cq.handle if self._send_cq is not None else None,
            self._recv_cq.handle if self._recv_cq is not None else None,
            self._wanted,
            qp_type=self.qp_type,
            srq=self._srq.handle if self._srq is not None else None,
            xrc_domain=self._xrc_domain.handle if self._xrc_domain is not None else None,
            affinity=self._life.owner,
        )
        self._handle = handle
        self._life.label = str(handle.qp_num)
        if self._send_cq is not None:
            self._posted = _Posted(handle, self._send_cq)
            self._life.hold(self._posted)
            self._life.drain = self._posted.flush
        self._life.hold(handle)

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

    def statistics(self) -> QueuePairStatistics:
        """What it has under way."""
        under_way = self._posted.under_way() if self._posted is not None else 0
        return QueuePairStatistics(len(self._life.children), under_way)

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

        What its type does not have is left out: see the tables of the InfiniBand architecture, chapter 11.2.5.

        :param access: what the peer may do through it: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``.
        :param timeout: how long an answer may take: 4.096 us * 2**timeout.
        :param retry_cnt: how often a request is repeated that was not answered, 0 to 7.
        :param rnr_retry: how often one is repeated that found no receive, 0 to 6; 7: without end.
        :param min_rnr_timer: the code, 0 to 31, of how long the peer waits before that.
        :param max_rd_atomic: reads and atomics that may be under way at once, in either direction.
        :raises ValueError: it is of type UD, which is not connected.
        :raises VerbsError: a value is out of range, or it is connected already.
        """
        if self.qp_type is QpType.UD:
            raise ValueError(f"{self!r} is of type UD: its datagrams go by address handles, it is not connected")
        handle = self.handle
        responds = self.qp_type in (QpType.RC, QpType.XRC_RECV)
        requests = self.qp_type in (QpType.RC, QpType.XRC_SEND)
        handle.modify(QpState.INIT, pkey_index=0, port_num=self._port, qp_access_flags=access)
        handle.modify(
            QpState.RTR,
            path_mtu=min(peer.mtu, handle.context.query_port(self._port).active_mtu),
            dest_qp_num=peer.qp_num,
            rq_psn=peer.psn,
            max_dest_rd_atomic=max_rd_atomic if responds else None,
            min_rnr_timer=min_rnr_timer if responds else None,
            av=AddressVector(dgid=peer.gid, sgid_index=self._gid_index, port_num=self._port),
        )
        handle.modify(
            QpState.RTS,
            timeout=timeout if requests or responds else None,
            retry_cnt=retry_cnt if requests else None,
            rnr_retry=rnr_retry if requests else None,
            sq_psn=self._psn,
            max_rd_atomic=max_rd_atomic if requests else None,
        )

    async def write(self, local: RegionSlice | MemoryRegion, remote: RemoteRegion) -> None:
        """Write local memory to a peer's: RDMA WRITE. It is done when the peer's device has it.

        Where this is cancelled the write goes on, and `local` stays registered until it is done.

        :raises ValueError: the two differ in length, or it is of a type that has no writes.
        :raises WorkCompletionError: it failed, and the queue pair is in the error state; or that was closed meanwhile.
        :raises BrokenResourceError: the queue pair was closed and did not flush it, or the completion queue broke.
        :raises VerbsError: it was not posted, with ENOMEM where the send queue is full.
        """
        if self.qp_type not in (QpType.RC, QpType.UC) or self._send_cq is None:
            raise ValueError(f"{self!r} is of type {self.qp_type.name}: write on one of type RC or UC")
        part = local[:] if isinstance(local, MemoryRegion) else local
        if len(part) != len(remote):
            raise ValueError(
                f"{len(part)} bytes do not fill the {len(remote)} of {remote!r}: give it slices of one length"
            )
        self._check_open()
        assert self._posted is not None
        work = Work(self._posted, [part])
        self._send_cq._add(work)
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
            self._send_cq._withdraw(work)
            raise
        await work.future


class _Posted:
    """What a queue pair has under way, and how that ends. Its life keeps this, and not the user's object."""

    def __init__(self, handle: engine.QueuePair, cq: CompletionQueue) -> None:
        self._handle = handle
        self._cq = cq

    def __repr__(self) -> str:
        return repr(self._handle)

    def under_way(self) -> int:
        """How many work requests."""
        return len(self._cq._under_way_of(self))

    async def flush(self) -> None:
        """Have what is under way completed with an error; what cannot be ends with the queue pair."""
        if self._cq._under_way_of(self) and await self._to_error():
            with anyio.move_on_after(_FLUSH_S, shield=True):
                await self._cq._settled(self)

    async def _to_error(self) -> bool:
        for _ in range(_TRIES):
            try:
                self._handle.modify(QpState.ERR)
            except ConcurrentAccessError:  # another thread is inside of a domain that any may use
                await asyncio.sleep(0)
            except VerbsError:  # as where the device is lost
                return False
            else:
                return self._cq._watched
        return False

    def destroy(self) -> None:
        """The queue pair was destroyed: what is left completes no more. Until then it had its memory."""
        self._cq._abandon(self)
