"""Memory that devices read and write: regions of this process, and what is known of a peer's."""

import asyncio
import ctypes
import mmap
import struct
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from aioverbs._core import engine
from aioverbs.affinity import Bell, running_loop, to_the_end
from aioverbs.allocators import USE_DEFAULT, Allocator
from aioverbs.errors import ClosedResourceError
from aioverbs.providers import hardware
from aioverbs.resource import Handled, Resource
from aioverbs.types import AccessFlags

if TYPE_CHECKING:
    from pyverbs.mr import MR
    from typing_extensions import Buffer

__all__ = ["LentMemoryRegion", "MemoryRegion", "Pins", "RegionSlice", "RemoteRegion"]

# From here on registering, which touches every page, is done beside the loop.
_OFF_LOOP_BYTES = 16 << 20

_WIRE = struct.Struct(">QQI")


def _part(key: slice | int, length: int, what: object) -> tuple[int, int]:
    """The offset and length of a slice, which must lie inside: what is cut off silently is read or written wrongly."""
    if isinstance(key, int):
        raise TypeError(f"{what!r} is sliced, as [{key}:{key + 1}], not indexed")
    start = 0 if key.start is None else key.start
    stop = length if key.stop is None else key.stop
    start, stop = (each + length if each < 0 else each for each in (start, stop))
    if key.step not in (None, 1):
        raise ValueError(f"a slice of {what!r} is one piece: no step, not {key.step}")
    if not 0 <= start <= stop <= length:
        raise IndexError(f"[{key.start}:{key.stop}] does not lie in the {length} bytes of {what!r}")
    return start, stop - start


@dataclass(frozen=True)
class RemoteRegion:
    """Memory of a peer: where it is, how long it is, and the key that opens it.

    ``len()`` raises `OverflowError` where `length` exceeds ``sys.maxsize``, as it may: a peer can register all of its
    address space. Everything else goes by `length`.

    :param address: of its first byte, in the peer's address space.
    :param length: in bytes.
    :param rkey: the key of the peer's region or window.
    """

    address: int
    length: int
    rkey: int

    def __post_init__(self) -> None:
        for name, value, bits in (("address", self.address, 64), ("length", self.length, 64), ("rkey", self.rkey, 32)):
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} has {bits} bits, and {value} is none of those numbers")
        if self.address + self.length > 1 << 64:
            raise ValueError(f"{self.length} bytes at {self.address:#x} leave the address space")

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:  # or it would be asked for its `len`
        return self.length > 0

    def __getitem__(self, key: slice) -> "RemoteRegion":
        """A part of it.

        :raises IndexError: the part does not lie inside.
        """
        offset, length = _part(key, self.length, self)
        return RemoteRegion(self.address + offset, length, self.rkey)

    def __bytes__(self) -> bytes:
        """Its wire form, 20 bytes in network order: address, length, key."""
        return _WIRE.pack(self.address, self.length, self.rkey)

    @classmethod
    def from_bytes(cls, data: "Buffer") -> Self:
        """From its wire form.

        :raises ValueError: it is none.
        """
        view = memoryview(data).cast("B")
        if len(view) != _WIRE.size:
            raise ValueError(f"a remote region is {_WIRE.size} bytes on the wire, not {len(view)}")
        return cls(*_WIRE.unpack(view))


class Pins:
    """What is under way with a piece of memory. Any thread adds and discards, any loop waits for the end.

    :param parent: the pins of the memory that this is a piece of: what is under way here is under way there.
    :param idle: called when nothing is under way any more, by the thread that discards; at times more often than once.
    """

    __slots__ = ("_bell", "_holders", "_idle", "_parent", "closed")

    def __init__(self, parent: "Pins | None" = None, idle: Callable[[], None] | None = None) -> None:
        self._parent = parent
        self._idle = idle
        self._holders: set[object] = set()
        self._bell = Bell()
        self.closed = False

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: object) -> None:
        """It is under way.

        :raises ClosedResourceError: the memory was given back; nothing was added.
        """
        if self._parent is not None:
            self._parent.add(holder)
        self._holders.add(holder)
        # Looked at last: who closes looks for holders after that, so that one of the two sees the other.
        if self.closed:
            self.discard(holder)
            self.check()

    def discard(self, holder: object) -> None:
        """It is over."""
        self._holders.discard(holder)
        if self._parent is not None:
            self._parent.discard(holder)
        self._bell.ring()
        if self._idle is not None and not self._holders:
            self._idle()

    def close(self) -> None:
        """Nothing more is to be done with the memory; what is under way goes on."""
        self.closed = True

    def check(self) -> None:
        """Whether something may be done with the memory.

        :raises ClosedResourceError: it was given back.
        """
        if self.closed:
            raise ClosedResourceError("this buffer was released to its pool: lease another one")

    async def wait(self) -> None:
        """Until nothing is under way."""
        await self._bell.wait_while(lambda: self._holders)


class RegionSlice:
    """A part of a memory region, without a copy.

    :param pins: what is under way with it; None: that of the region.
    """

    __slots__ = ("length", "offset", "pins", "region")

    def __init__(self, region: "MemoryRegion", offset: int, length: int, pins: Pins | None = None) -> None:
        self.region = region
        self.offset = offset
        self.length = length
        self.pins = region.pins if pins is None else pins

    def __repr__(self) -> str:
        return f"<{self.region!r}[{self.offset}:{self.offset + self.length}]>"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> "RegionSlice":
        offset, length = _part(key, self.length, self)
        return RegionSlice(self.region, self.offset + offset, length, self.pins)

    @property
    def address(self) -> int:
        """Of its first byte."""
        self.pins.check()
        return self.region.address + self.offset

    @property
    def sge(self) -> tuple[int, int, int]:
        """Its scatter/gather entry: address, length and lkey."""
        return self.address, self.length, self.region.lkey

    @property
    def buffer(self) -> memoryview:
        """Its bytes."""
        self.pins.check()
        return self.region.buffer[self.offset : self.offset + self.length]

    def remote(self) -> RemoteRegion:
        """What a peer needs to reach it."""
        return RemoteRegion(self.address, self.length, self.region.rkey)


