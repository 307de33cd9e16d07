"""Memory regions, slices, and descriptions of remote regions."""

import array
import asyncio
import ctypes
import errno
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from aioverbs import (
    USE_DEFAULT,
    AccessFlags,
    Allocator,
    ArenaAllocator,
    ClosedResourceError,
    HugePageAllocator,
    ProtectionDomain,
    RecordingAllocator,
    RemoteRegion,
    SharedPageAllocator,
    VerbsError,
    import_device,
)
from aioverbs._memory.region import map_pages
from aioverbs._sharing import shared_pd
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.core.allocators import Recording
from tests.pace import patience

if TYPE_CHECKING:
    from typing_extensions import Buffer

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
LARGE = 32 << 20


def file_mapping(folder: Path) -> mmap.mmap:
    path = folder / "file"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


BUFFERS: dict[str, Callable[[Path], "Buffer | int"]] = {
    "bytearray": lambda _: bytearray(8192),
    "memoryview": lambda _: memoryview(bytearray(10000))[100:8292],
    "array": lambda _: array.array("d", bytes(8192)),
    "anonymous mapping": lambda _: mmap.mmap(-1, 8192),
    "file mapping": file_mapping,
    "bytes to allocate": lambda _: 8192,
}


async def test_objects_with_the_buffer_protocol(device: Device, tmp_path: Path) -> None:
    async with device.protection_domain() as pd:
        for make in BUFFERS.values():
            await register_and_use(pd, make(tmp_path))


async def register_and_use(pd: ProtectionDomain, buffer: "Buffer | int") -> None:
    async with pd.register(buffer, REMOTE) as region:
        assert len(region) == len(region.buffer) == 8192
        assert region.access == REMOTE
        region.buffer[8191] = 7
        part = region[4096:][4095:]
        assert bytes(part.buffer) == b"\x07"
        assert part.sge == (region.address + 8191, 1, region.lkey)
        assert part.remote() == RemoteRegion(region.address + 8191, 1, region.rkey) == region.remote()[8191:]
        assert (len(part), part.offset) == (1, 8191)
        assert region.address == region.handle.address


class Record(ctypes.BigEndianStructure):
    """Element of a structured array."""

    _fields_ = (("key", ctypes.c_uint32), ("value", ctypes.c_double))


def ctypes_array(kind: Any, *shape: int) -> "Buffer":
    """Return an array with a shape, whose elements memoryview may not be able to read, as with numpy arrays."""
    for length in reversed(shape):
        kind *= length
    made: Buffer = kind()
    return made


SHAPED: dict[str, Callable[[], "Buffer"]] = {
    "two dimensions": lambda: ctypes_array(ctypes.c_double, 8, 16),
    "big endian": lambda: ctypes_array(ctypes.c_float.__ctype_be__, 256),
    "records": lambda: ctypes_array(Record, 4, 4, 4),
    "of memoryview": lambda: memoryview(bytearray(1024)).cast("d", (8, 16)),
    "numpy, two dimensions": lambda: numpy_array("zeros", (8, 16)),
    "numpy, complex numbers": lambda: numpy_array("zeros", 64, "c16"),
    "numpy, big endian": lambda: numpy_array("zeros", 256, ">f4"),
    "numpy, a part": lambda: numpy_array("zeros", (16, 16))[4:12],
}


def numpy_array(make: str, *arguments: object) -> Any:
    """Return an array of numpy, or skip the test without numpy; ctypes covers the same buffers."""
    return getattr(pytest.importorskip("numpy"), make)(*arguments)


@pytest.mark.parametrize("make", SHAPED.values(), ids=SHAPED)
async def test_arrays_of_any_shape_are_bytes(device: Device, make: Callable[[], "Buffer"]) -> None:
    array = make()
    size = memoryview(array).nbytes
    async with device.protection_domain() as pd, pd.register(array, REMOTE) as region:
        assert len(region) == len(region.buffer) == size
        assert (region.buffer.format, region.buffer.ndim) == ("B", 1)
        region.buffer[size - 8 :] = b"the end."
        assert memoryview(array).tobytes() == bytes(size - 8) + b"the end."
        assert bytes(region[size - 8 :].buffer) == b"the end."


