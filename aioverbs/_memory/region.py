"""Memory that devices read and write: memory regions and memory windows."""

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
from aioverbs._core.software.software import FileRegion, ImportedRegion
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
    "give_back_pages",
    "register_file",
    "register_queue_memory",
]

# Size from which registration, which touches every page, runs in a thread.
_LARGE_BYTES = 16 << 20
_HUGE_PAGE = 2 << 20  # bytes
_MADV_WIPEONFORK = 18  # linux/mman.h; the module mmap has no name for it


class WaitableInFlightCount(data_path.InFlightCount):
    """Count of work requests in flight that use some memory.

    Any thread may change it, and any event loop may wait for zero.

    :param parent: count for the memory that this memory is a part of, which includes the same work requests; None if
        there is none.
    :param idle: function that is called without arguments by each thread that decrements the count to zero; None to
        call nothing.
    """

    async def wait(self) -> None:
        """Wait until no work request that uses the memory is in flight.

        :raises ForkedProcessError: work requests of the parent process were in flight at the fork; only the parent
            receives their completions.
        :raises RuntimeError: work requests are in flight, and no asyncio event loop is running.
        """
        self._check_process()
        if self.condition is None:
            self.condition = CrossLoopCondition()
        await self.condition.wait_while(lambda: len(self))

    def _check_process(self) -> None:
        """Check that no work request that uses the memory was in flight when this process was forked.

        :raises ForkedProcessError: work requests of the parent process were in flight at the fork.
        """
        if self.inherited and len(self):
            raise ForkedProcessError("this memory")

    async def close_and_wait(self) -> None:
        """Let no further work request use the memory, and wait until none that uses it is in flight.

        If this fails or is cancelled, no work request can use the memory until `reopen` is called.

        :raises BusyResourceError: receives are posted in the memory, and may never complete.
        :raises ForkedProcessError: work requests of the parent process were in flight at the fork. In this case nothing
            is changed.
        :raises RuntimeError: work requests are in flight, and no asyncio event loop is running.
        """
        self._check_process()
        self.close()
        if self.receives:
            raise BusyResourceError(
                f"work requests still use this memory to receive (receives posted: {self.receives}): first close or "
                "reset their queue pair, or close their shared receive queue"
            )
        await self.wait()

    def close_now(self) -> bool:
        """Let no further work request use the memory, and return whether none that uses it is in flight."""
        self.close()
        return not len(self)


def map_pages(length: int) -> mmap.mmap:
    """Map new zeroed pages. A fork does not copy their content: a child finds zeros in them.

    MADV_DONTFORK is not used: the range would be unmapped in a child, which might map something else there and lose it
    when its copy of this object is collected. A mapping of at least one huge page (2 MiB) uses transparent huge pages
    if the kernel has them: devices, and the kernel when it copies between processes, then look up one huge page instead
    of 512 pages.

    :param length: size in bytes, at least 1.
    :returns: the mapping, which exists until the object is closed or garbage-collected.
    :raises OSError: the process cannot map that much memory, or the kernel is older than 4.14.
    """
    found = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found.madvise(_MADV_WIPEONFORK)
    if length >= _HUGE_PAGE:
        _advise(found, mmap.MADV_HUGEPAGE)
    return found


def _advise(memory: mmap.mmap, about_huge_pages: int) -> None:
    """Tell the kernel whether to use transparent huge pages for a mapping. A kernel without them ignores it."""
    try:
        memory.madvise(about_huge_pages)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the kernel has no huge pages
            raise


class _QueueMemory(Registered):
    """Memory of a queue for its own use, registered for the lifetime of the queue.

    :param size: size in bytes, at least 1.
    :raises OSError: the process cannot map that much memory.
    """

    def __init__(self, size: int) -> None:
        self.pins = WaitableInFlightCount()
        self.pages = map_pages(size)

    @property
    def buffer(self) -> memoryview:
        """Bytes of the memory, as a writable memoryview."""
        return memoryview(self.pages)


