"""The native allocators, and checks of the memory that they return."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aioverbs.allocators import (
    ArenaAllocator,
    HugePageAllocator,
    NativeAllocator,
    NumaAllocator,
    RecordingAllocator,
    SharedPageAllocator,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = os.sysconf("SC_PAGESIZE")

KINDS: dict[str, Callable[[], NativeAllocator]] = {
    "pages": SharedPageAllocator,
    "node": lambda: NumaAllocator(0),
    "arena": ArenaAllocator,
    "arena of a node": lambda: ArenaAllocator(NumaAllocator(0), chunk_bytes=64 * KIB),
    "2 MiB": HugePageAllocator,
    "1 GiB": lambda: HugePageAllocator(GIB),
    "recording": lambda: RecordingAllocator(ArenaAllocator()),
}
all_kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def huge_pages_free(page_bytes: int) -> int:
    """Return the number of huge pages of that size that are free now; usually none are configured."""
    path = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB/free_hugepages")
    return int(path.read_text()) if path.exists() else 0


def contents(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


@dataclass
class Holder:
    """Holds pieces, and checks that each is aligned, zeroed, disjoint from others, and unchanged when freed."""

    allocator: NativeAllocator
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # address: size, and the byte it is filled with

    def allocate(self, size: int, alignment: int) -> int:
        address = self.allocator.allocate(size, alignment)
        assert isinstance(address, int)
        assert address % alignment == 0
        assert not any(contents(address, size))
        for other, (length, _) in self.pieces.items():
            assert other + length <= address or address + size <= other
        mark = 1 + len(self.pieces) % 255
        ctypes.memset(address, mark, size)
        self.pieces[address] = size, mark
        return address

    def free(self, address: int) -> None:
        size, mark = self.pieces.pop(address)
        assert contents(address, size) == bytes([mark]) * size
        self.allocator.free(address)

    def free_all(self) -> None:
        for address in list(self.pieces):
            self.free(address)
