"""Waiters are woken and counters stay right, whatever happens between a request and its completion."""

import asyncio
import ctypes
import errno
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from aioverbs import (
    AccessFlags,
    LibraryNotFoundError,
    MessageModel,
    Operation,
    QpCapabilities,
    QueuePair,
    ResourceDomain,
    ThreadModel,
    VerbsError,
)
from aioverbs._core.data_path.data_path import CqDispatcher
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs._memory.region import RegionSlice, WaitableInFlightCount
from aioverbs._verbs.completion_queue import CompletionQueue
from aioverbs._verbs.device import Device, open_device
from tests.capabilities import Capability, needs
from tests.core.contexts import opened
from tests.data_path.turns import TURNS, polled_turns
from tests.holding import hold, unhold
from tests.pace import patience
from tests.waiting import until

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC


@asynccontextmanager
async def connected(
    domain: ResourceDomain, near_cq: CompletionQueue, remote_cq: CompletionQueue, sends: int = 16
) -> AsyncIterator[tuple[QueuePair, QueuePair]]:
    depths = QpCapabilities(max_send_wr=sends, max_recv_wr=16)
    async with domain.queue_pair(near_cq, capabilities=depths) as near, domain.queue_pair(remote_cq) as far:
        near.connect(far.local_endpoint(), ALL)
        far.connect(near.local_endpoint(), ALL)
        yield near, far


@pytest.mark.every_way
async def test_a_full_chain_is_not_posted_again_after_closing(device: Device) -> None:
    async with (
        device.resource_domain(message_model=MessageModel.HIGH_BANDWIDTH) as domain,
        domain.completion_queue(512) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq, 64) as (other, _),
    ):
        here, there = memory[:8], memory.remote()[8:16]
        async with connected(domain, cq, cq, 64) as (near, _far):
            writes = [near.write(here, there) for _ in range(64)]  # as many as are posted together
            while not writes[-1].done():
                pass
            await near.aclose()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(patience(5)):
            await other.write(here, there)


async def test_a_chain_refused_by_a_lost_device_ends_once() -> None:
    async with (
        open_device("soft0") as device,
        device.resource_domain(message_model=MessageModel.HIGH_BANDWIDTH) as domain,
        domain.completion_queue(512) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq, 128) as (near, _),
    ):
        device.faults.fail("post_send", errno.ENOMEM, times=100)
        writes = [near.write(memory[:8], memory.remote()[8:16]) for _ in range(64)]
        cq._cq_dispatcher.broke(VerbsError("ibv_poll_cq", errno.EIO))  # before the turn that reports the refusal
        assert near.statistics().in_flight == 0
        await asyncio.sleep(0.01)
        assert near.statistics().in_flight == cq.statistics().in_flight == 0
        assert all(write.done() for write in writes)
        device.faults.clear()


@needs(Capability.FAULT_PLAN)
async def test_a_poll_that_overlaps_a_call_is_repeated_silently(device: Device) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq) as (near, _),
    ):
        write = near.write(memory[:8], memory.remote()[8:16])
        device.faults.fail("start_poll", errno.EBUSY)
        await until(lambda: write.ended)  # without an await that would poll
        assert device.faults.records()
    assert reported == []


async def test_the_loop_goes_on_polling_after_an_error_of_other_code(device: Device) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64) as remote_cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, remote_cq) as (near, far),
    ):
        receive = near.receive(memory[:8])
        write = near.write(RegionSlice(memory, 8, 8, WaitableInFlightCount(memory.pins, fail)), memory.remote()[16:24])
        await until(lambda: reported)
        assert write.ended
        assert [type(each["exception"]) for each in reported] == [ZeroDivisionError]
        await far.send(memory[24:32])
        await until(lambda: receive.ended)  # without an await that would poll


async def test_a_completion_that_arrives_while_an_await_begins_is_reported(device_name: str) -> None:
    begins, completed = threading.Event(), threading.Event()

    class SlowFutureLoop(asyncio.SelectorEventLoop):
        def create_future(self) -> "asyncio.Future[object]":
            begins.set()
            completed.wait(patience(20))
            return super().create_future()

    async with (
        open_device(device_name) as device,
        device.resource_domain(thread_model=ThreadModel.SAFE) as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq) as (near, far),
    ):
        receive = far.receive(memory[:8])

        async def use() -> None:
            async with asyncio.timeout(patience(3)):
                await receive

        def other() -> None:
            with asyncio.Runner(loop_factory=SlowFutureLoop) as runner:
                runner.run(use())

        thread = asyncio.create_task(asyncio.to_thread(other))
        await asyncio.to_thread(begins.wait, patience(20))
        await near.send(memory[8:16])
        await until(lambda: far.statistics().receives.completed)
        completed.set()
        await thread


def test_a_turn_that_runs_while_being_scheduled_is_not_waited_for(device_name: str) -> None:
    scheduled: list[object] = []

    class EagerTurnLoop(asyncio.SelectorEventLoop):
        """An event loop that runs a completion queue's turn before the thread that scheduled it goes on."""

        def call_soon_threadsafe(self, callback, *args, **kwargs):  # type: ignore[no-untyped-def, override]
            handle = super().call_soon_threadsafe(callback, *args, **kwargs)
            if (
                getattr(callback, "__name__", "") == "_turn"
                and threading.current_thread() is not threading.main_thread()
            ):
                scheduled.append(callback)
                done = threading.Event()
                super().call_soon_threadsafe(done.set)
                done.wait(patience(20))
            return handle

    async def main() -> None:
        async with (
            open_device(device_name) as device,
            device.resource_domain(thread_model=ThreadModel.SAFE, message_model=MessageModel.HIGH_BANDWIDTH) as domain,
            domain.completion_queue(64) as cq,
            domain.register(64, ALL) as memory,
            connected(domain, cq, cq) as (near, _),
        ):
            here, there = memory[:8], memory.remote()[8:16]

            async def use() -> None:
                for _ in range(3):
                    async with asyncio.timeout(patience(3)):
                        await near.write(here, there)

            await asyncio.to_thread(asyncio.run, use())

    with asyncio.Runner(loop_factory=EagerTurnLoop) as runner:
        runner.run(main())
    assert scheduled


