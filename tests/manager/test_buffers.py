"""Buffer pools: order of leases, exclusive use, DMA, growth, and closing."""

import asyncio
import ctypes
import errno
import mmap
import random
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial

import anyio
import pytest
import pytest_asyncio
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aioverbs import (
    AccessFlags,
    BufferPool,
    BufferPoolStatistics,
    ClosedResourceError,
    LeasedBuffer,
    ProtectionDomain,
    RecordingAllocator,
    RemoteRegion,
    SharedPageAllocator,
    VerbsError,
    open_device,
)
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._verbs.device import Device
from tests.capabilities import Capability, needs
from tests.conftest import LOOP_FACTORIES
from tests.core.children import SANITIZED
from tests.garbage import collect_garbage
from tests.holding import hold, unhold
from tests.manager.test_write import ends
from tests.pace import patience

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
Factory = Callable[[], asyncio.AbstractEventLoop]


@pytest_asyncio.fixture
async def pd(device: Device) -> AsyncIterator[ProtectionDomain]:
    async with device.protection_domain() as pd:
        yield pd


def counts(pool: BufferPool) -> tuple[int, int, int, int]:
    """Return the numbers of buffers leased, under DMA and free, and of waiting tasks."""
    statistics = pool.statistics()
    return statistics.leased, statistics.under_dma, statistics.free, statistics.waiting


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def check_refused(pool: BufferPool) -> None:
    with pytest.raises(ClosedResourceError, match="is not open"):
        pool.lease_nowait()
    with pytest.raises(ClosedResourceError, match="is not open"):
        await pool.lease()


# ---- Leases


