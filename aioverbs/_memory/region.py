"""Memory that devices read and write: regions of this process, and what is known of a peer's."""

import asyncio
import ctypes
import errno
import mmap
import operator
import sys
import weakref
from typing import TYPE_CHECKING, Self

from aioverbs._core.data_path import data_path
from aioverbs._core.data_path.data_path import RegionSlice, Registered, RemoteRegion
from aioverbs._core.handles import handles
from aioverbs._core.software.software import ImportedRegion
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import CrossLoopCondition, running_loop, wait_uncancelled
from aioverbs._lifecycle.lifecycle import Lifecycle
from aioverbs._lifecycle.resource import HandleResource, Resource, open_now
from aioverbs._providers import hardware
from aioverbs.allocators import USE_DEFAULT, Allocator, checked_allocator
from aioverbs.errors import BusyResourceError, ForkedProcessError
from aioverbs.types import AccessFlags, MwType

if TYPE_CHECKING:
    from pyverbs.mr import MR
    from typing_extensions import Buffer

__all__ = [
    "AdoptedMemoryRegion",
    "ImportedMemoryRegion",
    "MemoryRegion",
    "MemoryWindow",
    "RegionSlice",
    "RemoteRegion",
    "WaitableInFlightCount",
    "register_queue_memory",
]

# From here on registering, which touches every page, is done beside the loop.
_LARGE_BYTES = 16 << 20
_HUGE_PAGE = 2 << 20  # bytes
_MADV_WIPEONFORK = 18  # linux/mman.h; the module mmap has no name for it


class WaitableInFlightCount(data_path.InFlightCount):
    """What is under way with some memory. Any thread adds and discards, any loop waits for the end.

    :param parent: of the memory that this is a part of: what is under way here is under way there.
    :param idle: called when nothing is under way any more, by the thread that discards; at times more often than once.
    """

    async def wait(self) -> None:
        """Until nothing is under way.

        :raises ForkedProcessError: something was when this process was forked, in the parent, which alone is told.
        """
        self._check_process()
        if self.condition is None:
            self.condition = CrossLoopCondition()
        await self.condition.wait_while(lambda: len(self))

    def _check_process(self) -> None:
        if self.inherited and len(self):
            raise ForkedProcessError("this memory")

    async def close_and_wait(self) -> None:
        """Let nothing more begin, and wait for what is under way.

        :raises BusyResourceError: receives are: they may never end by themselves.
        :raises ForkedProcessError: as `wait`.
        """
        self._check_process()
        self.close()
        if self.receives:
            raise BusyResourceError(
                f"{self.receives} receives may still be filled with what arrives: close or reset their queue pair, or "
                "close their shared receive queue, first"
            )
        await self.wait()


def map_pages(length: int) -> mmap.mmap:
    """Zeroed pages that no fork copies: a child finds zeros there.

    With MADV_DONTFORK it would find nothing, map something else there, and lose that by the end of this object. What is
    as large as a huge page is of such pages where the system has them at hand: devices, and the kernel where it moves
    memory from one process to another, look up one of them instead of 512.
    """
    found = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found.madvise(_MADV_WIPEONFORK)
    if length >= _HUGE_PAGE:
        try:
            found.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without them
                raise
    return found


class _QueueMemory(Registered):
    """Memory that a queue has for itself, registered once."""

    def __init__(self, size: int) -> None:
        self.pins = WaitableInFlightCount()
        self.pages = map_pages(size)

    @property
    def buffer(self) -> memoryview:
        """Its bytes."""
        return memoryview(self.pages)


def register_queue_memory(lifecycle: Lifecycle, pd: handles.ProtectionDomain, size: int) -> RegionSlice:
    """Memory for what a queue has the device write, registered for as long as the queue is."""
    own = _QueueMemory(size)
    handle = handles.MemoryRegion(pd, own.pages, AccessFlags.LOCAL_WRITE)
    lifecycle.hold_below(handle)
    return RegionSlice.of_all(own, handle, own.pins, AccessFlags.LOCAL_WRITE)


def is_large(length: int) -> bool:
    """Whether so many bytes are registered beside the loop."""
    return length >= _LARGE_BYTES


