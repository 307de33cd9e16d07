"""Registered memory that is leased: who borrows a buffer for a transfer pays for no registration."""

import asyncio
import contextlib
import functools
import itertools
import mmap
import threading
import warnings
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.lifecycle import Lifecycle, ResourceState, Site, format_site
from aioverbs._lifecycle.resource import (
    HandleResource,
    Resource,
    ResourceStatistics,
    creation_site,
    lifecycle_of,
    open_part_now,
)
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs._memory.region import MemoryRegion, RegionSlice, WaitableInFlightCount, is_large, open_in_thread
from aioverbs.allocators import Allocator
from aioverbs.errors import BusyResourceError, ClosedResourceError
from aioverbs.types import AccessFlags

__all__ = ["BufferPool", "BufferPoolStatistics", "LeaseContext", "LeasedBuffer"]


@dataclass(frozen=True)
class BufferPoolStatistics(ResourceStatistics):
    """What a buffer pool has, at one moment.

    :param slabs: memory regions that its buffers lie in.
    :param leased: buffers that somebody has.
    :param under_dma: those that were released and are still being worked with; they come back by themselves.
    :param free: those that may be leased.
    :param waiting: who waits for one.
    :param high_water: how many were leased at once, at most.
    """

    slabs: int
    leased: int
    under_dma: int
    free: int
    waiting: int
    high_water: int


@dataclass(frozen=True, slots=True)
class _Lease:
    """A buffer that is leased: where it goes back to, what is under way with it, who took it."""

    block: RegionSlice
    pins: WaitableInFlightCount
    site: Site | None


