"""DEFAULT: awaits poll in each turn of the loop while that pays, and sleep otherwise."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from aioverbs import Device, MessageModel, ThreadModel, open_device
from aioverbs._verbs import processors
from tests.capabilities import Capability, needs
from tests.data_path.ends import Ends, ends
from tests.data_path.turns import TURNS, polled_turns
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

pytestmark = needs(Capability.FAULT_PLAN)

ENOUGH = 8  # processors


@pytest.fixture(autouse=True)
def _enough_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", lambda: ENOUGH)


async def receive(pair: Ends) -> None:
    await pair.receive()


async def write(pair: Ends) -> None:
    await pair.write(b"x")


@asynccontextmanager
async def held_write(device: Device, pair: Ends) -> AsyncIterator["asyncio.Task[None]"]:
    """Yield a task that awaits a write which completes after the block."""
    hold(device, pair.near)
    task = asyncio.create_task(write(pair))
    yield task
    unhold(device, pair.near)
    await task


async def turns(condition: Callable[[], bool]) -> None:
    """Run turns of the loop until a condition is true. Callbacks that polls schedule run after this task."""
    while not condition():  # noqa: ASYNC110  (each turn is counted)
        await asyncio.sleep(0)


async def turns_for(nanoseconds: int) -> None:
    """Run turns of the loop for some time."""
    end = time.perf_counter_ns() + nanoseconds
    await turns(lambda: time.perf_counter_ns() > end)


async def wait_for_long(device: Device, pair: Ends) -> None:
    """Await a write that takes far longer than awaits poll."""
    async with held_write(device, pair):
        await asyncio.sleep(0.001)
        await turns(lambda: device.faults.calls("req_notify_cq") > 0)
    device.faults.count_calls(False)
    device.faults.count_calls()


async def test_a_completion_in_the_polling_time_causes_no_event() -> None:
    # Executed inline, the write completes before the next poll, however slow the machine is.
    async with open_device("soft0", execution="inline") as device, ends(device) as pair:
        device.faults.count_calls()
        async with held_write(device, pair):
            await turns(lambda: pair.cq.statistics().spins == 1)
        statistics = pair.cq.statistics()
        assert (statistics.spins, statistics.spins_paid, statistics.wakeups) == (1, 1, 0)
        assert device.faults.calls("req_notify_cq") == 0


async def test_a_long_wait_sleeps(device: Device) -> None:
    async with ends(device) as pair:
        device.faults.count_calls()
        async with held_write(device, pair):
            await turns(lambda: device.faults.calls("req_notify_cq") == 1)
            polls = device.faults.calls("start_poll")
            busy = time.thread_time()
            await asyncio.sleep(0.05)
            busy = time.thread_time() - busy
            assert device.faults.calls("start_poll") == polls
            assert device.faults.calls("req_notify_cq") == 1
            assert busy < 0.02
            assert await polled_turns(pair.cq) == 0
        statistics = pair.cq.statistics()
        assert (statistics.spins, statistics.spins_paid, statistics.wakeups) == (1, 0, 1)


async def test_long_waits_seldom_poll(device: Device) -> None:
    async with ends(device) as pair:
        device.faults.count_calls()
        for _ in range(30):
            await wait_for_long(device, pair)
        before = pair.cq.statistics()
        for _ in range(30):
            await wait_for_long(device, pair)
        after = pair.cq.statistics()
        assert after.wakeups - before.wakeups == 30
        assert after.spins - before.spins <= 2
        assert after.spins_paid == 0


async def polled_turns_of_a_wait(device: Device) -> int:
    async with ends(device) as pair, held_write(device, pair):
        await turns(lambda: pair.cq.statistics().spins == 1)
        return await polled_turns(pair.cq)


async def test_other_tasks_run_between_two_polls(device: Device) -> None:
    polled = 0
    for _ in range(20):  # a busy machine may run another process for the whole time that a wait polls
        polled = polled or await polled_turns_of_a_wait(device)
    assert 0 < polled <= TURNS


async def await_writes(pair: Ends, count: int) -> int:
    """Await writes, one after the other; return how many completed while the task spun, and did not suspend."""
    loop = asyncio.get_running_loop()
    create_future = loop.create_future
    suspended, paid = 0, pair.cq.statistics().spins_paid

    def counted() -> "asyncio.Future[object]":
        nonlocal suspended
        suspended += 1
        return create_future()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "create_future", counted)
        for _ in range(count):
            await pair.write(b"x")
    return pair.cq.statistics().spins_paid - paid - suspended


async def test_a_task_spins_only_while_the_loop_has_nothing_else_to_do() -> None:
    async def work() -> None:
        while True:
            end = time.perf_counter_ns() + 50_000
            while time.perf_counter_ns() < end:
                pass
            await asyncio.sleep(0)

    async with open_device("soft0", execution="thread", delay_ns=12_000) as device, ends(device) as pair:
        async with asyncio.timeout(patience(50)):
            while await await_writes(pair, 200) <= 0:
                pass
        working = asyncio.create_task(work())
        await await_writes(pair, 10)
        assert await await_writes(pair, 500) <= 50
        working.cancel()


async def test_waits_beside_ready_tasks_seldom_poll() -> None:
    async with open_device("soft0", execution="thread", delay_ns=60_000) as device, ends(device) as pair:
        ready = asyncio.create_task(turns(lambda: False))
        for _ in range(300):
            await write(pair)
        before = pair.cq.statistics().spins
        for _ in range(500):
            await write(pair)
        assert pair.cq.statistics().spins - before <= 250, "less than half of the waits, also on a busy machine"
        ready.cancel()


async def test_two_queues_of_a_loop_poll_and_then_sleep(device: Device) -> None:
    async with ends(device) as one, ends(device) as other:
        device.faults.count_calls()
        hold(device, one.near, other.near)
        waiting = [asyncio.create_task(write(pair)) for pair in (one, other)]
        await turns(lambda: device.faults.calls("req_notify_cq") == 2)
        assert await polled_turns(one.cq) == await polled_turns(other.cq) == 0
        unhold(device, one.near, other.near)
        await asyncio.gather(*waiting)
        for pair in (one, other):
            statistics = pair.cq.statistics()
            assert (statistics.spins, statistics.spins_paid, statistics.wakeups) == (1, 0, 1)


async def test_waits_of_another_loop_poll_and_then_sleep(device: Device) -> None:
    async def await_some(pair: Ends) -> None:
        for _ in range(200):
            await write(pair)

    async with ends(device, thread_model=ThreadModel.SAFE) as pair:
        await asyncio.to_thread(asyncio.run, await_some(pair))
        hold(device, pair.near)
        thread = asyncio.create_task(asyncio.to_thread(asyncio.run, write(pair)))
        await until(lambda: pair.cq.statistics().in_flight == 1)
        await asyncio.sleep(0.05)
        assert await polled_turns(pair.cq) == 0
        unhold(device, pair.near)
        await thread


@pytest.mark.parametrize("count", [0, 1])
async def test_a_process_with_a_single_processor_sleeps(
    device: Device, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", lambda: count)
    async with ends(device) as pair:
        device.faults.count_calls()
        for _ in range(3):
            async with held_write(device, pair):
                await turns(lambda: device.faults.calls("req_notify_cq") > 0)
            device.faults.count_calls()
        statistics = pair.cq.statistics()
        assert (statistics.spins, statistics.wakeups) == (0, 3)


async def test_loops_that_always_poll_take_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", lambda: 2)
    stop, polling = threading.Event(), threading.Barrier(3)

    async def poll() -> None:
        model = MessageModel.FORCE_LOW_LATENCY
        async with (
            open_device("soft0") as device,
            ends(device, message_model=model) as pair,
            held_write(device, pair),
        ):
            await turns(lambda: pair.cq.statistics().spins == 1)
            await asyncio.sleep(0)
            polling.wait(patience(20))
            await turns(stop.is_set)

    others = [asyncio.create_task(asyncio.to_thread(asyncio.run, poll())) for _ in range(2)]
    await asyncio.to_thread(polling.wait, patience(20))
    try:
        async with open_device("soft0") as device, asyncio.timeout(patience(20)):
            spins = 1
            while spins:  # a loop that has not run for long does not count
                async with ends(device) as pair:
                    device.faults.count_calls()
                    async with held_write(device, pair):
                        await turns(lambda: device.faults.calls("req_notify_cq") > 0)
                    device.faults.count_calls(False)
                    spins = pair.cq.statistics().spins
    finally:
        stop.set()
        await asyncio.wait(others)


async def test_an_affinity_mask_of_one_processor_makes_waits_sleep(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", processors.usable_processors)
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mask)})
    try:
        async with ends(device) as pair:
            device.faults.count_calls()
            async with held_write(device, pair):
                await turns(lambda: device.faults.calls("req_notify_cq") > 0)
            assert pair.cq.statistics().spins == 0
    finally:
        os.sched_setaffinity(0, mask)


async def test_processors_are_counted_before_a_wait(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count() -> int:
        counted.append(ENOUGH)
        return ENOUGH

    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", count)
    async with device.resource_domain() as domain, domain.completion_queue(8):
        assert len(counted) == 1
    async with device.resource_domain() as domain, domain.completion_queue(8, message_model=MessageModel.LOW_LATENCY):
        assert len(counted) == 1


async def test_processors_are_counted_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1
    monkeypatch.setattr("aioverbs._verbs.completion_queue.usable_processors", lambda: count)
    async with ends(device) as pair:
        async with held_write(device, pair):
            await asyncio.sleep(0.001)
        assert pair.cq.statistics().spins == 0
        count = 2
        await asyncio.sleep(1)
        async with held_write(device, pair):
            await turns(lambda: pair.cq.statistics().spins == 1)


async def spins_of_cancelled_waits(device: Device, pair: Ends, count: int) -> int:
    """Await writes and cancel each wait after 150 us; return how many of the waits polled."""
    before = pair.cq.statistics().spins
    for _ in range(count):
        hold(device, pair.near)
        task = asyncio.create_task(write(pair))
        await turns_for(150_000)
        task.cancel()
        await asyncio.wait([task])
        unhold(device, pair.near)
    return pair.cq.statistics().spins - before


@pytest.mark.parametrize("beside", [False, True])
async def test_waits_that_are_cancelled_soon_seldom_poll(beside: bool) -> None:
    async with open_device("soft0", execution="inline") as device, ends(device) as pair:
        receiving = asyncio.create_task(receive(pair)) if beside else None
        await spins_of_cancelled_waits(device, pair, 60)
        assert await spins_of_cancelled_waits(device, pair, 60) <= 10
        if receiving is not None:
            await pair.near.send(None)
            await receiving


async def test_a_cancelled_wait_stops_polling(device: Device) -> None:
    async with ends(device) as pair:
        device.faults.count_calls()
        hold(device, pair.near)
        task = asyncio.create_task(write(pair))
        await turns(lambda: pair.cq.statistics().spins == 1)
        task.cancel()
        await asyncio.wait([task])
        await turns(lambda: device.faults.calls("req_notify_cq") == 1)
        assert await polled_turns(pair.cq) == 0
        unhold(device, pair.near)
        await until(pair.is_idle)
        assert pair.cq.statistics().spins_paid == 0
