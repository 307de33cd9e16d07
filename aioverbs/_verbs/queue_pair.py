"""Queue pairs: what is awaited on them, what they have under way, and how that ends."""

import asyncio
import errno
import functools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import anyio

from aioverbs._core.data_path.data_path import (
    Batch,
    Inbox,
    Message,
    Operation,
    QpWorkState,
    QueuePairVerbs,
    Received,
    RegionSlice,
    RemoteRegion,
    WorkQueue,
    close_inbox,
    reopen_inbox,
    requester_of,
)
from aioverbs._core.handles import handles
from aioverbs._durations import duration
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, CrossLoopCondition, running_loop, wait_uncancelled, wake
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs._lifecycle.resource import HandleResource, Resource, ResourceStatistics
from aioverbs._memory.region import MemoryRegion, MemoryWindow, own_memory
from aioverbs._verbs.capability_checks import check_queue_pair
from aioverbs._verbs.completion_queue import (
    CompletionQueue,
    CqReservation,
    MessageModel,
    QueueLocation,
    retry_while_busy,
)
from aioverbs._verbs.ports import check_port
from aioverbs._verbs.qp_modify import Connectable
from aioverbs._verbs.receive_refill import Refiller
from aioverbs._verbs.shared_receive_queue import SharedReceiveQueue
from aioverbs.attributes import QpCapabilities
from aioverbs.errors import BrokenResourceError, VerbsError
from aioverbs.types import AccessFlags, QpState, QpType, WcStatus

__all__ = [
    "Batch",
    "Message",
    "Operation",
    "QueuePair",
    "QueuePairStatistics",
    "QueuePairVerbs",
    "Received",
    "WorkQueueStatistics",
    "qp_work_state_of",
]

logger = logging.getLogger("aioverbs")

_FLUSH_S = 10.0  # the longest that hardware is given to flush what is under way


@dataclass(frozen=True)
class WorkQueueStatistics:
    """What a send queue or a receive queue is at, and has seen.

    :param depth: requests that it has places for.
    :param in_flight: requests that have one: they were posted, or are about to be.
    :param queued: requests that wait for a place.
    :param high_water: the most places that were taken at once.
    :param posted: requests that were.
    :param completed: requests that are done, well or not.
    :param bytes: of those that were posted.
    :param doorbells: calls of the verb that posts.
    :param failed: how many ended with each status but success.
    """

    depth: int
    in_flight: int
    queued: int
    high_water: int
    posted: int
    completed: int
    bytes: int
    doorbells: int
    failed: tuple[tuple[WcStatus, int], ...]

    @classmethod
    def of(cls, queue: WorkQueue | None) -> "WorkQueueStatistics":
        """Those of a queue; all zeros where there is none."""
        if queue is None:
            return cls(0, 0, 0, 0, 0, 0, 0, 0, ())
        return cls(
            queue.depth,
            queue.in_flight,
            queue.queued,
            queue.high_water,
            queue.posted,
            queue.completed,
            queue.bytes,
            queue.doorbells,
            tuple(sorted(queue.failed.items())),
        )


@dataclass(frozen=True)
class QueuePairStatistics(ResourceStatistics):
    """What a queue pair is at, and has seen.

    :param sends: of its send queue.
    :param receives: of its receive queue, if it has one of its own.
    """

    sends: WorkQueueStatistics
    receives: WorkQueueStatistics

    @property
    def in_flight(self) -> int:
        """Requests that were posted and are not done."""
        return self.sends.in_flight + self.receives.in_flight


