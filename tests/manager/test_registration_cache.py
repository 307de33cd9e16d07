"""Registration cache: reuse, limits, and no stale entries."""

import array
import asyncio
import contextlib
import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioverbs import (
    AccessFlags,
    BusyResourceError,
    ClosedResourceError,
    ProtectionDomain,
    RegistrationCacheStatistics,
    ResourceState,
    VerbsError,
    open_device,
)
from aioverbs._core.handles import handles
from aioverbs._lifecycle.resource import Resource, open_now
from aioverbs._memory.region import MemoryRegion
from aioverbs._verbs.device import Device
from tests.capabilities import Capability, capabilities, needs
from tests.conftest import LOOP_FACTORIES
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.waiting import until

if TYPE_CHECKING:
    from typing_extensions import Buffer

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
SIZE = 4096


def a_numpy_array() -> "Buffer":
    numpy = pytest.importorskip("numpy")
    made: Buffer = numpy.zeros(SIZE // 4, dtype="u4")
    return made


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(SIZE),
    "array": lambda: array.array("d", bytes(SIZE)),
    "mmap": lambda: mmap.mmap(-1, SIZE),
    "ctypes": lambda: (ctypes.c_char * SIZE)(),
    "memoryview": lambda: memoryview(bytearray(SIZE)),
    "a part": lambda: memoryview(bytearray(2 * SIZE))[100 : 100 + SIZE],
    "numpy": a_numpy_array,
}
every_buffer = pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)


@pytest_asyncio.fixture
async def pd(device: Device) -> AsyncIterator[ProtectionDomain]:
    async with device.protection_domain() as pd:
        yield pd


def counts(pd: ProtectionDomain) -> tuple[int, int, int, int]:
    """Return hits, misses, evictions and entries, and check the number of bytes."""
    statistics = pd.cache.statistics()
    regions = [entry.region for entry in pd.cache._entries.values()]
    assert statistics.bytes == sum(len(region) for region in regions)
    return statistics.hits, statistics.misses, statistics.evictions, statistics.entries


