"""Messages of a shared receive queue: a block that keeps the queue filled from a pool and yields what arrives."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any

import anyio

from aioverbs._core.data_path.data_path import (
    Inbox,
    Message,
    Received,
    ReceiveVerbs,
    WorkQueue,
    close_inbox,
    empty_inbox,
    receive_into,
)
from aioverbs._core.handles import handles
from aioverbs._lifecycle.affinity import OwnedBlock, wait_uncancelled
from aioverbs._lifecycle.resource import lifecycle_of
from aioverbs._memory.buffer_pool import BufferPool, LeasedBuffer
from aioverbs._verbs.async_events import AsyncEventSource, DeviceEvent
from aioverbs.errors import ConcurrentAccessError
from aioverbs.types import EventType

__all__ = ["FillableQueue", "SrqMessages"]


class FillableQueue(AsyncEventSource[handles.SharedReceiveQueue], ReceiveVerbs):
    """Base class of the shared receive queue: what keeping the queue filled needs of it."""

    @property
    def depth(self) -> int:
        """Number of receives that can be posted at once. Subclasses implement this."""
        raise NotImplementedError

    @property
    def _receive_queue(self) -> WorkQueue:
        """The `WorkQueue` through which receives are posted. Subclasses implement this.

        :raises ClosedResourceError: the queue is not open.
        """
        raise NotImplementedError


class SrqMessages(OwnedBlock[AsyncIterator[Message]]):
    """Async context manager that `SharedReceiveQueue.messages` returns; ``async with`` yields the iterator.

    This is a class instead of an async generator, because an event loop that ends closes its open generators, even in
    the middle of an await.

    :param queue: queue that is kept filled.
    :param pool: pool of the buffers to receive into.
    :param low: number of posted receives below which the queue is refilled; None for half of the depth.
    """

    def __init__(self, queue: FillableQueue, pool: BufferPool, low: int | None) -> None:
        super().__init__(f"messages of {queue!r}", lambda: lifecycle_of(queue).check_owner("messages"))
        self._queue = queue
        self._pool = pool
        self._low = low
        self._filling: _Filling | None = None

    async def _begin(self) -> AsyncIterator[Message]:
        depth = self._queue.depth
        low = max(depth // 2, 1) if self._low is None else self._low
        if not 1 <= low <= depth:
            raise ValueError(f"`low` must be 1 to {depth} for {depth} receives, got {low}")
        work = self._queue._receive_queue
        missing = depth - work.in_flight - work.queued
        if self._pool.limit < missing:
            raise ValueError(
                f"{self._pool!r} has at most {self._pool.limit} buffers, which cannot fill the {missing} free receives "
                f"of {self._queue!r}: give it a `limit` of at least {missing}"
            )
        refill = asyncio.Event()
        posted = _PostedBuffers(low, asyncio.get_running_loop(), refill)
        inbox = Inbox(work, posted.message, posted.unused)
        filling = _Filling(self._queue, self._pool, low, inbox, posted, refill)
        events = self._queue.events()
        try:
            await filling.fill()
        except BaseException:
            filling.end()
            raise
        filling.start(events)
        self._filling = filling
        return inbox

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop refilling the queue, and release all buffers and messages that the user does not have."""
        assert self._filling is not None
        filling, self._filling = self._filling, None
        try:
            await filling.stop()
        finally:  # no await: a cancelled task must also release messages that were not iterated over
            filling.end()


