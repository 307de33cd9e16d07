"""Calls from several loops at once, cancelled and left at random, while workers die: every one of them ends."""

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


async def one(pool: WorkerPool, chance: random.Random, ends: Ends) -> None:
    functions: list[Callable[[], Any]] = [work.variable, partial(asyncio.sleep, chance.random() / 200), work.look_later]
    function = work.leave if chance.random() < 0.01 else chance.choice(functions)
    size = len(pool.statistics().workers)
    wheres: list[dict[str, Any]] = [{}, {"worker": chance.randrange(size)}, {"key": chance.randrange(100)}]
    where = chance.choice(wheres)
    try:
        with anyio.move_on_after(chance.choice([0.001, 0.003, 30])) as scope:
            await pool.run(function, **where)
    except WorkerDiedError:
        ends["died"] += 1
    else:
        ends["cancelled" if scope.cancelled_caught else "done"] += 1


async def many(pool: WorkerPool, seed: int, calls: int) -> Ends:
    chance = random.Random(seed)
    ends: Ends = collections.Counter()
    async with anyio.create_task_group() as group:
        for _ in range(calls):
            group.start_soon(one, pool, chance, ends)
            if chance.random() < 0.2:
                await asyncio.sleep(0.001)
    return ends


def elsewhere(pool: WorkerPool, seed: int, calls: int, loop: str) -> Ends:
    with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop]) as runner:
        return runner.run(many(pool, seed, calls))


both_kinds = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


async def storm(pool: WorkerPool, calls: int) -> None:
    """Call functions by three loops at once, so often each, while workers die."""
    loops = enumerate(LOOP_FACTORIES)
    threads = [asyncio.to_thread(elsewhere, pool, seed, calls, loop) for seed, loop in loops]
    storms = asyncio.gather(many(pool, 10, calls), *threads)
    with pytest.raises(WorkerDiedError):
        await pool.run(work.leave, worker=1)
    ended = sum(await storms, Ends())
    statistics = pool.statistics()
    assert [await pool.run(work.look_later, worker=worker) for worker in range(3)]
    assert ended.total() == calls * (1 + len(LOOP_FACTORIES))
    assert [each.calls for each in statistics.workers] == [0] * 3
    assert ended["done"] <= sum(each.completed for each in statistics.workers)


@both_kinds
async def test_every_call_ends(device: Device, processes: bool) -> None:
    async with (
        asyncio.timeout(patience(50)),
        WorkerPool(device, 3, processes=processes, placement=LeastLoaded()) as pool,
    ):
        await storm(pool, fewer(80))


@pytest.mark.slow
@pytest.mark.timeout(600)
@both_kinds
async def test_every_call_of_many_ends(device: Device, processes: bool) -> None:
    async with WorkerPool(device, 3, processes=processes, placement=LeastLoaded()) as pool:
        await storm(pool, 4000)


@both_kinds
async def test_every_call_ends_where_it_is_closed_meanwhile(device: Device, processes: bool) -> None:
    pool = await WorkerPool(device, 2, processes=processes).open()
    running = asyncio.create_task(many(pool, 1, fewer(100)))
    await until(lambda: sum(each.completed for each in pool.statistics().workers))
    async with asyncio.timeout(patience(20)):
        await pool.stop(0)
        with contextlib.suppress(ExceptionGroup, ClosedResourceError):
            await running
    assert [each.calls for each in pool.statistics().workers] == [0] * 2