def register_queue_memory(lifecycle: Lifecycle, pd: handles.ProtectionDomain, size: int) -> RegionSlice:
    """Allocate memory that the device writes to on behalf of a queue, and register it until the queue is closed.

    :param lifecycle: node of the queue, which deregisters the memory after its own handles are destroyed.
    :param pd: protection domain that the memory is registered with.
    :param size: size in bytes.
    :returns: slice that covers all of the memory.
    :raises OSError: the process cannot map that much memory.
    :raises VerbsError: the device cannot register the memory, which is unmapped in this case.
    :raises ClosedResourceError: the protection domain is closed.
    """
    own = _QueueMemory(size)
    handle = handles.MemoryRegion(pd, own.pages, AccessFlags.LOCAL_WRITE)
    lifecycle.hold_below(handle)
    return RegionSlice.of_all(own, handle, own.pins, AccessFlags.LOCAL_WRITE)


class _FileMemory(Registered):
    """Memory that a `FileRegion` owns."""

    access = AccessFlags.MW_BIND

    def __init__(self) -> None:
        self.pins = WaitableInFlightCount()


def register_file(lifecycle: Lifecycle, pd: handles.ProtectionDomain, size: int) -> tuple[RegionSlice, FileRegion]:
    """Register a new memory file, which peers on this host map to read it without a request to this process.

    Peers that have a key for a part of it can read all of it, until it is deregistered. It is for the software device.

    :param lifecycle: node of the queue pair, which deregisters the memory when it is closed.
    :param pd: protection domain that the memory is registered with, for memory windows.
    :param size: size in bytes, at most 4 MiB.
    :returns: slice that covers all of the memory, and the handle of its registration, which the caller may destroy
        earlier and then detaches.
    :raises VerbsError: the process cannot make the file, or has few descriptors left for others.
    :raises ClosedResourceError: the queue pair or the protection domain is closed.
    """
    own = _FileMemory()
    handle = FileRegion(pd, size, own.access)
    try:
        lifecycle.attach(handle)
    except BaseException:
        handle.destroy()
        raise
    return RegionSlice.of_all(own, handle, own.pins, own.access), handle


def is_shortage(error: OSError) -> bool:
    """Return whether memory could not be mapped or registered because the process or the device has too much of it, so
    that giving some back may help.

    :param error: exception of `map_pages`, or a `VerbsError`.
    """
    return error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EAGAIN)


def is_large(length: int) -> bool:
    """Return whether memory of a size in bytes is large enough to be registered in a thread: 16 MiB or more."""
    return length >= _LARGE_BYTES


def give_back_pages(region: "MemoryRegion", offset: int, length: int) -> None:
    """Give pages of a region back to the kernel, which provides new ones, zeroed, when they are next touched.

    The registration stays valid only on a device that does not pin memory, which is the software device. If the
    process locks its memory, the pages stay. This can be called from any thread.

    :param region: region whose memory the library has mapped.
    :param offset: where the pages begin in the region, in bytes; a multiple of the page size.
    :param length: number of bytes; a page that they do not fill is given back as a whole.
    """
    memory = region._memory
    assert isinstance(memory, mmap.mmap)
    try:
        memory.madvise(mmap.MADV_DONTNEED, offset, length)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the pages are locked
            raise


def use_small_pages(region: "MemoryRegion") -> None:
    """Give all pages of a region back to the kernel, which provides single pages from then on, and no huge ones.

    This is for buffers of which most are used in part: touching one byte of a huge page takes 2 MiB. The registration
    uses huge pages, which are touched faster. As for `give_back_pages`, the device must not pin memory.

    :param region: region whose memory the library has mapped.
    """
    give_back_pages(region, 0, len(region))
    memory = region._memory
    assert isinstance(memory, mmap.mmap)
    _advise(memory, mmap.MADV_NOHUGEPAGE)


async def open_in_thread(resource: Resource) -> None:
    """Open a resource in a thread and wait for that, so that the event loop keeps running meanwhile.

    If opening fails, the resource stays unopened, and this raises the same exceptions as `Resource.open`. If this is
    cancelled, the wait for the thread continues; if the thread has opened the resource, the resource is then closed.
    After that the cancellation is raised, or whatever closing the resource raised.

    :param resource: unopened resource.
    :raises RuntimeError: no asyncio event loop is running. In this case nothing is done.
    """
    opening = running_loop().run_in_executor(None, open_now, resource)
    try:
        await wait_uncancelled(opening)
    except asyncio.CancelledError as raised:
        # The thread cannot be stopped, so close the resource after it was opened. If the thread failed to open the
        # resource, do not close: another task may have opened it.
        if raised.__cause__ is None:
            await resource.aclose()
        raise


