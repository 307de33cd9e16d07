"""Native allocators among threads and forks, and when nobody remembers them."""

import ctypes
import gc
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aioverbs.allocators import (
    ArenaAllocator,
    NativeAllocator,
    RecordingAllocator,
    SharedPageAllocator,
)
from tests.core.children import in_child
from tests.core.pieces import MIB, Holder, all_kinds, contents, kept


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
        # What is there now, if anything, the child has mapped meanwhile.
        assert not {"sh", "dc"} & (flags_of(small) | flags_of(large))
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
