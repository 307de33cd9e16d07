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


def fetch_and_add_one(pair: Ends) -> Any:
    return pair.near.fetch_and_add(pair.target.remote()[64:72], 1)


@every_model
async def test_asyncio_functions_accept_operations(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        assert isinstance(fetch_and_add_one(pair), Coroutine)
        assert await fetch_and_add_one(pair) == 1
        assert await asyncio.wait_for(fetch_and_add_one(pair), patience(5)) == 2
        assert await asyncio.shield(fetch_and_add_one(pair)) == 3
        assert await asyncio.create_task(fetch_and_add_one(pair)) == 4
        assert await asyncio.ensure_future(fetch_and_add_one(pair)) == 5
        assert await asyncio.gather(*(fetch_and_add_one(pair) for _ in range(30))) == list(range(6, 36))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetch_and_add_one(pair)) for _ in range(30)]
        assert [task.result() for task in tasks] == list(range(36, 66))
        done, pending = await asyncio.wait({asyncio.create_task(fetch_and_add_one(pair))}, timeout=5)
        assert ([task.result() for task in done], pending) == ([66], set())
        assert [await each for each in asyncio.as_completed([fetch_and_add_one(pair)])] == [67]
        async with asyncio.timeout(patience(5)):
            assert await fetch_and_add_one(pair) == 68
        assert pair.is_idle()


@pytest.mark.every_way
async def test_ended_does_not_poll(device: Device) -> None:
    async with ends(device) as pair:
        operation = fetch_and_add_one(pair)
        assert not operation.ended  # although the device may have completed it
        completions = pair.cq.statistics().completions
        assert not operation.ended
        assert pair.cq.statistics().completions == completions
        wait_until(operation.done)
        assert operation.ended
        assert operation.result() == 0
        assert pair.is_idle()


@every_model
async def test_anyio_functions_accept_operations(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        results = []

        async def use() -> None:
            results.append(await fetch_and_add_one(pair))

        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(use)
        assert sorted(results) == list(range(30))
        with anyio.fail_after(patience(5)):
            assert await fetch_and_add_one(pair) == 30
        hold(device, pair.near)
        with pytest.raises(TimeoutError), anyio.fail_after(0.01):
            await fetch_and_add_one(pair)
        with anyio.move_on_after(0.01) as scope:
            await fetch_and_add_one(pair)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fetch_and_add_one(pair), 0.01)
        unhold(device, pair.near)
        assert await fetch_and_add_one(pair) == 34, "requests whose awaits were cancelled did not execute"
        assert pair.is_idle()


if sys.version_info >= (3, 12):

    def eager_task(loop: asyncio.AbstractEventLoop, coro: Any, *, eager_start: bool = True, **options: Any) -> Any:
        """Make an eager task. uvloop passes `eager_start`, which the factory of Python 3.13.0 refuses."""
        return asyncio.eager_task_factory(loop, coro, **options)

    @pytest.mark.every_way
    async def test_eager_tasks_accept_operations(device: Device) -> None:
        loop = asyncio.get_running_loop()
        async with ends(device) as pair:
            loop.set_task_factory(eager_task)
            try:
                assert await asyncio.gather(*(fetch_and_add_one(pair) for _ in range(300))) == list(range(300))
            finally:
                loop.set_task_factory(None)


@every_model
async def test_awaits_work_in_debug_mode(device: Device, model: MessageModel) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        async with ends(device, message_model=model) as pair:
            assert await asyncio.gather(*(fetch_and_add_one(pair) for _ in range(30))) == list(range(30))
            hold(device, pair.near)
            with anyio.move_on_after(0.01):
                await fetch_and_add_one(pair)
            unhold(device, pair.near)
            assert await fetch_and_add_one(pair) == 31
            assert pair.is_idle()
    finally:
        loop.set_debug(False)


@pytest.mark.every_way
async def test_an_operation_is_awaited_once(device: Device) -> None:
    async with ends(device) as pair:
        once = fetch_and_add_one(pair)
        await once
        with pytest.raises(RuntimeError, match="was awaited before: an operation can be awaited once"):
            await once
        assert once.result() == 0
        hold(device, pair.near)
        twice = fetch_and_add_one(pair)
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
        operation = fetch_and_add_one(pair)
        assert not operation.done()
        assert pair.cq.statistics().spins == 0, "done() does not spin"
        with pytest.raises(asyncio.InvalidStateError, match=r"ATOMIC_FETCH_AND_ADD .* is not done"):
            operation.result()
        wait_until(lambda: device.faults.held() == 1)
        unhold(device, pair.near)
        assert operation.done()
        assert [operation.result(), operation.result()] == [0, 0]
        assert await operation == 0


@pytest.mark.every_way
async def test_polling_done_completes_an_operation(device: Device) -> None:
    async with ends(device) as pair:
        operation = fetch_and_add_one(pair)
        wait_until(operation.done)  # without a turn of the event loop
        assert operation.result() == 0
        assert pair.is_idle()


@pytest.mark.every_way
async def test_an_operation_is_driven_by_hand(device: Device) -> None:
    async with ends(device) as pair:
        operation = fetch_and_add_one(pair)
        wait_until(operation.done)
        with pytest.raises(StopIteration) as stop:
            operation.send(None)
        assert stop.value.value == 0
        hold(device, pair.near)
        thrown, closed, fresh = fetch_and_add_one(pair), fetch_and_add_one(pair), fetch_and_add_one(pair)
        for each in (thrown, closed):
            assert asyncio.isfuture(each.send(None))
        with pytest.raises(KeyError, match="planted"):
            thrown.throw(KeyError("planted"))
        with pytest.raises(asyncio.CancelledError):
            fresh.throw(asyncio.CancelledError)
        closed.close()
        closed.close()
        for each in (thrown, closed, fresh):
            with pytest.raises(RuntimeError, match="was awaited before"):
                each.send(None)
        unhold(device, pair.near)
        assert await fetch_and_add_one(pair) == 4
        assert [each.result() for each in (thrown, closed, fresh)] == [1, 2, 3]
        assert pair.is_idle()


async def test_operations_are_not_constructed_directly(device: Device) -> None:
    async with ends(device) as pair:
        operation_type = type(fetch_and_add_one(pair))
        with pytest.raises(TypeError, match="come from the methods of a queue pair"):
            operation_type()


@every_model
async def test_other_tasks_run_beside_awaits_that_complete_at_once(device: Device, model: MessageModel) -> None:
    async with ends(device, message_model=model) as pair:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        for number in range(1000):
            assert await fetch_and_add_one(pair) == number
        counter.cancel()
        assert turns >= 10
