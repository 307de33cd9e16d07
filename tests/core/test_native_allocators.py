"""Allocators that work in C, by themselves: answers and refusals of their Python handles.

Their memory, also under threads and forks, is tested in C: tests/native/test_alloc_*.c.
"""

import ctypes
import errno
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, assert_type

import pytest

from aioverbs._core.alloc import allocators as compiled
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
from tests.core.pieces import GIB, KIB, MIB, Holder, all_kinds, contents, huge_pages_free
from tests.garbage import collect_garbage


@all_kinds
def test_each_kind_refuses_invalid_arguments(make: Callable[[], NativeAllocator]) -> None:
    allocator = make()
    assert isinstance(allocator, Allocator)
    assert allocator.native
    assert allocator.statistics().pieces == 0
    assert isinstance(allocator.statistics(), AllocatorStatistics)
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Derived", (type(allocator),), {})
    # A second initialisation would lose the pieces in use.
    initialise: Any = type(allocator).__init__
    arguments: dict[type, list[object]] = {NumaAllocator: [0], RecordingAllocator: [SharedPageAllocator()]}
    with pytest.raises(RuntimeError, match="was created before"):
        initialise(allocator, *arguments.get(type(allocator), []))
    for size, alignment in ((0, 8), (-1, 8), (8, 0), (8, -8), (8, 24)):
        with pytest.raises(ValueError, match=r"`size` must be at least 1|`alignment` must be a power of two"):
            allocator.allocate(size, alignment)
    with pytest.raises(OSError, match=r"cannot be mapped: Cannot allocate memory|cannot be allocated") as caught:
        allocator.allocate(1 << 50, 8)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(OSError, match=f"no memory can have this size or alignment: {1 << 62} bytes"):
        allocator.allocate(1 << 62, 8)
    address = allocator.allocate(4096, 64)
    assert isinstance(address, int)
    for wrong in (0, 1, address + 1, address + 64, address + (1 << 40)):
        with pytest.raises(ValueError, match=rf"{wrong:#x} is not a piece of <aioverbs.*: it was never allocated"):
            allocator.free(wrong)
    allocator.free(address)
    with pytest.raises(ValueError, match="is not a piece of"):
        allocator.free(address)


def test_the_base_class_is_no_allocator() -> None:
    with pytest.raises(TypeError, match="use SharedPageAllocator"):
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


def test_invalid_arguments_are_refused() -> None:
    for chunk_bytes in (0, 2048, 100_000, 2 * GIB):
        with pytest.raises(ValueError, match=f"from 4 KiB to 1 GiB, got {chunk_bytes}"):
            ArenaAllocator(chunk_bytes=chunk_bytes)
    for page_bytes in (0, 4096, 3 * MIB, 1 << 40):
        with pytest.raises(ValueError, match=f"or another power of two from 64 KiB to 16 GiB, got {page_bytes}"):
            HugePageAllocator(page_bytes)
    for node in (-1, 1024):
        with pytest.raises(ValueError, match=f"`node` must be from 0 to 1023, got {node}"):
            NumaAllocator(node)


def test_the_default_allocator() -> None:
    allocator = DefaultAllocator()
    assert allocator.allocate(8, 8) is USE_DEFAULT
    assert ArenaAllocator(allocator).allocate(8, 8) is USE_DEFAULT
    assert repr(USE_DEFAULT) == "USE_DEFAULT"
    with pytest.raises(ValueError, match="is not a piece of"):
        allocator.free(4096)


# ---- Fallbacks


@pytest.mark.parametrize(("page_bytes", "name"), [(2 * MIB, "2 MiB"), (GIB, "1 GiB")])
def test_huge_pages(page_bytes: int, name: str) -> None:
    strict, lenient = HugePageAllocator(page_bytes, strict=True), HugePageAllocator(page_bytes)
    assert (strict.page_bytes, strict.strict, lenient.strict) == (page_bytes, True, False)
    if huge_pages_free(page_bytes):
        holder = Holder(strict)
        for size in (8, 8, 100_000, MIB):
            holder.allocate(size, 64)
        assert strict.statistics().huge_bytes == strict.statistics().mapped_bytes == page_bytes
        holder.free_all()
    else:
        with pytest.raises(
            OSError, match=f"huge pages? of {name} cannot be allocated|has no huge pages of {name}"
        ) as caught:
            strict.allocate(8, 8)
        if caught.value.errno == errno.ENOMEM:
            assert re.search(r"`echo NUMBER > /\S+/nr_hugepages`", str(caught.value))
        assert strict.statistics().mapped_bytes == 0
    holder = Holder(lenient)
    holder.allocate(8, 8)
    if not huge_pages_free(page_bytes) and not huge_pages_free(2 * MIB):
        assert lenient.statistics().huge_bytes == 0
    assert lenient.statistics().mapped_bytes in (256 * KIB, 2 * MIB, page_bytes)
    holder.free_all()