class QueuePair(Connectable, QueuePairVerbs):
    """A queue pair: ``ibv_create_qp``; ``ibv_create_qp_ex`` for XRC_RECV. Made by the ``queue_pair`` of a domain.

    Its requests are described at `aioverbs.QueuePairVerbs`: posted when they are called, awaited or not.

    :param send_cq: where what it sends completes.
    :param recv_cq: where what it receives completes; None: there, too.
    :param capabilities: the depths that are needed. Completion queues must have room for them.
    :param srq: where it takes receives from, instead of a queue of its own.
    :param receive_depth: how many receives it is to keep posted, for `messages`; 0: none.
    :param receive_size: the bytes of each, which no message may exceed.
    :param qp_type: RC, UC, UD or XRC_SEND; those of type XRC_RECV are made by `XrcDomain.queue_pair`.
    :param port: the device's port that it sends from.
    :param gid_index: which of the port's GIDs it sends from. None: over Ethernet the first that is of RoCE v2 and made
        of an IPv4 address, before others of RoCE v2, before those of RoCE v1; on InfiniBand the first. It is chosen
        when it is first needed.
    """

    def __init__(
        self,
        domain: Resource,
        placement: QueueLocation | None,
        send_cq: CompletionQueue | None,
        recv_cq: CompletionQueue | None = None,
        capabilities: QpCapabilities | None = None,
        *,
        qp_type: QpType = QpType.RC,
        srq: SharedReceiveQueue | None = None,
        xrc_domain: HandleResource[handles.XrcDomain] | None = None,
        port: int = 1,
        gid_index: int | None = None,
        receive_depth: int = 0,
        receive_size: int = 0,
    ) -> None:
        self.qp_type = QpType(qp_type)
        wanted = capabilities if capabilities is not None else QpCapabilities()
        if (receive_depth > 0) != (receive_size > 0) or receive_depth < 0 or receive_size < 0:
            raise ValueError("receive_depth receives of receive_size bytes: give both, or neither")
        if receive_depth and (srq is not None or self.qp_type in (QpType.XRC_SEND, QpType.XRC_RECV)):
            raise ValueError("receive_depth is for a receive queue of its own, which this queue pair has not")
        if receive_depth > max(wanted.max_recv_wr, 0):
            wanted = replace(wanted, max_recv_wr=receive_depth)
        if recv_cq is None and self.qp_type not in (QpType.XRC_SEND, QpType.XRC_RECV):
            recv_cq = send_cq
        parents = dict.fromkeys(part for part in (domain, send_cq, recv_cq, srq) if part is not None)
        super().__init__(*parents)
        if placement is not None:
            for cq in filter(None, (send_cq, recv_cq)):
                placement.check_message_model("queue pair", cq)
        self._queue_location = placement
        self._send_cq = send_cq
        self._recv_cq = recv_cq
        self._wanted = wanted
        self._receive_depth = receive_depth
        self._receive_size = receive_size
        self._refiller: Refiller | None = None
        self._srq = srq
        self._xrc_domain = xrc_domain
        self._port = port
        self._gid_index = gid_index
        self._work: QpWorkState | None = None

    def _owner(self) -> Affinity | None:
        if self._queue_location is None:
            return None
        return self._queue_location.owner_with(self._send_cq, self._recv_cq, self._srq)

    def _open(self) -> None:
        wanted = self._wanted
        self._check(wanted)
        room = CqReservation()
        self._lifecycle.hold(room)
        room.reserve(self._send_cq, wanted.max_send_wr)
        if self._srq is None:
            room.reserve(self._recv_cq, wanted.max_recv_wr)
        end = _End()
        self._lifecycle.hold(end)
        if self.qp_type is QpType.UD:
            wanted = replace(wanted, max_recv_sge=wanted.max_recv_sge + 1)  # for the route
        handle = self._make(wanted)
        self._handle = handle
        self._lifecycle.hold(handle)
        self._lifecycle.label = str(handle.qp_num)
        work = self._begin(handle, wanted, end)
        if self._srq is not None and self._recv_cq is not None:
            end.share(self._srq._serve(self._recv_cq, work), self._recv_cq._cq_dispatcher.drain)

    def _check(self, wanted: QpCapabilities) -> None:
        if self._queue_location is None:  # of type XRC_RECV, which has no queues
            return
        context = self._queue_location.pd.context
        receives = self._recv_cq is not None and self._srq is None
        check_queue_pair(context.name, context.attributes, wanted, self.qp_type, receives=receives)
        check_port(context, self._port, self._gid_index)

    def _make(self, wanted: QpCapabilities) -> handles.QueuePair:
        try:
            return self._make_handle(wanted)
        except VerbsError as error:
            if error.errno != errno.EINVAL or not wanted.max_inline_data:
                raise
            # Of all that is asked for, this is what a device does not tell the most of.
            advice = f"max_inline_data of {wanted.max_inline_data:,} bytes may be more than it has: ask for less"
            raise VerbsError(error.verb, error.errno, advice) from error

    def _make_handle(self, wanted: QpCapabilities) -> handles.QueuePair:
        return handles.QueuePair(
            self._queue_location.pd if self._queue_location is not None else None,
            self._send_cq.handle if self._send_cq is not None else None,
            self._recv_cq.handle if self._recv_cq is not None else None,
            wanted,
            qp_type=self.qp_type,
            srq=self._srq.handle if self._srq is not None else None,
            xrc_domain=self._xrc_domain.handle if self._xrc_domain is not None else None,
            affinity=self._lifecycle.owner,
        )

    def _begin(self, handle: handles.QueuePair, wanted: QpCapabilities, end: "_End") -> QpWorkState:
        lifecycle, placement = self._lifecycle, self._queue_location
        work = QpWorkState(
            handle,
            placement.base if placement is not None else None,
            self._send_cq._cq_dispatcher if self._send_cq is not None else None,
            self._recv_cq._cq_dispatcher if self._recv_cq is not None and self._srq is None else None,
            send_depth=wanted.max_send_wr,
            receive_depth=wanted.max_recv_wr,
            chains=self._send_cq is not None and self._send_cq.message_model is MessageModel.HIGH_BANDWIDTH,
            most_bytes=handle.context.max_message(self._port),
            read_sge=handle.context.attributes.max_sge_rd or 0xFFFFFFFF,  # some tell none
            make_scratch=lambda size: _scratch(lifecycle, placement, size),
        )
        end.begin(handle, work)
        self._work = work
        self._requests_begin(work)
        if self._receive_depth and work.receive_queue is not None and placement is not None:
            poster = requester_of(work)
            self._refiller = Refiller(
                lifecycle, placement.base, work.receive_queue, poster, self._receive_depth, self._receive_size
            )
            end.inbox = self._refiller.inbox
        lifecycle.drain = end.flush
        lifecycle.resume = work.reopen
        return work

    @property
    def label(self) -> str:
        """Its number, as text."""
        return self._lifecycle.label

    @property
    def qp_num(self) -> int:
        """Its number."""
        return self.handle.qp_num

    @property
    def capabilities(self) -> QpCapabilities:
        """The depths that it was given."""
        return self.handle.capabilities

    def statistics(self) -> QueuePairStatistics:
        """What it is at, and has seen."""
        of = self._work
        queues = (of.send_queue, of.receive_queue) if of is not None else (None, None)
        return QueuePairStatistics(len(self._lifecycle.children), *map(WorkQueueStatistics.of, queues))

    def _in_flight(self) -> int:
        return self._work.in_flight if self._work is not None else 0

    def _broken_by(self) -> BaseException | None:
        return self._work.broken if self._work is not None else None

    def _moved(self, state: QpState) -> None:
        if state in (QpState.RESET, QpState.RTS) and self._work is not None:
            self._work.recovered()
        if state is QpState.ERR and self._work is not None:
            self._work.errored()
        if self._refiller is not None and state is QpState.RESET:
            reopen_inbox(self._refiller.inbox)
        if self._refiller is not None and state is QpState.INIT:
            self._refiller.fill()

    def messages(self) -> AsyncIterator[Message]:
        """What arrives, in its order: ``async for``, by one task at a time. It ends when the queue pair is closed.

        The queue pair keeps `receive_depth` receives posted: messages are released when they are read, so that their
        memory is received into again. A sender that finds none posted is told to wait (RNR).

        :raises ValueError: it was made without receive_depth.
        """
        if self._refiller is None:
            raise ValueError(f"{self!r} keeps no receives posted: make it with receive_depth and receive_size")
        return self._refiller.inbox

    def batch(self) -> Batch:
        """Requests that are posted together: see `Batch`."""
        return Batch(self)

    def bind_window(
        self,
        window: MemoryWindow,
        local: RegionSlice | MemoryRegion,
        access: AccessFlags,
        *,
        fence: bool = False,
    ) -> Operation[RemoteRegion]:
        """Bind a memory window to memory: ``ibv_bind_mw``, or ``IBV_WR_BIND_MW`` for one of type 2.

        Awaiting gives the `RemoteRegion` that a peer reaches it by. The region is registered with ``MW_BIND``; what was
        bound before is not any more.

        :param access: what may be done through it: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``.
        """
        return self._bind_window(window.handle, _slice(local), access, fence, False)

    def bind_window_nowait(
        self,
        window: MemoryWindow,
        local: RegionSlice | MemoryRegion,
        access: AccessFlags,
        *,
        fence: bool = False,
    ) -> Operation[RemoteRegion]:
        """`bind_window`, where there is a place in the send queue; `anyio.WouldBlock` is raised where there is none."""
        return self._bind_window(window.handle, _slice(local), access, fence, True)