class _FreeList:
    """The buffers of a pool, apart from the user's object: what is forgotten comes back here all the same.

    Any thread may be here, and a finalizer in the middle of anything. So nobody waits for a lock: what is shared is
    changed by single operations of deques, dictionaries and sets, which are atomic, with the GIL and without. Only who
    gives buffers to those that wait is to be alone, and who finds somebody there leaves it to them.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._serving = threading.Lock()  # only ever tried
        self._numbers = itertools.count()
        self.slabs: list[MemoryRegion] = []
        self.free: deque[RegionSlice] = deque()
        self.leased: dict[int, _Lease] = {}
        self.waiting: deque[_Waiter] = deque()
        self.leased_counts = {0}  # how many were leased at once: a maximum could not be kept by one operation

    def lease(self, pool: "BufferPool", site: Site | None) -> "LeasedBuffer | None":
        """A free one, unless somebody waits for it."""
        if self.waiting:
            return None
        try:
            block = self.free.pop()
        except IndexError:
            return None
        return self._lease_block(block, pool, site)

    def _lease_block(self, block: RegionSlice, pool: "BufferPool", site: Site | None) -> "LeasedBuffer":
        number = next(self._numbers)
        pins = WaitableInFlightCount(block.region.pins, functools.partial(self.return_if_idle, number))
        self.leased[number] = _Lease(block, pins, site)
        self.leased_counts.add(len(self.leased))
        return LeasedBuffer(block, pins, pool, self, number)

    def return_if_idle(self, number: int) -> None:
        """A lease is over where it was released and nothing is under way any more; of two that find this, one does it.

        Who releases closes the pins first and then looks here; who ends the last work does that first and then looks.
        So whoever comes second sees what the other did.
        """
        lease = self.leased.get(number)
        if lease is None or not lease.pins.closed or len(lease.pins):
            return
        if self.leased.pop(number, None) is not None and not lease.block.region.closed:
            self.free.append(lease.block)
            if self.waiting:
                self.serve_waiters()

    def serve_waiters(self) -> None:
        """Give what is free to those who wait, first come, first served.

        Called after every change that could let somebody have one. Who fails to get the lock changed something before
        it failed, and who has it looks once more after it let go: so nothing is overlooked.
        """
        while self.free and self.waiting and self._serving.acquire(blocking=False):
            try:
                self._serve_one_waiter()
            finally:
                self._serving.release()

    def _serve_one_waiter(self) -> None:
        try:
            block = self.free.pop()
        except IndexError:  # taken without waiting, meanwhile
            return
        try:
            waiter = self.waiting.popleft()
        except IndexError:  # withdrawn meanwhile
            self.free.append(block)
            return
        buffer = self._lease_block(block, waiter.pool, waiter.site)
        if not waiter.offer(buffer):
            buffer.release()

    def withdraw(self, waiter: "_Waiter") -> None:
        """Somebody does not wait any more; on their loop."""
        waiter.is_withdrawn = True  # what is on its way goes back
        with contextlib.suppress(ValueError):
            self.waiting.remove(waiter)
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()

    def fail(self, error: BaseException) -> None:
        """Tell those who wait now that there will be none."""
        with contextlib.suppress(IndexError):  # some are withdrawn meanwhile
            for _ in range(len(self.waiting)):
                self.waiting.popleft().fail(error)

    def count_receives(self) -> tuple[int, int]:
        """How many receives are posted in its slabs, and how many of these in buffers that were released."""
        in_released = sum(lease.pins.receives for lease in self.leased.copy().values() if lease.pins.closed)
        return sum(slab.pins.receives for slab in self.slabs), in_released

    def destroy(self) -> None:
        """The pool is closed, and so are its slabs: keep no memory."""
        self.free.clear()
        self.slabs.clear()

    def stop(self) -> None:
        """The pool is being closed: nobody gets one any more, and what is leased is left to those who have it."""
        self.fail(ClosedResourceError(f"{self._lifecycle!r} was closed"))
        sites = [lease.site for lease in self.leased.copy().values() if not lease.pins.closed]
        if sites:
            warnings.warn(
                f"{len(sites)} buffers of {self._lifecycle!r} were not released before it was closed; "
                f"the first of them was leased at {format_site(sites[0])}",
                ResourceWarning,
                stacklevel=2,
            )


class _Waiter:
    """Who waits for a buffer. What does not say otherwise is called on its own loop."""

    def __init__(self, pool: "BufferPool", site: Site | None) -> None:
        self.pool = pool
        self.site = site
        self.is_withdrawn = False  # it waits no more
        self._loop = running_loop()
        self.future: asyncio.Future[LeasedBuffer] = self._loop.create_future()

    def offer(self, buffer: "LeasedBuffer") -> bool:
        """From anywhere: whether it takes the buffer."""
        if asyncio._get_running_loop() is self._loop:
            if self.is_withdrawn or self.future.done():
                return False
            self.future.set_result(buffer)
            return True
        try:
            # A loop that is closed before it comes to this drops it: the buffer was forgotten then, and comes back.
            self._loop.call_soon_threadsafe(self._accept, buffer)
        except RuntimeError:  # it is closed already: nobody waits
            return False
        return True

    def _accept(self, buffer: "LeasedBuffer") -> None:
        if self.is_withdrawn or self.future.done():  # withdrawn meanwhile
            buffer.release()
        else:
            self.future.set_result(buffer)

    def fail(self, error: BaseException) -> None:
        """From anywhere: there will be none."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not (self.is_withdrawn or self.future.done()):
            self.future.set_exception(error)


