"""Registrations that are kept for buffers that come back."""

import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import CrossLoopCondition
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import HandleResource, lifecycle_of, open_part
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs._memory.region import MemoryRegion
from aioverbs.errors import BusyResourceError, ClosedResourceError, ForkedProcessError
from aioverbs.types import AccessFlags

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["RegistrationCache", "RegistrationCacheStatistics"]

_WRITES = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC

# What a registration is of: the object (its id), the address and length of its bytes, access, and whether it was given
# to be read only.
_Key = tuple[int, int, int, AccessFlags, bool]


@dataclass(frozen=True)
class RegistrationCacheStatistics:
    """What a registration cache has done, and keeps at one moment.

    :param hits: blocks that hit their memory registered.
    :param misses: blocks that registered it.
    :param evictions: registrations that were given up, to make room or because their memory was dropped.
    :param entries: registrations that are kept.
    :param bytes: the sum of their lengths.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


def _export(buffer: "Buffer", access: AccessFlags) -> memoryview:
    """An export of the bytes that is nobody else's, so that references to their object can be told apart."""
    view = memoryview(buffer)
    if view.readonly and access & _WRITES:
        raise BufferError("the memory is read-only, and is to be written")
    address, length = handles.span(view)
    if not length:
        raise ValueError("there is nothing to register: the memory has no bytes")
    if not isinstance(buffer, memoryview) or _exporter(view) is None:
        return view
    whole = memoryview(view.obj)
    start, size = handles.span(whole)
    if not start <= address <= address + length <= start + size:  # an object that exports something else each time
        return view
    part = whole.cast("B")[address - start : address - start + length]
    return part.toreadonly() if view.readonly else part


def _exporter(view: memoryview) -> object:
    """The object whose bytes these are; None where it is unknown."""
    return view.obj


def _references(view: memoryview) -> int:
    return sys.getrefcount(view.obj)


_EXPORT_ALONE = _references(memoryview(bytearray(1)))  # where an object has no other reference than its export's


class _Entry:
    """A registration that is kept."""

    def __init__(self, key: _Key, region: MemoryRegion) -> None:
        self.key = key
        self.region = region
        self.users: set[object] = set()
        self.opening = True
        self.condition = CrossLoopCondition()  # it was opened, or was not

    @property
    def ready(self) -> bool:
        """Whether it may be used now."""
        return not self.opening and self.region.state is ResourceState.OPEN

    async def wait_settled(self) -> None:
        """Until nobody is opening or closing it."""
        await self.condition.wait_while(lambda: self.opening)
        await lifecycle_of(self.region).wait_settled()

    @property
    def idle(self) -> bool:
        """Whether nobody is in its block, and no device at its memory."""
        return not (self.opening or self.users or len(self.region.pins))

    @property
    def orphaned(self) -> bool:
        """Whether its object would be gone by now if it were not for the registration."""
        view = self.region._memory
        return isinstance(view, memoryview) and _references(view) <= _EXPORT_ALONE


class _CacheRemoval:
    """What a region does when its handle is gone, whoever closed it: it leaves the cache, and its memory alone."""

    def __init__(self, cache: "RegistrationCache", entry: _Entry) -> None:
        self._cache = cache
        self._entry = entry

    def destroy(self) -> None:
        self._cache._on_region_closed(self._entry)
        self._entry.region._memory = None