class _AllocatorMemory:
    """Memory that an allocator provided for a region. It is freed after the handle of the region was destroyed."""

    def __init__(self, region: "MemoryRegion", allocator: Allocator, address: int) -> None:
        self._region = weakref.ref(region)  # weak: the region may be collected before its memory is freed
        self._allocator = allocator
        self._address = address

    def destroy(self) -> None:
        """Free the memory with the allocator. Views kept past this point are dangling.

        :raises Exception: whatever the allocator raised. The memory counts as not freed.
        """
        region = self._region()
        if region is not None:
            region._memory = None
        self._allocator.free(self._address, 0, None, None)


class MemoryRegion(HandleResource[handles.MemoryRegion], Registered):
    """Memory region (``ibv_reg_mr``). Any event loop may use it. Use `ProtectionDomain.register` to create one.

    Registered memory cannot move: a bytearray cannot be resized, and an mmap cannot be closed, until the region is
    closed. Closing waits for work requests that use the region. While receives use it, closing raises
    `BusyResourceError`, and the region stays open: close their queue pair first. If closing is cancelled, no further
    work request can use the region, and a background task closes the region when the last one has completed.

    :param pd: protection domain that the region belongs to.
    :param handle: handle of that protection domain.
    :param memory: contiguous object with the buffer protocol; or the number of bytes to allocate, zeroed, in pages that
        a fork does not copy.
    :param access: access rights of local work requests and of peers.
    :param allocator: allocator of these bytes, which are freed when the region is closed; only if ``memory`` is a
        number. None for pages of the library.
    :raises ValueError: ``memory`` has no bytes, or is a number less than 1, or is not a number although there is an
        allocator.
    :raises TypeError: ``memory`` has no buffer protocol, or the allocator lacks the methods of `Allocator`.
    """

    def __init__(
        self,
        pd: Resource,
        handle: handles.ProtectionDomain,
        memory: "Buffer | int",
        access: AccessFlags,
        allocator: Allocator | None = None,
    ) -> None:
        length = memory if isinstance(memory, int) else memoryview(memory).nbytes
        if length < 1:
            raise ValueError(f"a memory region must have at least 1 byte, got {length}")
        if allocator is not None and not isinstance(memory, int):
            raise ValueError(f"with an allocator, `memory` must be a number of bytes, got {type(memory).__name__}")
        super().__init__(pd)
        self._lifecycle.close_last = True
        self._pd_handle = handle
        self._length = length
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
        """Make a new handle the handle of the region, and have closing wait for work requests that use the region."""
        self._handle = handle
        RegionSlice.of_all(self, handle, self.pins, self._access)
        self._lifecycle.drain, self._lifecycle.drain_now = self.pins.close_and_wait, self.pins.close_now
        self._lifecycle.must_drain = True
        self._lifecycle.resume = self.pins.reopen

    def _allocate(self) -> "Buffer":
        """Allocate the memory of the region, with the allocator if there is one.

        Pages are mapped if there is no allocator, or if the allocator returns anything other than an address or None,
        such as `USE_DEFAULT`.

        :returns: object with the buffer protocol. Closing the region frees the allocator's memory.
        :raises MemoryError: the allocator returned no memory.
        :raises OSError: the process cannot map that much memory.
        :raises Exception: whatever the allocator raised.
        """
        address: object = USE_DEFAULT
        if self._allocator is not None:
            address = self._allocator.allocate(self._length, mmap.PAGESIZE, 0, None, None)
        if address is None:
            raise MemoryError(f"{self._allocator!r} returned no memory for {self._length} bytes")
        if self._allocator is None or not isinstance(address, int):
            return map_pages(self._length)
        self._lifecycle.hold(_AllocatorMemory(self, self._allocator, address))
        return (ctypes.c_char * self._length).from_address(address)

    async def open(self) -> Self:
        """Register the memory (``ibv_reg_mr``), in a thread if the region has 16 MiB or more.

        If this fails, the region stays unopened. The same applies if this is cancelled; but if a thread is already
        registering the memory, this waits for the thread, and the region is then closed.

        :returns: the region itself.
        :raises ClosedResourceError: the region was opened before, or its protection domain is closed.
        :raises ForkedProcessError: the region or its protection domain was opened in the process that this one was
            forked from.
        :raises ValueError: peers may write and ``LOCAL_WRITE`` is missing.
        :raises BufferError: the memory is not contiguous, or is read-only although ``access`` permits writing.
        :raises MemoryError: the allocator returned None.
        :raises OSError: the process cannot map that much memory.
        :raises VerbsError: the device cannot register the memory.
        :raises RuntimeError: the region has 16 MiB or more, and no asyncio event loop is running.
        :raises Exception: whatever the allocator raised.
        """
        if not is_large(self._length):
            return await super().open()
        await open_in_thread(self)
        return self

    def __len__(self) -> int:
        return self._length

    @property
    def access(self) -> AccessFlags:
        """Access rights of the region."""
        return self._access

    @property
    def address(self) -> int:
        """Address of the first byte of the region, in the process that registered it.

        :raises ClosedResourceError: the region is not open.
        :raises ForkedProcessError: the region was opened in the process that this one was forked from.
        """
        return self.handle.address

    @property
    def lkey(self) -> int:
        """Key of the region for local work requests.

        :raises ClosedResourceError: the region is not open.
        :raises ForkedProcessError: the region was opened in the process that this one was forked from.
        """
        return self.handle.lkey

    @property
    def rkey(self) -> int:
        """Key of the region for work requests of peers.

        :raises ClosedResourceError: the region is not open.
        :raises ForkedProcessError: the region was opened in the process that this one was forked from.
        """
        return self.handle.rkey

    @property
    def buffer(self) -> memoryview:
        """Bytes of the region, as a one-dimensional memoryview, which is read-only if the memory is.

        If an allocator provided the memory, the caller must not use the view after the region is closed.

        :raises ClosedResourceError: the region is not open.
        :raises ForkedProcessError: the region was opened in the process that this one was forked from.
        """
        self._check_open()
        assert self._memory is not None
        return memoryview(self._memory).cast("B")

    def remote(self) -> RemoteRegion:
        """Return the region's address, length and rkey, which a peer needs to access the region, as a `RemoteRegion`.

        :raises ClosedResourceError: the region is not open.
        :raises ForkedProcessError: the region was opened in the process that this one was forked from.
        """
        self._check_open()
        return self.whole.remote()