@pytest.mark.every_way
async def test_a_waiter_future_resolved_by_others_is_awaited_again(device: Device) -> None:
    async with (
        device.resource_domain(message_model=MessageModel.FORCE_LOW_LATENCY) as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq) as (near, far),
    ):
        receive = far.receive(memory[:8])
        for _ in range(3):
            waiter = receive.send(None)
            assert waiter is not None
            waiter.set_result(None)
        last = receive.send(None)
        assert last is not None
        assert await polled_turns(cq) == TURNS
        await near.send(memory[8:16])
        await last
        with pytest.raises(StopIteration):
            receive.send(None)
        another = far.receive(memory[:8])
        await polled_turns(cq)  # polling stops
        assert await polled_turns(cq) == 0, "polled without an awaiter"
        assert not another.done()


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("model", [MessageModel.DEFAULT, MessageModel.FORCE_LOW_LATENCY])
async def test_an_event_while_the_queue_is_polled_doubles_no_polls(device: Device, model: MessageModel) -> None:
    """The queue is armed for a request that nothing awaits; the event arrives when a task awaits another one."""
    async with (
        device.resource_domain(message_model=model) as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq) as (near, far),
    ):
        device.faults.count_calls()
        hold(device, near)
        write = near.write(memory[:8], memory.remote()[8:16])
        await until(lambda: device.faults.calls("req_notify_cq"))
        receive = asyncio.ensure_future(far.receive(memory[:8]))
        await asyncio.sleep(0)
        unhold(device, near)
        while not cq.statistics().wakeups:  # noqa: ASYNC110  (each turn is counted)
            await asyncio.sleep(0)
        assert write.ended
        assert await polled_turns(cq) <= TURNS
        await near.send(memory[8:16])
        await receive


@pytest.mark.parametrize("model", MessageModel)
async def test_an_error_of_a_callback_loses_no_completion(device: Device, model: MessageModel) -> None:
    def fail() -> None:
        raise InterruptedError

    handled = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: handled.append(context))
    async with (
        device.resource_domain(message_model=model) as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq, 4) as (near, _),
    ):
        here, there = memory[:8], memory.remote()[8:16]
        bad = RegionSlice(memory, 16, 8, WaitableInFlightCount(memory.pins, fail))
        first = near.write(bad, there)
        writes = [near.write(here, there) for _ in range(8)]
        await_it = asyncio.create_task(collect(writes[-1]))
        async with asyncio.timeout(patience(10)):
            while True:
                with suppress(InterruptedError):
                    if all(write.done() for write in (first, *writes)):
                        break
                await asyncio.sleep(0.001)
            await await_it
        assert near.statistics().in_flight == cq.statistics().in_flight == len(memory.pins) == 0


async def collect(operation: Operation[None]) -> None:
    with suppress(InterruptedError):
        await operation


@pytest.mark.every_way
async def test_requests_posted_while_a_batch_completes_find_free_slots(device: Device) -> None:
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(64, ALL) as memory,
        connected(domain, cq, cq, 4) as (near, _),
    ):
        posted: list[Operation[int]] = []

        def post() -> None:
            if not posted:
                posted.extend(near.fetch_and_add(memory.remote()[8:16], 1) for _ in range(4))

        batch = near.batch()
        batch.write(RegionSlice(memory, 16, 8, WaitableInFlightCount(memory.pins, post)), memory.remote()[24:32])
        added = [batch.fetch_and_add(memory.remote()[8:16], 1) for _ in range(3)]
        await batch.post()
        assert [each.result() for each in added] == [0, 1, 2]
        assert [await each for each in posted] == [3, 4, 5, 6]
        assert cq.statistics().in_flight == len(memory.pins) == 0


def adopted(context: software.Context) -> handles.Context:
    """Return another handle of a context, as if it were of an RDMA device; it can create completion queues."""
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    pointer = ctypes.c_void_p(context.verbs_pointer)
    try:
        other = handles.Context.adopt(new_capsule(ctypes.addressof(pointer), b"ibv_context *", None), pointer)
    except LibraryNotFoundError:
        pytest.skip("there is no libibverbs")
    for verb in ("create_cq", "destroy_cq"):
        slot, known = (ctypes.c_void_p.from_address(each.table_slot(verb)) for each in (other, context))
        slot.value = known.value
    return other


async def test_a_failed_poll_has_the_errno_of_the_software_device_or_eio() -> None:
    """RDMA devices return a negative number that is no errno."""
    errors = []
    with opened("inline") as context:
        other = adopted(context)
        for owner in (context, other):
            cq = handles.CompletionQueue(owner, 4)
            dispatcher = CqDispatcher(cq, asyncio.get_running_loop(), handles.Affinity.of_running_loop(), 0, 0, int)
            context.faults.fail("poll_cq", errno.ENOMEM)
            dispatcher.drain()
            errors.append(dispatcher.error)
            cq.destroy()
        other.destroy()
    assert [str(error).partition(" (")[0] for error in errors] == [
        "ibv_poll_cq failed: ENOMEM",
        "ibv_poll_cq failed: EIO",
    ]
