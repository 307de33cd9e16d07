"""Calls to a pool's workers: choice of the worker, context variables, cancellation, results."""

import asyncio
import collections
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, cast

import anyio
import pytest

from aioverbs import (
    AccessFlags,
    AffinityError,
    BrokenResourceError,
    CompletionQueue,
    Device,
    MemoryRegion,
    ThreadModel,
    open_device,
)
from aioverbs._pool.placement import LeastLoaded, rendezvous
from aioverbs._pool.pool import CallFuture, WorkerPool, current_worker
from aioverbs.attributes import Execution
from tests.pace import patience
from tests.waiting import until

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE")
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


def number() -> int:
    return current_worker().number


async def number_later() -> int:
    await asyncio.sleep(0.001)
    return number()


async def sleep_until_cancelled(started: threading.Event, ended: list[str]) -> None:
    started.set()
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.02)
        ended.append("ended")


async def cancelled_when(begun: threading.Event, call: Coroutine[Any, Any, object]) -> bool:
    """Cancel the scope of a call after an event, and return whether the cancellation ended the scope."""
    scope = anyio.CancelScope()

    async def wait() -> None:
        with scope:
            await call

    waiting = asyncio.create_task(wait())
    assert await asyncio.to_thread(begun.wait, patience(10))
    scope.cancel()
    await waiting
    return scope.cancelled_caught


async def cancelled_before(release: Callable[[], object], pool: WorkerPool, *calls: Callable[[], Any]) -> bool:
    """Cancel calls that wait for worker 0, which another call blocks, and then release that call.

    :returns: whether the cancellation ended the calls.
    """
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(call)
            await until(lambda: pool.statistics().workers[0].calls == 1 + len(calls))
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0.01)  # time for the cancellation to reach the worker
                release()
    return scope.cancelled_caught


async def test_each_worker_has_a_loop_a_thread_and_a_domain_of_its_own(pool: WorkerPool, loop_name: str) -> None:
    def look() -> tuple[int, int, str, bool, bool]:
        worker = current_worker()
        assert worker.loop is asyncio.get_running_loop()
        owner = worker.domain.owner
        assert owner is not None
        return (
            threading.get_ident(),
            id(worker.domain),
            type(worker.loop).__module__,
            owner.owns(),
            worker.domain.native,
        )

    seen = [await pool.run(look, worker=number) for number in range(3)]
    assert len({each[0] for each in seen} | {threading.get_ident()}) == 4
    assert len({each[1] for each in seen}) == 3
    assert {each[2].partition(".")[0] for each in seen} == {loop_name}
    assert all(owns for *_, owns, _ in seen)
    assert [each.native for each in pool.statistics().workers] == [native for *_, native in seen]


async def test_run_takes_plain_functions_coroutine_functions_and_awaitables(pool: WorkerPool) -> None:
    assert await pool.run(divmod, 7, 2) == (3, 1)
    assert await pool.run(number, worker=2) == 2
    assert await pool.run(number_later, worker=1) == 1
    assert await pool.run(lambda: number_later(), worker=1) == 1

    async def none_of_the_callers_tasks() -> bool:
        return asyncio.current_task() in tasks

    tasks = asyncio.all_tasks()
    assert not await pool.run(none_of_the_callers_tasks)


async def test_calls_go_round_robin_unless_worker_or_key_is_given(pool: WorkerPool) -> None:
    assert [await pool.run(number) for _ in range(6)] == [0, 1, 2] * 2
    for key in ("a", b"b", 3):
        assert {await pool.run(number, key=key) for _ in range(3)} == {rendezvous(key, range(3))}
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=r"`worker` must be in 0\.\.2 for"):
            await pool.run(number, worker=wrong)
    with pytest.raises(ValueError, match="are mutually exclusive"):
        await pool.run(number, worker=1, key="a")
    with pytest.raises(TypeError, match="`key` must be a string"):
        await pool.run(number, key=cast(Any, ()))


async def test_the_least_loaded_worker_gets_the_call(device: Device) -> None:
    async with WorkerPool(device, 3, placement=LeastLoaded()) as pool:
        begun, ended = {0: threading.Event(), 2: threading.Event()}, list[str]()
        blocking = [
            pool.start_soon(sleep_until_cancelled, each, ended, worker=number) for number, each in begun.items()
        ]
        assert {await pool.run(number_later) for _ in range(5)} == {1}
        for event in begun.values():
            assert await asyncio.to_thread(event.wait, patience(10))
        for each in blocking:
            assert each.cancel()
    assert ended == ["ended"] * 2