@pytest.mark.parametrize("read_only", [True, False])
async def test_read_only_or_non_contiguous_numpy_arrays(device: Device, read_only: bool) -> None:
    array = numpy_array("zeros", (8, 16))
    if read_only:
        array.flags.writeable = False
    async with device.protection_domain() as pd:
        async with pd.register(array, AccessFlags.REMOTE_READ) as region:
            assert region.buffer.readonly is read_only
        unfit = array if read_only else array[:, ::2]
        with pytest.raises((BufferError, ValueError)):
            await pd.register(unfit).open()


async def test_read_only_memory_can_be_read(device: Device) -> None:
    async with device.protection_domain() as pd:
        async with pd.register(bytes(64), AccessFlags.REMOTE_READ) as region:
            assert region.buffer.readonly
        with pytest.raises(BufferError):
            await pd.register(bytes(64)).open()


async def test_registered_memory_is_not_moved(device: Device) -> None:
    memory, mapping = bytearray(64), mmap.mmap(-1, 4096)
    async with device.protection_domain() as pd:
        async with pd.register(memory), pd.register(mapping):
            with pytest.raises(BufferError):
                memory.extend(b"more")
            with pytest.raises(BufferError):
                mapping.close()
        memory.extend(b"more")
        mapping.close()


async def test_a_parent_domain_registers_with_its_protection_domain(device: Device) -> None:
    async with device.protection_domain() as pd, pd.parent_domain() as domain, domain.register(64) as region:
        assert region.handle.pd is pd.handle
        assert await asyncio.to_thread(lambda: region.handle.lkey) == region.lkey, "usable from any thread"


async def test_closed_regions_have_no_keys(device: Device) -> None:
    async with device.protection_domain() as pd:
        async with pd.register(64) as region:
            part = region[:8]
        for ask in (
            lambda: region.lkey,
            lambda: region.rkey,
            lambda: region.address,
            lambda: region.buffer,
            lambda: region.handle,
            lambda: part.sge,
            lambda: part.buffer,
            part.remote,
        ):
            with pytest.raises(ClosedResourceError):
                ask()


async def test_unsuitable_memory_is_refused(device: Device) -> None:
    async with device.protection_domain() as pd:
        for nothing in (0, b"", bytearray(), memoryview(b"")):
            with pytest.raises(ValueError, match="at least 1 byte, got 0"):
                pd.register(nothing)
        with pytest.raises(BufferError):
            await pd.register(memoryview(bytearray(64))[::2], AccessFlags.REMOTE_READ).open()
        with pytest.raises(TypeError):
            await pd.register("text").open()  # type: ignore[arg-type]


@needs(Capability.NO_ON_DEMAND_PAGING)
async def test_on_demand_paging_is_refused(device: Device) -> None:
    async with device.protection_domain() as pd:
        with pytest.raises(VerbsError, match=r"EOPNOTSUPP|EINVAL"):
            await pd.register(64, AccessFlags.LOCAL_WRITE | AccessFlags.ON_DEMAND).open()


