"""Calls from several loops at once, cancelled at random, while workers die: every call ends."""

import asyncio
import collections
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from aioverbs import ClosedResourceError, Device, WorkerDiedError, WorkerPool
from aioverbs._pool.placement import LeastLoaded
from tests.conftest import LOOP_FACTORIES
from tests.pace import fewer, patience
from tests.pool import work
from tests.waiting import until

Ends = collections.Counter[str]


async def call_at_random(pool: WorkerPool, chance: random.Random, ends: Ends) -> None:
    """Make one random call, and count how it ends."""
    functions: list[Callable[[], Any]] = [
        work.variable,
        partial(asyncio.sleep, chance.random() / 200),
        work.describe_worker_later,
    ]
    function = work.exit_worker if chance.random() < 0.01 else chance.choice(functions)
    size = len(pool.statistics().workers)
    targets: list[dict[str, Any]] = [{}, {"worker": chance.randrange(size)}, {"key": chance.randrange(100)}]
    target = chance.choice(targets)
    try:
        with anyio.move_on_after(chance.choice([0.001, 0.003, 30])) as scope:
            await pool.run(function, **target)
    except WorkerDiedError:
        ends["died"] += 1
    else:
        ends["cancelled" if scope.cancelled_caught else "done"] += 1


async def call_many(pool: WorkerPool, seed: int, calls: int) -> Ends:
    chance = random.Random(seed)
    ends: Ends = collections.Counter()
    async with anyio.create_task_group() as group:
        for _ in range(calls):
            group.start_soon(call_at_random, pool, chance, ends)
            if chance.random() < 0.2:
                await asyncio.sleep(0.001)
    return ends


def call_many_on_new_loop(pool: WorkerPool, seed: int, calls: int, loop: str) -> Ends:
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
        return runner.run(call_many(pool, seed, calls))


both_backends = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


async def stress(pool: WorkerPool, calls: int) -> None:
    """Make the given number of calls from each of three loops at once, while workers die."""
    loops = enumerate(LOOP_FACTORIES)
    threads = [asyncio.to_thread(call_many_on_new_loop, pool, seed, calls, loop) for seed, loop in loops]
    calls_ended = asyncio.gather(call_many(pool, 10, calls), *threads)
    with pytest.raises(WorkerDiedError):
        await pool.run(work.exit_worker, worker=1)
    ended = sum(await calls_ended, Ends())
    statistics = pool.statistics()
    assert [await pool.run(work.describe_worker_later, worker=worker) for worker in range(3)]
    assert ended.total() == calls * (1 + len(LOOP_FACTORIES))
    assert [each.calls for each in statistics.workers] == [0] * 3
    assert ended["done"] <= sum(each.completed for each in statistics.workers)


@both_backends
async def test_every_call_ends(device: Device, processes: bool) -> None:
    async with (
        asyncio.timeout(patience(50)),
        WorkerPool(device, 3, processes=processes, placement=LeastLoaded()) as pool,
    ):
        await stress(pool, fewer(80))


@pytest.mark.slow
@pytest.mark.timeout(600)
@both_backends
async def test_every_one_of_many_calls_ends(device: Device, processes: bool) -> None:
    async with WorkerPool(device, 3, processes=processes, placement=LeastLoaded()) as pool:
        await stress(pool, 4000)


@pytest.mark.timeout(200)
@both_backends
async def test_every_call_ends_when_the_pool_is_closed_meanwhile(device: Device, processes: bool) -> None:
    pool = await WorkerPool(device, 2, processes=processes).open()
    running = asyncio.create_task(call_many(pool, 1, fewer(100)))
    # First, workers may die. If all calls are waiting when the workers start, all may end with them.
    await until(lambda: running.done() or sum(each.completed for each in pool.statistics().workers), 100)
    async with asyncio.timeout(patience(20)):
        await pool.stop(0)
        with contextlib.suppress(ExceptionGroup, ClosedResourceError):
            await running
    assert [each.calls for each in pool.statistics().workers] == [0] * 2
