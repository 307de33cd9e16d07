"""Opening and closing of thread pools, and deaths of their workers."""

import asyncio
import contextlib
import errno
import os
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest

from aioverbs import (
    BrokenResourceError,
    BusyResourceError,
    ClosedResourceError,
    Device,
    ResourceDomain,
    ResourceState,
    VerbsError,
    WorkerDiedError,
    open_device,
)
from aioverbs._pool.pool import CallFuture, WorkerPool, current_worker
from aioverbs._pool.supervisor import SupervisorState
from aioverbs._pool.thread_worker import ThreadWorker, _ThreadCall
from aioverbs._pool.worker import Worker
from tests.capabilities import Capability, needs
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.pool.test_calls import number, number_later, sleep_until_cancelled
from tests.waiting import until


def worker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "WorkerPool" in thread.name]


async def sleep_and_record(seconds: float, ended: list[str]) -> None:
    await asyncio.sleep(seconds)
    ended.append("ended by itself")


# ---- Closing


async def test_the_end_of_the_block_waits_for_started_calls(device: Device, loop_name: str) -> None:
    ended: list[str] = []
    async with WorkerPool(device, 2, loop=loop_name) as pool:
        assert len(worker_threads()) == 2
        for _ in range(4):
            pool.start_soon(sleep_and_record, 0.05, ended)
    assert ended == ["ended by itself"] * 4
    assert (worker_threads(), pool.state, pool.pd.closed) == ([], ResourceState.CLOSED, True)
    with pytest.raises(ClosedResourceError):
        pool.start_soon(number)
    with pytest.raises(ClosedResourceError):
        await pool.run(number)
    with pytest.raises(ClosedResourceError):
        await pool.drain()
    await pool.aclose()


