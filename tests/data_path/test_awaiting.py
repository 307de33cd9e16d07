"""An operation is a coroutine: every function that takes coroutines accepts an operation."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from aioverbs import Device, MessageModel
from tests.capabilities import Capability, needs
from tests.data_path.ends import Ends, ends
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until, wait_until

every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


def add(pair: Ends) -> Any:
    return pair.near.fetch_and_add(pair.target.remote()[64:72], 1)


@every_model
async def test_asyncio_takes_it(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        assert isinstance(add(pair), Coroutine)
        assert await add(pair) == 1
        assert await asyncio.wait_for(add(pair), patience(5)) == 2
        assert await asyncio.shield(add(pair)) == 3
        assert await asyncio.create_task(add(pair)) == 4
        assert await asyncio.ensure_future(add(pair)) == 5
        assert await asyncio.gather(*(add(pair) for _ in range(30))) == list(range(6, 36))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(add(pair)) for _ in range(30)]
        assert [task.result() for task in tasks] == list(range(36, 66))
        done, pending = await asyncio.wait({asyncio.create_task(add(pair))}, timeout=5)
        assert ([task.result() for task in done], pending) == ([66], set())
        assert [await each for each in asyncio.as_completed([add(pair)])] == [67]
        async with asyncio.timeout(patience(5)):
            assert await add(pair) == 68
        assert pair.nothing_is_left()


@pytest.mark.every_way
async def test_ended_does_not_look(device: Device) -> None:
    async with ends(device) as pair:
        asked = add(pair)
        assert not asked.ended  # although the device may have completed it
        seen = pair.cq.statistics().completions
        assert not asked.ended
        assert pair.cq.statistics().completions == seen
        wait_until(asked.done)
        assert asked.ended
        assert asked.result() == 0
        assert pair.nothing_is_left()


@every_model
async def test_anyio_takes_it(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        found = []

        async def use() -> None:
            found.append(await add(pair))

        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(use)
        assert sorted(found) == list(range(30))
        with anyio.fail_after(patience(5)):
            assert await add(pair) == 30
        hold(device, pair.near)
        with pytest.raises(TimeoutError), anyio.fail_after(0.01):
            await add(pair)
        with anyio.move_on_after(0.01) as scope:
            await add(pair)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(add(pair), 0.01)
        unhold(device, pair.near)
        assert await add(pair) == 34, "those that nobody awaits any more were done"
        assert pair.nothing_is_left()


if sys.version_info >= (3, 12):

    @pytest.mark.every_way
    async def test_eager_tasks_take_it(device: Device) -> None:
        loop = asyncio.get_running_loop()
        async with ends(device) as pair:
            loop.set_task_factory(asyncio.eager_task_factory)
            try:
                assert await asyncio.gather(*(add(pair) for _ in range(300))) == list(range(300))
            finally:
                loop.set_task_factory(None)


@every_model
async def test_awaits_work_in_debug_mode(device: Device, model: MessageModel) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        async with ends(device, message_model=model) as pair:
            assert await asyncio.gather(*(add(pair) for _ in range(30))) == list(range(30))
            hold(device, pair.near)
            with anyio.move_on_after(0.01):
                await add(pair)
            unhold(device, pair.near)
            assert await add(pair) == 31
            assert pair.nothing_is_left()
    finally:
        loop.set_debug(False)


@pytest.mark.every_way
async def test_an_operation_is_awaited_once(device: Device) -> None:
    async with ends(device) as pair:
        once = add(pair)
        await once
        with pytest.raises(RuntimeError, match="was awaited before: an operation can be awaited once"):
            await once
        assert once.result() == 0
        hold(device, pair.near)
        twice = add(pair)
        task = asyncio.create_task(twice)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RuntimeError, match="was awaited before"):
            await twice
        unhold(device, pair.near)
        await until(twice.done)
        assert twice.result() == 1


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_asking_for_the_result_does_not_spin(device: Device) -> None:
    async with ends(device, message_model=MessageModel.LOW_LATENCY, spin_ns=10**9) as pair:
        hold(device, pair.near)
        asked = add(pair)
        assert not asked.done()
        assert pair.cq.statistics().spins == 0, "it looks, and does not spin"
        with pytest.raises(asyncio.InvalidStateError, match=r"ATOMIC_FETCH_AND_ADD .* is not done"):
            asked.result()
        wait_until(lambda: device.faults.held() == 1)
        unhold(device, pair.near)
        assert asked.done()
        assert [asked.result(), asked.result()] == [0, 0]
        assert await asked == 0


@pytest.mark.every_way
async def test_an_operation_is_done_by_looking_alone(device: Device) -> None:
    async with ends(device) as pair:
        asked = add(pair)
        wait_until(asked.done)  # without a turn of the event loop
        assert asked.result() == 0
        assert pair.nothing_is_left()


@pytest.mark.every_way
async def test_an_operation_is_driven_by_hand(device: Device) -> None:
    async with ends(device) as pair:
        asked = add(pair)
        wait_until(asked.done)
        with pytest.raises(StopIteration) as stop:
            asked.send(None)
        assert stop.value.value == 0
        hold(device, pair.near)
        thrown, closed, fresh = add(pair), add(pair), add(pair)
        for each in (thrown, closed):
            assert asyncio.isfuture(each.send(None))
        with pytest.raises(KeyError, match="gone"):
            thrown.throw(KeyError("gone"))
        with pytest.raises(asyncio.CancelledError):
            fresh.throw(asyncio.CancelledError)
        closed.close()
        closed.close()
        for each in (thrown, closed, fresh):
            with pytest.raises(RuntimeError, match="was awaited before"):
                each.send(None)
        unhold(device, pair.near)
        assert await add(pair) == 4
        assert [each.result() for each in (thrown, closed, fresh)] == [1, 2, 3]
        assert pair.nothing_is_left()


async def test_nothing_else_makes_one(device: Device) -> None:
    async with ends(device) as pair:
        kind = type(add(pair))
        with pytest.raises(TypeError, match="come from the methods of a queue pair"):
            kind()


@every_model
async def test_others_run_while_awaits_are_done_at_once(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        for number in range(1000):
            assert await add(pair) == number
        counter.cancel()
        assert turns >= 10
