"""Pools of registered buffers: leasing a buffer for a transfer costs no registration."""

import asyncio
import contextlib
import copy
import functools
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import Lifecycle, ResourceState, Site, format_site, warn_at
from aioverbs._lifecycle.resource import (
    HandleResource,
    Resource,
    ResourceStatistics,
    creation_site,
    lifecycle_of,
    open_part_now,
)
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs._memory.region import (
    MemoryRegion,
    RegionSlice,
    WaitableInFlightCount,
    give_back_pages,
    is_large,
    open_in_thread,
    use_small_pages,
)
from aioverbs.allocators import Allocator
from aioverbs.errors import BusyResourceError, ClosedResourceError
from aioverbs.types import AccessFlags

__all__ = ["BufferPool", "BufferPoolStatistics", "LeaseContext", "LeasedBuffer"]


@dataclass(frozen=True)
class BufferPoolStatistics(ResourceStatistics):
    """Counts of a buffer pool at one moment. `BufferPool.statistics` returns one.

    :param slabs: number of memory regions that contain the buffers.
    :param leased: number of buffers leased and not released.
    :param under_dma: number of released buffers that work requests in flight still use; a buffer becomes free when
        these have completed.
    :param free: number of buffers that can be leased.
    :param waiting: number of tasks that wait for a buffer.
    :param high_water: largest number of buffers that were leased or under DMA at the same time.
    """

    slabs: int
    leased: int
    under_dma: int
    free: int
    waiting: int
    high_water: int


@dataclass(frozen=True, slots=True)
class _Lease:
    """Lease of a buffer: its block, the work in flight with it, and the place in the user's code that leased it."""

    block: RegionSlice
    pins: WaitableInFlightCount
    site: Site | None


def _copied(error: BaseException) -> BaseException:
    """Return a copy of an exception, with the original as its cause; the original if its class cannot be copied."""
    try:
        other = copy.copy(error)
    except Exception:
        return error
    if not isinstance(other, type(error)):
        return error
    # Not the original's list of notes, which the cause shows, nor its dictionary, which copies by tblib share.
    other.__dict__ = {name: value for name, value in vars(error).items() if name != "__notes__"}
    other.__cause__ = error
    return other