async def test_large_memory_is_registered_in_a_thread(device: Device) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    async with device.protection_domain() as pd, pd.register(LARGE) as region:
        assert len(region) == LARGE
    assert ticks > 1
    ticker.cancel()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_huge_pages_are_used_if_the_kernel_has_them(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, option: int, *range_: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(number, os.strerror(number))
            super().madvise(option, *range_)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    if number == errno.EINVAL:
        assert len(map_pages(LARGE)) == LARGE
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            map_pages(LARGE)


@needs(Capability.OBJECT_COUNTS)
async def test_a_cancelled_registration_leaks_nothing(device: Device) -> None:
    async with device.protection_domain() as pd:
        region = pd.register(LARGE)
        task = asyncio.create_task(region.open())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert dict(device.statistics().objects)["mrs"] == 0
    assert region.closed


async def test_slices_stay_within_the_region(device: Device) -> None:
    async with device.protection_domain() as pd, pd.register(100) as region:
        for whole in (region, region[:], region.remote()):
            assert len(whole[-10:]) == 10
            assert len(whole[100:]) == 0
            for key in (slice(0, 101), slice(-101, 3), slice(5, 4), slice(101, None)):
                with pytest.raises(IndexError, match=r"exceeds the 100 bytes of .* are not cut off at the end"):
                    whole[key]
            with pytest.raises(ValueError, match="no step, got 2"):
                whole[::2]
            with pytest.raises(TypeError, match=r"is sliced, as \[3:4\], not indexed"):
                whole[3]  # type: ignore[index]


@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(),
    st.integers(),
)
def test_wire_format_and_slices(address: int, length: int, rkey: int, start: int, stop: int) -> None:
    if address + length > 1 << 64:
        with pytest.raises(ValueError, match="exceed the address space"):
            RemoteRegion(address, length, rkey)
        return
    region = RemoteRegion(address, length, rkey)
    assert len(bytes(region)) == 20
    assert RemoteRegion.from_bytes(bytes(region)) == region
    try:
        part = region[start:stop]
    except IndexError:
        return
    assert address <= part.address <= part.address + part.length <= address + length
    assert part.rkey == rkey


@pytest.mark.parametrize("length", [sys.maxsize, sys.maxsize + 1, (1 << 64) - 1])
def test_a_region_longer_than_local_memory(length: int) -> None:
    region = RemoteRegion(0, length, 7)
    assert region.length == length
    if length > sys.maxsize:
        with pytest.raises(OverflowError):
            len(region)
    else:
        assert len(region) == length
    assert region
    assert RemoteRegion.from_bytes(bytes(region)) == region[:] == region[0:length] == region
    assert hash(region[:length]) == hash(region)
    assert region[-5:] == region[length - 5 :] == RemoteRegion(length - 5, 5, 7)
    assert region[1:] == RemoteRegion(1, length - 1, 7)
    assert region[length - 1 : length][:1].address == length - 1
    assert not region[length:]
    with pytest.raises(IndexError, match=f"exceeds? the {length} bytes"):
        region[: length + 1]


def test_invalid_wire_formats() -> None:
    with pytest.raises(ValueError, match="20 bytes, got 19"):
        RemoteRegion.from_bytes(bytes(19))
    for arguments in ((-1, 0, 0), (0, 1 << 64, 0), (0, 0, 1 << 32)):
        with pytest.raises(ValueError, match="bits"):
            RemoteRegion(*arguments)


@needs(Capability.SHARED_DOMAINS)
async def test_shared_protection_domains(device: Device) -> None:
    async with open_device("soft0") as other, device.protection_domain() as pd, pd.share(0x1234) as shared:
        async with other.shared_protection_domain(shared.id, 0x1234) as instance:
            region = await instance.register(64).open()
            with pytest.warns(ResourceWarning, match="MemoryRegion"):
                await instance.aclose()
            assert region.closed, "the region ends with its instance"
            assert not pd.closed
        with pytest.raises(VerbsError, match="EACCES"):
            await other.shared_protection_domain(shared.id, 0x4321).open()
        with pytest.raises(VerbsError, match="ENOENT"):
            await other.shared_protection_domain(shared.id + 77, 0x1234).open()
        with pytest.raises(ValueError, match="share_key must fit in 64 bits"):
            pd.share(1 << 64)
        with pytest.raises(ValueError, match="share_key must fit in 64 bits"):
            other.shared_protection_domain(1, 1 << 64)


@needs(Capability.SHARED_DOMAINS)
async def test_a_domain_has_one_id_and_one_key(device: Device) -> None:
    async with open_device("soft0") as other, device.protection_domain() as pd:
        async with pd.share(1) as first, pd.share(1) as second:
            assert first.id == second.id
        with pytest.raises(VerbsError, match=r"EEXIST .*shared with another key until it is closed: use that key"):
            await pd.share(2).open()
        async with pd.share(1) as again, other.shared_protection_domain(first.id, 1) as instance:
            assert again.id == first.id
            with pytest.raises(VerbsError, match=r"EEXIST .*shared elsewhere: share it again there"):
                await instance.share(1).open()