async def test_a_lease(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(100, 4, access=REMOTE) as pool:
        assert (pool.size, pool.access, pool.owner) == (100, REMOTE, None)
        async with pool.lease() as buffer:
            assert len(buffer) == len(buffer.buffer) == 100
            assert counts(pool) == (1, 0, 3, 0)
            buffer.buffer[90:] = b"0123456789"
            part = buffer[90:][2:4]
            assert bytes(part.buffer) == b"23"
            assert part.sge == (buffer.address + 92, 2, buffer.region.lkey)
            assert part.remote() == RemoteRegion(buffer.address + 92, 2, buffer.region.rkey)
            assert repr(buffer) == "<LeasedBuffer of 100 bytes (leased)>"
        assert counts(pool) == (0, 0, 4, 0)
        another = await pool.lease()
        another.release()
        with pool.lease_nowait() as buffer:
            assert counts(pool) == (1, 0, 3, 0)
        assert pool.statistics() == BufferPoolStatistics(
            children=1, slabs=1, leased=0, under_dma=0, free=4, waiting=0, high_water=1
        )


async def test_buffers_are_apart_and_aligned(pd: ProtectionDomain) -> None:
    for alignment, stride in ((1, 100), (64, 128), (mmap.PAGESIZE, mmap.PAGESIZE)):
        async with pd.buffer_pool(100, 3, limit=5, alignment=alignment) as pool:
            buffers = [await pool.lease() for _ in range(5)]
            first, second = buffers[:3], buffers[3:]
            for slab in (first, second):
                assert [buffer.address - slab[0].address for buffer in slab] == [
                    each * stride for each in range(len(slab))
                ]
                assert slab[0].address % mmap.PAGESIZE == 0
            assert first[0].region is not second[0].region
            for buffer in buffers:
                buffer.release()


async def test_pages_of_64_kib(pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page size of some arm64 and POWER kernels: slabs start at a page, so buffers can be aligned to pages."""
    page = 64 << 10
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    with pytest.raises(ValueError, match=f"power of two of at most {page} bytes, got {2 * page}"):
        pd.buffer_pool(1, 1, alignment=2 * page)
    allocator = RecordingAllocator(SharedPageAllocator())
    async with pd.buffer_pool(100, 2, limit=3, alignment=page, allocator=allocator) as pool:
        buffers = [await pool.lease() for _ in range(3)]
        assert [buffer.address % page for buffer in buffers] == [0, 0, 0]
        assert buffers[1].address - buffers[0].address == page
        for buffer in buffers:
            buffer.release()


async def test_a_released_buffer_refuses_every_use(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        buffer = await pool.lease()
        part = buffer[:8]
        buffer.release()
        buffer.release()
        assert counts(pool) == (0, 0, 1, 0), "released once"
        async with pool.lease() as another:
            for old in (buffer, part, buffer[8:]):
                asks: tuple[Callable[[], object], ...] = (
                    partial(getattr, old, "address"),
                    partial(getattr, old, "sge"),
                    partial(getattr, old, "buffer"),
                    old.remote,
                    old.pins.add,
                    buffer.__enter__,
                )
                for ask in asks:
                    with pytest.raises(ClosedResourceError, match="released to its pool"):
                        ask()
            assert len(another.pins) == len(another.region.pins) == 0
            assert repr(buffer) == "<LeasedBuffer of 64 bytes (released)>"


async def test_wrong_arguments_are_refused_at_once(pd: ProtectionDomain) -> None:
    makers: tuple[tuple[Callable[[], BufferPool], str], ...] = (
        (lambda: pd.buffer_pool(0, 1), "size of a buffer pool must be at least 1, got 0"),
        (lambda: pd.buffer_pool(1, 0), "count of a buffer pool must be at least 1, got 0"),
        (lambda: pd.buffer_pool(1, 4, limit=3), "limit of 3 buffers is less than one slab of 4"),
        (lambda: pd.buffer_pool(1, 1, alignment=48), f"power of two of at most {mmap.PAGESIZE} bytes, got 48"),
        (lambda: pd.buffer_pool(1, 1, alignment=2 * mmap.PAGESIZE), f"got {2 * mmap.PAGESIZE}"),
    )
    for make, match in makers:
        with pytest.raises(ValueError, match=match):
            make()
    pool = pd.buffer_pool(64, 1, access=AccessFlags.REMOTE_WRITE)
    with pytest.raises(ValueError, match="LOCAL_WRITE"):
        await pool.open()
    assert pool.state is ResourceState.NEW
    await check_refused(pool)


async def test_numpy_without_copies(pd: ProtectionDomain) -> None:
    numpy = pytest.importorskip("numpy")
    async with pd.buffer_pool(64, 1) as pool, pool.lease() as buffer:
        array = numpy.frombuffer(buffer.buffer, dtype="u4")
        array[:] = range(16)
        assert bytes(buffer[4:8].buffer) == (1).to_bytes(4, "little")
        assert array.ctypes.data == buffer.address


async def test_pools_of_every_kind_of_domain(device: Device) -> None:
    async with device.resource_domain() as domain, domain.buffer_pool(64, 1) as pool:
        with pool.lease_nowait() as buffer:
            assert buffer.region.handle.pd is domain.pd.handle
        assert not any(child.kind == "BufferPool" for child in domain._lifecycle.info().children), (
            "the pool is a child of the protection domain"
        )


# ---- Waiting for a buffer


async def test_leases_are_granted_first_come_first_served(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 2) as pool:
        held = [await pool.lease() for _ in range(2)]
        with pytest.raises(anyio.WouldBlock):
            pool.lease_nowait()
        order: list[int] = []

        async def wait(number: int) -> None:
            async with pool.lease():
                order.append(number)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(wait(number)) for number in range(10)]
        await turns()
        assert counts(pool) == (2, 0, 0, 10)
        held[0].release()
        with pytest.raises(anyio.WouldBlock):  # granted to the first waiter already
            pool.lease_nowait()
        held[1].release()
        await asyncio.gather(*tasks)
        assert order == list(range(10))
        assert pool.statistics().high_water == 2


@pytest.mark.parametrize("when", ["waiting", "granted", "granted in the same iteration"])
async def test_a_cancelled_waiter_takes_no_buffer(pd: ProtectionDomain, when: str) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        held = await pool.lease()
        order: list[int] = []

        async def wait(number: int) -> None:
            async with pool.lease():
                order.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(3)]
        await turns()
        if when == "waiting":
            tasks[0].cancel()
            await turns()
            assert counts(pool) == (1, 0, 0, 2)
            held.release()
        elif when == "granted":
            held.release()
            assert counts(pool) == (1, 0, 0, 2)
            tasks[0].cancel()
        else:
            tasks[0].cancel()
            held.release()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        assert order == [1, 2]
        assert counts(pool) == (0, 0, 1, 0)


async def test_waiters_are_not_overtaken_while_another_thread_releases(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        held = await pool.lease()
        first = asyncio.ensure_future(pool.lease())
        await turns()
        with pool._free_list._serving:  # another thread is serving waiters
            held.release()
            assert counts(pool) == (0, 0, 1, 1)
            with pytest.raises(anyio.WouldBlock):
                pool.lease_nowait()
            second = asyncio.ensure_future(pool.lease())
            await turns()
            assert counts(pool) == (0, 0, 1, 2)
        pool._free_list.serve_waiters()
        (await first).release()
        (await second).release()
        for _ in range(2):  # no waiter, then no free buffer
            pool._free_list._serve_one_waiter()
            assert counts(pool) == (0, 0, 1, 0)
            with pool.lease_nowait():
                pool._free_list._serve_one_waiter()
                assert counts(pool) == (1, 0, 0, 0)


async def test_cancel_scopes_and_timeouts_while_waiting(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool, pool.lease():
        with anyio.move_on_after(0.01) as scope:
            await pool.lease()
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), pool.lease():
                pytest.fail("leased more buffers than the pool has")
        assert counts(pool) == (1, 0, 0, 0)


def run_in_thread(factory: Factory, work: Callable[[], Coroutine[object, object, None]]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work())


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
async def test_loops_share_a_pool(pd: ProtectionDomain, factory: Factory) -> None:
    """Every buffer has one user at a time across loops, with random cancellations."""
    users: dict[int, object] = {}
    done: list[int] = []

    async def work() -> None:
        async def use(number: int) -> None:
            rng = random.Random(number)
            for _ in range(30):
                with suppress(TimeoutError):
                    async with asyncio.timeout(rng.choice([None, 0.001, 0.0])), pool.lease() as buffer:
                        assert users.setdefault(buffer.address, buffer) is buffer
                        try:
                            await asyncio.sleep(rng.choice([0, 0, 0.0005]))
                        finally:
                            assert users.pop(buffer.address) is buffer
            done.append(number)

        await asyncio.gather(*(use(number) for number in range(10)))

    async with pd.buffer_pool(64, 2, limit=5) as pool:
        async with asyncio.timeout(patience(30)):
            await asyncio.gather(*(asyncio.to_thread(run_in_thread, factory, work) for _ in range(4)))
        assert len(done) == 40
        assert not users
        statistics = pool.statistics()
        assert (statistics.leased, statistics.under_dma, statistics.waiting) == (0, 0, 0)
        assert statistics.free == statistics.high_water == 5


async def test_waiters_of_a_closed_loop_keep_no_buffer(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        held = await pool.lease()
        loop = asyncio.SelectorEventLoop()

        async def wait() -> None:
            await pool.lease()

        def begin() -> asyncio.Task[None]:
            task = loop.create_task(wait())
            loop.run_until_complete(asyncio.sleep(0))
            return task

        task = await asyncio.to_thread(begin)
        mine = asyncio.ensure_future(pool.lease())
        await turns()
        assert counts(pool) == (1, 0, 0, 2)
        loop.close()
        held.release()
        (await mine).release()
        assert counts(pool) == (0, 0, 1, 0)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del task
            collect_garbage()


async def test_a_buffer_granted_to_a_loop_that_closes_returns(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        held = await pool.lease()
        loop = asyncio.SelectorEventLoop()
        tasks = []

        async def wait() -> None:
            await pool.lease()

        def begin() -> None:
            tasks.append(loop.create_task(wait()))
            loop.run_until_complete(asyncio.sleep(0))

        await asyncio.to_thread(begin)
        held.release()
        assert counts(pool) == (1, 0, 0, 0), "granted, but not received by the waiter yet"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.close()
        assert (counts(pool), caught) == ((0, 0, 1, 0), []), "no user forgot it"
        tasks.pop()._log_destroy_pending = False  # type: ignore[attr-defined]


# ---- DMA


async def test_a_buffer_under_dma_is_not_leased_again(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        buffer = await pool.lease()
        buffer[8:16].pins.add()
        assert len(buffer.pins) == len(buffer.region.pins) == 1
        buffer.release()
        assert counts(pool) == (0, 1, 0, 0)
        with pytest.raises(anyio.WouldBlock):
            pool.lease_nowait()
        waiting = asyncio.ensure_future(pool.lease())
        await turns()
        assert not waiting.done()
        buffer.pins.discard()
        assert counts(pool) == (1, 0, 0, 0), "without an iteration of the loop"
        another = await waiting
        assert another.offset == buffer.offset
        assert counts(pool) == (1, 0, 0, 0)
        assert len(another.pins) == 0
        another.release()


async def test_a_cancelled_write_keeps_its_buffer(device: Device) -> None:
    async with ends(device) as pair, pair.domain.buffer_pool(16, 1, access=REMOTE) as pool:
        hold(device, pair.near)
        with anyio.move_on_after(0.01) as scope:
            async with pool.lease() as buffer:
                buffer.buffer[:5] = b"hello"
                await pair.near.write(buffer[:5], pair.target.remote()[:5])
        assert scope.cancelled_caught
        assert counts(pool) == (0, 1, 0, 0)
        assert pair.cq.statistics().in_flight == 1
        unhold(device, pair.near)
        async with asyncio.timeout(patience(5)), pool.lease() as buffer:
            assert pair.cq.statistics().in_flight == 0
            await pair.near.write(buffer[5:6], pair.target.remote()[5:6])
        assert bytes(pair.target.buffer[:5]) == b"hello"
        with pytest.raises(ClosedResourceError, match="released to its pool"):
            await pair.near.write(buffer[:5], pair.target.remote()[:5])
        assert pair.cq.statistics().in_flight == len(buffer.region.pins) == 0


async def test_a_collected_buffer_returns_to_the_pool(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        buffer = await pool.lease()
        part = buffer[:8]
        reference = weakref.ref(buffer)
        with pytest.warns(ResourceWarning, match=r"was leased at .*test_buffers.py:\d+ and forgotten"):
            del buffer
        assert reference() is None, "freed at once, since there is no reference cycle"
        assert counts(pool) == (0, 0, 1, 0)
        with pytest.raises(ClosedResourceError):
            part.sge  # noqa: B018


async def test_a_collected_buffer_returns_after_its_dma(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 1) as pool:
        buffer = await pool.lease()
        pins = buffer.pins
        pins.add()
        with pytest.warns(ResourceWarning, match="forgotten"):
            del buffer
        assert counts(pool) == (0, 1, 0, 0)
        pins.discard()
        assert counts(pool) == (0, 0, 1, 0)


# ---- Growing


async def test_a_pool_grows_up_to_its_limit(pd: ProtectionDomain) -> None:
    async with pd.buffer_pool(64, 2, limit=5) as pool:
        held = [pool.lease_nowait() for _ in range(3)]
        assert pool.statistics().slabs == 2
        held += [await pool.lease() for _ in range(2)]
        assert pool.statistics().slabs == 3
        assert len({buffer.address for buffer in held}) == 5
        with pytest.raises(anyio.WouldBlock):
            pool.lease_nowait()
        for buffer in held:
            buffer.release()
        assert counts(pool) == (0, 0, 5, 0)
        assert pool.statistics().high_water == 5
        tasks = [asyncio.ensure_future(pool.lease()) for _ in range(5)]
        for buffer in await asyncio.gather(*tasks):
            buffer.release()
        assert pool.statistics().slabs == 3


async def test_slabs_of_an_allocator(pd: ProtectionDomain) -> None:
    allocator = RecordingAllocator(SharedPageAllocator())
    async with pd.buffer_pool(64, 1, limit=3, allocator=allocator) as pool:
        held = [await pool.lease() for _ in range(3)]
        assert allocator.statistics().pieces == 3
        for buffer in held:
            buffer.release()
        assert allocator.statistics().pieces == 3
    assert allocator.statistics().pieces == 0


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
async def test_a_failed_slab_raises_for_the_waiters(
    pd: ProtectionDomain, device: Device, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    async with pd.buffer_pool(64, 1, limit=3) as pool, pool.lease():
        if large:
            monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
        device.faults.fail("reg_mr", errno.ENOMEM)
        with pytest.raises(VerbsError, match="ENOMEM"):
            await pool.lease()
        assert counts(pool) == (1, 0, 0, 0)
        async with pool.lease():
            if not large:
                device.faults.fail("reg_mr", errno.ENOMEM)
                with pytest.raises(VerbsError, match="ENOMEM"):
                    pool.lease_nowait()
        assert pool.statistics().slabs == 2


class UncopyableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class SharingError(Exception):
    """Copied as by tblib, which Dask uses: the copy shares the dictionary."""

    def __copy__(self) -> "SharingError":
        other = SharingError(*self.args)
        other.__dict__ = self.__dict__
        return other


async def error_of_lease(pool: BufferPool) -> Exception:
    """Return the exception that a lease raises, with a note of the task."""
    try:
        await pool.lease()
    except Exception as error:
        error.add_note("of one task")
        return error
    raise AssertionError("the lease raised no exception")


async def test_each_waiter_of_a_closed_pool_raises_an_exception_of_its_own(pd: ProtectionDomain) -> None:
    pool = await pd.buffer_pool(64, 1).open()
    with pool.lease_nowait():
        tasks = [asyncio.ensure_future(error_of_lease(pool)) for _ in range(3)]
        await turns()
        with pytest.warns(ResourceWarning, match="not released"):
            await pool.aclose()
        raised = await asyncio.gather(*tasks)
    assert len({id(each) for each in raised}) == 3
    assert [(type(each), each.__notes__) for each in raised] == [(ClosedResourceError, ["of one task"])] * 3


@pytest.mark.parametrize(
    "error", [MemoryError("none left"), SharingError("none left"), UncopyableError(1, 2)], ids=repr
)
async def test_each_waiter_of_a_pool_that_cannot_grow_raises_an_exception_of_its_own(
    pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Unless its class cannot be copied."""
    error.add_note("of the allocator")
    go_on = threading.Event()

    def fail(_: BufferPool) -> None:
        assert go_on.wait(patience(10))
        raise error

    async with pd.buffer_pool(64, 1, limit=2) as pool, pool.lease():
        monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
        monkeypatch.setattr(BufferPool, "_add_slab", fail)
        tasks = [asyncio.ensure_future(error_of_lease(pool)) for _ in range(3)]
        await turns()
        go_on.set()
        raised = await asyncio.gather(*tasks)
    if isinstance(error, UncopyableError):
        assert {*raised} == {error}
    else:
        assert len({id(each) for each in raised}) == 3
        expected = (type(error), "none left", ["of one task"], error)
        assert [(type(each), str(each), each.__notes__, each.__cause__) for each in raised] == [expected] * 3


async def test_large_slabs_are_registered_in_a_thread(pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
    threads: list[int] = []
    add_slab = BufferPool._add_slab

    def watched(self: BufferPool) -> None:
        threads.append(threading.get_ident())
        add_slab(self)

    monkeypatch.setattr(BufferPool, "_add_slab", watched)
    async with pd.buffer_pool(64, 2, limit=7) as pool:
        held = [await pool.lease(), pool.lease_nowait()]
        with pytest.raises(anyio.WouldBlock):  # does not wait for the thread that adds a slab
            pool.lease_nowait()
        tasks = [asyncio.ensure_future(pool.lease()) for _ in range(8)]
        await turns(1)
        tasks[0].cancel()  # the task that started the growth leaves; others still wait for it
        held += await asyncio.gather(*tasks[1:6])
        assert counts(pool) == (7, 0, 0, 2)
        assert len(threads) == 4
        assert threading.get_ident() not in threads
        for buffer in held:
            buffer.release()
        for task in tasks[6:]:
            (await task).release()


class SlowSlabs:
    """Delays the next slab, which a thread adds, until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioverbs._memory.region._LARGE_BYTES", 1)
        self.begun, self.go_on = threading.Event(), threading.Event()
        add_slab = BufferPool._add_slab

        def slow(pool: BufferPool) -> None:
            self.begun.set()
            assert self.go_on.wait(10)
            add_slab(pool)

        monkeypatch.setattr(BufferPool, "_add_slab", slow)


async def test_one_slab_at_a_time_serves_all_waiters(pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pd.buffer_pool(64, 1, limit=3) as pool, asyncio.timeout(patience(10)):
        with pool.lease_nowait():
            slow = SlowSlabs(monkeypatch)
            first = asyncio.ensure_future(pool.lease())
            await asyncio.to_thread(slow.begun.wait, 10)
            second = asyncio.ensure_future(pool.lease())
            await turns()
            assert pool._growth is not None
            await pool._growth  # the second task's growth ends at once, because the first one's is running
            assert pool.statistics().slabs == 1
            slow.go_on.set()
            for buffer in await asyncio.gather(first, second):  # no lease was released meanwhile
                buffer.release()
            assert pool.statistics().slabs == 3


async def test_closing_while_it_grows(pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = await pd.buffer_pool(64, 1, limit=2).open()
    held = await pool.lease()
    slow = SlowSlabs(monkeypatch)
    waiting = asyncio.ensure_future(pool.lease())
    await asyncio.to_thread(slow.begun.wait, 10)
    held.release()
    (await waiting).release()
    await pool.aclose()
    slow.go_on.set()
    assert pool._growth is not None
    await pool._growth
    assert pool.closed
    assert pool.statistics().slabs == 0


# ---- Closing


async def test_closing_with_outstanding_leases(pd: ProtectionDomain) -> None:
    pool = await pd.buffer_pool(64, 2).open()
    held = [await pool.lease() for _ in range(2)]
    view = held[0].buffer
    waiting = asyncio.ensure_future(pool.lease())
    await turns()
    with pytest.warns(
        ResourceWarning, match=r"2 buffers of <BufferPool .* were not released .*test_buffers.py:\d+"
    ) as all_of:
        await pool.aclose()
    assert len(all_of) == 1
    with pytest.raises(ClosedResourceError, match="was closed"):
        await waiting
    for buffer in held:
        with pytest.raises(ClosedResourceError):
            buffer.sge  # noqa: B018
        with pytest.raises(ClosedResourceError):
            buffer.buffer  # noqa: B018
    held[0].release()
    del held, buffer
    view[:2] = b"ok"  # the memory is still mapped
    assert counts(pool) == (0, 0, 0, 0)
    assert pool.statistics().slabs == 0
    await check_refused(pool)


async def test_leasing_while_another_thread_closes_the_pool_raises(
    pd: ProtectionDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pd.buffer_pool(64, 1) as pool, asyncio.timeout(patience(5)):

        def closed_meanwhile(*_: object) -> None:
            pool._lifecycle.state = ResourceState.CLOSING

        monkeypatch.setattr(pool._free_list, "lease", closed_meanwhile)
        pool._free_list.free.clear()
        with pytest.raises(ClosedResourceError, match="is not open"):
            await pool.lease()
        pool._lifecycle.state = ResourceState.OPEN
        assert counts(pool) == (0, 0, 0, 0)


async def test_closing_waits_for_dma(pd: ProtectionDomain) -> None:
    pool = await pd.buffer_pool(64, 1).open()
    with pool.lease_nowait() as buffer:
        buffer.pins.add()
    closing = asyncio.create_task(pool.aclose())
    await turns()
    assert not closing.done()
    buffer.pins.discard()
    await closing
    assert pool.closed


async def test_a_domain_closes_its_pools(pd: ProtectionDomain, device: Device) -> None:
    async with device.protection_domain() as another:
        pool = await another.buffer_pool(64, 1).open()
        with pytest.warns(ResourceWarning, match="BufferPool"):
            await another.aclose()
    assert pool.closed
    pool = await pd.buffer_pool(64, 1).open()
    with pytest.warns(ResourceWarning, match="was forgotten"):
        del pool


async def test_a_pool_closes_when_warnings_are_errors(pd: ProtectionDomain) -> None:
    pool = await pd.buffer_pool(64, 1).open()
    buffer = await pool.lease()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ResourceWarning, match="1 buffers of"):
            await pool.aclose()
    assert pool.closed
    buffer.release()


@needs(Capability.FAULT_PLAN)
async def test_a_pool_that_failed_to_close_leases_open_memory_only(pd: ProtectionDomain, device: Device) -> None:
    """One slab has been closed by then, another one has not."""
    pool = await pd.buffer_pool(64, 2, limit=4).open()
    *early, late = [pool.lease_nowait() for _ in range(4)]
    for buffer in early:
        buffer.release()
    device.faults.fail("dereg_mr", errno.EIO, first=2)
    with pytest.warns(ResourceWarning, match="1 buffers of"), pytest.raises(VerbsError, match="EIO"):
        await pool.aclose()
    late.release()
    statistics = pool.statistics()
    assert (statistics.slabs, statistics.free, statistics.leased) == (1, 2, 0)
    held = [pool.lease_nowait() for _ in range(4)]
    for number, buffer in enumerate(held):
        buffer.buffer[:] = bytes([number]) * 64
    assert [bytes(buffer.buffer) for buffer in held] == [bytes([number]) * 64 for number in range(4)]
    with pytest.raises(anyio.WouldBlock):
        pool.lease_nowait()
    for buffer in held:
        buffer.release()
    await pool.aclose()


@needs(Capability.FAULT_PLAN)
async def test_a_failed_open_leaks_nothing(pd: ProtectionDomain, device: Device) -> None:
    device.faults.fail("reg_mr", errno.ENOMEM)
    pool = pd.buffer_pool(64, 1)
    with pytest.raises(VerbsError, match="ENOMEM"):
        await pool.open()
    assert pool.state is ResourceState.NEW
    async with pool:
        assert counts(pool) == (0, 0, 1, 0)


# ---- Model


class BufferPoolModel(RuleBasedStateMachine):
    """Compares a pool with a model: queue of waiters, leased buffers, buffers under DMA."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.device = open_device("soft0")
        self.leased: list[LeasedBuffer] = []
        self.released: list[LeasedBuffer] = []  # released, but still under DMA
        self.queue: list[asyncio.Task[LeasedBuffer]] = []
        self.run(self.open())

    def run(self, work: Coroutine[object, object, None]) -> None:
        self.runner.run(work)

    async def open(self) -> None:
        await self.device.open()
        self.pd = await self.device.protection_domain().open()
        self.pool = await self.pd.buffer_pool(64, 2, limit=5).open()

    async def settle(self) -> None:
        """Check that the waiters with a buffer were the first in the queue."""
        await turns()
        while self.queue and self.queue[0].done():
            self.leased.append(self.queue.pop(0).result())
        assert not any(task.done() for task in self.queue), "a later waiter was served first"

    @rule()
    def lease(self) -> None:
        async def work() -> None:
            self.queue.append(asyncio.ensure_future(self.pool._lease(None)))
            await self.settle()

        self.run(work())

    @rule()
    def lease_nowait(self) -> None:
        async def work() -> None:
            free = 5 - len(self.leased) - len(self.released)
            if free and not self.queue:
                self.leased.append(self.pool.lease_nowait())
            else:
                with pytest.raises(anyio.WouldBlock):
                    self.pool.lease_nowait()

        self.run(work())

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), dma=st.booleans(), forget=st.booleans(), cancel=st.booleans())
    def release(self, data: st.DataObject, dma: bool, forget: bool, cancel: bool) -> None:
        async def work() -> None:
            buffer = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
            if dma:
                buffer.pins.add()
                self.released.append(buffer)
            if forget and not dma:
                with pytest.warns(ResourceWarning, match="forgotten"):
                    del buffer
            else:
                buffer.release()
            if cancel and self.queue and not dma:  # cancel the waiter that was granted this buffer in this iteration
                self.queue.pop(0).cancel()
            await self.settle()

        self.run(work())

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        async def work() -> None:
            buffer = self.released.pop(data.draw(st.integers(0, len(self.released) - 1)))
            buffer.pins.discard()
            await self.settle()

        self.run(work())

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        async def work() -> None:
            self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1))).cancel()
            await self.settle()

        self.run(work())

    @invariant()
    def counts_match_the_model(self) -> None:
        leased, under_dma, free, waiting = counts(self.pool)
        assert (leased, under_dma, waiting) == (len(self.leased), len(self.released), len(self.queue))
        assert not (waiting and (free or leased + under_dma < 5)), "a task waits although a buffer is available"
        away = [buffer.offset + 4096 * id(buffer.region) for buffer in (*self.leased, *self.released)]
        assert len(set(away)) == len(away), "a buffer is leased twice"
        assert leased + under_dma + free in (2, 4, 5)
        assert self.pool.statistics().high_water <= 5

    def teardown(self) -> None:
        async def work() -> None:
            for task in self.queue:
                task.cancel()
            for buffer in self.released:
                buffer.pins.discard()
            for buffer in self.leased:
                buffer.release()
            await turns()
            assert not any(counts(self.pool)[each] for each in (0, 1, 3))
            await self.pool.aclose()
            await self.pd.aclose()
            await self.device.aclose()

        self.run(work())
        self.runner.close()


BufferPoolModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestBufferPoolModel = BufferPoolModel.TestCase


# ---- Pages of free buffers


@pytest.mark.parametrize("is_locked", [False, True])
async def test_free_buffers_give_back_their_pages(pd: ProtectionDomain, is_locked: bool) -> None:
    """And stay usable, also in a process that locks its memory, which keeps the pages."""
    if is_locked and SANITIZED:
        pytest.skip("mlock of the address sanitizer does nothing")
    async with BufferPool(pd, mmap.PAGESIZE, 2, alignment=mmap.PAGESIZE, gives_back_pages=True) as pool:
        first, second = pool.lease_nowait(), pool.lease_nowait()
        if is_locked:
            address = ctypes.addressof(ctypes.c_char.from_buffer(first.buffer))
            assert not ctypes.CDLL(None).mlock(ctypes.c_void_p(address), mmap.PAGESIZE)
        first.buffer[0] = second.buffer[0] = 7
        first.release()
        assert second.buffer[0] == 7
        with pool.lease_nowait() as again:
            assert (again.region, again.offset) == (first.region, first.offset)
            assert again.buffer[0] == (7 if is_locked else 0)
            again.buffer[0] = 8
        second.release()