async def open_in_thread(resource: Resource) -> None:
    """Open what takes long in a thread, so that the loop goes on meanwhile. Where that fails it is left as it was."""
    opening = running_loop().run_in_executor(None, open_now, resource)
    try:
        await wait_uncancelled(opening)
    except asyncio.CancelledError as raised:
        # The thread cannot be stopped: what it made is undone when it has made it. Where it made nothing, what is open
        # is open by somebody else.
        if raised.__cause__ is None:
            await resource.aclose()
        raise


class _AllocatorMemory:
    """Memory of an allocator that a region has: it goes back when the region's handle is gone."""

    def __init__(self, region: "MemoryRegion", allocator: Allocator, address: int) -> None:
        self._region = weakref.ref(region)  # which may be forgotten before its memory
        self._allocator = allocator
        self._address = address

    def destroy(self) -> None:
        """Give it back. Who kept a view of it has one of memory that is somebody else's now."""
        region = self._region()
        if region is not None:
            region._memory = None
        self._allocator.free(self._address, 0, None, None)


class MemoryRegion(HandleResource[handles.MemoryRegion], Registered):
    """A memory region: ``ibv_reg_mr``. Any event loop may use it. Made by `ProtectionDomain.register`.

    What is registered stays where it is: a bytearray refuses to be resized, a file mapping to be closed. Closing waits
    for work requests that use it, and is refused while receives do: close their queue pair before. Where that is
    cancelled, or takes too long, no work request can begin with it any more, and it is closed when the last has ended.

    :param memory: an object with the buffer protocol, contiguous; or how many bytes to allocate, zeroed, in pages that
        a fork does not copy.
    :param access: what may be done to it, by local work requests and by peers.
    :param allocator: where to allocate those bytes, whole pages; they are given back when it is closed.
    """

    def __init__(
        self,
        pd: Resource,
        handle: handles.ProtectionDomain,
        memory: "Buffer | int",
        access: AccessFlags,
        allocator: Allocator | None = None,
    ) -> None:
        if isinstance(memory, int) and memory < 1:
            raise ValueError(f"a memory region has 1 byte at least, not {memory}")
        if allocator is not None and not isinstance(memory, int):
            raise ValueError("an allocator goes with a number of bytes: memory that is there already needs none")
        super().__init__(pd)
        self._lifecycle.close_last = True
        self._pd_handle = handle
        self._length = memory if isinstance(memory, int) else memoryview(memory).nbytes
        self._memory: Buffer | None = None if isinstance(memory, int) else memory
        self._allocator = checked_allocator(allocator)
        self._access = AccessFlags(access)
        self.pins = WaitableInFlightCount()

    def _open(self) -> None:
        if self._memory is None:
            self._memory = self._allocate()
        handle = handles.MemoryRegion(self._pd_handle, self._memory, self._access)
        self._lifecycle.hold(handle)
        self._begin(handle)

    def _begin(self, handle: handles.MemoryRegion) -> None:
        self._handle = handle
        RegionSlice.of_all(self, handle, self.pins, self._access)
        self._lifecycle.drain = self.pins.close_and_wait
        self._lifecycle.must_drain = True
        self._lifecycle.resume = self.pins.reopen

    def _allocate(self) -> "Buffer":
        address: object = USE_DEFAULT
        if self._allocator is not None:
            address = self._allocator.allocate(self._length, mmap.PAGESIZE, 0, None, None)
        if address is None:
            raise MemoryError(f"{self._allocator!r} has no {self._length} bytes")
        if self._allocator is None or not isinstance(address, int):
            return map_pages(self._length)
        self._lifecycle.hold(_AllocatorMemory(self, self._allocator, address))
        return (ctypes.c_char * self._length).from_address(address)

    async def open(self) -> Self:
        """Register it; where it is large, in a thread, so that the loop goes on meanwhile.

        :raises ClosedResourceError: it was opened before, or its protection domain is closed.
        :raises ValueError: there is nothing to register, or ``LOCAL_WRITE`` is missing where peers may write.
        :raises BufferError: the memory is not contiguous, or is read-only and to be written.
        :raises VerbsError: the device cannot.
        """
        if not is_large(self._length):
            return await super().open()
        await open_in_thread(self)
        return self

    def __len__(self) -> int:
        return self._length

    @property
    def access(self) -> AccessFlags:
        """What may be done to it."""
        return self._access

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.handle.address

    @property
    def lkey(self) -> int:
        """Its key for local work requests."""
        return self.handle.lkey

    @property
    def rkey(self) -> int:
        """Its key for peers."""
        return self.handle.rkey

    @property
    def buffer(self) -> memoryview:
        """Its bytes, flat."""
        self._check_open()
        assert self._memory is not None
        return memoryview(self._memory).cast("B")

    def remote(self) -> RemoteRegion:
        """What a peer needs to reach all of it."""
        self._check_open()
        return self.whole.remote()


