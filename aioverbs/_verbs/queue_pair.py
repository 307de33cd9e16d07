"""Queue pairs: opening, message streams, window binding, statistics, and flushing of work requests on close."""

import asyncio
import contextlib
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
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import Affinity, CrossLoopCondition, running_loop, wait_uncancelled, wake
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs._lifecycle.resource import HandleResource, Resource, ResourceStatistics
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs._memory.region import MemoryRegion, MemoryWindow, register_queue_memory
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
from aioverbs.errors import BrokenResourceError, ConcurrentAccessError, VerbsError
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

_FLUSH_S = 10.0  # longest time that the device gets to flush work requests in flight, in seconds


@dataclass(frozen=True)
class WorkQueueStatistics:
    """Current depth and lifetime counters of a send queue or a receive queue: see `QueuePairStatistics`.

    :param depth: number of slots of the queue.
    :param in_flight: number of slots in use by requests that are posted or about to be posted.
    :param queued: number of requests waiting for a slot.
    :param high_water: maximum number of slots in use at once so far.
    :param posted: number of requests posted so far.
    :param completed: number of requests completed so far, successfully or not.
    :param bytes: total size of the posted requests, in bytes.
    :param doorbells: number of calls to the posting verb; one call posts one or more requests.
    :param failed: pairs of an unsuccessful completion status and the number of requests that ended with this status.
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
        """Return the current `WorkQueueStatistics` of a send queue or a receive queue.

        :param queue: the queue; None to return zeros.
        """
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
    """Current depth and lifetime counters of a queue pair, from `QueuePair.statistics`.

    :param sends: statistics of the send queue.
    :param receives: statistics of the receive queue; zeros if the queue pair uses a shared receive queue.
    """

    sends: WorkQueueStatistics
    receives: WorkQueueStatistics

    @property
    def in_flight(self) -> int:
        """Number of slots in use in the send queue and the receive queue together."""
        return self.sends.in_flight + self.receives.in_flight


class QueuePair(Connectable, QueuePairVerbs):
    """A queue pair: ``ibv_create_qp``; ``ibv_create_qp_ex`` for XRC_RECV. Made by the ``queue_pair`` of a domain.

    The methods that post work requests are described in `aioverbs.QueuePairVerbs`. A method posts its request when it
    is called, whether or not the result is awaited.

    :param domain: domain that the queue pair belongs to.
    :param location: verbs objects and owner with which the domain makes its queues; None for XRC_RECV.
    :param send_cq: completion queue of the send queue.
    :param recv_cq: completion queue of the receive queue; None to use `send_cq` for both.
    :param capabilities: depths and sizes of the queues; None for the defaults of `QpCapabilities`. The completion
        queues need room for all requests of these depths.
    :param qp_type: RC, UC, UD or XRC_SEND; XRC_RECV queue pairs are made by `XrcDomain.queue_pair`.
    :param srq: shared receive queue to use; None to use a receive queue of its own.
    :param xrc_domain: XRC domain of an XRC_RECV queue pair.
    :param port: number of the device port to send from.
    :param gid_index: index of the port's GID to send from. None to have one chosen when it is first needed: over
        Ethernet, the first RoCE v2 GID that maps an IPv4 address, else the first RoCE v2 GID, else the first RoCE v1
        GID; on InfiniBand, the first GID.
    :param receive_depth: number of receives that the queue pair keeps posted for `messages`; 0 to keep none posted.
    :param receive_size: size of each of these receives, in bytes; a message must not be larger.
    :raises ValueError: the message model of a completion queue differs from that of the resource domain; or only one of
        `receive_depth` and `receive_size` is given, or one is negative, or both are given for a queue pair without a
        receive queue of its own. On opening: the device does not support the capabilities, the completion queues lack
        room for the requests, the port or GID index does not exist, or the domain and the queues belong to different
        devices or owners.
    :raises AffinityError: on opening: another event loop owns the domain and the queues.
    :raises RuntimeError: on opening with `receive_depth`: no asyncio event loop is running.
    :raises OSError: on opening with `receive_depth`: the process cannot map that much memory.
    :raises VerbsError: on opening: the verb failed, or the memory of the receives cannot be registered.
    """

    def __init__(
        self,
        domain: Resource,
        location: QueueLocation | None,
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
            raise ValueError(
                f"`receive_depth` and `receive_size` must both be positive or both be 0, got {receive_depth} and"
                f" {receive_size}"
            )
        if receive_depth and (srq is not None or self.qp_type in (QpType.XRC_SEND, QpType.XRC_RECV)):
            raise ValueError(
                "`receive_depth` requires a receive queue of its own: leave it out with `srq` or an XRC type"
            )
        if receive_depth > max(wanted.max_recv_wr, 0):
            wanted = replace(wanted, max_recv_wr=receive_depth)
        if recv_cq is None and self.qp_type not in (QpType.XRC_SEND, QpType.XRC_RECV):
            recv_cq = send_cq
        parents = dict.fromkeys(part for part in (domain, send_cq, recv_cq, srq) if part is not None)
        super().__init__(*parents)
        if location is not None:
            for cq in filter(None, (send_cq, recv_cq)):
                location.check_message_model("queue pair", cq)
        self._queue_location = location
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
        if self._send_cq is not None:
            self._lifecycle.hold(CqReservation(self._send_cq, wanted.max_send_wr))
        if self._recv_cq is not None and self._srq is None:
            self._lifecycle.hold(CqReservation(self._recv_cq, wanted.max_recv_wr))
        flusher = _Flusher(self._lifecycle, self._queue_location)
        self._lifecycle.hold(flusher)
        if self.qp_type is QpType.UD:
            wanted = replace(wanted, max_recv_sge=wanted.max_recv_sge + 1)  # one more entry for the route (GRH)
        handle = self._make(wanted)
        self._handle = handle
        self._lifecycle.hold(handle)
        self._lifecycle.label = str(handle.qp_num)
        work = self._begin(handle, wanted, flusher)
        if self._srq is not None and self._recv_cq is not None:
            flusher.use_srq(self._srq._attach_queue_pair(self._recv_cq, work), self._recv_cq._cq_dispatcher.drain)

    def _check(self, wanted: QpCapabilities) -> None:
        """Check that the device supports the capabilities, the port and the GID index of this queue pair.

        Nothing is checked for an XRC_RECV queue pair, which has no queues.

        :raises ValueError: the device does not support the capabilities, or the port or GID index does not exist.
        :raises VerbsError: the device or the port cannot be queried.
        """
        if self._queue_location is None:  # an XRC_RECV queue pair has no queues
            return
        context = self._queue_location.pd.context
        receives = self._recv_cq is not None and self._srq is None
        check_queue_pair(context.name, context.attributes, wanted, self.qp_type, receives=receives)
        check_port(context, self._port, self._gid_index)

    def _make(self, wanted: QpCapabilities) -> handles.QueuePair:
        """Create the queue pair and return its handle, which the caller must destroy.

        If the verb fails with EINVAL and ``max_inline_data`` was requested, the error message suggests a smaller value.

        :raises VerbsError: the verb failed.
        :raises ClosedResourceError: a resource that the queue pair is made from is not open.
        :raises ValueError: these resources belong to different devices or owners.
        :raises AffinityError: another event loop owns these resources.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain.
        """
        try:
            return self._make_handle(wanted)
        except VerbsError as error:
            if error.errno != errno.EINVAL or not wanted.max_inline_data:
                raise
            # The device reports no limit for max_inline_data, so `_check` cannot have checked this value.
            advice = f"max_inline_data of {wanted.max_inline_data:,} bytes may exceed its limit: ask for less"
            raise VerbsError(error.verb, error.errno, advice) from error

    def _make_handle(self, wanted: QpCapabilities) -> handles.QueuePair:
        """Create the queue pair (``ibv_create_qp`` or ``ibv_create_qp_ex``) and return its handle.

        This raises the exceptions of `_make`.
        """
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

    def _begin(self, handle: handles.QueuePair, wanted: QpCapabilities, flusher: "_Flusher") -> QpWorkState:
        """Set up the state of a new queue pair: its work requests, its receives for `messages`, its flushing on close.

        :param handle: handle of the queue pair.
        :param wanted: capabilities that the queue pair was created with.
        :param flusher: object that will end the work requests when the queue pair is closed.
        :returns: the `QpWorkState`, which is the state of the work requests.
        :raises VerbsError: memory for ``receive_depth`` receives cannot be registered, or the port cannot be queried.
        :raises OSError: the memory for these receives cannot be mapped.
        :raises RuntimeError: ``receive_depth`` is not 0, and no asyncio event loop is running.
        :raises ValueError: the port number is not in 0..255.
        """
        lifecycle, location = self._lifecycle, self._queue_location
        work = QpWorkState(
            handle,
            location.base if location is not None else None,
            self._send_cq._cq_dispatcher if self._send_cq is not None else None,
            self._recv_cq._cq_dispatcher if self._recv_cq is not None and self._srq is None else None,
            send_depth=wanted.max_send_wr,
            receive_depth=wanted.max_recv_wr,
            chains=self._send_cq is not None and self._send_cq.message_model is MessageModel.HIGH_BANDWIDTH,
            most_bytes=handle.context.max_message(self._port),
            read_sge=handle.context.attributes.max_sge_rd or 0xFFFFFFFF,  # some devices report no limit
            make_scratch=flusher.make_scratch,
        )
        flusher.begin(handle, work)
        self._work = work
        self._requests_begin(work)
        if self._receive_depth and work.receive_queue is not None and location is not None:
            poster = requester_of(work)
            self._refiller = Refiller(
                lifecycle, location.base, work.receive_queue, poster, self._receive_depth, self._receive_size
            )
            flusher.inbox = self._refiller.inbox
        lifecycle.drain, lifecycle.drain_now = flusher.flush, flusher.flush_now
        lifecycle.resume = work.reopen
        return work

    @property
    def label(self) -> str:
        """Queue pair number as a string, which is empty if the queue pair was never opened."""
        return self._lifecycle.label

    @property
    def qp_num(self) -> int:
        """Queue pair number, 0..2**24-1.

        :raises ClosedResourceError: the queue pair is not open.
        :raises BusyResourceError: a helper thread is changing the state, as in `establish`.
        """
        return self.handle.qp_num

    @property
    def capabilities(self) -> QpCapabilities:
        """Depths and sizes that the device granted; each is at least the requested value.

        :raises ClosedResourceError: the queue pair is not open.
        """
        return self.handle.capabilities

    def statistics(self) -> QueuePairStatistics:
        """Return a `QueuePairStatistics`: for the send queue and the receive queue, the current depth, the numbers of
        requests in flight and waiting for a slot, and the numbers of requests and bytes posted, of completions and of
        failures so far. All are 0 if the queue pair was never opened.
        """
        work = self._work
        queues = (work.send_queue, work.receive_queue) if work is not None else (None, None)
        return QueuePairStatistics(len(self._lifecycle.children), *map(WorkQueueStatistics.of, queues))

    def _in_flight(self) -> int:
        return self._work.in_flight if self._work is not None else 0

    def _shared_receive_poll(self) -> Callable[[], None] | None:
        return self._recv_cq._cq_dispatcher.drain if self._srq is not None and self._recv_cq is not None else None

    def _breaking_error(self) -> BaseException | None:
        return self._work.broken if self._work is not None else None

    def _on_transition(self, state: QpState) -> None:
        """Update the state of the work requests after a transition of the queue pair to `state`.

        In INIT, also post receives for `messages`; in RESET, let a stopped iteration over `messages` start again.

        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain.
        :raises VerbsError: a receive cannot be posted.
        """
        if state in (QpState.RESET, QpState.RTS) and self._work is not None:
            self._work.recovered()
        if state is QpState.ERR and self._work is not None:
            self._work.errored()
        if self._refiller is not None and state is QpState.RESET:
            reopen_inbox(self._refiller.inbox)
        if self._refiller is not None and state is QpState.INIT:
            self._refiller.fill()

    def messages(self) -> AsyncIterator[Message]:
        """Return an asynchronous iterator over arriving messages in order, to be used by one task at a time.

        The iteration ends when the queue pair is closed. If an exception has ended it, another iteration can begin
        after `to_reset`. The queue pair keeps ``receive_depth`` receives posted, the number that it was made with.
        Release each message after reading it, so that its memory is posted again. If a message arrives while no
        receive is posted, the sender is told to retry later (RNR NAK).

        :returns: an iterator that yields a `Message` each time; every call returns the same iterator.
        :raises ValueError: the queue pair was made without ``receive_depth``, or was never opened.
        :raises RuntimeError: during iteration: another task is waiting for the next message.
        :raises AffinityError: during iteration: another event loop owns the queue pair.
        :raises ConcurrentAccessError: during iteration: another thread is inside a verb on the same unlocked domain;
            the iteration can continue.
        :raises WorkCompletionError: during iteration: a receive failed; this ends the iteration.
        :raises BrokenResourceError: during iteration: the queue pair is broken and accepts no more receives; this ends
            the iteration.
        """
        if self._refiller is None:
            raise ValueError(f"{self!r} keeps no receives posted: make it with receive_depth and receive_size")
        return self._refiller.inbox

    def batch(self) -> Batch:
        """Return a new `Batch`, which collects work requests until its method ``post`` posts them together.

        :raises ClosedResourceError: the queue pair was never opened.
        """
        return Batch(self)

    def bind_window(
        self,
        window: MemoryWindow,
        local: RegionSlice | MemoryRegion,
        access: AccessFlags,
        *,
        fence: bool = False,
    ) -> Operation[RemoteRegion]:
        """Bind a memory window to memory: ``ibv_bind_mw`` for a window of type 1, ``IBV_WR_BIND_MW`` for type 2.

        This replaces any earlier binding of the window. The memory region must be registered with ``MW_BIND``. If the
        send queue is full, the request waits for a free slot.

        :param window: window to bind.
        :param local: memory to bind the window to: a slice of a `MemoryRegion`, or a whole region.
        :param access: operations that peers may perform through the window: ``REMOTE_READ``, ``REMOTE_WRITE``,
            ``REMOTE_ATOMIC``.
        :param fence: start the bind only after all earlier reads and atomics of the queue pair have completed.
        :returns: an awaitable of the `RemoteRegion` that peers use to access the memory.
        :raises ClosedResourceError: the queue pair, the window or the memory is closed.
        :raises ValueError: the memory is not registered with ``MW_BIND``, or belongs to another device.
        :raises AffinityError: another event loop owns the queue pair; nothing was posted.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; nothing was posted.
        :raises BusyResourceError: another thread is changing the state of the queue pair; nothing was posted.
        :raises QueuePairStateError: the queue pair is not connected.
        :raises BrokenResourceError: the queue pair is in an error state; when the result is awaited: the completion
            queue failed, or the queue pair was reset after an error or destroyed, before the bind completed.
        :raises VerbsError: the verb failed; also when the result is awaited, if the request waited for a slot.
        :raises WorkCompletionError: when the result is awaited: the bind failed, or the queue pair failed or was closed
            before the bind completed.
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
        """Bind a memory window as `bind_window` does, but never wait for a free slot in the send queue.

        Other exceptions are those of `bind_window`.

        :param window: as for `bind_window`.
        :param local: as for `bind_window`.
        :param access: as for `bind_window`.
        :param fence: as for `bind_window`.
        :returns: an awaitable of the `RemoteRegion` that peers use to access the memory.
        :raises anyio.WouldBlock: the send queue is full; nothing was posted.
        """
        return self._bind_window(window.handle, _slice(local), access, fence, True)