async def test_joining_threads_does_not_keep_the_lock(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has reported its end may still need the lock of the pool to report the end of a call."""
    pool = await WorkerPool(device, 1).open()
    lock = pool._supervisor.lock
    join = ThreadWorker.join
    could_lock: list[bool] = []

    def take_and_give() -> None:
        could_lock.append(lock.acquire(timeout=patience(0.5)))
        if could_lock[-1]:
            lock.release()

    def join_after_taking_the_lock(worker: ThreadWorker, timeout_s: float) -> bool:
        thread = threading.Thread(target=take_and_give)
        thread.start()
        thread.join()
        return join(worker, timeout_s)

    monkeypatch.setattr(ThreadWorker, "join", join_after_taking_the_lock)
    await pool.aclose()
    assert could_lock
    assert all(could_lock)


async def test_closing_again_joins_threads_that_were_not_joined(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        """As by Ctrl-C, but the loop goes on."""

    pool = await WorkerPool(device, 3).open()
    join = ThreadWorker.join
    joined: list[int] = []
    interrupts = True

    def interrupted(worker: ThreadWorker, timeout_s: float) -> bool:
        if not timeout_s:
            return False  # as if the thread were still exiting
        if interrupts:
            raise Interrupted
        joined.append(worker.number)
        return join(worker, timeout_s)

    monkeypatch.setattr(ThreadWorker, "join", interrupted)
    with pytest.raises(Interrupted):
        await pool.aclose()
    assert pool.state is ResourceState.OPEN
    interrupts = False
    await pool.aclose()
    assert (sorted(joined), pool.state) == ([0, 1, 2], ResourceState.CLOSED)


async def test_the_end_of_a_worker_counts_once(device: Device) -> None:
    """For a process, it may be found by the loop that opened the pool and by a caller on another one."""
    async with WorkerPool(device, 1) as pool:
        (worker,) = pool._supervisor._handles
        with pytest.raises(WorkerDiedError):
            await pool.run(sys.exit)
        await until(lambda: pool.statistics().deaths == 1)
        pool._supervisor.on_worker_end(worker, "it was found again", None)
        assert pool.statistics().deaths == 1


@pytest.mark.every_way
async def test_an_exception_in_the_block_cancels_calls(device: Device) -> None:
    started, ended = threading.Event(), list[str]()
    left: list[CallFuture[None]] = []

    async def use() -> None:
        async with WorkerPool(device, 2) as pool:
            left.append(pool.start_soon(sleep_until_cancelled, started, ended))
            await asyncio.to_thread(started.wait, 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    assert ended == ["ended"]
    assert isinstance(left[0].exception(), ClosedResourceError)
    assert worker_threads() == []


@pytest.mark.every_way
@pytest.mark.parametrize("by", ["deadline", "cancellation"])
async def test_stop_cancels_calls_at_its_deadline_under_load(device: Device, loop_name: str, by: str) -> None:
    ended: list[str] = []
    pool = await WorkerPool(device, 2, loop=loop_name).open()
    counts = [0] * 8

    async def ask(at: int) -> str:
        try:
            while True:
                await pool.run(number_later)
                counts[at] += 1
        except ClosedResourceError as error:
            return str(error)

    asking = [asyncio.create_task(ask(at)) for at in range(8)]
    begun = [threading.Event() for _ in range(3)]
    staying = [asyncio.create_task(pool.run(sleep_until_cancelled, each, ended)) for each in begun]
    await until(lambda: all(counts) and all(each.is_set() for each in begun))
    async with asyncio.timeout(patience(10)):
        if by == "deadline":
            await pool.stop(0.05)
        else:
            with anyio.move_on_after(0.05) as scope:
                await pool.stop()
            assert scope.cancelled_caught
    assert (ended, worker_threads(), pool.state) == (["ended"] * 3, [], ResourceState.CLOSED)
    # Calls in flight at the deadline, if a worker is slow.
    cut_off = sum("which cancelled the call" in why for why in await asyncio.gather(*asking))
    for each in staying:
        with pytest.raises(ClosedResourceError, match="was closed before this call ended, which cancelled the call"):
            await each
    assert [worker.calls for worker in pool.statistics().workers] == [0, 0]
    assert sum(worker.cancelled for worker in pool.statistics().workers) == 3 + cut_off


@pytest.mark.every_way
async def test_running_functions_may_call_the_pool_while_it_drains(device: Device) -> None:
    async with WorkerPool(device, 2) as pool:
        begun, go_on = threading.Event(), threading.Event()

        async def nested() -> int:
            begun.set()
            await until(go_on.is_set)
            return await pool.run(number_later, worker=1)

        running = asyncio.create_task(pool.run(nested, worker=0))
        await asyncio.to_thread(begun.wait, 10)
        draining = asyncio.create_task(pool.drain())
        await asyncio.sleep(0)
        with pytest.raises(ClosedResourceError, match="takes no more calls"):
            await pool.run(number)
        assert not draining.done()
        go_on.set()
        assert await running == 1
        await draining


async def test_functions_on_workers_cannot_close_the_pool(device: Device) -> None:
    async with WorkerPool(device, 2) as pool:
        for call in (pool.drain, pool.aclose):
            with pytest.raises(BusyResourceError, match="cannot be drained or closed by a function that runs on it"):
                await pool.run(call)
        assert await pool.run(number) == 0


@pytest.mark.every_way
async def test_stop_cancels_a_call_that_another_thread_has_not_posted_yet(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the pool is stopped, its worker has the call already, but the worker's loop does not."""
    about, go_on = threading.Event(), threading.Event()
    post = _ThreadCall.post

    def post_later(call: _ThreadCall) -> None:
        about.set()
        assert go_on.wait(patience(10))
        post(call)

    pool = await WorkerPool(device, 1).open()
    monkeypatch.setattr(_ThreadCall, "post", post_later)
    began: list[int] = []
    starting = asyncio.create_task(asyncio.to_thread(pool.start_soon, began.append, 1))
    await until(about.is_set)
    stopping = asyncio.create_task(pool.stop(0))
    await until(lambda: pool._supervisor.state is SupervisorState.STOPPED)
    go_on.set()
    started = await starting
    await stopping
    assert isinstance(started.exception(), ClosedResourceError)
    assert (began, worker_threads(), pool.state) == ([], [], ResourceState.CLOSED)


@pytest.mark.every_way
async def test_several_tasks_close_a_pool_at_once(device: Device) -> None:
    pool = await WorkerPool(device, 2).open()
    ended: list[str] = []
    pool.start_soon(sleep_and_record, 0.05, ended)
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(pool.aclose())
    assert (ended, pool.state) == (["ended by itself"], ResourceState.CLOSED)


@pytest.mark.every_way
async def test_another_loop_can_close_a_thread_pool(device: Device) -> None:
    pool = await WorkerPool(device, 2).open()
    await asyncio.to_thread(lambda: asyncio.run(pool.aclose()))
    assert (worker_threads(), pool.state) == ([], ResourceState.CLOSED)


async def test_closing_names_a_thread_that_does_not_end(device: Device) -> None:
    pool = await WorkerPool(device, 1, grace_s=0.05).open()
    begun, release = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        release.wait()

    stuck = pool.start_soon(wait)
    await asyncio.to_thread(begun.wait, 10)
    try:
        with pytest.raises(BusyResourceError, match=r"have not ended: <worker 0 of WorkerPool \d+> with 1 calls"):
            await pool.stop(0)
        assert not stuck.done()
        with pytest.raises(ClosedResourceError):
            await pool.run(number)
    finally:  # else the thread stays during all later tests
        release.set()
        await pool.aclose()
    assert (stuck.done(), worker_threads()) == (True, [])


@pytest.mark.every_way
async def test_tasks_left_by_functions_end_before_the_domain_closes(device: Device) -> None:
    states: list[ResourceState] = []

    async def use(domain: ResourceDomain) -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            states.append(domain.state)

    def exit_worker() -> None:
        worker = current_worker()
        tasks_left.append(worker.loop.create_task(use(worker.domain)))

    tasks_left: list[asyncio.Task[None]] = []
    async with WorkerPool(device, 1) as pool:
        await pool.run(exit_worker)
        await pool.run(number_later)
    assert states == [ResourceState.OPEN]


async def test_a_device_with_an_open_thread_pool_cannot_be_closed() -> None:
    device = await open_device("soft0").open()
    async with WorkerPool(device, 1):
        with pytest.raises(BusyResourceError, match="close that resource there first"):
            await device.aclose()
    await device.aclose()


async def test_a_garbage_collected_pool_warns_and_ends_its_workers(device: Device) -> None:
    pool = await WorkerPool(device, 2).open()
    assert await pool.run(number) == 0
    pd = pool.pd
    held = [pool]
    del pool
    with pytest.warns(ResourceWarning, match="was still open: it was forgotten"):
        held.clear()
    collect_garbage()
    await until(lambda: not worker_threads())
    await pd.aclose()


async def test_a_garbage_collected_pool_ends_its_workers_if_warnings_are_errors(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(str(unraisable.exc_value)))
    pool = await WorkerPool(device, 2).open()
    pd = pool.pd
    del pool
    collect_garbage()
    await until(lambda: not worker_threads())
    assert ["was still open: it was forgotten" in each for each in raised] == [True]
    await pd.aclose()


# ---- Opening


async def test_invalid_arguments_and_unopened_pools(device: Device) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"size": 0}, "must be at least 1, got 0"),
        ({"size": 1, "loop": "twisted"}, "`loop` must be 'asyncio', 'uvloop' or a function"),
        ({"size": 1, "on_worker_death": "ignore"}, "`on_worker_death` must be 'replace' or 'fail'"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            WorkerPool(device, **arguments)
    pool = WorkerPool(device, 1)
    with pytest.raises(ClosedResourceError):
        await pool.run(number)
    await pool.aclose()
    async with pool:
        with pytest.raises(ClosedResourceError, match="cannot be opened again"):
            await pool.open()
        assert await pool.run(number) == 0


@needs(Capability.FAULT_PLAN)
async def test_open_raises_when_a_worker_cannot_be_made(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.faults.fail("alloc_parent_domain", errno.ENOMEM, first=3)
    with pytest.raises(VerbsError, match="ibv_alloc_parent_domain"):
        await WorkerPool(device, 4).open()
    assert (worker_threads(), caplog.text) == ([], "")


async def test_open_raises_when_the_loop_function_raises_stop_iteration(device: Device) -> None:
    loops: Iterator[asyncio.AbstractEventLoop] = iter(())
    async with asyncio.timeout(patience(10)):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await WorkerPool(device, 1, loop=lambda: next(loops)).open()


@pytest.mark.every_way
async def test_cancelled_opening_leaves_no_workers(device: Device) -> None:
    inside = threading.Event()

    @contextlib.asynccontextmanager
    async def slow(worker: Worker) -> AsyncIterator[None]:
        inside.set()
        await asyncio.sleep(0.05)
        yield

    pool = WorkerPool(device, 2, setup=slow)
    opening = asyncio.create_task(pool.open())
    await until(inside.is_set)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert (worker_threads(), pool.state) == ([], ResourceState.CLOSED)


@pytest.mark.every_way
async def test_open_raises_that_another_task_closed_the_pool(device: Device) -> None:
    inside = threading.Event()

    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[None]:
        inside.set()
        await asyncio.sleep(3600)
        yield

    pool = WorkerPool(device, 2, setup=setup)
    opening = asyncio.create_task(pool.open())
    await until(inside.is_set)
    await pool.stop(0)
    with pytest.raises(ClosedResourceError, match="was closed while it was being opened"):
        await opening
    assert (worker_threads(), pool.state) == ([], ResourceState.CLOSED)


async def test_open_raises_that_the_setup_of_a_worker_cancelled_it(device: Device) -> None:
    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future
        yield

    with pytest.raises(WorkerDiedError, match="CancelledError"):
        await WorkerPool(device, 1, setup=setup).open()
    assert worker_threads() == []


@pytest.mark.every_way
@pytest.mark.parametrize("by", ["an exception", "a timeout"])
async def test_open_raises_its_reason_although_a_worker_does_not_end(device: Device, by: str) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[None]:
        if worker.number == 1:
            inside.set()
            assert go_on.wait(patience(20))
        elif by == "an exception":
            assert inside.wait(patience(20))
            raise ValueError("a bad configuration")
        yield

    pool = WorkerPool(device, 2, setup=setup, grace_s=0.05)
    try:
        with pytest.raises(ValueError if by == "an exception" else TimeoutError) as caught:
            async with asyncio.timeout(patience(0.5) if by == "a timeout" else patience(20)):
                await pool.open()
        error = caught.value if by == "an exception" else caught.value.__cause__
        assert error is not None
        assert "these workers have not ended: <worker 1" in error.__notes__[0]
        assert pool.state is ResourceState.OPEN
    finally:
        go_on.set()
    await until(lambda: not worker_threads())
    await pool.aclose()
    assert pool.closed


@pytest.mark.every_way
async def test_a_worker_that_cannot_start_ends_the_others_at_once(device: Device) -> None:
    entered: list[int] = []
    left: list[int] = []

    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[None]:
        if worker.number == 1:
            await until(lambda: len(entered) == 2)
            raise ValueError("a bad configuration")
        entered.append(worker.number)
        try:
            await asyncio.sleep(3600)  # as for the other worker
        finally:
            left.append(worker.number)
        yield

    pool = WorkerPool(device, 3, setup=setup)
    async with asyncio.timeout(patience(20)):
        with pytest.raises(ValueError, match="a bad configuration"):
            await pool.open()
    assert (worker_threads(), pool.state, sorted(left)) == ([], ResourceState.CLOSED, [0, 2])


async def test_setup_is_entered_before_calls_and_left_at_the_end(device: Device, loop_name: str) -> None:
    left: list[int] = []

    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[str]:
        assert current_worker() is worker
        async with worker.domain.completion_queue(4):
            yield f"of {worker.number}"
        left.append(worker.number)

    async with WorkerPool(device, 2, loop=loop_name, setup=setup) as pool:
        assert [await pool.run(lambda: current_worker().state, worker=each) for each in (0, 1)] == ["of 0", "of 1"]
    assert sorted(left) == [0, 1]


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_a_pool_that_cannot_be_opened_without_a_loop_can_be_opened_later(processes: bool) -> None:
    async def use() -> None:
        async with pool:
            assert await pool.run(int) == 0
        await device.aclose()

    with asyncio.Runner() as runner:
        device = runner.run(open_device("soft0").open())
        pool = WorkerPool(device, 1, processes=processes)
        with pytest.raises(RuntimeError, match=r"no asyncio event loop|none is running here"):
            pool.open().send(None)
        assert device.statistics().children == 0
        runner.run(use())


async def test_an_exception_at_the_end_of_a_worker_is_logged(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[None]:
        yield
        raise ValueError("not flushed")

    async with WorkerPool(device, 1, setup=setup) as pool:
        assert await pool.run(number) == 0
    (record,) = caplog.records
    assert "an exception ended <worker 0 of WorkerPool" in record.message
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "not flushed"


# ---- Deaths


async def exit_worker() -> None:
    raise SystemExit(3)


def stop_the_loop() -> None:
    current_worker().loop.stop()


async def stop_the_loop_and_wait() -> None:
    stop_the_loop()
    await asyncio.sleep(30)


def interrupt() -> None:
    raise KeyboardInterrupt


CAUSES: dict[str, Callable[[], Any]] = {
    "SystemExit": lambda: exit(3),
    "SystemExit of a coroutine": exit_worker,
    "KeyboardInterrupt": interrupt,
    "its loop is stopped": stop_the_loop_and_wait,
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_a_dead_worker_is_reported_and_replaced(
    device: Device, loop_name: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerPool(device, 2, loop=loop_name) as pool:
        others = [asyncio.create_task(pool.run(asyncio.sleep, 30, worker=1)) for _ in range(3)]
        go_on = threading.Event()
        elsewhere = asyncio.create_task(pool.run(until, go_on.is_set, worker=0))
        thread = await pool.run(threading.get_ident, worker=1)
        await pool.run(number_later, worker=1)
        with pytest.raises(WorkerDiedError, match=r"worker 1 of the pool died: .* stopped its event loop") as caught:
            await pool.run(CAUSES[cause], worker=1)
        assert (caught.value.worker, caught.value.replaced, caught.value.__cause__ is None) == (1, True, False)
        assert str(caught.value).endswith("; a new worker replaces it")
        for each in others:
            with pytest.raises(WorkerDiedError):
                await each
        go_on.set()
        await elsewhere
        assert await pool.run(number, worker=1) == 1
        assert await pool.run(threading.get_ident, worker=1) != thread or not worker_threads()
        assert [await pool.run(number) for _ in range(2)] == [0, 1]
        statistics = pool.statistics()
        assert (statistics.deaths, statistics.workers[1].deaths, statistics.workers[1].failed) == (1, 1, 4)
        assert "worker 1 of the pool died" in caplog.text
        assert "a new worker replaces it" in caplog.text
    assert worker_threads() == []


@pytest.mark.every_way
async def test_a_worker_that_dies_early_is_replaced_after_a_pause(device: Device) -> None:
    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[None]:
        asyncio.get_running_loop().call_later(0.001, sys.exit, 3)
        yield

    begin = time.monotonic()
    pool = await WorkerPool(device, 1, setup=setup).open()
    await until(lambda: pool.statistics().deaths == 3)
    assert time.monotonic() - begin > 0.1 + 0.2
    await pool.stop(0)  # during the next pause
    assert (worker_threads(), pool.statistics().deaths) == ([], 3)


async def test_calls_wait_for_the_replacement_of_a_dead_worker(device: Device) -> None:
    gate = threading.Event()
    gate.set()

    @contextlib.asynccontextmanager
    async def setup(worker: Worker) -> AsyncIterator[None]:
        await asyncio.to_thread(gate.wait, 10)
        yield

    async with WorkerPool(device, 1, setup=setup) as pool:
        gate.clear()
        with pytest.raises(WorkerDiedError):
            await pool.run(exit_worker)
        waiting = [asyncio.create_task(pool.run(number_later)) for _ in range(3)]
        started, withdrawn = pool.start_soon(number), pool.start_soon(number)
        assert withdrawn.cancel()
        await until(withdrawn.done)
        assert [started.done(), *(each.done() for each in waiting)] == [False] * 4
        gate.set()
        assert await asyncio.gather(*waiting) == [0, 0, 0]
        assert await started.wait() == 0
        assert withdrawn.cancelled()


async def test_a_death_breaks_a_pool_that_does_not_replace_workers(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        async with WorkerPool(device, 2, on_worker_death="fail") as pool:
            others = pool.start_soon(number_later, worker=1)
            with pytest.raises(WorkerDiedError, match="it is not replaced") as died:
                await pool.run(exit_worker, worker=0)
            assert not died.value.replaced
            assert await others.wait() == 1
            for worker in (0, 1, None):
                with pytest.raises(BrokenResourceError, match="is broken"):
                    await pool.run(number, worker=worker)

    with pytest.raises(BrokenResourceError, match="is broken: worker 0 of the pool died") as caught:
        await use()
    assert isinstance(caught.value.__cause__, WorkerDiedError)
    assert (worker_threads(), "it is not replaced" in caplog.text) == ([], True)


async def test_a_worker_that_cannot_be_replaced_breaks_the_pool(device: Device) -> None:
    times = 0

    @contextlib.asynccontextmanager
    async def once(worker: Worker) -> AsyncIterator[None]:
        nonlocal times
        times += 1
        if times > 1:
            raise OSError("no more of these")
        yield

    async def use() -> None:
        async with WorkerPool(device, 1, setup=once) as pool:
            with pytest.raises(WorkerDiedError):
                await pool.run(exit_worker)
            with contextlib.suppress(BrokenResourceError):
                await pool.run(number)
            with pytest.raises(BrokenResourceError):
                await pool.run(number)

    with pytest.raises(BrokenResourceError, match="no more of these"):
        await use()
    assert (times, worker_threads()) == (4, [])


async def test_calls_wait_when_the_first_replacement_dies(device: Device) -> None:
    times = 0

    @contextlib.asynccontextmanager
    async def not_twice(worker: Worker) -> AsyncIterator[None]:
        nonlocal times
        times += 1
        if times == 2:
            await asyncio.sleep(0.05)
            raise SystemExit
        yield

    async with WorkerPool(device, 1, setup=not_twice) as pool:
        with pytest.raises(WorkerDiedError):
            await pool.run(exit_worker)
        assert await pool.run(number) == 0
        assert (times, pool.statistics().deaths) == (3, 2)


# ---- Several pools


async def test_a_worker_opens_a_pool_of_its_own(device: Device, loop_name: str) -> None:
    async def inner(outer: int) -> list[tuple[int, int]]:
        def numbers() -> tuple[int, int]:
            return outer, number()

        async with WorkerPool(device, 2, loop=loop_name) as pool:
            assert number() == outer
            return [await pool.run(numbers) for _ in range(2)]

    async with WorkerPool(device, 2, loop=loop_name) as pool:
        assert await pool.map(inner, range(2)) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert worker_threads() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_thousand_pools_leak_no_descriptors_or_threads() -> None:
    before = 0, 0
    async with open_device("soft0") as device:
        for round_ in range(1000):
            async with WorkerPool(device, 2, loop=("asyncio", "uvloop")[round_ % 2]) as pool:
                assert await pool.map(lambda _: number(), range(2)) == [0, 1]
                if not round_ % 10:
                    with pytest.raises(WorkerDiedError):
                        await pool.run(exit_worker)
            if round_ == 20:
                before = len(os.listdir("/proc/self/fd")), threading.active_count()
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
        assert not any(count for _, count in device.statistics().objects)


@pytest.fixture(autouse=True)
def _warnings() -> None:
    warnings.simplefilter("error", ResourceWarning)


@pytest.mark.every_way
async def test_a_pool_stays_open_when_its_closing_is_cancelled_and_fails(device: Device) -> None:
    go_on, inside = threading.Event(), threading.Event()

    def stick() -> None:
        inside.set()
        assert go_on.wait(patience(60))

    pool = await WorkerPool(device, 1, grace_s=0.05).open()
    try:
        call = pool.start_soon(stick)
        await until(inside.is_set)
        stopping = asyncio.create_task(pool.stop(0))
        await until(lambda: pool.state is ResourceState.CLOSING)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await stopping
        assert any("BusyResourceError" in note for note in caught.value.__notes__)
        assert pool.state is pool.pd.state is ResourceState.OPEN
    finally:
        go_on.set()
    async with asyncio.timeout(patience(20)):
        while not pool.closed:  # on a busy machine, the worker's thread may take longer to end
            with contextlib.suppress(BusyResourceError):
                await pool.stop(0)
    assert pool.pd.closed
    await call.wait()


@pytest.mark.every_way
async def test_a_call_that_waits_for_a_starting_worker_can_be_cancelled(device: Device) -> None:
    go_on = threading.Event()
    made = 0

    @contextlib.asynccontextmanager
    async def setup(_: Worker) -> AsyncIterator[None]:
        nonlocal made
        made += 1
        if made > 1:
            await asyncio.to_thread(go_on.wait, patience(60))
        yield

    def die() -> None:
        raise SystemExit(1)

    async with WorkerPool(device, 1, setup=setup) as pool:
        try:
            with pytest.raises(WorkerDiedError):
                await pool.run(die)
            await until(lambda: made == 2)
            waiting = asyncio.create_task(pool.run(number))
            await until(lambda: pool.statistics().workers[0].calls == 1)
            waiting.cancel()
            await asyncio.wait([waiting], timeout=patience(20))
            assert waiting.cancelled()
            assert pool.statistics().workers[0].cancelled == 1
        finally:
            go_on.set()