class AdoptedMemoryRegion(MemoryRegion):
    """A memory region that its user registered with pyverbs, keeps, and closes when this is closed.

    Any event loop may use it. Made by `ProtectionDomain.adopt_memory_region`.

    :param mr: an open `pyverbs.mr.MR` of any kind, of the same protection domain.
    :param access: what it was registered for, which it does not tell.
    """

    def __init__(self, pd: Resource, handle: handles.ProtectionDomain, mr: "MR", access: AccessFlags) -> None:
        super().__init__(pd, handle, b"", access)  # how long it is, it is asked when it is opened
        self._mr = mr

    def _open(self) -> None:
        handle = hardware.adopt_memory_region(self._pd_handle, self._mr)
        self._lifecycle.hold(handle)
        self._length = handle.length
        if self._length > sys.maxsize:
            raise ValueError(f"{self._mr!r} is all of the address space: register or adopt the parts that are needed")
        self._begin(handle)
        self._memory = None
        if self._mr.buf:  # not so of device memory, or of what was imported
            memory = (ctypes.c_char * handle.length).from_address(handle.address)
            self._memory = memory if self._access & AccessFlags.LOCAL_WRITE else memoryview(memory).toreadonly()

    def _check_open(self) -> None:
        super()._check_open()
        assert self._handle is not None
        # Asking the handle is what finds that its user closed it.
        self._handle.length  # noqa: B018

    @property
    def buffer(self) -> memoryview:
        """Its bytes, flat; to be written where it was registered for that. They are gone once its user closes it.

        :raises ValueError: they are not in this process's memory.
        """
        self._check_open()
        if self._memory is None:
            raise ValueError(f"{self!r} has no memory in this process: it is reached by work requests only")
        return super().buffer


class ImportedMemoryRegion(MemoryRegion):
    """A memory region of another process, which shares its protection domain: ``ibv_import_mr``.

    Any event loop may use it. Made by `ProtectionDomain.import_memory_region`. It serves for as long as that process
    has it open; work requests fail afterwards, with LOC_PROT_ERR. Closing it leaves that one open.

    :param key: its lkey, which is its rkey, too.
    """

    def __init__(self, pd: Resource, handle: handles.ProtectionDomain, key: int) -> None:
        super().__init__(pd, handle, b"", AccessFlags(0))  # how long it is, it is asked when it is opened
        self._key = operator.index(key)  # no float, which would be truncated

    def _open(self) -> None:
        handle = ImportedRegion(self._pd_handle, self._key)
        self._lifecycle.hold(handle)
        self._length, self._access = handle.length, handle.access
        memory = (ctypes.c_char * handle.length).from_address(handle.here)
        self._memory = memory if self._access & AccessFlags.LOCAL_WRITE else memoryview(memory).toreadonly()
        self._begin(handle)


class MemoryWindow(HandleResource[handles.MemoryWindow]):
    """A memory window: ``ibv_alloc_mw``. Any event loop may use it. Made by `ProtectionDomain.memory_window`.

    `QueuePair.bind_window` binds it to a part of a region, for as long as that is to be granted to a peer.

    :param mw_type: of type 1, which is bound and unbound by a verb, or of type 2, which is bound by a work request,
        used through that queue pair alone, and unbound by invalidating its key. Reset does not unbind it: invalidate
        or close it before the queue pair is connected to another peer that is not to have what it grants.
    """

    def __init__(self, pd: Resource, handle: handles.ProtectionDomain, mw_type: MwType) -> None:
        super().__init__(pd)
        self._pd_handle = handle
        self.mw_type = MwType(mw_type)

    def _open(self) -> None:
        self._handle = handles.MemoryWindow(self._pd_handle, self.mw_type)
        self._lifecycle.hold(self._handle)

    @property
    def rkey(self) -> int:
        """The key that a peer needs; each binding changes it."""
        return self.handle.rkey


publish(__name__)