class AdoptedMemoryRegion(MemoryRegion):
    """Memory region that the user registered with pyverbs. The user still owns the pyverbs object and closes it after
    this region.

    Any event loop may use the region. Use `ProtectionDomain.adopt_memory_region` to create one. Opening raises
    `ValueError` if ``mr`` is closed, belongs to another protection domain, or covers the whole address space,
    `TypeError` if ``mr`` is not a `pyverbs.mr.MR`, and `RuntimeError` if this version of pyverbs is unknown. The region
    then stays unopened. If the user closes ``mr`` first, using the region raises `BorrowedObjectClosedError`.

    :param pd: protection domain that the region belongs to.
    :param handle: handle of that protection domain.
    :param mr: open `pyverbs.mr.MR` of any kind, of the same protection domain.
    :param access: access rights that ``mr`` was registered with; the object itself does not provide them.
    """

    def __init__(self, pd: Resource, handle: handles.ProtectionDomain, mr: "MR", access: AccessFlags) -> None:
        super().__init__(pd, handle, 1, access)  # `_open` sets the length
        self._mr = mr

    def _open(self) -> None:
        """Adopt the pyverbs object, and use its memory if that is mapped in this process.

        :raises ValueError: the object is closed, belongs to another protection domain, or covers the address space.
        :raises TypeError: the object is not a `pyverbs.mr.MR`.
        :raises RuntimeError: the layout of objects in this version of pyverbs is unknown.
        """
        handle = hardware.adopt_memory_region(self._pd_handle, self._mr)
        self._lifecycle.hold(handle)
        self._length = handle.length
        if self._length > sys.maxsize:
            raise ValueError(
                f"{self._mr!r} covers the whole address space: register or adopt the parts that are needed"
            )
        self._begin(handle)
        self._memory = None
        if self._mr.buf:  # None for device memory and imported regions
            memory = (ctypes.c_char * handle.length).from_address(handle.address)
            self._memory = memory if self._access & AccessFlags.LOCAL_WRITE else memoryview(memory).toreadonly()

    def _check_open(self) -> None:
        """Check that the region and the pyverbs object are open.

        :raises ClosedResourceError: the region is not open.
        :raises ForkedProcessError: the region was opened in the process that this one was forked from.
        :raises BorrowedObjectClosedError: the user closed the pyverbs object.
        """
        super()._check_open()
        assert self._handle is not None
        # Reading the length raises BorrowedObjectClosedError if the user closed the pyverbs object.
        self._handle.length  # noqa: B018

    @property
    def buffer(self) -> memoryview:
        """Bytes of the region, as a one-dimensional memoryview, writable if the access rights include ``LOCAL_WRITE``.

        The view is dangling after the user has closed the pyverbs object.

        :raises ValueError: the memory is not mapped in this process.
        :raises ClosedResourceError: the region is not open.
        :raises ForkedProcessError: the region was opened in the process that this one was forked from.
        :raises BorrowedObjectClosedError: the user closed the pyverbs object.
        """
        self._check_open()
        if self._memory is None:
            raise ValueError(f"{self!r} has no memory in this process: access it by work requests")
        return super().buffer


