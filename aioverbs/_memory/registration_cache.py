"""Cache of memory registrations, for buffers that are used repeatedly."""

import asyncio
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles
from aioverbs._exports import publish
from aioverbs._lifecycle import forks
from aioverbs._lifecycle.affinity import Affinity, CrossLoopCondition
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import (
    HandleResource,
    close_after_error,
    lifecycle_of,
    open_part,
    suppress_warning,
)
from aioverbs._lifecycle.turns import LIGHT, spend, yield_to_loop
from aioverbs._memory.region import MemoryRegion, is_shortage
from aioverbs.errors import BusyResourceError, ClosedResourceError, ForkedProcessError, VerbsError
from aioverbs.types import AccessFlags

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["RegistrationCache", "RegistrationCacheStatistics", "is_temporary"]

# Interval at which a task that waits for another loop checks that the loop still exists: its end notifies no waiter.
_POLL_S = 0.1
_WRITES = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC

# Key of a registration: id of the exporting object, address and length of the bytes, access rights, and whether the
# buffer was read-only.
_Key = tuple[int, int, int, AccessFlags, bool]


@dataclass(frozen=True)
class RegistrationCacheStatistics:
    """Counts of a registration cache at one moment. `RegistrationCache.statistics` returns one.

    :param hits: number of blocks whose memory was already registered.
    :param misses: number of blocks that registered their memory.
    :param evictions: number of registrations evicted, to make room, by `RegistrationCache.drop` or because only
        registrations in caches held their memory.
    :param entries: number of registrations in the cache.
    :param bytes: sum of their lengths.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


# Exports of objects, by the ids of these, that the registrations of each object share: so many registrations are one
# reference to the object. An export keeps its object alive, so no other object has that id while it is in here.
_shared: weakref.WeakValueDictionary[int, memoryview] = weakref.WeakValueDictionary()


def _export(buffer: "Buffer", access: AccessFlags) -> tuple[memoryview, memoryview | None]:
    """Export a buffer apart from the caller's memoryviews, so that references to its exporter can be counted.

    :param buffer: object with the buffer protocol; if it is a memoryview, only the bytes of that view are exported.
    :param access: access rights for which the buffer is to be registered.
    :returns: the bytes, and the export of the whole object, which all registrations of its bytes share as long as one
        of them refers to it; None if they cannot share one.
    :raises TypeError: the object has no buffer protocol.
    :raises BufferError: the memory is not contiguous, or is read-only although ``access`` permits writing.
    :raises ValueError: the memory has no bytes.
    """
    view = memoryview(buffer)
    if view.readonly and access & _WRITES:
        raise BufferError("the memory is read-only, but `access` permits writing")
    address, length = handles.span(view)
    if not length:
        raise ValueError("there is nothing to register: the memory has no bytes")
    exporter = _exporter(view)
    if exporter is None:
        return view, None
    try:
        whole = _shared.get(id(exporter))
        if whole is None:
            whole = _shared.setdefault(id(exporter), memoryview(exporter))
    except TypeError:  # an object that helps another one to export its memory, such as one with `__buffer__`
        return view, None
    start, size = handles.span(whole)
    is_inside = start <= address <= address + length <= start + size  # else the object exports other memory each time
    if not is_inside or (whole.readonly and not view.readonly):
        return view, None
    part = whole.cast("B")[address - start : address - start + length]
    return part.toreadonly() if view.readonly else part, whole


def _exporter(view: memoryview) -> "Buffer | None":
    """Return the object that exports the bytes of a memoryview; None if unknown."""
    return view.obj


def _key(view: memoryview, access: AccessFlags) -> _Key:
    """Return the key of the registration of a memoryview."""
    return id(_exporter(view)), *handles.span(view), access, view.readonly


def _references(view: memoryview) -> int:
    """Return the number of references to the object that exports the bytes of a memoryview."""
    return sys.getrefcount(view.obj)


_EXPORT_ALONE = _references(memoryview(bytearray(1)))  # count of an object that only its export references


def is_temporary(view: memoryview) -> bool:
    """Return whether nothing but this memoryview, and slices of it, reference the object that exports its bytes: the
    cache would evict a registration at the end of its first use.

    :param view: the memoryview. None of its slices was exported separately.
    """
    return _exporter(view) is not None and _references(view) <= _EXPORT_ALONE


class _Entry:
    """Registration in the cache, open or being opened, with the blocks that use it.

    :param key: key in the cache.
    :param region: the registration.
    :param export: export of the whole object, if its registrations share one.
    """

    def __init__(self, key: _Key, region: MemoryRegion, export: memoryview | None) -> None:
        self.key = key
        self.region = region
        self._export = export
        self.users: set[object] = set()
        self.opening = True
        self._opener = Affinity.of_running_loop() if asyncio._get_running_loop() is not None else None
        self.condition = CrossLoopCondition()  # notified when opening succeeded or failed

    @property
    def ready(self) -> bool:
        """True if the region is open and can be used."""
        return not self.opening and self.region.state is ResourceState.OPEN

    @property
    def deserted(self) -> bool:
        """True if the task that was opening the region cannot continue, because its loop was closed or the thread of
        the loop has ended.
        """
        opener = self._opener
        return (
            self.opening
            and opener is not None
            and opener.orphaned
            and not (opener.loop is not None and opener.loop.is_running())
        )

    def opened(self) -> None:
        """Record that opening the region succeeded or failed, and notify waiting tasks."""
        self.opening, self._opener = False, None
        self.condition.notify()

    async def wait_settled(self) -> None:
        """Wait until no task is opening or closing the region, or the task that was opening it has been deserted.

        :raises RuntimeError: a task is opening or closing the region, and no asyncio event loop is running here.
        """
        await self.condition.wait_while(lambda: self.opening and not self.deserted, poll_s=_POLL_S)
        await lifecycle_of(self.region).wait_settled()

    @property
    def idle(self) -> bool:
        """True if the region is not being opened, no task is in a block with it, and no work request uses it."""
        return not (self.opening or self.users or len(self.region.pins))

    def release_memory(self) -> None:
        """Drop the references to the memory, because it is not registered any longer."""
        self.region._memory = self._export = None

    @property
    def orphaned(self) -> bool:
        """True if nothing but registrations references the object that exports the memory."""
        view = self.region._memory
        return isinstance(view, memoryview) and _references(view) <= _EXPORT_ALONE


class _CacheRemoval:
    """Removal of an entry from the cache, and release of its memory, after the handle of the region was destroyed."""

    def __init__(self, cache: "RegistrationCache", entry: _Entry) -> None:
        self._cache = cache
        self._entry = entry

    def destroy(self) -> None:
        """Remove the entry from the cache, and drop the region's reference to the memory."""
        self._cache._on_region_closed(self._entry)
        self._entry.release_memory()