class _FreeList:
    """Free and leased buffers of a pool, apart from the user's object, which may be garbage-collected before them.

    Any thread may call the methods, and so may a finalizer that interrupts any of them. Therefore no method waits for a
    lock: shared state is changed by single operations on deques, dictionaries and sets, which are atomic with the GIL
    and without it. Only `serve_waiters` needs mutual exclusion; it tries the lock and, if another thread holds it,
    leaves the work to that thread.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._serving = threading.Lock()  # acquired without blocking only
        self._numbers = itertools.count()
        self.slabs: list[MemoryRegion] = []
        self.free: deque[RegionSlice] = deque()
        self.leased: dict[int, _Lease] = {}
        self.waiting: deque[_Waiter] = deque()
        self.gives_back_pages = False
        self.leased_counts = {0}  # all values of len(leased) so far: a maximum cannot be updated atomically

    def lease(self, pool: "BufferPool", site: Site | None) -> "LeasedBuffer | None":
        """Lease a free buffer without waiting.

        :param pool: pool of the buffer.
        :param site: place in the user's code that leases the buffer; None if unknown.
        :returns: the buffer; None if no buffer is free, or if tasks are waiting for one.
        """
        if self.waiting:
            return None
        try:
            block = self.free.pop()
        except IndexError:
            return None
        return self._lease_block(block, pool, site)

    def _lease_block(self, block: RegionSlice, pool: "BufferPool", site: Site | None) -> "LeasedBuffer":
        """Return a new lease of a block that the caller took from the free list, as a `LeasedBuffer`."""
        number = next(self._numbers)
        pins = WaitableInFlightCount(block.region.pins, functools.partial(self.return_if_idle, number))
        self.leased[number] = _Lease(block, pins, site)
        self.leased_counts.add(len(self.leased))
        return LeasedBuffer(block, pins, pool, self, number)

    def return_if_idle(self, number: int) -> None:
        """Return a buffer to the free list if it has been released and no work request in flight uses it, then serve
        the tasks that are waiting for a buffer.

        Do nothing if the buffer was returned before. If its slab is closed, only remove the lease.

        Two callers can run at the same time. A release first closes the count of requests in flight, so that no further
        request can begin. The last request decrements the count before it does anything else. Both then call this
        method, so at least the later caller finds both conditions true. If both find them true, the atomic `pop` lets
        only one of them return the buffer.

        :param number: number of the lease.
        """
        lease = self.leased.get(number)
        if lease is None or not lease.pins.closed or len(lease.pins):
            return
        if self.leased.pop(number, None) is None or lease.block.region.closed:
            return
        if self.gives_back_pages:
            give_back_pages(lease.block.region, lease.block.offset, lease.block.length)
        self.free.append(lease.block)
        self._discard_if_closed(lease.block)  # the slab may have been closed just before, and `resume` called
        if self.waiting:
            self.serve_waiters()

    def serve_waiters(self) -> None:
        """Hand free buffers to waiting tasks, first come, first served.

        Return when no buffer is free, no task is waiting, or another thread is doing this work. Call after every change
        that could make a buffer or a waiter available. A thread that fails to get the lock made its change before it
        tried; the thread that holds the lock looks for more work after releasing it. So no change is overlooked.
        """
        while self.free and self.waiting and self._serving.acquire(blocking=False):
            try:
                self._serve_one_waiter()
            finally:
                self._serving.release()

    def _serve_one_waiter(self) -> None:
        """Hand a free buffer to the task that has waited longest.

        Do nothing if there is no longer a free buffer or a waiting task. If the waiter refuses the buffer, release the
        buffer. Call with the lock that `serve_waiters` takes.
        """
        try:
            block = self.free.pop()
        except IndexError:  # leased by another thread meanwhile
            return
        try:
            waiter = self.waiting.popleft()
        except IndexError:  # the waiter was withdrawn meanwhile
            self.free.append(block)
            return
        buffer = self._lease_block(block, waiter.pool, waiter.site)
        if not waiter.offer(buffer):
            buffer.release()

    def withdraw(self, waiter: "_Waiter") -> None:
        """Remove a waiter whose task no longer waits, and release the buffer if it has been given one.

        Call on the waiter's loop.
        """
        waiter.is_withdrawn = True  # a buffer that is already on its way is released on arrival
        with contextlib.suppress(ValueError):
            self.waiting.remove(waiter)
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()

    def fail(self, make_error: Callable[[], BaseException]) -> None:
        """Raise an exception in all tasks that are waiting for a buffer. This can be called from any thread.

        :param make_error: function that returns the exception for one task. Each task needs its own, to which it adds
            its traceback and notes.
        """
        with contextlib.suppress(IndexError):  # some waiters are withdrawn meanwhile
            for _ in range(len(self.waiting)):
                self.waiting.popleft().fail(make_error())

    def count_receives(self) -> tuple[int, int]:
        """Count the receives that are posted in the buffers of the pool.

        :returns: tuple of the number of all these receives, and the number of those in buffers that were released.
        """
        in_released = sum(lease.pins.receives for lease in self.leased.copy().values() if lease.pins.closed)
        return sum(slab.pins.receives for slab in self.slabs), in_released

    def destroy(self) -> None:
        """Drop all references to the memory. The pool calls this when it closes, after its slabs have been closed."""
        self.free.clear()
        self.slabs.clear()

    def resume(self) -> None:
        """Remove the slabs that were closed, and their blocks, after an attempt to close the pool has failed.

        The pool may add further slabs in their place.
        """
        self.slabs[:] = [slab for slab in self.slabs if not slab.closed]
        for block in tuple(self.free):
            self._discard_if_closed(block)

    def _discard_if_closed(self, block: RegionSlice) -> None:
        """Remove a block from the free list if its slab is closed."""
        if block.region.closed:
            with contextlib.suppress(ValueError):  # leased or removed meanwhile
                self.free.remove(block)

    def stop(self) -> None:
        """Begin to close the pool: make all waiting tasks raise `ClosedResourceError`, and warn of unreleased buffers.

        :raises ResourceWarning: if warnings are turned into errors and buffers were not released. The waiting tasks
            still raise `ClosedResourceError`.
        """
        self.fail(lambda: ClosedResourceError(f"{self._lifecycle!r} was closed"))
        sites = [lease.site for lease in self.leased.copy().values() if not lease.pins.closed]
        if sites:
            warn_at(
                sites[0],
                f"{len(sites)} buffers of {self._lifecycle!r} were not released before it was closed; "
                f"the first of them was leased at {format_site(sites[0])}",
            )


class _Offer:
    """Leased buffer on its way to the loop of a waiting task. If that loop is closed before the buffer arrives, the
    buffer is released when this is garbage-collected, without a warning, because no user has it.
    """

    def __init__(self, buffer: "LeasedBuffer") -> None:
        self._buffer: LeasedBuffer | None = buffer

    def take(self) -> "LeasedBuffer":
        """Return the buffer, which the caller must release. Call once."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        return buffer

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffer.release()


