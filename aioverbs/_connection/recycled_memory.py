"""Registered memory for received messages, which is used again when nothing refers to it any longer."""

import asyncio
import contextlib
import ctypes
import weakref
from collections import deque
from time import monotonic

from aioverbs._core.data_path.data_path import RegionSlice
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.resource import lifecycle_of, open_part
from aioverbs._memory.region import MemoryRegion, is_shortage, map_pages
from aioverbs._verbs.base_domain import Domain, shared_resources_of
from aioverbs._verbs.capability_checks import has_windows
from aioverbs.types import AccessFlags

__all__ = ["RecycledMemory", "recycled_memory_of", "rounded"]

_MAX_IDLE_BYTES = 256 << 20
_MAX_RECENT_BYTES = 5 << 28  # a message of 1 GiB, and what it leaves unused of its region
_KEEP_S = 1.0
_EARLY_S = 0.005  # by which a timer may fire too early
_SMALLEST_STEP = 16 << 10
_STEPS = 4  # sizes from one power of two to the next, so that less than a quarter of a region is unused


class RecycledMemory:
    """Registered memory of a protection domain, for the connections of all event loops.

    There is nothing to release: memory is used again when no memoryview of it, and no object made from one, exists any
    longer. Up to 256 MiB are kept for that. The memory of a message up to 1 GiB that was returned last is kept for a
    second, so that long messages that follow each other find memory whose pages exist; if the event loop ends
    meanwhile, until another one takes memory.

    :param domain: domain that the memory is registered with, and closed together with.
    """

    # A memoryview keeps the object alive that it was made from, but neither can be told of its end by a finalizer of
    # ours: slices and arrays made from it outlive it, and an mmap unmaps its pages when it ends. So each time, a ctypes
    # array over the mapping is the object behind all memoryviews, and a weak reference to it tells of the end of all.

    def __init__(self, domain: Domain) -> None:
        self._pd = domain.base
        self._loop: asyncio.AbstractEventLoop | None = None  # on which memory was last taken
        self._trimming: asyncio.Task[None] | None = None
        self._waiting: asyncio.AbstractEventLoop | None = None  # trims when the last region was kept for long enough
        self._returned_at = 0.0  # when memory was last returned, by the monotonic clock
        # Regions that are not in use; the last one was used last. Other loops, and finalizers in any thread, change it
        # at any time, so it is copied before it is searched, and the one that removes a region has it.
        self._idle: deque[MemoryRegion] = deque()
        # By the id of the weak reference, which is kept: it has no hash.
        self._in_use: dict[int, tuple[weakref.ref[ctypes.Array[ctypes.c_char]], MemoryRegion]] = {}

    async def take(self, length: int) -> tuple[RegionSlice, memoryview]:
        """Return registered memory that nothing else refers to, with any content.

        :param length: length in bytes, at least 1.
        :returns: the memory as a registered slice, and as a memoryview of format ``B``. The memory is not used again
            while the memoryview, or an object made from it, exists.
        :raises VerbsError: the device cannot register the memory, even after that which is not in use was deregistered.
        :raises OSError: the process cannot map that much memory, even then.
        :raises ClosedResourceError: the domain is closed.
        """
        self._loop = loop = running_loop()
        if self._waiting is not None and self._waiting.is_closed():
            self._stop_waiting(loop)
        size = rounded(length)
        while (region := self._take_idle(size)) is None:
            try:
                region = await self._register(size)
                break
            except OSError as error:
                idle = self._take_idle() if is_shortage(error) else None
                if idle is None:
                    raise
            await idle.aclose()
        memory = (ctypes.c_char * size).from_buffer(region.buffer)
        reference = weakref.ref(memory, self._return)
        self._in_use[id(reference)] = reference, region
        return region[:length], memoryview(memory).cast("B")[:length]

    async def _register(self, size: int) -> MemoryRegion:
        """Return a new region.

        :raises Exception: whatever `take` raises.
        """
        pd, access = self._pd.handle, AccessFlags.LOCAL_WRITE
        if has_windows(pd.context.attributes):
            access |= AccessFlags.MW_BIND  # for copies of messages: see `Staging`
        region = MemoryRegion(self._pd, pd, map_pages(size), access)
        return await open_part(region, keeps_parents=False)

    def _take_idle(self, size: int | None = None) -> MemoryRegion | None:
        """Take a region that is not in use, neither by the user nor by work requests.

        :param size: its size: the region that was used last, as it may still be in the CPU's cache; None for the region
            of any size that was not used for the longest time.
        :returns: the region; None if there is none.
        """
        regions = self._idle.copy()
        for region in regions if size is None else reversed(regions):
            if size in (None, len(region)) and not region.pins:
                with contextlib.suppress(ValueError):  # another loop has taken it
                    self._idle.remove(region)
                    return region
        return None

    def _return(self, reference: "weakref.ref[ctypes.Array[ctypes.c_char]]") -> None:
        """Keep a region for the next use, because no memoryview of it exists any longer. This is called in any thread.

        :param reference: weak reference to the object behind the memoryviews, which has ended.
        """
        _, region = self._in_use.pop(id(reference))
        self._idle.append(region)
        self._returned_at = monotonic()
        loop = self._loop
        if loop is not None and self._idle_bytes() > _MAX_IDLE_BYTES and not lifecycle_of(self._pd).inherited:
            with contextlib.suppress(RuntimeError):  # the loop is closed: another one trims when it returns memory
                loop.call_soon_threadsafe(self._start_trimming, loop)

    def _idle_bytes(self) -> int:
        """Return how many bytes are not in use."""
        return sum(len(each) for each in self._idle.copy())

    def _stop_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on with `_trim` on the running loop, because the last region was kept for long enough, or the loop that
        waited has ended."""
        self._waiting = None
        self._start_trimming(loop)

    def _start_trimming(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start `_trim` on the running loop, unless it runs, so that it also deregisters what was returned since."""
        trimming = self._trimming
        if trimming is None or trimming.done() or trimming.get_loop().is_closed():
            self._trimming = loop.create_task(self._trim())

    async def _trim(self) -> None:
        """Deregister the memory that was not used for the longest time, until at most 256 MiB are not in use. The last
        of it stays for a second, up to 1.25 GiB.

        :raises VerbsError: the device cannot deregister it. It is closed together with the domain.
        """
        while self._idle_bytes() > _MAX_IDLE_BYTES:
            rest_s = self._returned_at + _KEEP_S - monotonic()
            if len(self._idle) == 1 and rest_s > _EARLY_S and self._idle_bytes() <= _MAX_RECENT_BYTES:
                if self._waiting is None:
                    self._waiting = loop = running_loop()
                    loop.call_later(rest_s, self._stop_waiting, loop)
                return
            region = self._take_idle()
            if region is None:
                return
            await region.aclose()


def rounded(length: int) -> int:
    """Return the size of the region for a length in bytes: the next one of a few sizes, so that regions can be used for
    messages of similar lengths.
    """
    step = max(1 << max((length - 1).bit_length() - 1, 0), _STEPS * _SMALLEST_STEP) // _STEPS
    return -(-length // step) * step


def recycled_memory_of(domain: Domain) -> RecycledMemory:
    """Return the memory that connections on a protection domain share."""
    key = "received messages"
    found = shared_resources_of(domain.base).get(key)
    if found is None:
        found = shared_resources_of(domain.base).setdefault(key, RecycledMemory(domain))
    assert isinstance(found, RecycledMemory)
    return found