@pytest.mark.every_way
async def test_context_variables_are_copied_to_the_worker_and_not_back(pool: WorkerPool) -> None:
    def plain() -> str:
        value = VARIABLE.get()
        VARIABLE.set("changed there")
        return value

    async def coroutine() -> str:
        await asyncio.sleep(0)
        return plain()

    VARIABLE.set("carried")
    assert [await pool.run(function, worker=0) for function in (plain, coroutine, plain)] == ["carried"] * 3
    assert await pool.start_soon(plain).wait() == "carried"
    assert VARIABLE.get() == "carried"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_exceptions_of_functions_are_raised_by_run(pool: WorkerPool, asynchronous: bool) -> None:
    def fail() -> None:
        raise ZeroDivisionError("there")

    async def fail_later() -> None:
        await asyncio.sleep(0)
        fail()

    with pytest.raises(ZeroDivisionError, match="there"):
        await pool.run(fail_later if asynchronous else fail)
    assert await pool.run(number) in range(3)
    assert sum(worker.failed for worker in pool.statistics().workers) == 1


@pytest.mark.parametrize("kind", ["native", "native, often", "anyio", "wait_for"])
async def test_cancelling_a_call_cancels_the_function_and_waits_for_its_end(pool: WorkerPool, kind: str) -> None:
    started, ended = threading.Event(), list[str]()
    if kind == "anyio":
        assert await cancelled_when(started, pool.run(sleep_until_cancelled, started, ended))
    else:
        task = asyncio.create_task(pool.run(sleep_until_cancelled, started, ended))
        assert await asyncio.to_thread(started.wait, patience(10))
        if kind == "wait_for":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.01)
        else:
            for _ in range(5 if "often" in kind else 1):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
    assert ended == ["ended"]
    assert sum(worker.cancelled for worker in pool.statistics().workers) == 1


@pytest.mark.every_way
async def test_a_call_cancelled_before_its_start_does_not_start(pool: WorkerPool) -> None:
    began: list[int] = []
    go_on = threading.Event()
    blocking = pool.start_soon(go_on.wait, patience(30), worker=0)

    async def begin() -> None:
        began.append(1)

    calls = partial(pool.run, begin, worker=0), partial(pool.run, began.append, 1, worker=0)
    assert await cancelled_before(go_on.set, pool, *calls)
    assert await blocking.wait()
    assert began == []


@pytest.mark.every_way
async def test_a_function_cancelled_on_its_worker_raises_broken_resource_error(pool: WorkerPool) -> None:
    async def cancel_myself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(30)

    with pytest.raises(BrokenResourceError, match=r"<worker 1 of WorkerPool .* cancelled the call that was sent to it"):
        await pool.run(cancel_myself, worker=1)


@pytest.mark.every_way
async def test_workers_call_each_other_and_themselves(pool: WorkerPool) -> None:
    async def there_and_back(hops: int) -> list[int]:
        here = number()
        rest = await pool.run(there_and_back, hops - 1, worker=hops % 3) if hops else []
        assert number() == here
        return [here, *rest]

    assert await pool.run(there_and_back, 7, worker=1) == [1, 1, 0, 2, 1, 0, 2, 1]


@pytest.mark.every_way
async def test_calls_from_other_loops_and_threads(pool: WorkerPool) -> None:
    def elsewhere() -> tuple[int, int]:
        started = pool.start_soon(number_later, worker=2)
        with pytest.raises(RuntimeError, match="aioverbs needs an asyncio event loop, and none is running here"):
            pool.run(number).send(None)
        return asyncio.run(pool.run(number_later, worker=1)), started.result(patience(10))

    assert await asyncio.to_thread(elsewhere) == (1, 2)


# ---- Objects of the workers


async def test_objects_of_a_workers_domain_are_refused_on_other_threads(pool: WorkerPool) -> None:
    async def make() -> CompletionQueue:
        return await current_worker().domain.completion_queue(4).open()

    async def use(cq: CompletionQueue) -> None:
        with pytest.raises(AffinityError, match=r"which belongs to thread 'WorkerPool .*, worker 0'"):
            cq.resize(8)

    cq = await pool.run(make, worker=0)
    await use(cq)
    await pool.run(use, cq, worker=1)
    await pool.run(cq.resize, 8, worker=0)
    await pool.run(cq.aclose, worker=0)


@pytest.mark.parametrize("execution", ["inline", "thread"])
async def test_memory_registered_once_serves_all_workers(execution: Execution) -> None:
    async def write(region: MemoryRegion, at: int) -> None:
        domain = current_worker().domain
        async with domain.completion_queue(64) as cq, domain.queue_pair(cq) as near, domain.queue_pair(cq) as far:
            near.connect(far.local_endpoint(), ACCESS)
            far.connect(near.local_endpoint(), ACCESS)
            await near.write(region[:5], region.remote()[at : at + 5])

    async with (
        open_device("soft0", execution=execution) as device,
        WorkerPool(device, 3) as pool,
        pool.pd.register(4096, ACCESS) as region,
    ):
        region.buffer[:5] = b"hello"
        for worker in range(3):
            await pool.run(write, region, 100 * (worker + 1), worker=worker)
        assert [bytes(region.buffer[at : at + 5]) for at in (100, 200, 300)] == [b"hello"] * 3