class _Waiter:
    """Running task, which waits for a buffer. Methods are called on the loop of the task, unless they say otherwise.

    :param pool: pool of the buffer.
    :param site: place in the user's code that leases the buffer; None if unknown.
    :raises RuntimeError: no asyncio event loop is running.
    """

    def __init__(self, pool: "BufferPool", site: Site | None) -> None:
        self.pool = pool
        self.site = site
        self.is_withdrawn = False  # True after the task stopped waiting
        self._loop = running_loop()
        self.future: asyncio.Future[LeasedBuffer] = self._loop.create_future()

    def offer(self, buffer: "LeasedBuffer") -> bool:
        """Offer a buffer to the waiting task. This can be called from any thread.

        :returns: True if the waiter takes the buffer; if its task has stopped waiting by then, the waiter releases the
            buffer. False if the task no longer waits, and the caller must release the buffer.
        """
        if asyncio._get_running_loop() is self._loop:
            if self.is_withdrawn or self.future.done():
                return False
            self.future.set_result(buffer)
            return True
        try:
            self._loop.call_soon_threadsafe(self._accept, _Offer(buffer))
        except RuntimeError:  # the loop is closed already, so no task waits
            return False
        return True

    def _accept(self, offer: _Offer) -> None:
        """Pass a buffer to the task, or release the buffer if the task is no longer waiting."""
        buffer = offer.take()
        if self.is_withdrawn or self.future.done():  # the waiter was withdrawn meanwhile
            buffer.release()
        else:
            self.future.set_result(buffer)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the waiting task.

        This can be called from any thread. Do nothing if the task is no longer waiting.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """Raise `error` in the task, if the task is still waiting."""
        if not (self.is_withdrawn or self.future.done()):
            self.future.set_exception(error)