def held_registrations(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let each registration run in a thread, and wait there until the returned event is set."""
    go_on = threading.Event()

    def open_later(resource: Resource) -> None:
        assert go_on.wait(patience(20))
        open_now(resource)

    monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
    monkeypatch.setattr("aioverbs._memory.region.open_now", open_later)
    return go_on


async def use(pd: ProtectionDomain, buffer: "Buffer", access: AccessFlags = AccessFlags.LOCAL_WRITE) -> int:
    """Register a buffer through the cache; return its key."""
    async with pd.cache.region(buffer, access) as region:
        assert (region.address, len(region)) == handles.span(buffer)
        return region.lkey


# ---- Reuse


@every_buffer
async def test_a_buffer_used_again_is_registered_once(pd: ProtectionDomain, make: Callable[[], Any]) -> None:
    buffer = make()
    keys = {await use(pd, buffer) for _ in range(3)}
    assert len(keys) == 1
    assert counts(pd) == (2, 1, 0, 1)
    async with pd.cache.region(buffer) as region:
        region.buffer[5] = 7
        assert memoryview(buffer).cast("B")[5] == 7
    assert pd.cache.statistics() == RegistrationCacheStatistics(hits=3, misses=1, evictions=0, entries=1, bytes=SIZE)
    await pd.cache.drop(buffer)
    assert counts(pd) == (3, 1, 1, 0)


@every_buffer
async def test_buffers_held_only_by_the_cache_are_evicted(pd: ProtectionDomain, make: Callable[[], Any]) -> None:
    kept, lost = make(), make()
    await use(pd, kept)
    await use(pd, lost)
    del lost
    assert counts(pd) == (0, 2, 0, 2), "evictions happen only in later calls"
    async with pd.cache.region(bytearray(SIZE)):  # not referenced afterwards, so evicted at once
        pass
    assert counts(pd) == (0, 3, 2, 1)
    await use(pd, kept)
    assert counts(pd) == (1, 3, 2, 1)


async def test_slices_of_an_object_that_only_caches_hold_are_evicted(device: Device) -> None:
    async with device.protection_domain() as one, device.protection_domain() as other:
        memory = bytearray(SIZE)
        for pd in (one, other):
            await use(pd, memoryview(memory)[:100])
            await use(pd, memoryview(memory)[100:])
            await use(pd, memory)
        del memory
        for pd in (one, other):
            assert counts(pd) == (0, 3, 0, 3), "evictions happen only in later calls"
            async with pd.cache.region(bytearray(SIZE)):
                pass
            assert counts(pd) == (0, 4, 4, 0)


async def test_slices_and_access_flags_have_separate_entries(pd: ProtectionDomain) -> None:
    memory = bytearray(SIZE)
    whole = await use(pd, memory)
    for buffer, access in (
        (memoryview(memory)[:100], AccessFlags.LOCAL_WRITE),
        (memoryview(memory)[100:], AccessFlags.LOCAL_WRITE),
        (memory, REMOTE),
        (memory, AccessFlags.REMOTE_READ),
        (memoryview(memory).toreadonly(), AccessFlags.REMOTE_READ),
    ):
        assert await use(pd, buffer, access) != whole
    assert counts(pd) == (0, 6, 0, 6)
    for same in (memory, memoryview(memory), memoryview(memoryview(memory))[:]):
        assert await use(pd, same) == whole
    assert counts(pd) == (3, 6, 0, 6)
    async with pd.cache.region(memoryview(memory).toreadonly(), AccessFlags.REMOTE_READ) as region:
        assert region.buffer.readonly
    del buffer, same
    await pd.cache.drop(memoryview(memory)[7:])  # drops all entries of the underlying object
    assert counts(pd) == (4, 6, 6, 0)
    memory.append(1)


async def test_read_only_memory_is_not_written(pd: ProtectionDomain) -> None:
    memory = bytearray(SIZE)
    await use(pd, memory)
    buffers: list[Any] = [memoryview(memory).toreadonly(), bytes(SIZE)]
    if Capability.READ_ONLY_MAPPINGS in capabilities(pd.handle.context.name):
        buffers.append(mmap.mmap(-1, SIZE, access=mmap.ACCESS_READ))
    for buffer in buffers:
        with pytest.raises(BufferError, match="is read-only"):
            await use(pd, buffer)
        await use(pd, buffer, AccessFlags.REMOTE_READ)


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize(("error", "count", "evicted"), [
    (errno.ENOMEM, 1, 1), (errno.ENOMEM, 2, 2), (errno.ENOMEM, 3, 2), (errno.EOPNOTSUPP, 1, 0),
])  # fmt: skip
async def test_idle_registrations_make_room(device: Device, error: int, count: int, evicted: int) -> None:
    """If the device can register no more memory, those that were not used for the longest time are evicted first."""
    async with device.protection_domain() as pd:
        used, buffers, more = bytearray(SIZE), [bytearray(SIZE), bytearray(SIZE)], bytearray(SIZE)
        async with pd.cache.region(used) as held:
            regions = []
            for buffer in buffers:
                async with pd.cache.region(buffer) as region:
                    regions.append(region)
            device.faults.fail("reg_mr", error, times=count)
            with pytest.raises(VerbsError) if count > 2 or not evicted else contextlib.nullcontext():
                async with pd.cache.region(more) as region:
                    assert region.state is ResourceState.OPEN
            assert [each.closed for each in regions] == [evicted > 0, evicted > 1]
            assert not held.closed
        more.extend(b"free to be resized" if count > 2 or not evicted else b"")


@needs(Capability.FAULT_PLAN)
async def test_unsuitable_memory_is_refused(pd: ProtectionDomain, device: Device) -> None:
    with pytest.raises(BufferError):
        await use(pd, memoryview(bytearray(64))[::2])
    with pytest.raises(ValueError, match="no bytes"):
        await use(pd, bytearray())
    with pytest.raises(TypeError):
        await use(pd, "text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LOCAL_WRITE"):
        await use(pd, bytearray(64), AccessFlags.REMOTE_WRITE)
    device.faults.fail("reg_mr", errno.ENOMEM)
    memory = bytearray(64)
    with pytest.raises(VerbsError, match="ENOMEM"):
        await use(pd, memory)
    assert pd.cache.statistics().entries == 0
    memory.append(1)
    await use(pd, memory)


# ---- No stale entries


async def test_cached_memory_is_not_moved_until_dropped(pd: ProtectionDomain) -> None:
    memory, mapping, numbers = bytearray(SIZE), mmap.mmap(-1, SIZE), array.array("B", bytes(SIZE))
    for buffer in (memory, mapping, numbers):
        await use(pd, buffer)
        await use(pd, memoryview(buffer)[8:])
    changes: tuple[Callable[[], None], ...] = (lambda: memory.append(1), mapping.close, lambda: numbers.append(1))
    for change in changes:
        with pytest.raises(BufferError):
            change()
    for buffer in (memory, mapping, numbers):
        await pd.cache.drop(buffer)
    memory.append(1)
    numbers.append(1)
    mapping.close()
    assert counts(pd) == (0, 6, 6, 0)
    async with pd.cache.region(memory) as region:
        assert len(region) == SIZE + 1
        with pytest.raises(BusyResourceError, match="leave the block first"):
            await pd.cache.drop(memory)
    with pytest.raises(ValueError, match="closed"):
        await use(pd, mapping)


async def test_memory_of_posted_receives_is_not_dropped(pd: ProtectionDomain) -> None:
    memory = bytearray(SIZE)
    await use(pd, memory)
    async with pd.cache.region(memory) as region:
        pass
    async with pd.completion_queue(64) as cq, pd.queue_pair(cq) as qp:
        qp.to_init()
        _ = qp.receive(region[:8])
        with pytest.raises(BusyResourceError, match="has 1 receives posted in it: close or reset their queue pair"):
            await pd.cache.drop(memory)
        assert counts(pd) == (1, 1, 0, 1), "nothing was dropped"
    await pd.cache.drop(memory)
    assert counts(pd) == (1, 1, 1, 0)
    memory.append(1)


async def test_another_object_at_the_same_address(pd: ProtectionDomain) -> None:
    pages = mmap.mmap(-1, SIZE)
    address, _ = handles.span(pages)
    one = (ctypes.c_char * SIZE).from_address(address)
    other = (ctypes.c_char * SIZE).from_address(address)
    assert await use(pd, one) != await use(pd, other)
    assert counts(pd) == (0, 2, 0, 2)
    # Cached objects stay alive, so no new object can have the identity of one of them.
    seen = set()
    for _ in range(20):
        memory = bytearray(SIZE)
        seen.add(await use(pd, memory))
        del memory
    assert counts(pd)[0] == 0
    assert len(seen) == 20


async def test_memory_without_an_owning_object_is_not_cached(pd: ProtectionDomain) -> None:
    pages = mmap.mmap(-1, SIZE)
    make = ctypes.pythonapi.PyMemoryView_FromMemory
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view = make(handles.span(pages)[0], SIZE, 0x200)
    assert view.obj is None
    assert await use(pd, view) != await use(pd, view)
    assert counts(pd) == (0, 2, 0, 0)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="PEP 688 is part of Python 3.12")
async def test_memory_that_an_object_exports_by_another_one_is_registered(pd: ProtectionDomain) -> None:
    class Exporter:
        def __init__(self) -> None:
            self.memory = bytearray(SIZE)

        def __buffer__(self, flags: int) -> memoryview:
            return memoryview(self.memory)

    exporter = Exporter()
    for buffer in (exporter, memoryview(exporter)):
        _ = await use(pd, buffer)
    assert counts(pd)[1] == 2


async def test_an_object_held_only_by_a_view_is_cached(pd: ProtectionDomain) -> None:
    view = memoryview(bytearray(SIZE))
    await use(pd, view)
    async with pd.cache.region(bytearray(1)):
        pass
    assert counts(pd) == (0, 2, 1, 1)
    await use(pd, view)
    assert counts(pd) == (1, 2, 1, 1)


# ---- Bounds


async def test_the_least_recently_used_entry_is_evicted(pd: ProtectionDomain) -> None:
    cache = pd.cache
    cache.max_bytes = 3 * SIZE
    buffers = [bytearray(SIZE) for _ in range(5)]
    for each in (0, 1, 2, 0):
        await use(pd, buffers[each])
    await use(pd, buffers[3])
    assert counts(pd) == (1, 4, 1, 3)
    await use(pd, buffers[0])
    assert counts(pd) == (2, 4, 1, 3)
    await use(pd, buffers[1])
    assert counts(pd) == (2, 5, 2, 3), "buffer 1 was evicted"
    cache.max_entries = 2
    await use(pd, buffers[1])
    assert counts(pd) == (3, 5, 3, 2)
    cache.max_entries = 0
    await use(pd, buffers[4])
    assert counts(pd) == (3, 6, 3, 2)
    await use(pd, buffers[1])
    assert cache.statistics().entries == 2
    cache.max_entries = 1
    await use(pd, buffers[1])
    assert cache.statistics().entries == 1


async def test_too_large_buffers_evict_nothing(pd: ProtectionDomain) -> None:
    small, large = bytearray(SIZE), bytearray(4 * SIZE)
    pd.cache.max_bytes = 3 * SIZE
    await use(pd, small)
    for _ in range(2):
        await use(pd, large)
    large.append(1)
    await use(pd, small)
    assert counts(pd) == (1, 3, 0, 1)


async def test_entries_in_use_are_not_evicted(pd: ProtectionDomain) -> None:
    pd.cache.max_bytes = SIZE
    one, two, three = (bytearray(SIZE) for _ in range(3))
    async with pd.cache.region(one) as first, pd.cache.region(one) as again:
        assert first is again
        async with pd.cache.region(two) as second:
            assert counts(pd) == (1, 2, 0, 2)
            second.pins.add()
        assert counts(pd) == (1, 2, 0, 2), "pinned by the device"
        second.pins.discard()
        del second
        async with pd.cache.region(three):
            assert counts(pd) == (1, 3, 1, 2)
        assert not first.closed
        first.buffer[0] = 1
    assert counts(pd) == (1, 3, 2, 1)


async def test_dropping_waits_for_dma(pd: ProtectionDomain) -> None:
    memory = bytearray(SIZE)
    async with pd.cache.region(memory) as region:
        region.pins.add()
    dropping = asyncio.create_task(pd.cache.drop(memory))
    await asyncio.sleep(0.01)
    assert not dropping.done()
    region.pins.discard()
    await dropping
    assert region.closed


@needs(Capability.FAULT_PLAN, Capability.OBJECT_COUNTS)
async def test_an_entry_that_fails_to_deregister(pd: ProtectionDomain, device: Device) -> None:
    one, two, three = (bytearray(SIZE) for _ in range(3))
    await use(pd, one)
    await use(pd, two)
    pd.cache.max_entries = 1
    device.faults.fail("dereg_mr", errno.EIO)
    with pytest.raises(VerbsError, match="EIO"):
        await use(pd, three)
    assert dict(device.statistics().objects)["mrs"] == 1, "one was deregistered; the domain still owns the other"
    await use(pd, three)
    assert pd.cache.statistics().entries == 1


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("cached", [True, False])
async def test_an_exception_of_the_block_gets_a_note_of_a_failure_to_deregister(
    pd: ProtectionDomain, device: Device, cached: bool
) -> None:
    one, two = bytearray(SIZE), bytearray(SIZE)
    await use(pd, one)
    pd.cache.max_bytes = SIZE if cached else 1

    async def fail() -> None:
        async with pd.cache.region(two):
            pd.cache.max_entries = 0
            device.faults.fail("dereg_mr", errno.EIO)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block") as caught:
        await fail()
    (note,) = caught.value.__notes__
    assert "failed: VerbsError: ibv_dereg_mr failed: EIO" in note
    pd.cache.max_entries = 1
    await use(pd, two)


# ---- Concurrency and closing


async def test_concurrent_users_share_one_registration(pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
    memory = bytearray(SIZE)
    keys = await asyncio.gather(*(use(pd, memory) for _ in range(5)))
    assert len(set(keys)) == 1
    assert counts(pd) == (4, 1, 0, 1)
    del memory


async def test_a_cancelled_registration_is_repeated_by_the_next_waiter(
    pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = held_registrations(monkeypatch)
    memory = bytearray(SIZE)
    tasks = [asyncio.create_task(use(pd, memory)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks[0].cancel()
    go_on.set()
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()
    assert tasks[1].result() == tasks[2].result()
    assert counts(pd) == (1, 2, 0, 1)


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
async def test_loops_share_a_cache(pd: ProtectionDomain, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    pd.cache.max_entries = 3
    buffers = [bytearray(SIZE) for _ in range(6)]

    def run(seed: int) -> None:
        async def work() -> None:
            for each in range(60):
                buffer = buffers[(each * seed + each // 7) % 6]
                async with pd.cache.region(buffer) as region:
                    assert region.address == handles.span(buffer)[0]
                    region.buffer[seed] = each
                    if each % 3 == 0:
                        await asyncio.sleep(0)
                    assert region.buffer[seed] == each

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work())

    await asyncio.gather(*(asyncio.to_thread(run, seed) for seed in (1, 5, 7, 11)))
    statistics = pd.cache.statistics()
    assert statistics.hits + statistics.misses == 240
    assert statistics.misses - statistics.evictions == statistics.entries <= 3


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # a cancel scope left by the collector
@pytest.mark.parametrize("how", ["used", "dropped"])
@pytest.mark.parametrize("when", ["before the thread ends", "after that"])
async def test_a_registration_whose_loop_was_closed_meanwhile_does_not_block_the_buffer(
    pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    open_region = MemoryRegion._open

    def slow(region: MemoryRegion) -> None:
        begun.set()
        assert go_on.wait(patience(10))
        open_region(region)

    monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
    monkeypatch.setattr(MemoryRegion, "_open", slow)
    buffer = bytearray(SIZE)
    deserted = use(pd, buffer)

    def desert() -> "asyncio.Task[int]":
        loop = asyncio.new_event_loop()
        task = loop.create_task(deserted)
        while not begun.is_set():
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        return task

    task = await asyncio.to_thread(desert)
    if when == "after that":
        go_on.set()
        await until(lambda: [each.region.state for each in pd.cache._entries.values()] == [ResourceState.OPEN])
    asyncio.get_running_loop().call_later(0.3, go_on.set)
    async with asyncio.timeout(patience(20)):
        await (use(pd, buffer) if how == "used" else pd.cache.drop(buffer))
        await pd.cache.drop(buffer)
    assert counts(pd)[3] == 0
    assert not task.done()
    with contextlib.suppress(RuntimeError):  # a cancel scope may be left by its own task only
        deserted.close()
    collect_garbage()
    buffer.append(1)  # no longer exported


async def test_closing_the_protection_domain_closes_its_cache(device: Device) -> None:
    memory = bytearray(SIZE)
    async with (
        device.protection_domain() as pd,
        pd.parent_domain() as domain,
        domain.cache.region(memory) as region,
    ):
        assert domain.cache is pd.cache
        assert region.handle.pd is pd.handle
    assert region.closed
    memory.append(1)
    assert pd.cache.statistics().entries == 0
    with pytest.raises(ClosedResourceError):
        await use(pd, memory)
    cache = pd.cache
    del pd, domain
    collect_garbage()
    with pytest.raises(ClosedResourceError, match="was garbage-collected"):
        async with cache.region(memory):
            pass


async def test_a_closed_region_leaves_the_cache(pd: ProtectionDomain) -> None:
    memory = bytearray(SIZE)
    async with pd.cache.region(memory) as region:
        await region.aclose()
        memory.append(1)
    assert counts(pd) == (0, 1, 0, 0)
    await use(pd, memory)


async def test_a_collected_protection_domain_with_a_cache_warns() -> None:
    memory = bytearray(SIZE)
    async with open_device("soft0") as device:
        pd = await device.protection_domain().open()
        await use(pd, memory)
        with pytest.warns(ResourceWarning, match="ProtectionDomain .* was forgotten") as all_of:
            del pd
        assert len(all_of) == 1
    memory.append(1)


class RegistrationCacheModel(RuleBasedStateMachine):
    """Adds, removes, uses and resizes buffers; every registration must cover the present memory."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.device = open_device("soft0")
        self.buffers: list[bytearray] = []
        self.run(self.open())

    def run(self, work: Any) -> None:
        self.runner.run(work)

    async def open(self) -> None:
        await self.device.open()
        self.pd = await self.device.protection_domain().open()
        self.pd.cache.max_bytes, self.pd.cache.max_entries = 10_000, 4

    @rule(size=st.integers(1, 6_000))
    def add_buffer(self, size: int) -> None:
        self.buffers.append(bytearray(size))

    @precondition(lambda self: self.buffers)
    @rule(data=st.data())
    def remove_buffer(self, data: st.DataObject) -> None:
        self.buffers.pop(data.draw(st.integers(0, len(self.buffers) - 1)))

    @precondition(lambda self: self.buffers)
    @rule(data=st.data(), content=st.binary(min_size=1, max_size=1))
    def use(self, data: st.DataObject, content: bytes) -> None:
        async def work() -> None:
            buffer = data.draw(st.sampled_from(self.buffers))
            start = data.draw(st.integers(0, len(buffer) - 1))
            stop = data.draw(st.integers(start + 1, len(buffer)))
            async with self.pd.cache.region(memoryview(buffer)[start:stop]) as region:
                assert region.address == handles.span(buffer)[0] + start
                assert len(region) == stop - start
                ctypes.memmove(region.handle.address, content, 1)  # as a device writes
                assert buffer[start : start + 1] == content

        self.run(work())

    @precondition(lambda self: self.buffers)
    @rule(data=st.data(), size=st.integers(1, 6_000))
    def resize(self, data: st.DataObject, size: int) -> None:
        async def work() -> None:
            buffer = data.draw(st.sampled_from(self.buffers))
            await self.pd.cache.drop(buffer)
            buffer[:] = bytes(size)

        self.run(work())

    @invariant()
    def size_is_bounded(self) -> None:
        hits, misses, evictions, entries = counts(self.pd)
        assert misses - evictions >= entries <= 4
        assert self.pd.cache.statistics().bytes <= 10_000
        assert hits >= 0

    def teardown(self) -> None:
        async def work() -> None:
            await self.pd.aclose()
            await self.device.aclose()

        self.run(work())
        self.runner.close()


RegistrationCacheModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestRegistrationCacheModel = RegistrationCacheModel.TestCase


@pytest.mark.parametrize("size", [64, 1 << 20])
async def test_a_referenced_error_does_not_keep_the_buffer(
    device: Device, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Neither for a cancelled registration, nor for a buffer too large for the cache."""
    go_on = held_registrations(monkeypatch)
    async with device.protection_domain() as pd:
        pd.cache.max_bytes = 4096
        buffer = bytearray(size)

        async def use() -> None:
            async with pd.cache.region(buffer):
                raise AssertionError

        task = asyncio.create_task(use())
        await asyncio.sleep(0)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        await pd.cache.drop(buffer)
        buffer.append(1)
        assert caught.tb is not None  # keeps the error referenced until here