class _Filling:
    """Keeps a shared receive queue filled for one block, by two tasks on the event loop of the block.

    One task waits for the device's event that few receives are left, and one refills the queue. The event alone does
    not suffice: it can come before the completions of the receives that it reports, whose slots are still in use then,
    and no further event follows when no receive is left. So each message that leaves too few receives asks for a refill
    as well.

    :param queue: queue to fill.
    :param pool: pool of the buffers to receive into.
    :param low: number of posted receives below which the queue is refilled.
    :param inbox: destination of the messages.
    :param posted: record of the posted buffers.
    :param refill: event that asks for a refill.
    """

    def __init__(
        self,
        queue: FillableQueue,
        pool: BufferPool,
        low: int,
        inbox: Inbox,
        posted: "_PostedBuffers",
        refill: asyncio.Event,
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._low = low
        self._inbox = inbox
        self._posted = posted
        self._refill_wanted = refill
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, events: AsyncGenerator[DeviceEvent, None]) -> None:
        """Start the tasks.

        :param events: iterator over the events of the queue; a task closes it at its end.
        """
        for work in (functools.partial(self._watch, events), self._refill):
            self._tasks.append(asyncio.create_task(self._end_on_error(work)))

    async def stop(self) -> None:
        """Cancel the tasks and wait for their end, even if this is cancelled."""
        if self._tasks[0].get_loop() is not asyncio.get_running_loop():  # that loop ended, and the tasks with it
            return
        for task in self._tasks:
            task.cancel()
        await wait_uncancelled(asyncio.wait(self._tasks))

    def end(self) -> None:
        """End the iteration, and release the posted buffers and the messages that the user has not taken."""
        self._posted.release()
        close_inbox(self._inbox)
        for message in empty_inbox(self._inbox):
            message.release()

    async def _end_on_error(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call and await a coroutine function. If that raises, end the iteration over the messages with the
        exception."""
        try:
            await work()
        except Exception as error:  # for example the pool was closed: the reader of messages gets the error
            close_inbox(self._inbox, error)

    async def _watch(self, events: AsyncGenerator[DeviceEvent, None]) -> None:
        """Ask for a refill whenever the event SRQ_LIMIT_REACHED arrives, until the queue is closed."""
        async with contextlib.aclosing(events):
            async for event in events:
                if event.event_type is EventType.SRQ_LIMIT_REACHED:
                    self._refill_wanted.set()

    async def _refill(self) -> None:
        """Fill the queue whenever that is asked for. This raises the exceptions of `fill`."""
        while await self._refill_wanted.wait():
            self._refill_wanted.clear()
            try:
                await self.fill()
            except ConcurrentAccessError:  # another thread is inside the domain
                self._refill_wanted.set()
                await asyncio.sleep(0)

    async def fill(self) -> None:
        """Post buffers from the pool until the queue is full, then arm the limit.

        If the pool has no free buffer, wait for one. This also raises the exceptions of `BufferPool.lease`, and those
        of ``receive``, for example for unsuitable memory.

        :raises ClosedResourceError: the queue or the pool is not open.
        :raises AffinityError: another event loop owns the queue.
        :raises ConcurrentAccessError: another thread is inside a verb on the same unlocked domain; the buffers that
            have been posted stay posted.
        :raises VerbsError: a receive cannot be posted, or the limit cannot be armed.
        """
        queue = self._queue
        while queue._receive_queue.in_flight + queue._receive_queue.queued < queue.depth:
            buffer = await self._pool.lease()
            self._posted.add(buffer)  # before anything can arrive in it
            try:
                _ = receive_into(queue, self._inbox, buffer)  # its result goes to the inbox
            except anyio.WouldBlock:  # another task posts to the queue, too
                self._posted.unused(buffer)
                break
            except BaseException:
                self._posted.unused(buffer)
                raise
        queue.handle.modify(limit=self._low)


class _PostedBuffers:
    """Buffers posted to a shared receive queue, until a message arrives in them.

    Any thread may call the methods: shared state is changed only by single atomic operations.

    :param low: number of buffers below which more are asked for.
    :param loop: event loop of the block.
    :param refill: event of that loop that asks for more buffers.
    """

    def __init__(self, low: int, loop: asyncio.AbstractEventLoop, refill: asyncio.Event) -> None:
        self._buffers: dict[int, LeasedBuffer] = {}  # by `id`
        self._ended = False  # the block has ended, arriving messages are dropped
        self._low = low
        self._loop = loop
        self._refill = refill

    def add(self, buffer: LeasedBuffer) -> None:
        """Record a buffer that is about to be posted."""
        self._buffers[id(buffer)] = buffer

    def message(self, received: Received) -> Message | None:
        """Return a `Message` for a completed receive, and forget its buffer, which the message now owns.

        After `release`, return None instead: the message is dropped, and its buffer was already released.
        """
        self._buffers.pop(id(received.local), None)
        if self._ended:
            return None
        if len(self._buffers) < self._low:
            self._ask_for_refill()
        return Message(received, LeasedBuffer.release, None)

    def _ask_for_refill(self) -> None:
        """Wake the task that fills the queue. Do nothing if its loop is closed."""
        if asyncio._get_running_loop() is self._loop:
            self._refill.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the queue is no longer filled
                self._loop.call_soon_threadsafe(self._refill.set)

    def unused(self, buffer: LeasedBuffer) -> None:
        """Forget and release a buffer in which no message will arrive, such as that of a failed receive."""
        self._buffers.pop(id(buffer), None)
        buffer.release()

    def release(self) -> None:
        """Release all posted buffers, and drop all messages that arrive from now on.

        Each buffer returns to the pool when its receive has ended, even if a message arrives in it.
        """
        self._ended = True
        for buffer in tuple(self._buffers.values()):
            buffer.release()