class LeasedBuffer(RegionSlice):
    """Buffer of a pool, valid until `release` or the end of its ``with`` block. Use `BufferPool.lease` or
    `BufferPool.lease_nowait` to lease one.

    The buffer is a slice of a memory region, and can be sliced like any region. After the release the buffer and its
    slices raise `ClosedResourceError`. A buffer that is garbage-collected before the release is released then, with a
    `ResourceWarning`. A memoryview or array made from ``buffer`` cannot be revoked: the caller must not use it after
    the release. A buffer is not cleared between leases.

    If work requests use the buffer when it is released, the pool leases it again only after they have completed.
    """

    __slots__ = ("__weakref__", "_free_list", "_number", "_pool")

    def __init__(
        self, block: RegionSlice, pins: WaitableInFlightCount, pool: "BufferPool", free_list: _FreeList, number: int
    ) -> None:
        super().__init__(block.region, block.offset, block.length, pins)
        self._pool = pool  # keeps the pool alive as long as the buffer
        self._free_list = free_list
        self._number = number

    def __repr__(self) -> str:
        state = "released" if self.pins.closed else "leased"
        return f"<{type(self).__name__} of {self.length} bytes ({state})>"

    def release(self) -> None:
        """Return the buffer to its pool, which leases it to the task that has waited longest, if any.

        This can be called from any thread; further calls do nothing.

        Work requests in flight that use the buffer continue, and the pool leases the buffer again only after they have
        completed. A further request that uses the buffer raises `ClosedResourceError`.
        """
        self.pins.close()
        self._free_list.return_if_idle(self._number)

    def __enter__(self) -> Self:
        self.pins.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if self.pins.closed:
            return
        lease = self._free_list.leased.get(self._number)
        self.release()
        # No warning if the pool was closed, which warned already, nor in the child of a fork.
        if lease is not None and not self.region.closed:
            warn_at(lease.site, f"{self!r} was leased at {format_site(lease.site)} and forgotten", self)


class LeaseContext:
    """Result of `BufferPool.lease`: ``await`` returns a buffer; ``async with`` also releases it at the end.

    Each await leases a new buffer, which the caller must release. At most one block at a time may use the object: a
    second one raises `RuntimeError`. `BufferPool.lease` describes the other exceptions of both forms.
    """

    __slots__ = ("_buffer", "_is_in_use", "_pool", "_site")

    def __init__(self, pool: "BufferPool", site: Site | None) -> None:
        self._pool = pool
        self._site = site
        self._buffer: LeasedBuffer | None = None
        self._is_in_use = False

    def __await__(self) -> Generator[Any, Any, LeasedBuffer]:
        return self._pool._lease(self._site).__await__()

    async def __aenter__(self) -> LeasedBuffer:
        if self._is_in_use:
            raise RuntimeError("this lease is in use by another block: call lease() once for each block")
        self._is_in_use = True
        try:
            self._buffer = await self._pool._lease(self._site)
        except BaseException:
            self._is_in_use = False
            raise
        return self._buffer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        self._is_in_use = False
        buffer.release()


