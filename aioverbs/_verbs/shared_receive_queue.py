"""Shared receive queues: receives that several queue pairs take from."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import anyio

from aioverbs._core.data_path.data_path import (
    Inbox,
    Message,
    QpWorkState,
    Received,
    ReceiveVerbs,
    WorkQueue,
    attach,
    close_inbox,
    detach,
    empty_inbox,
)
from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import Affinity, OwnedContext, wait_uncancelled
from aioverbs._lifecycle.resource import HandleResource, Resource, ResourceStatistics
from aioverbs._memory.buffer_pool import BufferPool, LeasedBuffer
from aioverbs._verbs.async_events import AsyncEventSource, DeviceEvent
from aioverbs._verbs.capability_checks import check_shared_receive_queue
from aioverbs._verbs.completion_queue import CompletionQueue, CqReservation, QueueLocation
from aioverbs.attributes import SrqAttributes
from aioverbs.errors import ConcurrentAccessError
from aioverbs.types import EventType, WcStatus

__all__ = ["ReceiveVerbs", "SharedReceiveQueue", "SharedReceiveQueueStatistics"]


@dataclass(frozen=True)
class SharedReceiveQueueStatistics(ResourceStatistics):
    """What a shared receive queue is at.

    :param depth: receives that it holds.
    :param in_flight: receives that were posted and are not done.
    :param queued: receives that wait for a place.
    :param posted: receives that were.
    :param completed: receives that are done.
    """

    depth: int
    in_flight: int
    queued: int
    posted: int
    completed: int


class SharedReceiveQueue(AsyncEventSource[handles.SharedReceiveQueue], ReceiveVerbs):
    """A shared receive queue: ``ibv_create_srq``; ``ibv_create_srq_ex`` for XRC.

    Made by the ``shared_receive_queue`` of a domain. What queue pairs of type UD receive from it begins with the 40
    bytes of its route.

    :param max_wr: how many receives it holds at least.
    :param max_sge: how many entries a receive's list may have.
    :param limit: raise ``EventType.SRQ_LIMIT_REACHED``, once, when fewer receives are left; 0 for never.
    :param xrc_domain: the XRC domain whose queue pairs fill it; with it goes `cq`.
    :param cq: where its receives complete.
    """

    def __init__(
        self,
        domain: Resource,
        placement: QueueLocation,
        max_wr: int,
        max_sge: int = 1,
        limit: int = 0,
        *,
        xrc_domain: HandleResource[handles.XrcDomain] | None = None,
        cq: CompletionQueue | None = None,
    ) -> None:
        if (xrc_domain is None) != (cq is None):
            raise ValueError("a shared receive queue for XRC takes both xrc_domain and cq, any other neither")
        super().__init__(*(parent for parent in (domain, xrc_domain, cq) if parent is not None))
        if cq is not None:
            placement.check_message_model("shared receive queue", cq)
        self._queue_location = placement
        self._sizes = max_wr, max_sge, limit
        self._xrc_domain = xrc_domain
        self._cq = cq
        self._work: WorkQueue | None = None
        self._served: dict[CompletionQueue, int] = {}  # how many of its queue pairs complete there
        self._serving = threading.Lock()

    def _owner(self) -> Affinity | None:
        return self._queue_location.owner_with(self._cq)

    def _open(self) -> None:
        max_wr, max_sge, _ = self._sizes
        context = self._queue_location.pd.context
        check_shared_receive_queue(context.name, context.attributes, max_wr, max_sge)
        room = CqReservation()
        self._lifecycle.hold(room)
        room.reserve(self._cq, max_wr)
        end = _End()
        self._lifecycle.hold(end)
        self._handle = handles.SharedReceiveQueue(
            self._queue_location.pd,
            *self._sizes,
            xrc_domain=self._xrc_domain.handle if self._xrc_domain is not None else None,
            cq=self._cq.handle if self._cq is not None else None,
            affinity=self._lifecycle.owner,
        )
        self._lifecycle.hold(self._handle)
        dispatcher = self._cq._cq_dispatcher if self._cq is not None else None
        self._work = end.work = self._receives_begin(
            self._handle, self._queue_location.base, max_wr, max_sge, dispatcher
        )

    @property
    def _receive_queue(self) -> WorkQueue:
        """Its receives.

        :raises ClosedResourceError: it is not open.
        """
        self._check_open()
        assert self._work is not None
        return self._work

    def _serve(self, cq: CompletionQueue, requests: QpWorkState) -> Callable[[], None]:
        """A queue pair takes receives from it, which complete in a completion queue; what is returned ends that.

        :raises ValueError: the completion queue has no room for all of them.
        """
        work, dispatcher = self._receive_queue, cq._cq_dispatcher
        with self._serving:
            if cq not in self._served:
                cq._reserve(self.depth)
            self._served[cq] = self._served.get(cq, 0) + 1
        attach(work, dispatcher, requests)

        def leave() -> None:
            detach(work, dispatcher, requests)
            with self._serving:
                self._served[cq] -= 1
                if not self._served[cq]:
                    del self._served[cq]
                    cq._release(self.depth)

        return leave

    def messages(
        self, pool: BufferPool, low: int | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Message], None]:
        """What arrives at its queue pairs, in the order of completion: ``async for`` in an ``async with``, by one task.

        Inside of it the queue is kept filled with buffers of a pool: all of it at first, and again whenever the device
        says that fewer than `low` are left (``EventType.SRQ_LIMIT_REACHED``). A message that is released gives its
        buffer back to the pool. Those that are posted when the block ends stay posted, until the queue is closed, and
        what arrives in them is lost, as is what nobody has asked for; the pool may be closed before the queue. The
        block belongs to the event loop that enters it, whoever may use the queue.

        :param pool: where the memory of the receives comes from; where it has none, senders wait until it has.
        :param low: how many receives are few; None: half of them.
        :raises AffinityError: another event loop owns it, or entered the block; nothing was done.
        :raises ValueError: `low` is not from 1 to one less than its depth.
        """
        name = f"messages of {self!r}"
        return OwnedContext(name, self._messages(pool, low), lambda: self._lifecycle.check_owner("messages"))

    @contextlib.asynccontextmanager
    async def _messages(self, pool: BufferPool, low: int | None) -> AsyncIterator[AsyncIterator[Message]]:
        low = max(self.depth // 2, 1) if low is None else low
        if not 1 <= low < self.depth:
            raise ValueError(f"low is from 1 to {self.depth - 1}, of {self.depth} receives, not {low}")
        posted = _Posted()
        inbox = Inbox(self._receive_queue, posted.message, posted.unused)
        events = self.events()
        try:
            await self._fill(pool, inbox, posted, low)
            filler = asyncio.create_task(self._keep_filled(events, pool, inbox, posted, low))
            try:
                yield inbox
            finally:
                if filler.get_loop() is asyncio.get_running_loop():  # else that one is gone: the task does not go on
                    filler.cancel()
                    await wait_uncancelled(asyncio.wait([filler]))
        finally:  # without an await: whoever is cancelled gives back what nobody has asked for, too
            posted.release()
            close_inbox(inbox)
            for message in empty_inbox(inbox):
                message.release()

    async def _keep_filled(
        self, events: AsyncGenerator[DeviceEvent, None], pool: BufferPool, inbox: Inbox, posted: "_Posted", low: int
    ) -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    while event.event_type is EventType.SRQ_LIMIT_REACHED:
                        try:
                            await self._fill(pool, inbox, posted, low)
                            break
                        except ConcurrentAccessError:  # a thread is inside of a domain that any may use
                            await asyncio.sleep(0)
        except Exception as error:  # as of a pool that was closed: whoever reads messages is told
            close_inbox(inbox, error)

    async def _fill(self, pool: BufferPool, inbox: Inbox, posted: "_Posted", low: int) -> None:
        while self._receive_queue.in_flight + self._receive_queue.queued < self.depth:
            buffer = await pool.lease()
            posted.add(buffer)  # before anything can arrive in it
            try:
                _ = self._receive_into(inbox, buffer)  # which goes to the inbox
            except anyio.WouldBlock:  # somebody else posts, too
                posted.unused(buffer)
                break
            except BaseException:
                posted.unused(buffer)
                raise
        self.handle.modify(limit=low)

    @property
    def depth(self) -> int:
        """How many receives it holds."""
        return self._sizes[0]

    @property
    def number(self) -> int:
        """Its number, which XRC peers need: ``ibv_get_srq_num``."""
        return self.handle.number

    def query(self) -> SrqAttributes:
        """Its sizes and its limit: ``ibv_query_srq``."""
        return self.handle.query()

    def statistics(self) -> SharedReceiveQueueStatistics:
        """What it is at."""
        of = self._work
        seen = (of.in_flight, of.queued, of.posted, of.completed) if of is not None else (0,) * 4
        return SharedReceiveQueueStatistics(len(self._lifecycle.children), self.depth, *seen)


class _Posted:
    """The buffers that a queue is kept filled with, until something arrives in them.

    Any thread may be here: what is shared is changed by single operations.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, LeasedBuffer] = {}  # by `id`
        self._over = False  # nobody asks for messages any more

    def add(self, buffer: LeasedBuffer) -> None:
        """It is about to be posted."""
        self._buffers[id(buffer)] = buffer

    def message(self, received: Received) -> Message | None:
        """What arrived, for who asks; None where nobody does: then its buffer was released."""
        self._buffers.pop(id(received.local), None)
        return None if self._over else Message(received, LeasedBuffer.release, None)

    def unused(self, buffer: LeasedBuffer) -> None:
        """Nothing arrives in it any more."""
        self._buffers.pop(id(buffer), None)
        buffer.release()

    def release(self) -> None:
        """Nobody asks any more: each goes back to the pool when its receive ends, whatever arrives."""
        self._over = True
        for buffer in tuple(self._buffers.values()):
            buffer.release()


class _End:
    """The end of its receives, after the verb."""

    def __init__(self) -> None:
        self.work: WorkQueue | None = None

    def destroy(self) -> None:
        """Nobody receives into them any more: they end as if they were flushed."""
        if self.work is not None:
            self.work.abandon(WcStatus.WR_FLUSH_ERR, None)


publish(__name__)