class ImportedMemoryRegion(MemoryRegion):
    """Memory region of another process that shares its protection domain with this one (``ibv_import_mr``).

    Any event loop may use the region. Use `ProtectionDomain.import_memory_region` to create one. The region is valid as
    long as the other process keeps it open; after that work requests fail with LOC_PROT_ERR. Closing the imported
    region does not close the original one. If the region cannot be imported, opening raises `VerbsError`: with ENOENT
    if no region of the domain has that key, with EFAULT if its memory is private to the other process, or with
    EOPNOTSUPP on RDMA devices. The region then stays unopened.

    :param pd: protection domain that the region belongs to.
    :param handle: handle of that protection domain.
    :param key: lkey of the region, which equals its rkey.
    :raises TypeError: ``key`` is not an integer.
    :raises ValueError: ``key`` does not fit in 32 bits.
    """

    def __init__(self, pd: Resource, handle: handles.ProtectionDomain, key: int) -> None:
        number = operator.index(key)  # raises for a float, which would be truncated
        if not 0 <= number < 1 << 32:
            raise ValueError(f"`key` must fit in 32 bits, got {key}")
        super().__init__(pd, handle, 1, AccessFlags(0))  # `_open` sets the length
        self._key = number

    def _open(self) -> None:
        handle = ImportedRegion(self._pd_handle, self._key)
        self._lifecycle.hold(handle)
        self._length, self._access = handle.length, handle.access
        memory = (ctypes.c_char * handle.length).from_address(handle.here)
        self._memory = memory if self._access & AccessFlags.LOCAL_WRITE else memoryview(memory).toreadonly()
        self._begin(handle)


class MemoryWindow(HandleResource[handles.MemoryWindow]):
    """Memory window (``ibv_alloc_mw``). Any event loop may use it. Use `ProtectionDomain.memory_window` to create one.

    `QueuePair.bind_window` binds the window to a part of a region, to grant a peer access to that part. Opening raises
    `VerbsError` if the device cannot allocate the window, with EOPNOTSUPP if it has no memory windows.

    :param pd: protection domain that the window belongs to.
    :param handle: handle of that protection domain.
    :param mw_type: type 1 is bound and unbound by a verb. Type 2 is bound by a work request, usable through that queue
        pair only, and unbound by invalidating its key. A reset of the queue pair does not unbind the window: invalidate
        or close the window before the queue pair is connected to a peer that must not have this access.
    :raises ValueError: ``mw_type`` is not an `MwType`.
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
        """Key of the window for work requests of peers. Each binding changes the key.

        :raises ClosedResourceError: the window is not open.
        :raises ForkedProcessError: the window was opened in the process that this one was forked from.
        """
        return self.handle.rkey


publish(__name__)
