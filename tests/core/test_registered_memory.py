"""Registered memory stays in place until it is deregistered."""

import array
import ctypes
import mmap
from typing import Any

import pytest

from aioverbs import AccessFlags, BusyResourceError, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.contexts import children
from tests.core.pairs import ALL_ACCESS, make_pair, wait_for
from tests.raw_verbs import post_send

READABLE = AccessFlags.REMOTE_READ


@pytest.fixture
def pd(inline: software.Context) -> handles.ProtectionDomain:
    return handles.ProtectionDomain(inline)


def test_attributes_of_a_region(pd: handles.ProtectionDomain) -> None:
    memory = bytearray(100)
    region = handles.MemoryRegion(pd, memory)
    assert region.address == ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert region.length == 100
    assert region.lkey == region.rkey != handles.MemoryRegion(pd, memory).lkey
    assert region.pd is pd


def test_a_bytearray_cannot_be_resized_until_its_last_region_is_destroyed(pd: handles.ProtectionDomain) -> None:
    memory = bytearray(8)
    first, second = handles.MemoryRegion(pd, memory), handles.MemoryRegion(pd, memory)
    for region in (first, second):
        with pytest.raises(BufferError, match="cannot be re-sized"):
            memory.extend(b"x")
        region.destroy()
    memory.extend(b"x")
    assert len(memory) == 9


def test_a_refused_destruction_keeps_the_memory(pd: handles.ProtectionDomain) -> None:
    memory = bytearray(8)
    handles.MemoryRegion(pd, memory)
    with pytest.raises(BusyResourceError):
        pd.destroy()
    with pytest.raises(BufferError):
        memory.clear()


def test_writable_buffers(pd: handles.ProtectionDomain) -> None:
    buffers: list[Any] = [memoryview(bytearray(32))[8:24], array.array("Q", [1, 2]), mmap.mmap(-1, 16)]
    for memory in buffers:
        region = handles.MemoryRegion(pd, memory, ALL_ACCESS)
        assert region.length == 16
        region.destroy()


def test_read_only_memory_can_be_registered_for_reading(context: software.Context) -> None:
    near, far = make_pair(context)
    region = handles.MemoryRegion(far.pd, b"constant", READABLE)
    post_send(near.qp, 4, [near.sge(0, 8)], flags=2, remote_addr=region.address, rkey=region.rkey)
    wait_for(near.cq)
    assert near.memory[:8] == b"constant"
    for access in (AccessFlags.LOCAL_WRITE, ALL_ACCESS):
        with pytest.raises(BufferError, match="not writable"):
            handles.MemoryRegion(far.pd, b"constant", access)


def test_an_address_and_a_length(pd: handles.ProtectionDomain) -> None:
    memory = (ctypes.c_char * 64)()
    region = handles.MemoryRegion(pd, (ctypes.addressof(memory), 64))
    assert (region.address, region.length) == (ctypes.addressof(memory), 64)


def unmapped_page() -> int:
    """Return the address of a page that is no longer mapped."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory.close()
    return address


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "None": (None, READABLE, TypeError, "buffer protocol, got NoneType"),
    "no bytes": (bytearray(), READABLE, ValueError, "no bytes"),
    "no bytes at an address": ((4096, 0), READABLE, ValueError, "no bytes"),
    "gaps": (memoryview(bytearray(8))[::2], READABLE, BufferError, "contiguous"),
    "read-only view": (memoryview(bytearray(8)).toreadonly(), ALL_ACCESS, BufferError, "not writable"),
    "three numbers": ((1, 2, 3), READABLE, ValueError, "unpack"),
    "float address": ((4096.0, 2), READABLE, TypeError, "integer"),
    "negative address": ((-4096, 8), READABLE, OverflowError, "negative"),
    "address too big": ((1 << 64, 8), READABLE, OverflowError, "too (large|big)"),
    "past the end of all": (((1 << 64) - 8, 16), READABLE, VerbsError, "ibv_reg_mr failed: EINVAL"),
    "remote write alone": (bytearray(8), AccessFlags.REMOTE_WRITE, ValueError, "also need LOCAL_WRITE"),
    "on demand": (bytearray(8), AccessFlags.ON_DEMAND, VerbsError, "ibv_reg_mr failed: EOPNOTSUPP"),
}


@pytest.mark.parametrize(("memory", "access", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_invalid_memory_is_refused(
    pd: handles.ProtectionDomain, memory: Any, access: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        handles.MemoryRegion(pd, memory, access)
    assert children(pd.context) == [pd]
    if isinstance(memory, bytearray):
        memory.append(0)  # raises BufferError if still exported


def test_unmapped_memory_is_refused(pd: handles.ProtectionDomain) -> None:
    with pytest.raises(VerbsError, match="ibv_reg_mr failed: EFAULT"):
        handles.MemoryRegion(pd, (unmapped_page(), mmap.PAGESIZE), READABLE)
