"""Registered memory for received messages, which is used again when nothing refers to it any longer."""

import asyncio
import contextlib
import ctypes
import weakref
from collections import deque

from aioverbs._core.data_path.data_path import RegionSlice
from aioverbs._lifecycle.affinity import running_loop
from aioverbs._lifecycle.resource import lifecycle_of, open_part
from aioverbs._memory.region import MemoryRegion, map_pages
from aioverbs._verbs.base_domain import Domain, shared_resources_of
from aioverbs.types import AccessFlags

__all__ = ["RecycledMemory", "recycled_memory_of"]

_MAX_IDLE_BYTES = 256 << 20
_SMALLEST_STEP = 16 << 10
_STEPS = 4  # sizes from one power of two to the next, so that less than a quarter of a region is unused


class RecycledMemory:
    """Registered memory of one domain and event loop.

    There is nothing to release: memory is used again when no memoryview of it, and no object made from one, exists any
    longer. Up to 256 MiB are kept for that.

    :param domain: domain that the memory is registered with, and closed together with.
    """

    # A memoryview keeps the object alive that it was made from, but neither can be told of its end by a finalizer of
    # ours: slices and arrays made from it outlive it, and an mmap unmaps its pages when it ends. So each time, a ctypes
    # array over the mapping is the object behind all memoryviews, and a weak reference to it tells of the end of all.

    def __init__(self, domain: Domain) -> None:
        self._pd = domain.base
        self._loop = running_loop()
        self._trimming: asyncio.Task[None] | None = None
        # Regions that are not in use; the last one was used last. Finalizers append, in any thread.
        self._idle: deque[MemoryRegion] = deque()
        # By the id of the weak reference, which is kept: it has no hash.
        self._in_use: dict[int, tuple[weakref.ref[ctypes.Array[ctypes.c_char]], MemoryRegion]] = {}

    async def take(self, length: int) -> tuple[RegionSlice, memoryview]:
        """Return registered memory that nothing else refers to, with any content.

        :param length: length in bytes, at least 1.
        :returns: the memory as a registered slice, and as a memoryview of format ``B``. The memory is not used again
            while the memoryview, or an object made from it, exists.
        :raises VerbsError: the device cannot register the memory.
        :raises OSError: the process cannot map that much memory.
        :raises ClosedResourceError: the domain is closed.
        """
        size = _rounded(length)
        # That of the last use may still be in the CPU's cache. A copy, since finalizers may append.
        region = next((each for each in reversed(self._idle.copy()) if len(each) == size and not each.pins), None)
        if region is not None:
            self._idle.remove(region)
        else:
            region = MemoryRegion(self._pd, self._pd.handle, map_pages(size), AccessFlags.LOCAL_WRITE)
            await open_part(region, keeps_parents=False)
        memory = (ctypes.c_char * size).from_buffer(region.buffer)
        reference = weakref.ref(memory, self._return)
        self._in_use[id(reference)] = reference, region
        return region[:length], memoryview(memory).cast("B")[:length]

    def _return(self, reference: "weakref.ref[ctypes.Array[ctypes.c_char]]") -> None:
        """Keep a region for the next use, because no memoryview of it exists any longer. This is called in any thread.

        :param reference: weak reference to the object behind the memoryviews, which has ended.
        """
        _, region = self._in_use.pop(id(reference))
        self._idle.append(region)
        if self._surplus() > 0 and not lifecycle_of(self._pd).inherited:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the domain deregisters the memory
                self._loop.call_soon_threadsafe(self._start_trimming)

    def _surplus(self) -> int:
        """Return how many bytes more are not in use than are kept; 0 or less if there are none."""
        return sum(len(each) for each in self._idle.copy()) - _MAX_IDLE_BYTES  # a copy, since finalizers may append

    def _start_trimming(self) -> None:
        """Start `_trim`, unless it runs, so that it also deregisters what was returned since."""
        if self._trimming is None or self._trimming.done():
            self._trimming = self._loop.create_task(self._trim())

    async def _trim(self) -> None:
        """Deregister the memory that was not used for the longest time, until at most 256 MiB are not in use.

        :raises VerbsError: the device cannot deregister it. It is closed together with the domain.
        """
        while self._surplus() > 0:
            await self._idle.popleft().aclose()


def _rounded(length: int) -> int:
    """Return the size of the region for a length in bytes: the next one of a few sizes, so that regions can be used for
    messages of similar lengths.
    """
    step = max(1 << max((length - 1).bit_length() - 1, 0), _STEPS * _SMALLEST_STEP) // _STEPS
    return -(-length // step) * step


def recycled_memory_of(domain: Domain) -> RecycledMemory:
    """Return the memory that connections of the running loop on a domain share."""
    key = "received messages", running_loop()
    found = shared_resources_of(domain.base).get(key)
    if found is None:
        found = shared_resources_of(domain.base).setdefault(key, RecycledMemory(domain))
    assert isinstance(found, RecycledMemory)
    return found