async def test_a_pool_over_an_existing_protection_domain(device: Device) -> None:
    async with device.protection_domain() as pd:
        async with WorkerPool(device, 2, pd=pd, thread_model=ThreadModel.UNSAFE) as pool:
            assert pool.pd is pd
            bases = await pool.map(lambda _: current_worker().domain.base, range(2))
            assert bases == [pd, pd]
            assert await pool.run(lambda: current_worker().domain.thread_model) is ThreadModel.UNSAFE
        assert not pd.closed


def test_current_worker_raises_outside_of_a_worker() -> None:
    with pytest.raises(RuntimeError, match=r"use pool.run\(function\)"):
        current_worker()


# ---- map


async def test_map_returns_results_in_the_order_of_the_items(pool: WorkerPool) -> None:
    async def late(item: int) -> int:
        await asyncio.sleep((item * 7 % 5) / 1000)
        return item * item

    assert await pool.map(late, range(100)) == [item * item for item in range(100)]
    assert await pool.map(str, [], limit=1) == []
    numbers = await pool.map(lambda _: number(), range(30), key=str)
    assert numbers == [rendezvous(str(item), range(3)) for item in range(30)]


async def test_map_advances_its_items_lazily(pool: WorkerPool) -> None:
    running: collections.Counter[str] = collections.Counter()
    most = 0

    async def count(_: int) -> None:
        running["asked"] -= 1
        await asyncio.sleep(0.001)

    def items() -> Iterator[int]:
        nonlocal most
        for item in range(50):
            running["asked"] += 1
            most = max(most, running["asked"])
            yield item

    await pool.map(count, items(), limit=4)
    assert most <= 4
    with pytest.raises(ValueError, match="`limit` must be at least 1"):
        await pool.map(number, [], limit=0)  # type: ignore[arg-type]


@pytest.mark.every_way
async def test_map_cancels_the_other_calls_when_one_fails(pool: WorkerPool) -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def fail(item: int) -> None:
        if item == 5:
            await until(lambda: len(begun) == 9)
            raise ZeroDivisionError(f"{item}")
        begun.append(item)
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(item)
            if item == 6:
                raise KeyError(item)

    with pytest.raises(ZeroDivisionError, match="5") as caught:
        await pool.map(fail, range(1000), limit=10)
    assert sorted(ended) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert caught.value.__notes__ == ["and another call raised KeyError: 6"]

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        await pool.map(lambda item: item, broken(), limit=2)


# ---- start_soon


@pytest.mark.every_way
async def test_a_started_call_can_be_awaited_queried_and_cancelled(pool: WorkerPool) -> None:
    started: CallFuture[int] = pool.start_soon(number_later, worker=2)
    assert await started.wait() == 2
    assert (started.done(), started.result(), started.exception(), started.cancel()) == (True, 2, None, False)
    begun, ended = threading.Event(), list[str]()
    staying = pool.start_soon(sleep_until_cancelled, begun, ended)
    await asyncio.to_thread(begun.wait, patience(10))
    assert staying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staying.wait()
    await until(staying.cancelled)
    assert ended == ["ended"]
    failing = pool.start_soon(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        await failing.wait()


@pytest.mark.every_way
async def test_cancelling_the_wait_for_a_started_call_cancels_the_call(pool: WorkerPool) -> None:
    begun, ended = threading.Event(), list[str]()
    staying = pool.start_soon(sleep_until_cancelled, begun, ended)
    assert await cancelled_when(begun, staying.wait())
    await pool.drain()
    assert ended == ["ended"]


async def test_a_plain_function_that_raises_stop_iteration_ends_its_call(pool: WorkerPool) -> None:
    """Futures of asyncio refuse StopIteration, and coroutines turn it into a RuntimeError."""

    def next_of_nothing() -> int:
        return next(iter(()))

    started = pool.start_soon(next_of_nothing)
    async with asyncio.timeout(patience(10)):
        with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
            await started.wait()
    assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        started.result()
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await pool.run(next_of_nothing)


async def test_a_failed_call_whose_result_is_not_retrieved_is_logged(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.start_soon(divmod, 1, 0)
    await pool.drain()
    await until(lambda: "its result was never retrieved" in caplog.text)
    assert "ZeroDivisionError" in caplog.text


# ---- Reentrant calls


class Busiest:
    """Policy that reads the statistics of its pool."""

    pool: WorkerPool

    def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
        assert [worker.calls for worker in self.pool.statistics().workers] == loads
        return max(self.pool.statistics().workers, key=lambda worker: (worker.completed, worker.number)).number


async def test_a_placement_policy_can_read_the_pools_statistics(device: Device) -> None:
    policy = Busiest()
    async with WorkerPool(device, 2, placement=policy) as pool:
        policy.pool = pool
        assert [await pool.run(number) for _ in range(3)] == [1] * 3


async def test_a_call_can_be_started_while_its_thread_holds_the_lock(device: Device) -> None:
    """As a signal handler or a finalizer may."""
    async with WorkerPool(device, 2) as pool:
        with pool._supervisor.lock:
            call = pool.start_soon(number)
            assert sum(worker.calls for worker in pool.statistics().workers) == 1
        assert await call.wait() == 0