def is_large(length: int) -> bool:
    """Whether so many bytes are registered beside the loop."""
    return length >= _OFF_LOOP_BYTES


async def open_beside_the_loop(resource: Resource) -> None:
    """Open what takes long in a thread, so that the loop goes on meanwhile."""
    opening = running_loop().run_in_executor(None, resource._open_now)
    try:
        await to_the_end(opening)
    except asyncio.CancelledError:
        # The thread cannot be stopped: what it made is undone when it has made it.
        await resource.aclose()
        raise


class _Piece:
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
        self._allocator.free(self._address, 0)


class MemoryRegion(Handled[engine.MemoryRegion]):
    """A memory region: ``ibv_reg_mr``. Any event loop may use it. Made by `ProtectionDomain.register`.

    What is registered stays where it is: a bytearray refuses to be resized, a file mapping to be closed. Closing waits
    for work requests that use it: close their queue pair before, to have those flushed.

    :param memory: an object with the buffer protocol, contiguous; or how many bytes to allocate, zeroed, in pages that
        a fork does not copy.
    :param access: what may be done to it, by local work requests and by peers.
    :param allocator: where to allocate those bytes, whole pages; they are given back when it is closed.
    """

    def __init__(
        self,
        pd: Resource,
        handle: engine.ProtectionDomain,
        memory: "Buffer | int",
        access: AccessFlags,
        allocator: Allocator | None = None,
    ) -> None:
        if isinstance(memory, int) and memory < 1:
            raise ValueError(f"a memory region has 1 byte at least, not {memory}")
        if allocator is not None and not isinstance(memory, int):
            raise ValueError("an allocator goes with a number of bytes: memory that is there already needs none")
        super().__init__(pd)
        self._life.late = True
        self._pd_handle = handle
        self._length = memory if isinstance(memory, int) else memoryview(memory).nbytes
        self._memory: Buffer | None = None if isinstance(memory, int) else memory
        self._allocator = allocator
        self._access = AccessFlags(access)
        self._constants = (0, 0, 0)
        self.pins = Pins()

    def _open(self) -> None:
        if self._memory is None:
            self._memory = self._allocate()
        self._begin(engine.MemoryRegion(self._pd_handle, self._memory, self._access))

    def _begin(self, handle: engine.MemoryRegion) -> None:
        self._life.hold(handle)
        self._handle = handle
        self._constants = (handle.address, handle.lkey, handle.rkey)
        self._life.drain = self.pins.wait

    def _allocate(self) -> "Buffer":
        address: object = USE_DEFAULT
        if self._allocator is not None:
            address = self._allocator.allocate(self._length, mmap.PAGESIZE, 0)
        if address is None:
            raise MemoryError(f"{self._allocator!r} has no {self._length} bytes")
        if self._allocator is None or not isinstance(address, int):
            pages = mmap.mmap(-1, self._length)
            pages.madvise(mmap.MADV_DONTFORK)
            return pages
        self._life.hold(_Piece(self, self._allocator, address))
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
        await open_beside_the_loop(self)
        return self

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: slice) -> RegionSlice:
        """A part of it, without a copy.

        :raises IndexError: the part does not lie inside.
        """
        return RegionSlice(self, *_part(key, len(self), self))

    @property
    def access(self) -> AccessFlags:
        """What may be done to it."""
        return self._access

    @property
    def address(self) -> int:
        """Of its first byte."""
        self._check_open()
        return self._constants[0]

    @property
    def lkey(self) -> int:
        """Its key for local work requests."""
        self._check_open()
        return self._constants[1]

    @property
    def rkey(self) -> int:
        """Its key for peers."""
        self._check_open()
        return self._constants[2]

    @property
    def buffer(self) -> memoryview:
        """Its bytes, flat."""
        self._check_open()
        assert self._memory is not None
        return memoryview(self._memory).cast("B")

    def remote(self) -> RemoteRegion:
        """What a peer needs to reach all of it."""
        return self[:].remote()


class LentMemoryRegion(MemoryRegion):
    """A memory region that its user registered with pyverbs, keeps, and closes when this is closed.

    Any event loop may use it. Made by `ProtectionDomain.adopt_memory_region`.

    :param mr: an open `pyverbs.mr.MR` of any kind, of the same protection domain.
    :param access: what it was registered for, which it does not tell.
    """

    def __init__(self, pd: Resource, handle: engine.ProtectionDomain, mr: "MR", access: AccessFlags) -> None:
        super().__init__(pd, handle, b"", access)  # how long it is, it is asked when it is opened
        self._lent = mr

    def _open(self) -> None:
        handle = hardware.adopt_memory_region(self._pd_handle, self._lent)
        self._begin(handle)
        self._length = handle.length
        if self._length > sys.maxsize:
            raise ValueError(f"{self._lent!r} is all of the address space: register or adopt the parts that are needed")
        self._memory = None
        if self._lent.buf:  # not so of device memory, or of what was imported
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
