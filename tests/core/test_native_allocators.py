"""Allocators that work in C, by themselves: what they promise, whatever is asked of them."""

import ctypes
import errno
import functools
import gc
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_type

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioverbs.allocators import (
    USE_DEFAULT,
    Allocator,
    AllocatorStatistics,
    AllocatorUsage,
    ArenaAllocator,
    DefaultAllocator,
    HugePageAllocator,
    NativeAllocator,
    NumaAllocator,
    RecordingAllocator,
    ResourceKind,
    SharedPageAllocator,
    UseDefault,
)
from tests.core.children import in_child

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
    """How many huge pages of that size could be had now; mostly none are configured."""
    path = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB/free_hugepages")
    return int(path.read_text()) if path.exists() else 0


def contents(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


@dataclass
class Holder:
    """Takes pieces and checks each: aligned, zeroed, in nobody's way, as it was left when it goes."""

    allocator: NativeAllocator
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # address: size, and what was written all over it

    def take(self, size: int, alignment: int) -> int:
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

    def give(self, address: int) -> None:
        size, mark = self.pieces.pop(address)
        assert contents(address, size) == bytes([mark]) * size
        self.allocator.free(address)

    def give_all(self) -> None:
        for address in list(self.pieces):
            self.give(address)


SIZES = st.one_of(st.integers(1, 100), st.integers(1, 20_000), st.integers(1, 3 * MIB))
ALIGNMENTS = st.integers(0, 21).map(lambda power: 1 << power)


@functools.cache
def one_of(make: Callable[[], NativeAllocator]) -> NativeAllocator:
    """The same for all examples: a huge page takes long to clear."""
    return make()


def kept(allocator: NativeAllocator) -> int:
    """How many chunks may stay mapped without pieces: one of each size of pages."""
    return 3 if isinstance(allocator, HugePageAllocator) else 1


# A request, or which of the pieces that are out goes.
STEPS = st.lists(st.one_of(st.tuples(SIZES, ALIGNMENTS), st.integers(0, 1000)), max_size=25)


@all_kinds
@given(steps=STEPS)
def test_any_sequence(make: Callable[[], NativeAllocator], steps: list[tuple[int, int] | int]) -> None:
    holder = Holder(one_of(make))
    try:
        for step in steps:
            if isinstance(step, tuple):
                holder.take(*step)
            elif holder.pieces:
                holder.give(list(holder.pieces)[step % len(holder.pieces)])
            assert holder.allocator.statistics().pieces == len(holder.pieces)
    finally:
        holder.give_all()
    statistics = holder.allocator.statistics()
    assert statistics.pieces == 0
    assert statistics.mappings <= kept(holder.allocator)


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@given(requests=st.lists(st.tuples(st.integers(1, 300_000), st.integers(0, 16).map(lambda n: 1 << n)), max_size=60))
def test_the_footprint_of_an_arena(requests: list[tuple[int, int]]) -> None:
    """What it maps is bounded by what it was asked for: less than twice, and chunks that are partly used."""
    arena = ArenaAllocator(chunk_bytes=256 * KIB)
    holder = Holder(arena)
    blocks = large = 0
    for size, alignment in requests:
        holder.take(size, alignment)
        least = max(size, alignment, 64)
        if least > arena.chunk_bytes // 2:
            large += -(-size // PAGE) * PAGE
        else:
            blocks += power_of_two(least)
    statistics = arena.statistics()
    assert statistics.mapped_bytes >= large + blocks
    # A new chunk comes only when no other has room for a block of half of it, or less.
    assert statistics.mapped_bytes - large <= 2 * blocks + arena.chunk_bytes
    assert statistics.bookkeeping_bytes <= 8 * KIB + statistics.mapped_bytes // 16 + 100 * len(requests)
    holder.give_all()
    assert arena.statistics().mapped_bytes <= arena.chunk_bytes


def test_ten_thousand_doorbell_records_in_a_mebibyte() -> None:
    arena = ArenaAllocator()
    records = [arena.allocate(8, 8, 1 << 32 | 3) for _ in range(10_000)]
    assert all(isinstance(record, int) and record % 64 == 0 for record in records)  # a cache line each
    statistics = arena.statistics()
    assert statistics.mapped_bytes + statistics.bookkeeping_bytes <= MIB
    assert len(set(records)) == statistics.pieces == 10_000
    for record in records:
        assert isinstance(record, int)
        arena.free(record)
    assert arena.statistics().mapped_bytes == arena.chunk_bytes


def test_pages_are_a_mapping_each() -> None:
    pages = SharedPageAllocator()
    holder = Holder(pages)
    holder.take(8, 8)
    holder.take(PAGE + 1, MIB)
    assert (pages.statistics().mappings, pages.statistics().mapped_bytes) == (2, 3 * PAGE)
    holder.give_all()
    assert pages.statistics().mappings == 0


@all_kinds
def test_nonsense(make: Callable[[], NativeAllocator]) -> None:
    allocator = make()
    for size, alignment in ((0, 8), (-1, 8), (8, 0), (8, -8), (8, 24)):
        with pytest.raises(ValueError, match=r"a piece has 1 byte at least|an alignment is a power of two"):
            allocator.allocate(size, alignment)
    with pytest.raises(OSError, match=r"cannot be mapped: Cannot allocate memory|cannot be had") as caught:
        allocator.allocate(1 << 50, 8)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(OSError, match=f"{1 << 62} is no size or alignment that memory can have"):
        allocator.allocate(1 << 62, 8)
    address = allocator.allocate(4096, 64)
    assert isinstance(address, int)
    for wrong in (0, 1, address + 1, address + 64, address + (1 << 40)):
        with pytest.raises(
            ValueError, match=rf"{wrong:#x} is no piece of <aioverbs.*: it never was, or was given back"
        ):
            allocator.free(wrong)
    allocator.free(address)
    with pytest.raises(ValueError, match="is no piece of"):
        allocator.free(address)


@all_kinds
def test_what_they_are(make: Callable[[], NativeAllocator]) -> None:
    allocator = make()
    assert isinstance(allocator, Allocator)
    assert allocator.native
    assert allocator.statistics().pieces == 0
    assert isinstance(allocator.statistics(), AllocatorStatistics)
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Derived", (type(allocator),), {})
    # A second time it would forget what is out.
    initialise: Any = type(allocator).__init__
    arguments: dict[type, list[object]] = {NumaAllocator: [0], RecordingAllocator: [SharedPageAllocator()]}
    with pytest.raises(RuntimeError, match="was made before"):
        initialise(allocator, *arguments.get(type(allocator), []))


def test_what_all_have_in_common_is_no_allocator() -> None:
    with pytest.raises(TypeError, match="is what SharedPageAllocator"):
        NativeAllocator()

    class Derived(NativeAllocator):
        def __init__(self) -> None:
            pass

    derived = Derived()
    assert not derived.native
    for call in (
        lambda: derived.allocate(8, 8),
        lambda: derived.free(8),
        derived.statistics,
        lambda: derived.c_functions,
        lambda: ArenaAllocator(derived),
    ):
        with pytest.raises(TypeError, match=r"was not made by one of aioverbs' own|is an allocator in Python"):
            call()


def test_wrong_arguments() -> None:
    for chunk_bytes in (0, 2048, 100_000, 2 * GIB):
        with pytest.raises(ValueError, match=f"from 4 KiB to 1 GiB of bytes, not {chunk_bytes}"):
            ArenaAllocator(chunk_bytes=chunk_bytes)
    for page_bytes in (0, 4096, 3 * MIB, 1 << 40):
        with pytest.raises(ValueError, match=f"or another power of two of bytes, not {page_bytes}"):
            HugePageAllocator(page_bytes)
    for node in (-1, 1024):
        with pytest.raises(ValueError, match=f"a number from 0 to 1023, not {node}"):
            NumaAllocator(node)


def test_the_provider_s_own() -> None:
    allocator = DefaultAllocator()
    assert allocator.allocate(8, 8) is USE_DEFAULT
    assert ArenaAllocator(allocator).allocate(8, 8) is USE_DEFAULT
    assert repr(USE_DEFAULT) == "USE_DEFAULT"
    with pytest.raises(ValueError, match="is no piece of"):
        allocator.free(4096)


# --------------------------------------------------------------------------------------------------- what falls back


@pytest.mark.parametrize(
    ("page_bytes", "name", "where"),
    [
        (2 * MIB, "2 MiB", "/proc/sys/vm/nr_hugepages"),
        (GIB, "1 GiB", "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"),
    ],
)
def test_huge_pages(page_bytes: int, name: str, where: str) -> None:
    strict, willing = HugePageAllocator(page_bytes, strict=True), HugePageAllocator(page_bytes)
    assert (strict.page_bytes, strict.strict, willing.strict) == (page_bytes, True, False)
    if huge_pages_free(page_bytes):
        holder = Holder(strict)
        for size in (8, 8, 100_000, MIB):
            holder.take(size, 64)
        assert strict.statistics().huge_bytes == strict.statistics().mapped_bytes == page_bytes
        holder.give_all()
    else:
        with pytest.raises(OSError, match=f"huge pages? of {name} cannot be had|has no huge pages of {name}") as caught:
            strict.allocate(8, 8)
        if caught.value.errno == errno.ENOMEM:
            assert f"`echo NUMBER > {where}`" in str(caught.value)
        assert strict.statistics().mapped_bytes == 0
    holder = Holder(willing)
    holder.take(8, 8)
    if not huge_pages_free(page_bytes) and not huge_pages_free(2 * MIB):
        assert willing.statistics().huge_bytes == 0
    assert willing.statistics().mapped_bytes in (256 * KIB, 2 * MIB, page_bytes)
    holder.give_all()


def test_huge_pages_that_no_machine_has() -> None:
    with pytest.raises(OSError, match=r"this kernel has no huge pages of 1 MiB; it has: ") as caught:
        HugePageAllocator(MIB, strict=True).allocate(8, 8)
    assert caught.value.errno == errno.EINVAL
    holder = Holder(HugePageAllocator(MIB))
    holder.take(8, 8)
    holder.give_all()


def nodes() -> set[int]:
    """The NUMA nodes that are online; none where the kernel knows of none."""
    path = Path("/sys/devices/system/node/online")
    ranges = re.findall(r"(\d+)(?:-(\d+))?", path.read_text() if path.exists() else "")
    return {node for first, last in ranges for node in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("node", [0, 1000])
def test_nodes(node: int) -> None:
    strict, willing = NumaAllocator(node, strict=True), NumaAllocator(node)
    assert (strict.node, strict.strict, willing.strict) == (node, True, False)
    holder = Holder(willing)
    holder.take(10_000, 8)
    bound = willing.statistics().bound_bytes
    assert bound in (0, willing.statistics().mapped_bytes)
    if bound:
        assert node in nodes()
        holders = Holder(strict), Holder(ArenaAllocator(strict))
        for each in holders:
            each.take(10_000, 8)
        assert strict.statistics().bound_bytes == strict.statistics().mapped_bytes
        for each in holders:
            each.give_all()
    else:
        with pytest.raises(OSError, match=r"NUMA node") as caught:
            strict.allocate(8, 8)
        assert caught.value.errno in (errno.EINVAL, errno.ENOSYS, errno.EPERM)
    assert node != 1000 or not bound
    holder.give_all()


# ------------------------------------------------------------------------------------------------ threads and forks


def flags_of(address: int) -> set[str]:
    """What the kernel knows of the mapping at an address: see VmFlags in proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


@all_kinds
def test_a_fork_copies_nothing(make: Callable[[], NativeAllocator]) -> None:
    allocator = make()
    holder = Holder(allocator)
    small, large = holder.take(8, 8), holder.take(MIB, 4096)
    for address in (small, large):
        assert {"sh", "dc"} <= flags_of(address)  # shared, and not for children

    def child() -> tuple[int, int]:
        assert flags_of(small) == flags_of(large) == set()
        assert allocator.statistics().pieces == allocator.statistics().mappings == 0
        with pytest.raises(ValueError, match="is no piece of"):
            allocator.free(small)
        own = Holder(allocator)
        own.take(8, 8)
        own.take(MIB, 4096)
        own.give_all()
        return allocator.statistics().pieces, allocator.statistics().mappings

    pieces, mappings = in_child(child)
    assert pieces == 0
    assert mappings <= kept(allocator)
    assert allocator.statistics().pieces == 2
    holder.give_all()


def test_forks_beside_threads() -> None:
    """Whoever is inside at that moment, the child can use the allocator."""
    arena = ArenaAllocator()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            address = arena.allocate(300_000, 64)
            assert isinstance(address, int)
            arena.free(address)

    def child() -> None:
        own = Holder(arena)
        for size in (8, 100_000, 300_000):
            own.take(size, 64)
        own.give_all()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            in_child(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_threads() -> None:
    arena = ArenaAllocator()

    def work() -> None:
        holder = Holder(arena)
        for number in range(300):
            holder.take(8 << number % 16, 8 << number % 8)
            if number % 3:
                holder.give(next(iter(holder.pieces)))
        holder.give_all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.statistics().pieces == 0
    assert arena.statistics().mappings <= 1


BESIDE = """
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

struct allocator {
    void *(*alloc)(void *self, size_t size, size_t alignment, uint64_t resource_type);
    void (*free)(void *self, void *address, uint64_t resource_type);
    void *self;
    int sound;
};

static void *use(void *argument)
{
    struct allocator *allocator = argument;
    int i;

    for (i = 0; i < 1000; i++) {
        char *piece = allocator->alloc(allocator->self, 100, 64, 1);

        if (!piece || (uintptr_t)piece % 64 || piece[99]++)
            return NULL;
        allocator->free(allocator->self, piece, 1);
    }
    allocator->sound = 1;
    return NULL;
}

int beside(void *alloc, void *free, void *self)
{
    struct allocator allocator = {alloc, free, self, 0};
    pthread_t thread;

    return pthread_create(&thread, NULL, use, &allocator) == 0 && pthread_join(thread, NULL) == 0 && allocator.sound;
}
"""


@pytest.mark.toolchain
@all_kinds
def test_no_interpreter_is_needed(make: Callable[[], NativeAllocator], tmp_path: Path) -> None:
    """A thread that Python knows nothing of asks, while this one waits for it and keeps the GIL."""
    source, library = tmp_path / "beside.c", tmp_path / "beside.so"
    source.write_text(BESIDE)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
    beside = ctypes.PyDLL(str(library)).beside
    beside.argtypes = [ctypes.c_void_p] * 3
    allocator = make()
    assert beside(*allocator.c_functions) == 1
    assert allocator.statistics().pieces == 0


def test_memory_outlives_a_forgotten_allocator() -> None:
    arena = ArenaAllocator()
    address = arena.allocate(100, 64)
    assert isinstance(address, int)
    with pytest.warns(ResourceWarning, match="an allocator was forgotten with a piece out: their memory stays"):
        del arena
    ctypes.memset(address, 1, 100)
    assert contents(address, 100) == b"\1" * 100


def test_what_is_on_top_keeps_what_is_under() -> None:
    arena = ArenaAllocator(RecordingAllocator(SharedPageAllocator()))
    holder = Holder(arena)
    gc.collect()
    holder.take(8, 8)
    holder.take(MIB, 8)
    assert arena.inner.statistics().pieces == 2
    holder.give_all()


def test_types() -> None:
    allocator = RecordingAllocator(ArenaAllocator())
    address = assert_type(allocator.allocate(8, 8), int | UseDefault)
    assert isinstance(address, int)
    assert isinstance(allocator.inner, ArenaAllocator)
    assert isinstance(assert_type(allocator.native, bool), bool)
    assert isinstance(assert_type(allocator.statistics(), AllocatorStatistics), AllocatorStatistics)
    ((kind, usage),) = assert_type(allocator.usage(), Mapping[ResourceKind, AllocatorUsage]).items()
    assert (str(kind), usage.size_bytes) == ("aioverbs buffer", 8)
    allocator.free(address)
    assert isinstance(assert_type(HugePageAllocator().page_bytes, int), int)
    assert isinstance(assert_type(ArenaAllocator().inner, NativeAllocator), SharedPageAllocator)

    class Own:
        def allocate(self, size: int, alignment: int, resource_type: int, /) -> int | UseDefault | None:
            return USE_DEFAULT if size > 8 else None

        def free(self, address: int, resource_type: int, /) -> None:
            pass

    own: Allocator = Own()
    assert RecordingAllocator(own).allocate(16, 8) is USE_DEFAULT
    assert allocator_of_buffers(own) is own


def allocator_of_buffers(allocator: Allocator) -> Allocator:
    """What is typed so takes one of aioverbs' own as well."""
    taken: list[Allocator] = [SharedPageAllocator(), HugePageAllocator(), NumaAllocator(0), allocator]
    return taken[-1]