class _MemoryRelease:
    """Release of the memory of a region that is not in the cache, after its handle was destroyed."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    def destroy(self) -> None:
        """Drop the region's reference to the memory."""
        self._region._memory = None


class RegistrationCache:
    """Cache of the registrations of a protection domain: `Domain.cache`. Any event loop may use it.

    Registering memory costs more than a transfer. A program that sends from the same buffers repeatedly finds them
    already registered:

        async with pd.cache.region(buffer) as region:
            await qp.write(region, remote)

    A registration is never stale. Like any `MemoryRegion`, it holds an export of the buffer's object, so while it is in
    the cache, that object exists and its memory does not move. A later use finds the registration by the same object,
    address and length. Until the registration is evicted, for example by `drop`, a bytearray cannot be resized and an
    mmap cannot be closed. A new array object, such as each slice of a numpy array, is a different object: slice the
    region instead.

    At the end of a block and when a further buffer is registered, the cache evicts registrations whose object nothing
    but registrations in caches references, and, if a limit is exceeded or the device can register no more memory, the
    least recently used ones. Registrations in use or under DMA stay.
    Peers that hold the key of a registration keep access until it is evicted. Closing the protection domain evicts all
    registrations.

    :param pd: protection domain that the memory is registered with.
    """

    # The cache holds exports, not weak references: a bytearray has no weak references, and none could tell that an
    # array was moved or an mmap closed. An address alone may be reused with other pages behind it. With an export the
    # object cannot be collected, so its references are counted whenever the cache is used.

    max_bytes: int
    """Maximum size of the cache in bytes. A larger buffer is registered only while it is in use."""

    max_entries: int
    """Maximum number of registrations in the cache."""

    def __init__(self, pd: HandleResource[handles.ProtectionDomain]) -> None:
        self._pd = weakref.ref(pd)  # weak, because the protection domain references the cache
        self.max_bytes = 256 << 20
        self.max_entries = 1024
        # Guards the entries, their order (least recently used first), the evicted ones and the counts. The garbage
        # collector may end a block while the lock is held and take it again, therefore a RLock; that only removes a
        # user. In the child of a fork the lock is replaced.
        self._lifecycle = lifecycle_of(pd)
        self._lock = threading.RLock()
        forks.renew_lock_in_children(self)
        self._entries: dict[_Key, _Entry] = {}
        self._evicted: set[_Entry] = set()  # evicted entries that are still registered
        self._bytes = self._hits = self._misses = self._evictions = 0

    def _renew_lock(self) -> None:
        """Replace the lock with a new one in a forked child."""
        self._lock = threading.RLock()

    def statistics(self) -> RegistrationCacheStatistics:
        """Return the current counts of the cache, such as hits and misses, as a `RegistrationCacheStatistics`."""
        return RegistrationCacheStatistics(self._hits, self._misses, self._evictions, len(self._entries), self._bytes)

    @asynccontextmanager
    async def region(
        self, buffer: "Buffer", access: AccessFlags = AccessFlags.LOCAL_WRITE
    ) -> AsyncIterator[MemoryRegion]:
        """Return an async context manager that yields the open region of a buffer, a `MemoryRegion`.

        The caller must not close the region. At the end of the block the buffer stays registered, unless it is evicted.
        A buffer that is larger than ``max_bytes``, or whose memory belongs to no object that the cache can keep alive,
        is not cached: the end of the block waits for work requests that use the buffer, and deregisters it. The
        exceptions are raised by entering the block or, if a buffer cannot be deregistered, at the end of the block;
        that buffer then stays registered.

        :param buffer: contiguous object with the buffer protocol. For a memoryview, the object behind it counts. If the
            object does not own its memory, such as a ctypes object at an address, `drop` it before that memory is
            freed.
        :param access: access rights. A registration with other rights is not reused.
        :raises ClosedResourceError: the protection domain is not open or was garbage-collected.
        :raises ForkedProcessError: the protection domain was opened in the process that this one was forked from.
        :raises ValueError: the buffer has no bytes, or peers may write and ``LOCAL_WRITE`` is missing.
        :raises BufferError: the memory is not contiguous, or is read-only although ``access`` permits writing.
        :raises TypeError: ``buffer`` has no buffer protocol.
        :raises VerbsError: the device cannot register the memory, or cannot deregister an evicted region.
        :raises BusyResourceError: at the end of the block: receives are posted in a buffer that does not stay
            registered.
        :raises RuntimeError: no asyncio event loop is running, and the buffer has 16 MiB or more, its registration is
            just being opened or closed, or the end of the block must wait for work requests.
        """
        pd = self._pd()
        if pd is None:
            raise ClosedResourceError("the protection domain of this cache was garbage-collected")
        pd.handle  # noqa: B018  checks that the protection domain is open
        access = AccessFlags(access)
        view, whole = _export(buffer, access)
        del buffer  # a temporary object must not live until the end of the block
        if _exporter(view) is None or view.nbytes > self.max_bytes or not self.max_entries:
            # Not cached: the buffer is too large, or no object is known that would keep its memory alive.
            with self._lock:
                self._misses += 1
            region = MemoryRegion(pd, pd.handle, view, access)
            suppress_warning(region)  # a region that cannot be deregistered is closed with the protection domain
            del view, whole, pd
            lifecycle_of(region).hold(_MemoryRelease(region))
            try:
                async with region:
                    yield region
            finally:  # a stored exception references this frame, and this the region, which must not keep the export
                if region.state is ResourceState.NEW:
                    region._memory = None
            return
        user = object()
        try:
            entry = await self._acquire(pd, view, whole, access, user)
        finally:  # a stored exception references this frame, which must not keep the export alive
            del view, whole, pd
        try:
            if turn := spend(LIGHT):
                await yield_to_loop(turn)
            yield entry.region
        except BaseException as error:
            entry.users.discard(user)
            await close_after_error(error, _close_regions(self._evict_surplus([entry])), "evicted registrations")
            raise
        entry.users.discard(user)
        await _close_regions(self._evict_surplus([entry]))

    @contextmanager
    def registered(self, view: memoryview, access: AccessFlags) -> Iterator[MemoryRegion | None]:
        """Return a context manager that yields the region of some bytes if these are registered already, and needs no
        await. At the end of the block nothing is evicted: the next use of the cache does that.

        :param view: the bytes, contiguous.
        :param access: access rights of the registration.
        :returns: the context manager, which yields None if `region` has to register the bytes.
        :raises ClosedResourceError: the protection domain is closed.
        :raises ForkedProcessError: the protection domain was opened in the process that this one was forked from.
        """
        pd, user = self._pd(), object()
        if pd is not None:
            pd.handle  # noqa: B018  checks that the protection domain is open
        key = _key(view, access)
        with self._lock:
            entry = self._entries.get(key)
            is_full = self._bytes > self.max_bytes or len(self._entries) > self.max_entries  # `region` evicts
            if entry is not None and entry.ready and not is_full:
                self._entries[key] = self._entries.pop(key)  # now the most recently used
                self._hits += 1
                entry.users.add(user)
            else:
                entry = None
        if entry is None:
            yield None
            return
        try:
            yield entry.region
        finally:
            entry.users.discard(user)

    async def drop(self, buffer: "Buffer") -> None:
        """Evict all registrations of a buffer's object, so that it can be resized or closed.

        Do nothing if there is no registration. Wait for work requests that use the registrations. If the wait is
        cancelled, the memory stays registered until these have completed; another call to `drop` waits for that as
        well.

        :param buffer: object with the buffer protocol; for a memoryview, the object behind it counts.
        :raises BusyResourceError: a task is in a block with the buffer, or receives are posted in it. In this case
            nothing is done.
        :raises ForkedProcessError: the protection domain was opened in the process that this one was forked from, and
            only that process can evict the registrations. In this case nothing is done.
        :raises TypeError: ``buffer`` has no buffer protocol.
        :raises VerbsError: the device cannot deregister the memory, which stays registered; another call to `drop`
            tries again.
        :raises RuntimeError: work requests use a registration, and no asyncio event loop is running. The memory stays
            registered; another call to `drop` tries again.
        """
        if self._lifecycle.inherited:
            raise ForkedProcessError(repr(self._lifecycle))
        exporter_id = id(_exporter(memoryview(buffer)))
        with self._lock:
            entries = [entry for key, entry in self._entries.items() if key[0] == exporter_id]
            deserted = [entry for entry in entries if entry.deserted]
            for entry in entries:
                if entry.users and entry not in deserted:
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
        for entry in deserted:
            self._on_region_closed(entry)  # if it was never opened

    # ---- Registering

    async def _acquire(
        self,
        pd: HandleResource[handles.ProtectionDomain],
        view: memoryview,
        whole: memoryview | None,
        access: AccessFlags,
        user: object,
    ) -> _Entry:
        """Return the open entry for some bytes. If there is none, register the bytes first.

        If another task is opening or closing the region of the entry, wait until that task has finished.

        :param pd: protection domain of the cache.
        :param view: the bytes. The view keeps their object alive, so no other object has its id.
        :param whole: export of the whole object, if its registrations share one.
        :param access: access rights.
        :param user: object that is added to the users of the entry. The caller removes it after use. If this raises,
            `user` has been removed.
        :returns: the entry, whose region is open.
        :raises VerbsError: the device cannot register the memory. The other exceptions that `region` lists are raised
            as well.
        """
        try:  # a stored exception references this frame, too
            key = _key(view, access)
            while True:
                with self._lock:
                    entry = self._entries.pop(key, None)
                    hit = entry is not None
                    if entry is None:
                        entry = _Entry(key, MemoryRegion(pd, pd.handle, view, access), whole)
                        self._bytes += view.nbytes
                        self._misses += 1
                    self._entries[key] = entry  # now the most recently used
                    entry.users.add(user)
                    if hit and entry.ready:
                        self._hits += 1
                        return entry
                try:
                    if not hit:
                        await self._register(entry)
                        return entry
                    await entry.wait_settled()
                    if entry.deserted:
                        await self._close_deserted(entry)
                except BaseException as error:
                    entry.users.discard(user)
                    if not (isinstance(error, VerbsError) and is_shortage(error) and await self._close_idle()):
                        raise
                entry.users.discard(user)  # try again: the entry is ready now, or was removed
        finally:
            del view, whole

    async def _register(self, entry: _Entry) -> None:
        """Evict surplus registrations, and open the region of a new entry.

        If that fails, remove the entry from the cache.

        :raises VerbsError: the device cannot register the memory, or cannot deregister an evicted region. The other
            exceptions that `region` lists are raised as well.
        """
        region = entry.region
        try:
            await _close_regions(self._evict_surplus())  # first, because the device may be at a limit
            lifecycle_of(region).hold(_CacheRemoval(self, entry))  # held before the handle, so destroyed after it
            await open_part(region, keeps_parents=False)
        except BaseException:
            self._remove(entry)
            if region.state is ResourceState.NEW:
                entry.release_memory()
            raise
        finally:
            entry.opened()

    async def _close_idle(self) -> bool:
        """Evict the registration that is idle and was not used for the longest time, and deregister its memory.

        :returns: False if there is none.
        :raises VerbsError: the device cannot deregister the memory, which `drop` tries again.
        """
        with self._lock:
            idle = [entry for entry in self._entries.values() if entry.idle][:1]
            self._evict(idle)
        await _close_regions(idle)
        return bool(idle)

    async def _close_deserted(self, entry: _Entry) -> None:
        """Remove an entry that no task continues to open, and close its region if a thread has opened it.

        :raises VerbsError: the device cannot deregister the memory, which `drop` tries again.
        """
        with self._lock:
            if self._entries.get(entry.key) is entry:
                self._evict([entry])
        await entry.region.aclose()
        self._on_region_closed(entry)  # if it was never opened

    # ---- Evicting

    def _remove(self, entry: _Entry) -> None:
        """Remove an entry from the cache, if it is still there, without closing its region."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self._bytes -= len(entry.region)

    def _on_region_closed(self, entry: _Entry) -> None:
        """Forget an entry whose region has been closed."""
        with self._lock:
            self._remove(entry)
            self._evicted.discard(entry)

    def _evict(self, entries: list[_Entry]) -> None:
        """Remove entries from the cache and count them as evicted.

        The caller holds the lock and must close the regions.
        """
        for entry in entries:
            self._remove(entry)
        self._evicted.update(entries)
        self._evictions += len(entries)

    def _evict_surplus(self, candidates: Iterable[_Entry] | None = None) -> list[_Entry]:
        """Evict idle registrations that are orphaned or exceed the limits.

        While a limit is exceeded, idle registrations are evicted, the least recently used first.

        :param candidates: entries that are evicted if they are idle and orphaned; None for all entries of the cache.
        :returns: list of the evicted entries, whose regions the caller must close.
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
    """Close the regions of all entries, even if closing one fails.

    :raises BaseException: closing at least one region failed, or this was cancelled. After the attempt to close each
        region, the last exception is raised; regions that could not be closed stay open.
    """
    async with AsyncExitStack() as stack:
        for entry in entries:
            stack.push_async_callback(entry.region.aclose)


publish(__name__)