class BufferPool(Resource):
    """Pool of registered buffers of equal size. Any event loop may use it. Use `Domain.buffer_pool` to create one.

    Memory is registered in slabs of ``count`` buffers: the first slab when the pool is opened, further ones, up to
    ``limit``, when no buffer is free.

    Closing the pool makes waiting tasks raise `ClosedResourceError`, warns of buffers that were not released, and waits
    for work in flight. After that, using an unreleased buffer raises `ClosedResourceError`. If closing is cancelled, a
    background task closes the pool when work is no longer in flight. The same happens if receives in released buffers,
    such as those of `SharedReceiveQueue.messages`, are in flight: they complete when their queue is closed, so closing
    does not wait for them, nor for other work requests.

    :param pd: protection domain that the memory is registered with.
    :param size: size of a buffer in bytes, at least 1.
    :param count: number of buffers of a slab, at least 1.
    :param limit: maximum number of buffers, at least ``count``; None for ``count``, which is one slab.
    :param allocator: allocator of the memory; None for pages that a fork does not copy.
    :param access: access rights of the buffers, for local work requests and for peers.
    :param alignment: alignment of each buffer in bytes: a power of two, at most the page size.
    :param gives_back_pages: whether buffers that are not leased have no pages, which the kernel then provides when a
        buffer is touched. Only for a device that does not pin memory, without an allocator, and with an alignment to
        pages.
    :raises ValueError: ``size`` or ``count`` is less than 1, ``limit`` is less than ``count``, or ``alignment`` is
        invalid.
    """

    def __init__(
        self,
        pd: HandleResource[handles.ProtectionDomain],
        size: int,
        count: int,
        *,
        limit: int | None = None,
        allocator: Allocator | None = None,
        access: AccessFlags = AccessFlags.LOCAL_WRITE,
        alignment: int = 64,
        gives_back_pages: bool = False,
    ) -> None:
        for name, value in (("size", size), ("count", count)):
            if value < 1:
                raise ValueError(f"the {name} of a buffer pool must be at least 1, got {value}")
        if limit is not None and limit < count:
            raise ValueError(f"a limit of {limit} buffers is less than one slab of {count}: raise limit or lower count")
        if alignment not in (1 << bit for bit in range(mmap.PAGESIZE.bit_length())):
            raise ValueError(f"`alignment` must be a power of two of at most {mmap.PAGESIZE} bytes, got {alignment}")
        super().__init__(pd)
        self._lifecycle.close_last = True
        self._pd = pd
        self._size = size
        self._count = count
        self._limit = count if limit is None else limit
        self._stride = -(-size // alignment) * alignment
        self._allocator = allocator
        self._access = AccessFlags(access)
        self._growing = threading.Lock()  # acquired without blocking only, like the lock of the free list
        self._growth: asyncio.Future[None] | None = None
        self._free_list = _FreeList(self._lifecycle)
        self._free_list.gives_back_pages = gives_back_pages

    def _open(self) -> None:
        self._lifecycle.hold(self._free_list)
        self._lifecycle.stop = self._free_list.stop
        self._lifecycle.resume = self._free_list.resume
        self._lifecycle.must_drain = True  # because its slabs may be under DMA
        self._add_slab()

    async def open(self) -> Self:
        """Open the pool and register its first slab (``ibv_reg_mr``), in a thread if the slab has 16 MiB or more.

        If this fails, the pool stays unopened. The same applies if this is cancelled; but if a thread is already
        registering the slab, this waits for the thread, and the pool is then closed.

        :returns: the pool itself.
        :raises ClosedResourceError: the pool was opened before, or its protection domain is closed.
        :raises ForkedProcessError: the pool or its protection domain was opened in the process that this one was forked
            from.
        :raises ValueError: peers may write and ``LOCAL_WRITE`` is missing.
        :raises TypeError: the allocator lacks the methods of `Allocator`.
        :raises MemoryError: the allocator returned None.
        :raises OSError: the process cannot map that much memory.
        :raises VerbsError: the device cannot register the slab.
        :raises RuntimeError: the slab has 16 MiB or more, and no asyncio event loop is running.
        :raises Exception: whatever the allocator raised.
        """
        if not is_large(self._count * self._stride):
            return await super().open()
        await open_in_thread(self)
        return self

    async def aclose(self) -> None:
        """Close the pool after the work requests in flight have completed.

        If receives are posted in released buffers, return at once: a background task closes the pool when all work
        requests have completed, which these receives do when their queues are closed. A background task also closes the
        pool if this is cancelled while work requests are in flight. A `ResourceWarning` is issued if buffers were not
        released. Closing a closed pool does nothing. In a forked child, nothing is done.

        :raises BusyResourceError: receives are posted in buffers that were not released. In this case nothing is done.
        :raises VerbsError: a slab cannot be deregistered. The pool stays open, without the slabs that were closed
            before, and can be closed again. In a background task, the event loop logs the exception instead.
        :raises ResourceWarning: if warnings are turned into errors and buffers were not released. The pool is still
            closed, in the background if receives are posted.
        :raises RuntimeError: no asyncio event loop is running, and work requests are in flight, or another task is
            opening or closing the pool. The pool can be closed again; if receives are posted in released buffers,
            nothing is changed.
        """
        posted, in_released = self._free_list.count_receives()
        if posted > in_released and self.state is ResourceState.OPEN and not self.closed:
            raise BusyResourceError(
                f"{posted - in_released} receives are posted in buffers of {self!r} that were not released: release "
                "those, or close or reset their queue pair first"
            )
        if posted:
            self._lifecycle.abort()
        else:
            await super().aclose()

    @property
    def size(self) -> int:
        """Size of a buffer in bytes."""
        return self._size

    @property
    def limit(self) -> int:
        """Maximum number of buffers."""
        return self._limit

    @property
    def access(self) -> AccessFlags:
        """Access rights of the buffers."""
        return self._access

    def statistics(self) -> BufferPoolStatistics:
        """Return the current counts of the pool, such as the number of leased buffers, as a `BufferPoolStatistics`."""
        free_list = self._free_list
        leases = free_list.leased.copy().values()
        released = sum(lease.pins.closed for lease in leases)
        return BufferPoolStatistics(
            children=len(self._lifecycle.children),
            slabs=len(free_list.slabs),
            leased=len(leases) - released,
            under_dma=released,
            free=len(free_list.free),
            waiting=len(free_list.waiting),
            high_water=max(free_list.leased_counts.copy()),
        )

    # ---- Leasing

    def lease(self) -> LeaseContext:
        """Lease a buffer, waiting until one is free.

        Buffers go to waiting tasks in the order in which they began to wait. Write ``async with pool.lease() as
        buffer``, or ``buffer = await pool.lease()`` and ``buffer.release()``. If the wait is cancelled, no buffer is
        leased. The exceptions are raised by the await or by entering the block.

        :returns: object for one of the two forms, which both give a `LeasedBuffer`.
        :raises ClosedResourceError: the pool is not open, or was closed during the wait.
        :raises ForkedProcessError: the pool was opened in the process that this one was forked from.
        :raises RuntimeError: no buffer is free, and no asyncio event loop is running; or another block is using the
            returned object.
        :raises MemoryError: no buffer is free, and the allocator has no memory for a further slab.
        :raises OSError: no buffer is free, and the process cannot map the memory of a further slab.
        :raises VerbsError: no buffer is free, and the device cannot register a further slab.
        :raises Exception: whatever the allocator raised. If a further slab cannot be added, all tasks that are waiting
            for a buffer raise that, each a copy of its own.
        """
        return LeaseContext(self, None if self._lifecycle.suppress_warning else creation_site())

    def lease_nowait(self) -> LeasedBuffer:
        """Lease a buffer without waiting. If none is free, a further slab is registered if it has less than 16 MiB.

        :returns: the buffer, which the caller must release.
        :raises anyio.WouldBlock: no buffer is free and none could be added without waiting, or tasks are waiting for
            one.
        :raises ClosedResourceError: the pool is not open.
        :raises ForkedProcessError: the pool was opened in the process that this one was forked from.
        :raises MemoryError: no buffer is free, and the allocator has no memory for a further slab.
        :raises OSError: no buffer is free, and the process cannot map the memory of a further slab.
        :raises VerbsError: no buffer is free, and the device cannot register a further slab.
        :raises Exception: whatever the allocator raised.
        """
        self._check_open()
        site = None if self._lifecycle.suppress_warning else creation_site()  # a pool of the library's needs none
        buffer = self._free_list.lease(self, site)
        if buffer is None and not self._free_list.waiting and not is_large(self._next_slab * self._stride):
            try:
                self._grow_once()
                buffer = self._free_list.lease(self, site)
            finally:
                self._grow()  # for tasks that began to wait meanwhile
        if buffer is None:
            raise anyio.WouldBlock
        return buffer

    async def _lease(self, site: Site | None) -> LeasedBuffer:
        """Lease a buffer, waiting until one is free. This raises the exceptions that `BufferPool.lease` describes.

        :param site: place in the user's code that leases the buffer; None if unknown.
        :returns: the buffer, which the caller must release.
        """
        self._check_open()
        buffer = self._free_list.lease(self, site)
        if buffer is not None:
            if turn := spend(LIGHT):
                try:
                    await yield_to_loop(turn)
                except BaseException:
                    buffer.release()
                    raise
            return buffer
        waiter = _Waiter(self, site)
        self._free_list.waiting.append(waiter)
        try:
            self._free_list.serve_waiters()
            self._check_open()  # tested last: closing changes the state before it fails the waiters
            if not waiter.future.done():
                if is_large(self._next_slab * self._stride):
                    self._growth = running_loop().run_in_executor(None, self._grow)
                else:
                    self._grow()
            return await waiter.future
        except BaseException:
            self._free_list.withdraw(waiter)
            raise

    # ---- Growing

    @property
    def _next_slab(self) -> int:
        """Number of buffers that the next slab would have; 0 if the pool has reached its limit."""
        buffers = sum(len(slab) // self._stride for slab in self._free_list.slabs)
        return min(self._count, self._limit - buffers)

    def _grow(self) -> None:
        """Add slabs while tasks are waiting for a buffer and the limit is not reached.

        If a slab cannot be added, the exception is not raised here, but copies of it are raised in all tasks that are
        waiting at that moment.
        """
        may_grow = True
        while may_grow and self._free_list.waiting:
            with contextlib.suppress(Exception):  # tasks that wait after an error came later than it
                may_grow = self._grow_once()

    def _grow_once(self) -> bool:
        """Add a slab unless the limit is reached, and hand its buffers to waiting tasks.

        If another thread is adding a slab, leave the work to that thread, which adds slabs while tasks are waiting. If
        a slab cannot be added, all tasks that are waiting raise copies of the exception that this method raises.

        :returns: True if a slab was added; False at the limit, or if another thread is adding a slab.
        :raises MemoryError: the allocator has no memory.
        :raises OSError: the process cannot map that much memory.
        :raises VerbsError: the device cannot register the slab.
        :raises ClosedResourceError: the pool is not open.
        :raises Exception: whatever the allocator raised.
        """
        if not self._growing.acquire(blocking=False):
            return False
        try:
            grown = self._next_slab > 0
            if grown:
                self._add_slab()
        except BaseException as error:
            self._free_list.fail(functools.partial(_copied, error))  # below the limit, all depend on this slab
            raise
        finally:
            self._growing.release()
        self._free_list.serve_waiters()
        return grown

    def _add_slab(self) -> None:
        """Register a further slab and add its buffers to the free list. Nothing is changed on failure.

        :raises MemoryError: the allocator has no memory.
        :raises OSError: the process cannot map that much memory.
        :raises VerbsError: the device cannot register the slab.
        :raises ValueError: peers may write and ``LOCAL_WRITE`` is missing.
        :raises TypeError: the allocator lacks the methods of `Allocator`.
        :raises ClosedResourceError: the pool is neither open nor being opened.
        :raises Exception: whatever the allocator raised.
        """
        buffers = self._next_slab
        slab = MemoryRegion(self, self._pd.handle, buffers * self._stride, self._access, self._allocator)
        open_part_now(slab, keeps_parents=False)
        lifecycle_of(slab).drain = functools.partial(_drain_slab, slab.pins)
        starts = range((buffers - 1) * self._stride, -1, -self._stride)  # the last one is leased first
        blocks = [slab[start : start + self._size] for start in starts]
        if self._free_list.gives_back_pages:  # registration has touched all of them
            use_small_pages(slab)
        self._free_list.slabs.append(slab)
        self._free_list.free.extend(blocks)


async def _drain_slab(pins: WaitableInFlightCount) -> None:
    """Wait until no work request that uses a slab is in flight, and let no further one begin.

    Receives are waited for as well, because their queues are closed before the slab.

    :param pins: count of the work requests that use the slab.
    :raises ForkedProcessError: work requests of the parent process were in flight at the fork.
    :raises RuntimeError: work requests are in flight, and no asyncio event loop is running.
    """
    pins.close()
    await pins.wait()


publish(__name__)