def _slice(local: RegionSlice | MemoryRegion) -> RegionSlice:
    return local[:] if isinstance(local, MemoryRegion) else local


def _scratch(lifecycle: Lifecycle, placement: QueueLocation | None, size: int) -> RegionSlice:
    """Memory that the device writes old values of atomics and routes of datagrams to; as long as the queue pair is."""
    assert placement is not None
    return own_memory(lifecycle, placement.base, size)


def qp_work_state_of(qp: QueuePair) -> QpWorkState | None:
    """What a queue pair posts and has under way; None before it was opened."""
    return qp._work


class _End:
    """How what a queue pair has under way ends. Its life keeps this, and not the user's object."""

    def __init__(self) -> None:
        self._handle: handles.QueuePair | None = None
        self._work: QpWorkState | None = None
        self.inbox: Inbox | None = None
        self._leave: Callable[[], None] | None = None
        self._take: Callable[[], None] | None = None

    def begin(self, handle: handles.QueuePair, work: QpWorkState) -> None:
        self._handle, self._work = handle, work

    def share(self, leave: Callable[[], None], take: Callable[[], None]) -> None:
        """It takes receives of a shared receive queue until it is destroyed; `take` takes what they completed by."""
        self._leave, self._take = leave, take

    async def flush(self) -> None:
        """Have what is under way completed with an error; what cannot be ends with the queue pair."""
        handle, work = self._handle, self._work
        assert handle is not None
        assert work is not None
        await self._wait_for_modification(work)
        work.close()
        if self._take is not None and await self._to_error():
            await retry_while_busy(self._take)  # completions of what it took from others' queue go with it
        if not work.in_flight or not await self._to_error() or not work.watched:
            return
        condition = CrossLoopCondition()
        work.when_idle(condition.notify)
        with anyio.move_on_after(_FLUSH_S, shield=True) as scope:
            await condition.wait_while(lambda: work.in_flight and work.watched)
        work.when_idle(None)
        if scope.cancelled_caught:
            logger.warning(
                "%r: %d requests were not flushed within %s, and end with it",
                handle,
                work.in_flight,
                duration(_FLUSH_S),
            )

    async def _wait_for_modification(self, work: QpWorkState) -> None:
        """Until no other thread changes its state, which ends; before that it cannot be destroyed, whoever cancels."""
        if work.end_modification():
            return
        loop = running_loop()
        cancelled: asyncio.CancelledError | None = None
        while not work.end_modification(loop, functools.partial(wake, over := loop.create_future())):
            try:
                await wait_uncancelled(over)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _to_error(self) -> bool:
        handle = self._handle
        assert handle is not None
        try:
            return await retry_while_busy(lambda: handle.modify(QpState.ERR))
        except VerbsError:  # as where the device is lost
            return False

    def destroy(self) -> None:
        """The queue pair was destroyed: what is left completes no more. Until then it had its memory."""
        if self._work is not None:
            self._work.abandon(BrokenResourceError(f"{self._handle!r} was closed before this was done"))
        if self.inbox is not None:
            close_inbox(self.inbox)
        if self._leave is not None:
            self._leave()


publish(__name__)