def _slice(local: RegionSlice | MemoryRegion) -> RegionSlice:
    """Return a slice of registered memory unchanged, and a region as a slice of all of its bytes."""
    return local[:] if isinstance(local, MemoryRegion) else local


def qp_work_state_of(qp: QueuePair) -> QpWorkState | None:
    """Return the `QpWorkState` of a queue pair; None if the queue pair was never opened."""
    return qp._work


class _Flusher:
    """Ends the work requests of a queue pair when it is closed.

    The lifecycle refers to this object instead of the user's `QueuePair`, which can then be garbage collected.

    :param lifecycle: node of the queue pair.
    :param location: verbs objects with which the domain makes its queues; None for XRC_RECV.
    """

    __slots__ = ("_handle", "_leave_srq", "_lifecycle", "_location", "_poll_recv_cq", "_work", "inbox")

    def __init__(self, lifecycle: Lifecycle, location: QueueLocation | None) -> None:
        self._lifecycle = lifecycle
        self._location = location
        self._handle: handles.QueuePair | None = None
        self._work: QpWorkState | None = None
        self.inbox: Inbox | None = None
        self._leave_srq: Callable[[], None] | None = None
        self._poll_recv_cq: Callable[[], None] | None = None

    def begin(self, handle: handles.QueuePair, work: QpWorkState) -> None:
        """Set the queue pair whose work requests are to be ended. Call once, when the queue pair has been created."""
        self._handle, self._work = handle, work

    def make_scratch(self, size: int) -> RegionSlice:
        """Allocate and register `size` bytes, and return all of them as a slice. They exist as long as the queue pair.

        The device writes the old values of atomics and the routes (GRH) of datagrams to this memory.

        :raises VerbsError: the memory cannot be registered.
        :raises OSError: the memory cannot be mapped.
        """
        assert self._location is not None
        return register_queue_memory(self._lifecycle, self._location.base, size)

    def use_srq(self, leave_srq: Callable[[], None], poll_recv_cq: Callable[[], None]) -> None:
        """Record that the queue pair uses a shared receive queue, so that `destroy` unregisters it from that queue.

        :param leave_srq: function that unregisters the queue pair from the shared receive queue.
        :param poll_recv_cq: function that polls the completion queue in which the receives complete.
        """
        self._leave_srq, self._poll_recv_cq = leave_srq, poll_recv_cq

    async def flush(self) -> None:
        """If work requests are in flight, move the queue pair to ERR and wait until all of them have completed.

        Requests that are still waiting for a slot, or for the end of the loop's turn, are not posted. Wait for at most
        10 s; a cancellation does not shorten this. If requests are left after 10 s, log a warning; `destroy` abandons
        all that are left. Do not wait if the verb fails or if no event loop dispatches the completions. A queue pair
        with a shared receive queue is moved to ERR in any case, and its completion queue is polled.

        :raises asyncio.CancelledError: this was cancelled; it is raised after the wait. In a forked child, it is raised
            at once.
        :raises RuntimeError: there is something to wait for, or the queue pair has a shared receive queue, and no
            asyncio event loop is running; nothing was done.
        """
        handle, work = self._handle, self._work
        assert handle is not None
        assert work is not None
        interruption = await self._wait_for_modification(work)
        must_wait = self._poll_recv_cq is not None or work.in_flight > 0
        if must_wait:
            running_loop()  # raises an exception before anything is changed
        work.close()
        is_flushed = not must_wait
        try:
            if must_wait:
                with contextlib.suppress(ConcurrentAccessError):
                    is_flushed = self.flush_now()  # without a task, as far as that goes
            if not is_flushed:
                await wait_uncancelled(self._end_requests(handle, work))
            elif must_wait and (turn := spend(LIGHT)):
                await yield_to_loop(turn)
        except Exception as error:
            if interruption is not None:
                raise interruption from error
            raise
        if interruption is not None:
            raise interruption

    async def _end_requests(self, handle: handles.QueuePair, work: QpWorkState) -> None:
        """Do the part of `flush` that follows when the queue pair takes no more requests. A cancellation ends this."""
        if not await self._to_error(handle):
            return
        if self._poll_recv_cq is not None:
            await retry_while_busy(self._poll_recv_cq)  # completions of its receives would be lost with the queue pair
        if work.in_flight and work.watched:
            await self._wait_flushed(handle, work)

    async def _wait_flushed(self, handle: handles.QueuePair, work: QpWorkState) -> None:
        """Wait until no work request is in flight or no event loop dispatches the completions, for at most 10 s.

        If requests are left after that time, log a warning.
        """
        condition = CrossLoopCondition()
        work.when_idle(condition.notify)
        with anyio.move_on_after(_FLUSH_S) as scope:
            await condition.wait_while(lambda: work.in_flight and work.watched)
        work.when_idle(None)
        if scope.cancelled_caught:
            logger.warning(
                "%r: %d work requests were not flushed within %s and are abandoned",
                handle,
                work.in_flight,
                duration(_FLUSH_S),
            )

    def flush_now(self) -> bool:
        """Do what `flush` does, without waiting. Completions that have already arrived are dispatched.

        :returns: False if there is something to wait for, or if this is called while completions are dispatched, whose
            order a poll would change.
        :raises ConcurrentAccessError: another thread is executing a verb on the same domain.
        """
        handle, work = self._handle, self._work
        assert handle is not None
        assert work is not None
        if self._poll_recv_cq is not None or not work.end_modification():
            return False
        work.close()
        if not work.in_flight:
            return True
        try:
            handle.modify(QpState.ERR)
        except VerbsError:  # for example because the device was lost
            return True
        for queue in work.queues():
            if queue.dispatcher is None or queue.dispatcher.dispatching:
                return False
            if queue.dispatcher.watched:
                queue.dispatcher.drain()
        return not work.in_flight or not work.watched

    async def _wait_for_modification(self, work: QpWorkState) -> asyncio.CancelledError | None:
        """Wait until no other thread is changing the state of the queue pair.

        The queue pair cannot be destroyed before that. The change always ends, so a cancellation does not end the wait.
        In a forked child, which has no such thread, it does.

        :returns: the last cancellation during the wait, which the caller must raise; None if there was none.
        :raises asyncio.CancelledError: this was cancelled in a forked child.
        :raises RuntimeError: such a change is in progress, and no asyncio event loop is running.
        """
        if work.end_modification():
            return None
        loop, forks_before = running_loop(), forks.count
        cancelled: asyncio.CancelledError | None = None
        while not work.end_modification(loop, functools.partial(wake, ended := loop.create_future())):
            try:
                await wait_uncancelled(ended)
            except asyncio.CancelledError as error:
                if forks.count != forks_before:
                    raise
                cancelled = error
        return cancelled

    async def _to_error(self, handle: handles.QueuePair) -> bool:
        """Move the queue pair to ERR and return True.

        If the verb fails, or if another thread is inside the domain in each of 1,000 attempts, return False.
        """
        try:
            return await retry_while_busy(lambda: handle.modify(QpState.ERR))
        except VerbsError:  # for example because the device was lost
            return False

    def destroy(self) -> None:
        """Abandon the work requests that are left, after the queue pair has been destroyed.

        The device may access their memory until the queue pair is destroyed, so the requests are kept until this call.
        Operations that are still awaited raise `BrokenResourceError`. The iteration over `QueuePair.messages` ends, and
        the queue pair is unregistered from its shared receive queue.
        """
        if self._work is not None:
            self._work.abandon(BrokenResourceError(f"{self._handle!r} was closed before this request completed"))
        if self.inbox is not None:
            close_inbox(self.inbox)
        if self._leave_srq is not None:
            self._leave_srq()


publish(__name__)