class _MemoryRelease:
    """What a region that is not kept does when its handle is gone: it leaves its memory alone."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    def destroy(self) -> None:
        self._region._memory = None


def _release_unopened(region: MemoryRegion) -> None:
    # Who keeps an error keeps frames, and the region by those, which is not to keep the export, too.
    if region.state is ResourceState.NEW:
        region._memory = None


class RegistrationCache:
    """Registrations of buffers that come back, kept by a protection domain: `Domain.cache`. Any event loop may use it.

    Registering costs more than a transfer does; who sends from the same buffers again finds them registered:

        async with pd.cache.region(buffer) as region:
            await qp.write(region, remote)

    A registration is never a stale one. It holds an export of the buffer's object, as any `MemoryRegion` does: as long
    as it is kept, that object is not gone, and its memory is where it was; and it is hit again by that very object,
    address and length. So a bytearray cannot be resized and an mmap not closed before it is evicted, as `drop` does. A
    new array object, as each slice of a numpy array is, is another object: take slices of the region instead.

    Without being asked it evicts what only the cache still holds (at the end of the block, or when the next buffer is
    registered) and, where there is too much, the longest unused. What is in use, or under DMA, stays. Whom a peer was
    given the key of, it can reach until then. Closing the protection domain evicts all.

    :param pd: the protection domain.
    """

    # A weak reference to the object instead of an export could not say when a bytearray (which takes none) or an array
    # was moved, or an mmap closed; and the address alone may come back with other pages behind it. With an export the
    # object cannot die; so its references are counted when something happens here anyway.

    max_bytes: int
    """How many bytes may be kept. More than that is registered only as long as it is in use."""

    max_entries: int
    """How many registrations may be kept."""

    def __init__(self, pd: HandleResource[handles.ProtectionDomain]) -> None:
        self._pd = weakref.ref(pd)  # which has this
        self.max_bytes = 256 << 20
        self.max_entries = 1024
        # Guards the entries, their order (the longest unused first), those that go, and the counts. The collector may
        # end a block inside of it, which takes the lock again, and only ever takes a user away. In a child of a fork it
        # is a new one.
        self._lifecycle = lifecycle_of(pd)
        self._lock = threading.RLock()
        forks.renew_lock_in_children(self)
        self._entries: dict[_Key, _Entry] = {}
        self._evicted: set[_Entry] = set()  # those that were given up and are still registered
        self._bytes = self._hits = self._misses = self._evictions = 0

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def statistics(self) -> RegistrationCacheStatistics:
        """What it did, and what it keeps."""
        return RegistrationCacheStatistics(self._hits, self._misses, self._evictions, len(self._entries), self._bytes)

    @asynccontextmanager
    async def region(
        self, buffer: "Buffer", access: AccessFlags = AccessFlags.LOCAL_WRITE
    ) -> AsyncIterator[MemoryRegion]:
        """A buffer's region, registered now or before. The end of the block leaves it registered: do not close it.

        :param buffer: an object with the buffer protocol, contiguous. Where it is a memoryview, the object behind it
            is what counts. What has memory that is not its own, as a ctypes object at an address, is to be dropped
            before that memory goes.
        :param access: what may be done to it; what was registered for more or less does not serve.
        :raises ClosedResourceError: the protection domain is not open.
        :raises ValueError: there is nothing to register, or ``LOCAL_WRITE`` is missing where peers may write.
        :raises BufferError: the memory is not contiguous, or is read-only and to be written.
        :raises VerbsError: the device cannot register it, or cannot give up another one.
        """
        pd = self._pd()
        if pd is None:
            raise ClosedResourceError("the protection domain of this cache is gone")
        pd.handle  # noqa: B018  that it is open
        access = AccessFlags(access)
        view = _export(buffer, access)
        del buffer  # a temporary one is gone at the end
        if _exporter(view) is None or view.nbytes > self.max_bytes or not self.max_entries:
            # Too large to be kept, or nobody's memory, of which nothing could tell whether it is still there.
            with self._lock:
                self._misses += 1
            region = MemoryRegion(pd, pd.handle, view, access)
            del view, pd
            lifecycle_of(region).hold(_MemoryRelease(region))
            try:
                async with region:
                    yield region
            finally:
                _release_unopened(region)
            return
        user = object()
        try:
            entry = await self._acquire(pd, view, access, user)
        finally:  # who keeps an error keeps this frame, too, and would keep the export by it
            del view, pd
        try:
            if turn := spend(LIGHT):
                await yield_to_loop(turn)
            yield entry.region
        finally:
            entry.users.discard(user)
            await _close_regions(self._evict_surplus([entry]))

    async def drop(self, buffer: "Buffer") -> None:
        """Evict a buffer's object, so that it can be resized or closed. Work with it is waited for.

        Where that is cancelled the memory stays registered until its work has ended; to drop it once more waits for
        that, too.

        :raises BusyResourceError: somebody is in a block with it, or receives are posted in it; nothing was done.
        :raises ForkedProcessError: the protection domain was opened in the process that this one was forked from, which
            alone can evict it; nothing was done.
        """
        if self._lifecycle.inherited:
            raise ForkedProcessError(repr(self._lifecycle))
        exporter_id = id(_exporter(memoryview(buffer)))
        with self._lock:
            entries = [entry for key, entry in self._entries.items() if key[0] == exporter_id]
            for entry in entries:
                if entry.users:
                    raise BusyResourceError(f"{entry.region!r} is in use: leave the block first")
                if entry.region.pins.receives:
                    raise BusyResourceError(
                        f"{entry.region!r} has {entry.region.pins.receives} receives posted in it: close or reset "
                        "their queue pair, or close their shared receive queue, first"
                    )
            self._evict(entries)
            # Includes entries of earlier calls that were cancelled.
            entries = [entry for entry in self._evicted if entry.key[0] == exporter_id]
        await _close_regions(entries)

    # ---- Coming

    async def _acquire(
        self, pd: HandleResource[handles.ProtectionDomain], view: memoryview, access: AccessFlags, user: object
    ) -> _Entry:
        """The entry of these bytes, open. `view` keeps their object here: so no other one has its id."""
        try:  # as above: of this frame, too
            key = (id(_exporter(view)), *handles.span(view), access, view.readonly)
            while True:
                with self._lock:
                    entry = self._entries.pop(key, None)
                    hit = entry is not None
                    if entry is None:
                        entry = _Entry(key, MemoryRegion(pd, pd.handle, view, access))
                        self._bytes += view.nbytes
                        self._misses += 1
                    self._entries[key] = entry  # the latest used
                    entry.users.add(user)
                    if hit and entry.ready:
                        self._hits += 1
                        return entry
                try:
                    if not hit:
                        await self._register(entry)
                        return entry
                    await entry.wait_settled()
                except BaseException:
                    entry.users.discard(user)
                    raise
                entry.users.discard(user)  # and once more: it is ready now, or is not there any more
        finally:
            del view

    async def _register(self, entry: _Entry) -> None:
        region = entry.region
        try:
            await _close_regions(self._evict_surplus())  # first: the device may have no more room
            lifecycle_of(region).hold(_CacheRemoval(self, entry))  # before its handle, and so after that at the end
            await open_part(region, keeps_parents=False)
        except BaseException:
            self._remove(entry)
            _release_unopened(region)
            raise
        finally:
            entry.opening = False
            entry.condition.notify()

    # ---- Going

    def _remove(self, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self._bytes -= len(entry.region)

    def _on_region_closed(self, entry: _Entry) -> None:
        with self._lock:
            self._remove(entry)
            self._evicted.discard(entry)

    def _evict(self, entries: list[_Entry]) -> None:
        for entry in entries:
            self._remove(entry)
        self._evicted.update(entries)
        self._evictions += len(entries)

    def _evict_surplus(self, candidates: Iterable[_Entry] | None = None) -> list[_Entry]:
        """Give up what is idle and orphaned of those that are looked at, by default all, and the longest unused of all
        that are idle while there are too many; what is returned is to be closed.
        """
        with self._lock:
            kept = tuple(self._entries.values())
            surplus = [
                entry
                for entry in (kept if candidates is None else candidates)
                if entry.idle and entry.orphaned and self._entries.get(entry.key) is entry
            ]
            self._evict(surplus)
            for entry in kept:
                if self._bytes <= self.max_bytes and len(self._entries) <= self.max_entries:
                    break
                if entry.idle and self._entries.get(entry.key) is entry:
                    surplus.append(entry)
                    self._evict([entry])
            return surplus


async def _close_regions(entries: Iterable[_Entry]) -> None:
    """All of them, whatever fails."""
    async with AsyncExitStack() as stack:
        for entry in entries:
            stack.push_async_callback(entry.region.aclose)


publish(__name__)