@needs(Capability.SHARED_DOMAINS, Capability.FAULT_PLAN)
async def test_a_domain_stays_shared_when_it_cannot_be_closed(device: Device) -> None:
    pd = await device.protection_domain().open()
    async with pd.share(1) as before:
        pass
    device.faults.fail("dealloc_pd", errno.EIO)
    with pytest.raises(VerbsError, match="EIO"):
        await pd.aclose()
    async with open_device("soft0") as other, pd.share(1) as after, other.shared_protection_domain(after.id, 1):
        assert after.id == before.id
    await pd.aclose()


@needs(Capability.SHARED_DOMAINS)
async def test_several_loops_share_a_domain_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Barrier(2)
    share = shared_pd.share

    def share_slowly(*arguments: Any) -> Any:
        time.sleep(0.05)  # the other loop begins meanwhile
        return share(*arguments)

    async def share_id() -> int:
        begun.wait(patience(10))
        async with pd.share(1) as shared:
            return shared.id

    monkeypatch.setattr(shared_pd, "share", share_slowly)
    async with device.protection_domain() as pd:
        threads = [asyncio.to_thread(lambda: asyncio.run(share_id())) for _ in range(2)]
        first, second = await asyncio.gather(*threads)
        assert first == second


async def test_keys_are_integers(device: Device) -> None:
    """Keys are not converted or truncated, which could make them guessable, and error messages do not show them."""
    for key in (1.5, 1.0, "1", b"1", None):
        await check_key_refused(device, key)


async def check_key_refused(device: Device, key: Any) -> None:
    pattern = f"share_key must be an integer of 64 bits, not of type {type(key).__name__}$"
    async with device.protection_domain() as pd:
        with pytest.raises(TypeError, match=pattern):
            pd.share(key)
        with pytest.raises(TypeError, match=pattern):
            device.shared_protection_domain(1, key)
        with pytest.raises(TypeError, match="shared_id must be an integer of 96 bits"):
            device.shared_protection_domain(key, 1)
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(TypeError, match=pattern):
            import_device(ours, 1, key)
        with pytest.raises(TypeError, match="integer"):
            pd.import_memory_region(key)
        for wrong in (-1, 1 << 32):
            with pytest.raises(ValueError, match=f"`key` must fit in 32 bits, got {wrong}"):
                pd.import_memory_region(wrong)


@pytest.mark.parametrize(
    "make", [SharedPageAllocator, HugePageAllocator, ArenaAllocator], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("page", [mmap.PAGESIZE, 64 << 10])  # also the page size of some arm64 and POWER kernels
async def test_memory_of_an_allocator(
    device: Device, make: Callable[[], Allocator], page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    allocator = RecordingAllocator(make())
    async with device.protection_domain() as pd:
        async with pd.register(5000, REMOTE, allocator) as region:
            assert (len(region), bytes(region.buffer)) == (5000, bytes(5000))
            assert region.address % page == 0
            assert allocator.statistics().pieces == 1
            region.buffer[:3] = b"dirt"[:3]
        assert allocator.statistics().pieces == 0
        with pytest.raises(ClosedResourceError):
            region.buffer  # noqa: B018
        async with pd.register(5000, REMOTE, allocator) as region:
            assert bytes(region.buffer) == bytes(5000)


@needs(Capability.FAULT_PLAN)
async def test_allocators_that_fail(device: Device) -> None:
    async with device.protection_domain() as pd:
        with pytest.raises(MemoryError, match="returned no memory for 64 bytes"):
            await pd.register(64, REMOTE, Recording(lambda *_: None)).open()
        async with pd.register(64, REMOTE, Recording(lambda *_: USE_DEFAULT)) as region:
            assert bytes(region.buffer) == bytes(64)
        with pytest.raises(ValueError, match="must be a number of bytes, got"):
            pd.register(bytearray(8), REMOTE, Recording())
        recording = Recording()
        device.faults.fail("reg_mr", 12)
        with pytest.raises(VerbsError, match="ENOMEM"):
            await pd.register(64, REMOTE, recording).open()
        assert not recording.live