@pytest.mark.parametrize(
    ("default", "page_bytes", "where", "boot_size"),
    [
        (2 * MIB, 2 * MIB, "/proc/sys/vm/nr_hugepages", "2M"),
        (2 * MIB, MIB, "/sys/kernel/mm/hugepages/hugepages-1024kB/nr_hugepages", "1M"),  # s390x
        (2 * MIB, GIB, "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "1024M"),
        (512 * MIB, 2 * MIB, "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "2M"),  # arm64, 64 KiB pages
        (2 * MIB, 64 * KIB, "/sys/kernel/mm/hugepages/hugepages-64kB/nr_hugepages", "64K"),  # arm64, 4 KiB pages
    ],
)
def test_the_error_says_how_to_configure_huge_pages(
    monkeypatch: pytest.MonkeyPatch, default: int, page_bytes: int, where: str, boot_size: str
) -> None:
    monkeypatch.setattr(compiled, "_default_huge_page_size", lambda: default)
    text = vars(compiled)["_huge_pages_error_text"](errno.ENOMEM, page_bytes, page_bytes)
    assert f"`echo NUMBER > {where}`" in text
    assert f"`hugepagesz={boot_size} hugepages=NUMBER`" in text


def test_an_unsupported_huge_page_size() -> None:
    with pytest.raises(OSError, match=r"this kernel has no huge pages of 1 MiB; it has: ") as caught:
        HugePageAllocator(MIB, strict=True).allocate(8, 8)
    assert caught.value.errno == errno.EINVAL
    holder = Holder(HugePageAllocator(MIB))
    holder.allocate(8, 8)
    holder.free_all()


def nodes() -> set[int]:
    """Return the online NUMA nodes; none if the kernel does not report them."""
    path = Path("/sys/devices/system/node/online")
    ranges = re.findall(r"(\d+)(?:-(\d+))?", path.read_text() if path.exists() else "")
    return {node for first, last in ranges for node in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("node", [0, 1000])
def test_memory_of_a_numa_node(node: int) -> None:
    strict, lenient = NumaAllocator(node, strict=True), NumaAllocator(node)
    assert (strict.node, strict.strict, lenient.strict) == (node, True, False)
    holder = Holder(lenient)
    holder.allocate(10_000, 8)
    bound = lenient.statistics().bound_bytes
    assert bound in (0, lenient.statistics().mapped_bytes)
    if bound:
        assert node in nodes()
        holders = Holder(strict), Holder(ArenaAllocator(strict))
        for each in holders:
            each.allocate(10_000, 8)
        assert strict.statistics().bound_bytes == strict.statistics().mapped_bytes
        for each in holders:
            each.free_all()
    else:
        with pytest.raises(OSError, match=r"NUMA node") as caught:
            strict.allocate(8, 8)
        assert caught.value.errno in (errno.EINVAL, errno.ENOSYS, errno.EPERM)
    assert node != 1000 or not bound
    holder.free_all()


# ---- Without the interpreter, and without references

FOREIGN_THREAD_SOURCE = """
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
def test_no_interpreter_is_needed(tmp_path: Path) -> None:
    """A thread unknown to Python allocates while this thread waits for it and holds the GIL."""
    source, library = tmp_path / "beside.c", tmp_path / "beside.so"
    source.write_text(FOREIGN_THREAD_SOURCE)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
    beside = ctypes.PyDLL(str(library)).beside
    beside.argtypes = [ctypes.c_void_p] * 3
    allocator = RecordingAllocator(ArenaAllocator())
    assert beside(*allocator.c_functions) == 1
    assert allocator.statistics().pieces == 0


@pytest.mark.parametrize("wrong", [{"resource_type": 1 << 64}, {"resource_type": -1}, {"size": 1 << 64}])
def test_a_number_that_cannot_be_recorded_leaks_no_piece_of_an_allocator_in_python(wrong: dict[str, int]) -> None:
    pieces: list[int] = []

    class InPython:
        def allocate(self, *_: object) -> int:
            pieces.append(4096)
            return 4096

        def free(self, address: int, *_: object) -> None:
            pieces.remove(address)

    allocator = RecordingAllocator(InPython())
    with pytest.raises(OverflowError):
        allocator.allocate(**{"size": 64, "alignment": 64, "resource_type": 0} | wrong)
    assert pieces == []


def test_memory_outlives_a_dropped_allocator() -> None:
    arena = ArenaAllocator()
    address = arena.allocate(100, 64)
    assert isinstance(address, int)
    with pytest.warns(ResourceWarning, match="an allocator was dropped with a piece allocated: their memory leaks"):
        del arena
    ctypes.memset(address, 1, 100)
    assert contents(address, 100) == b"\1" * 100


def test_an_allocator_keeps_its_inner_allocator() -> None:
    arena = ArenaAllocator(RecordingAllocator(SharedPageAllocator()))
    holder = Holder(arena)
    collect_garbage()
    holder.allocate(8, 8)
    holder.allocate(MIB, 8)
    assert arena.inner.statistics().pieces == 2
    holder.free_all()


def test_types_of_allocators() -> None:
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
        def allocate(self, size: int, alignment: int, resource_type: int, *of: object) -> int | UseDefault | None:
            return USE_DEFAULT if size > 8 else None

        def free(self, address: int, resource_type: int, *of: object) -> None:
            pass

    own: Allocator = Own()
    assert RecordingAllocator(own).allocate(16, 8) is USE_DEFAULT
    assert allocator_of_buffers(own) is own


def allocator_of_buffers(allocator: Allocator) -> Allocator:
    """Check that the `Allocator` type accepts the allocators of aioverbs as well."""
    allocators: list[Allocator] = [SharedPageAllocator(), HugePageAllocator(), NumaAllocator(0), allocator]
    return allocators[-1]