class LeasedBuffer(RegionSlice):
    """A buffer of a pool, until it is released, as the end of its ``with`` block does.

    It is a part of a memory region, and parts of it are taken as of any region. After the release all of them refuse,
    with a `ClosedResourceError`; so they do where it was forgotten, and they were not. A memoryview or an array that
    was made of `buffer` cannot be called back: not to use it after the release is the user's business. Nor is the
    memory cleared: it has in it what was there before.

    What is under way with it when it is released is finished; only then does somebody else get it.
    """

    __slots__ = ("__weakref__", "_free_list", "_number", "_pool")

    def __init__(
        self, block: RegionSlice, pins: WaitableInFlightCount, pool: "BufferPool", free_list: _FreeList, number: int
    ) -> None:
        super().__init__(block.region, block.offset, block.length, pins)
        self._pool = pool  # who has a buffer of it has the pool
        self._free_list = free_list
        self._number = number

    def __repr__(self) -> str:
        state = "released" if self.pins.closed else "leased"
        return f"<{type(self).__name__} of {self.length} bytes ({state})>"

    def release(self) -> None:
        """Give it back; from any thread. Twice is fine."""
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
        # That of a closed pool was warned of, and the child of a fork has nothing to give back.
        if lease is not None and not self.region.closed:
            warnings.warn(
                f"{self!r} was leased at {format_site(lease.site)} and forgotten",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


class LeaseContext:
    """What `BufferPool.lease` returns: awaited it gives a buffer, ``async with`` releases that at the end.

    Each await gives another buffer; one block at a time has it.
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
            raise RuntimeError("this is in a block already, which releases one buffer: call lease() for each block")
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
    """Buffers of one size in registered memory, which are leased. Any event loop may use it.

    Made by `Domain.buffer_pool`. It is registered a slab at a time, the first one when the pool is opened, and
    the others when somebody finds nothing free. Closing it waits for what is under way, and warns of what was not
    released, which refuses from then on; who waits for a buffer gets a `ClosedResourceError`. Where closing is
    cancelled it ends by itself, when nothing is under way any more. So it does where all that is under way are receives
    in released buffers, as those of `SharedReceiveQueue.messages`: they end with their queue, which nobody waits for.

    :param pd: the domain that its memory is registered with.
    :param size: of a buffer, in bytes.
    :param count: how many buffers a slab has.
    :param limit: how many buffers there are at most; None: one slab.
    :param allocator: where to allocate them; None: in pages that a fork does not copy.
    :param access: what may be done to them, by local work requests and by peers.
    :param alignment: of each buffer, in bytes: a power of two, a page at most.
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
    ) -> None:
        for name, value in (("size", size), ("count", count)):
            if value < 1:
                raise ValueError(f"the {name} of a buffer pool is 1 at least, not {value}")
        if limit is not None and limit < count:
            raise ValueError(f"a limit of {limit} buffers leaves no room for a slab of {count}")
        if alignment not in (1 << bit for bit in range(mmap.PAGESIZE.bit_length())):
            raise ValueError(f"buffers are aligned to a power of two of {mmap.PAGESIZE} bytes at most, not {alignment}")
        super().__init__(pd)
        self._lifecycle.close_last = True
        self._pd = pd
        self._size = size
        self._count = count
        self._limit = count if limit is None else limit
        self._stride = -(-size // alignment) * alignment
        self._allocator = allocator
        self._access = AccessFlags(access)
        self._buffers = 0
        self._growing = threading.Lock()  # only ever tried, as that of the free list
        self._growth: asyncio.Future[None] | None = None
        self._free_list = _FreeList(self._lifecycle)

    def _open(self) -> None:
        self._lifecycle.hold(self._free_list)
        self._lifecycle.stop = self._free_list.stop
        self._lifecycle.must_drain = True  # as its slabs are
        self._add_slab()

    async def open(self) -> Self:
        """Register the first slab; where it is large, in a thread, so that the loop goes on meanwhile.

        :raises ClosedResourceError: it was opened before, or its protection domain is closed.
        :raises ValueError: ``LOCAL_WRITE`` is missing where peers may write.
        :raises MemoryError: the allocator has none.
        :raises VerbsError: the device cannot.
        """
        if not is_large(self._count * self._stride):
            return await super().open()
        await open_in_thread(self)
        return self

    async def aclose(self) -> None:
        """Close it.

        Where nothing is under way but receives in buffers that were released, this returns at once, and it is closed
        when their queues are.

        :raises BusyResourceError: receives are posted in buffers that were not released; nothing was done.
        :raises VerbsError: a slab cannot be deregistered; it is still open, and can be closed again.
        """
        posted, in_released = self._free_list.count_receives()
        if posted > in_released and self.state is ResourceState.OPEN and not self.closed:
            raise BusyResourceError(
                f"{posted - in_released} receives are posted in buffers of {self!r} that were not released: release "
                "those, or close or reset their queue pair first"
            )
        if posted:
            self._lifecycle.close_later()
        else:
            await super().aclose()

    @property
    def size(self) -> int:
        """Of a buffer, in bytes."""
        return self._size

    @property
    def access(self) -> AccessFlags:
        """What may be done to its buffers."""
        return self._access

    def statistics(self) -> BufferPoolStatistics:
        """How many buffers are where."""
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
        """A buffer, as soon as there is one: first come, first served, in the order of awaiting.

        ``async with pool.lease() as buffer``, or ``buffer = await pool.lease()`` and ``buffer.release()``. Where it is
        cancelled, nothing is leased.

        :raises ClosedResourceError: the pool is not open, or was closed meanwhile; when it is awaited, as the next.
        :raises MemoryError: nothing is free, and the allocator has no memory for a further slab.
        :raises VerbsError: nothing is free, and the device cannot register a further slab.
        """
        return LeaseContext(self, creation_site())

    def lease_nowait(self) -> LeasedBuffer:
        """A buffer, if one is there or a slab that is not large can be added for it.

        :raises anyio.WouldBlock: there is none, or others wait for it.
        :raises ClosedResourceError: the pool is not open.
        :raises MemoryError: as `lease`.
        :raises VerbsError: as `lease`.
        """
        self._check_open()
        site = creation_site()
        buffer = self._free_list.lease(self, site)
        if buffer is None and not self._free_list.waiting and not is_large(self._next_slab * self._stride):
            try:
                self._grow_once()
                buffer = self._free_list.lease(self, site)
            finally:
                self._grow()  # for those who came meanwhile
        if buffer is None:
            raise anyio.WouldBlock
        return buffer

    async def _lease(self, site: Site | None) -> LeasedBuffer:
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
            self._check_open()  # looked at last: who closes says so before he tells those who wait
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
        """How many buffers it would have."""
        return min(self._count, self._limit - self._buffers)

    def _grow(self) -> None:
        """Add slabs for those who wait. They are told of what fails."""
        may_grow = True
        while may_grow and self._free_list.waiting:
            with contextlib.suppress(Exception):  # who waits now came after those who were told
                may_grow = self._grow_once()

    def _grow_once(self) -> bool:
        """Add a slab, if there may be one, and give it to those who wait; whether it was added.

        Who finds somebody else at it leaves it to them: they go on as long as somebody waits.
        """
        if not self._growing.acquire(blocking=False):
            return False
        try:
            grown = self._next_slab > 0
            if grown:
                self._add_slab()
        except BaseException as error:
            self._free_list.fail(error)  # below the limit, all of them wait for this
            raise
        finally:
            self._growing.release()
        self._free_list.serve_waiters()
        return grown

    def _add_slab(self) -> None:
        buffers = self._next_slab
        slab = MemoryRegion(self, self._pd.handle, buffers * self._stride, self._access, self._allocator)
        open_part_now(slab, keeps_parents=False)
        lifecycle_of(slab).drain = functools.partial(_drain_slab, slab.pins)
        self._buffers += buffers
        self._free_list.slabs.append(slab)
        starts = range((buffers - 1) * self._stride, -1, -self._stride)  # the last in is the first out
        self._free_list.free.extend([slab[start : start + self._size] for start in starts])


async def _drain_slab(pins: WaitableInFlightCount) -> None:
    """Let nothing more begin in a slab, and wait for what is under way: for receives, too, whose queues end first."""
    pins.close()
    await pins.wait()


publish(__name__)
