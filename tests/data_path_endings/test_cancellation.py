"""Cancellation of an await at each point: a posted request goes on and keeps its memory, and nothing is lost."""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest

from aioverbs import (
    BrokenResourceError,
    ClosedResourceError,
    ConcurrentAccessError,
    Device,
    LeasedBuffer,
    MessageModel,
    QpState,
    QueuePair,
    ResourceState,
    WcStatus,
    WorkCompletionError,
)
from aioverbs._core.data_path.data_path import Inbox, Operation
from aioverbs._core.handles import handles
from tests.capabilities import Capability, needs
from tests.data_path_endings.pair import ACCESS, PATIENCE_S, Pair, pair_on, until
from tests.pace import patience
from tests.waiting import wait_until

every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


async def cancel(awaited: Awaitable[object]) -> None:
    """Await in a task, let the task run until it blocks, and cancel it."""

    async def wait() -> None:
        await awaited

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.005)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(awaited: Awaitable[object]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(awaited, 0.005)


async def move_on(awaited: Awaitable[object]) -> None:
    with anyio.move_on_after(0.005) as scope:
        await awaited
    assert scope.cancelled_caught


Abandon = Callable[[Awaitable[object]], Awaitable[None]]
ABANDON_WAYS: list[Abandon] = [cancel, time_out, move_on]
every_way_to_abandon = pytest.mark.parametrize("abandon", ABANDON_WAYS)


# ---- Operations


@pytest.mark.parametrize(("model", "abandon"), list(zip(MessageModel, itertools.cycle(ABANDON_WAYS), strict=False)))
async def test_a_request_that_was_posted_goes_on(device: Device, model: MessageModel, abandon: Abandon) -> None:
    async with pair_on(device, model, spin_ns=1000 if "LATENCY" in model.name else None) as pair:
        pair.hold()
        await abandon(pair.write())
        assert len(pair.source.pins) == pair.near.statistics().sends.in_flight == 1
        pair.unhold()
        await until(lambda: not len(pair.source.pins))
        assert pair.written() == b"12345678"
        await pair.check_idle()


@every_way_to_abandon
async def test_a_request_that_waits_for_a_slot_is_withdrawn(device: Device, abandon: Abandon) -> None:
    async with pair_on(device, sends=2) as pair:
        pair.hold()
        first = [pair.write(8 * each) for each in (0, 1)]
        await abandon(pair.write(16))
        await until(lambda: not pair.near.statistics().sends.queued)
        assert len(pair.source.pins) == pair.near.statistics().sends.in_flight == 2
        pair.unhold()
        await asyncio.wait_for(asyncio.gather(*first), PATIENCE_S)
        assert pair.written(16) == bytes(8)
        assert pair.near.statistics().sends.posted == 2
        await pair.check_idle()


@every_way_to_abandon
async def test_a_waiting_request_that_is_still_referenced_is_posted(device: Device, abandon: Abandon) -> None:
    async with pair_on(device, sends=2) as pair:
        pair.hold()
        operations = [pair.write(8 * each) for each in range(3)]
        await abandon(operations[2])
        assert pair.near.statistics().sends.queued == 1
        assert len(pair.source.pins) == 3
        pair.unhold()
        await asyncio.wait_for(asyncio.gather(*operations[:2]), PATIENCE_S)
        await until(operations[2].done)
        assert operations[2].result() is None
        assert pair.written(16) == b"12345678"
        await pair.check_idle()


@pytest.mark.every_way
async def test_requests_behind_a_withdrawn_one_keep_their_order(device: Device) -> None:
    async with pair_on(device, sends=1) as pair:
        pair.hold()
        order: list[int] = []

        async def write(number: int) -> None:
            await pair.write(8 * number)
            order.append(number)

        tasks = [asyncio.create_task(write(each)) for each in range(8)]
        await asyncio.sleep(0)
        for each in (1, 4, 7):  # the first that waits, one in the middle, and the last
            tasks[each].cancel()
        await asyncio.sleep(0)
        assert pair.near.statistics().sends.queued == 4
        pair.unhold()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        assert order == [0, 2, 3, 5, 6]
        assert [bool(pair.written(8 * each)[0]) for each in range(8)] == [each in order for each in range(8)]
        await pair.check_idle()


@pytest.mark.parametrize("sends", [1, 16], ids=["signalled", "covered"])
@pytest.mark.every_way
async def test_a_chained_request_goes_on(device: Device, sends: int) -> None:
    async with pair_on(device, MessageModel.HIGH_BANDWIDTH) as pair:
        pair.hold()
        operation = pair.write()
        assert operation.send(None) is not None
        others = [pair.write(8 * each) for each in range(1, sends)]
        assert all("to be posted" in repr(each) for each in (operation, *others))
        with pytest.raises(asyncio.CancelledError):
            operation.throw(asyncio.CancelledError())
        del operation
        assert len(pair.source.pins) == sends
        await until(lambda: pair.near.statistics().sends.doorbells == 1)
        assert len(pair.source.pins) == sends
        pair.unhold()
        await asyncio.wait_for(asyncio.gather(*others), PATIENCE_S)
        await until(lambda: not len(pair.source.pins))
        assert pair.written(0, 8 * sends) == b"12345678" * sends
        await pair.check_idle()


@every_model
async def test_a_completed_request_keeps_its_result_when_its_await_is_cancelled(
    device: Device, model: MessageModel
) -> None:
    async with pair_on(device, model, sends=128) as pair:
        operations = [pair.write(8 * each) for each in range(128)]
        await until(lambda: all(each.done() for each in operations))
        operation = next(each for each in operations if yields_first(each))
        assert operation.done()
        with pytest.raises(asyncio.CancelledError):
            operation.throw(asyncio.CancelledError())
        assert operation.result() is None
        with pytest.raises(RuntimeError, match="can be awaited once"):
            operation.send(None)
        await pair.check_idle()


def yields_first(operation: Operation[Any]) -> bool:
    """Begin to await a completed operation; return whether it yields to other tasks first."""
    try:
        assert operation.send(None) is None
    except StopIteration as stop:
        if stop.value is not None:
            stop.value.release()
        return False
    return True


@pytest.mark.every_way
async def test_a_task_is_cancelled_between_its_completion_and_its_step(device: Device) -> None:
    async with pair_on(device) as pair:
        pair.hold()

        async def write() -> None:
            await pair.write()

        task = asyncio.create_task(write())
        await asyncio.sleep(0)
        pair.unhold()
        other = pair.write(8)
        wait_until(other.done)  # completes both, and wakes the task
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.written() == b"12345678"
        await pair.check_idle()


@pytest.mark.every_way
async def test_a_request_of_a_task_that_never_started_goes_on(device: Device) -> None:
    async with pair_on(device) as pair:
        pair.hold()
        task = asyncio.create_task(pair.write())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(pair.source.pins) == 1
        pair.unhold()
        await pair.check_idle()


@every_model
async def test_dropped_requests_go_on(device: Device, model: MessageModel) -> None:
    async with pair_on(device, model) as pair:
        for each in range(16):
            _ = pair.write(8 * each)
        await until(lambda: pair.near.statistics().sends.completed == 16)
        assert pair.written(0, 128) == b"12345678" * 16
        await pair.check_idle()


# ---- Batches


@every_way_to_abandon
async def test_a_posted_batch_goes_on(device: Device, abandon: Abandon) -> None:
    async with pair_on(device) as pair:
        pair.hold()
        batch = pair.near.batch()
        remote = pair.target.remote()
        for each in range(4):
            part = slice(8 * each, 8 * each + 8)
            pair.source.buffer[part] = b"12345678"
            batch.write(pair.source[part], remote[part])
        await abandon(batch.post())
        assert len(pair.source.pins) == pair.near.statistics().sends.in_flight == 4
        pair.unhold()
        await until(lambda: not len(pair.source.pins))
        assert pair.written(0, 32) == b"12345678" * 4
        await pair.check_idle()


@every_way_to_abandon
async def test_a_batch_that_waits_for_slots_is_withdrawn(device: Device, abandon: Abandon) -> None:
    async with pair_on(device, sends=4) as pair:
        pair.hold()
        first = pair.write(64)

        async def post() -> None:
            async with pair.near.batch() as batch:
                for each in range(4):
                    batch.write(pair.source[8 * each : 8 * each + 8], pair.target.remote()[8 * each : 8 * each + 8])

        pair.source.buffer[:32] = b"x" * 32
        await abandon(post())
        await until(lambda: not pair.near.statistics().sends.queued)
        assert len(pair.source.pins) == 1
        pair.unhold()
        await asyncio.wait_for(first, PATIENCE_S)
        assert pair.written(0, 32) == bytes(32)
        await pair.check_idle()


# ---- Messages


async def send(pair: Pair, number: int) -> None:
    pair.source.buffer[:8] = number.to_bytes(8, "big")
    await asyncio.wait_for(pair.near.send(pair.source[:8]), PATIENCE_S)


def has_arrived(pair: Pair) -> bool:
    """Return whether a message has arrived; its waiter is woken, but does not run yet."""
    pair.cq._cq_dispatcher.drain()
    return pair.far.statistics().receives.completed == 1


async def receive_numbers(pair: Pair, count: int) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        numbers: list[int] = []
        while len(numbers) < count:
            with await anext(pair.far.messages()) as message:
                numbers.append(int.from_bytes(message.data, "big"))
        return numbers


@pytest.fixture
async def messages_pair(device: Device) -> AsyncIterator[Pair]:
    async with pair_on(device, receive_depth=128, receive_size=8) as pair:
        yield pair


@every_way_to_abandon
async def test_abandoned_waits_lose_no_message(messages_pair: Pair, abandon: Abandon) -> None:
    for number in range(8):
        await abandon(anext(messages_pair.far.messages()))
        await send(messages_pair, number)
        assert await receive_numbers(messages_pair, 1) == [number]
    assert messages_pair.far.statistics().receives.in_flight == 128


@pytest.mark.every_way
async def test_a_message_delivered_to_a_cancelled_task_is_returned(messages_pair: Pair) -> None:
    async def next_message() -> object:
        return await anext(messages_pair.far.messages())

    task = asyncio.create_task(next_message())
    await asyncio.sleep(0)
    _ = messages_pair.near.send(messages_pair.source[:8])
    wait_until(lambda: has_arrived(messages_pair))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await receive_numbers(messages_pair, 1) == [0]


@pytest.mark.every_way
async def test_a_message_of_a_cancelled_waiter_goes_to_the_next(messages_pair: Pair) -> None:
    async def next_message() -> int:
        with await anext(messages_pair.far.messages()) as message:
            return int.from_bytes(message.data, "big")

    first = asyncio.create_task(next_message())
    await asyncio.sleep(0)
    _ = messages_pair.near.send(messages_pair.source[:8])
    wait_until(lambda: has_arrived(messages_pair))
    # The first task has its message, but did not run yet. Another task asks, and then the first is cancelled.
    second = anext(messages_pair.far.messages())
    first.cancel()
    waiting = asyncio.create_task(asyncio.wait_for(second, patience(2)))
    with pytest.raises(asyncio.CancelledError):
        await first
    with await waiting as message:
        assert bytes(message.data) == bytes(8)


@pytest.mark.every_way
async def test_a_received_message_is_returned_when_its_await_is_cancelled(messages_pair: Pair) -> None:
    inbox = messages_pair.far.messages()
    assert isinstance(inbox, Inbox)
    for number in range(128):
        await send(messages_pair, number)
    await until(lambda: len(inbox) == 128)
    operation = next(each for each in map(anext, [inbox] * 128) if yields_first(each))
    remaining = len(inbox)
    with pytest.raises(asyncio.CancelledError):
        operation.throw(asyncio.CancelledError())
    assert len(inbox) == remaining + 1
    assert await receive_numbers(messages_pair, 1) == [127 - remaining]


@pytest.mark.every_way
async def test_closing_a_request_for_a_message_returns_the_message(messages_pair: Pair) -> None:
    await send(messages_pair, 7)
    inbox = messages_pair.far.messages()
    assert isinstance(inbox, Inbox)
    await until(lambda: len(inbox))
    anext(inbox).close()
    assert await receive_numbers(messages_pair, 1) == [7]


@every_way_to_abandon
async def test_an_abandoned_receive_is_filled(device: Device, abandon: Abandon) -> None:
    async with pair_on(device) as pair:
        receive = pair.far.receive(pair.target[:8])
        await abandon(receive)
        assert len(pair.target.pins) == 1
        await send(pair, 1)
        await until(receive.done)
        assert receive.result().byte_len == 8
        assert pair.written() == (1).to_bytes(8, "big")
        await pair.check_idle()


# ---- Closing


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("abandon", [cancel, time_out])
@pytest.mark.every_way
async def test_closing_a_queue_pair_continues_after_cancellation(device: Device, abandon: Abandon) -> None:
    async with pair_on(device) as pair:
        pair.hold()
        write = pair.write()
        await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.1, pair.unhold)
        await abandon(pair.near.aclose())
        assert pair.near.closed
        (result,) = await asyncio.gather(write, return_exceptions=True)
        assert result is None or isinstance(result, WorkCompletionError), "the request was flushed, and not abandoned"
        assert len(pair.source.pins) == 0
        assert not pair.cq.statistics().in_flight


class BusyHandle:
    """Handle of a queue pair whose first changes of state are refused, as if another thread were inside the domain.

    :param handle: handle that has all other members.
    :param refused: function that is called in each refused change.
    """

    def __init__(self, handle: handles.QueuePair, refused: Callable[[], object]) -> None:
        self._handle = handle
        self._refused = refused
        self._refusals = 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def modify(self, state: QpState) -> None:
        if self._refusals:
            self._refusals -= 1
            self._refused()
            raise ConcurrentAccessError("another thread")
        self._handle.modify(state)


@pytest.mark.every_way
async def test_a_close_that_is_cancelled_while_the_domain_is_busy_flushes_requests(device: Device) -> None:
    async with pair_on(device) as pair:
        receive = pair.near.receive(pair.target[:8])
        closing = asyncio.create_task(pair.near.aclose())
        drain: Any = pair.near._lifecycle.drain
        busy = drain.__self__._handle = BusyHandle(pair.near.handle, closing.cancel)
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (pair.near.closed, busy._refusals) == (True, 0)
        with pytest.raises(WorkCompletionError, match="WR_FLUSH_ERR"):
            await receive


@pytest.mark.every_way
async def test_closing_while_the_domain_is_busy_posts_no_chain(device: Device) -> None:
    async with pair_on(device, MessageModel.HIGH_BANDWIDTH) as pair:
        receive = pair.near.receive(pair.target[:8])
        write = pair.write()
        drain: Any = pair.near._lifecycle.drain
        busy = drain.__self__._handle = BusyHandle(pair.near.handle, lambda: None)
        await pair.near.aclose()
        assert (pair.near.closed, busy._refusals) == (True, 0)
        for request in (receive, write):
            with pytest.raises(WorkCompletionError, match="WR_FLUSH_ERR"):
                await request
        assert (pair.written(), len(pair.source.pins)) == (bytes(8), 0)


@pytest.mark.every_way
async def test_closing_a_queue_pair_in_a_cancelled_scope_flushes_it(device: Device) -> None:
    async with pair_on(device) as pair:
        pair.hold()
        write = pair.write()
        with anyio.CancelScope() as scope:
            scope.cancel()
            asyncio.get_running_loop().call_later(0.005, pair.unhold)
            await pair.near.aclose()
        assert pair.near.closed
        (result,) = await asyncio.gather(write, return_exceptions=True)
        if result is not None:  # the request was not executed before the flush
            assert isinstance(result, WorkCompletionError)
            assert result.status is WcStatus.WR_FLUSH_ERR
        assert len(pair.source.pins) == 0


@needs(Capability.OBJECT_COUNTS)
@pytest.mark.parametrize(("kind", "abandon"), list(zip(["region", "cache", "pool"], ABANDON_WAYS, strict=True)))
async def test_memory_stays_registered_until_its_requests_end(device: Device, kind: str, abandon: Abandon) -> None:
    """The caller of `aclose` is cancelled twice while it waits; memory stays registered until its requests end."""
    memory = bytearray(4096)
    buffer: LeasedBuffer | None = None
    close: Callable[[], Coroutine[Any, Any, None]]

    def registered() -> int:
        return dict(device.statistics().objects)["mrs"]

    async with pair_on(device) as pair:
        if kind == "pool":
            pool = await pair.domain.buffer_pool(64, 1, access=ACCESS).open()
            buffer = await pool.lease()
            region, close = buffer.region, pool.aclose
        elif kind == "cache":
            async with pair.domain.cache.region(memory, ACCESS) as region:
                close = functools.partial(pair.domain.cache.drop, memory)
        else:
            region = await pair.domain.register(memory, ACCESS).open()
            close = region.aclose
        before = registered()
        region.buffer[:8] = b"12345678"
        pair.hold()
        write = pair.near.write((buffer if buffer is not None else region)[:8], pair.target.remote()[:8])
        if buffer is not None:
            buffer.release()
        for _ in range(2):
            await abandon(close())
        assert not write.done()
        assert (region.state, len(region.pins), registered()) == (ResourceState.CLOSING, 1, before)
        with pytest.raises(ClosedResourceError):
            _ = pair.near.write(region[:8], pair.target.remote()[:8])
        pair.unhold()
        await asyncio.wait_for(write, PATIENCE_S)
        assert pair.written() == b"12345678"
        await asyncio.wait_for(close(), PATIENCE_S)
        assert region.closed
        assert registered() == before - 1
        memory.append(0)  # raises BufferError if the memory is still exported
        await pair.check_idle()


@needs(Capability.FAULT_PLAN)
@pytest.mark.parametrize("abandon", [cancel, time_out])
@pytest.mark.every_way
async def test_closing_a_completion_queue_continues_after_cancellation(device: Device, abandon: Abandon) -> None:
    async with device.resource_domain() as domain, pair_on(device) as pair:
        cq = domain.completion_queue(64)
        await cq.open()
        near: QueuePair = domain.queue_pair(cq)
        await near.open()
        near.connect(pair.far.local_endpoint())
        device.faults.hold()
        write = near.receive(None)
        asyncio.get_running_loop().call_later(0.2, device.faults.unhold)  # 0.195 s after the cancellation
        with pytest.warns(ResourceWarning, match="still open"):
            await abandon(cq.aclose())
        assert cq.closed
        assert near.closed
        with pytest.raises((WorkCompletionError, BrokenResourceError)) as caught:
            await asyncio.wait_for(write, PATIENCE_S)
        assert not isinstance(caught.value, WorkCompletionError) or caught.value.status is WcStatus.WR_FLUSH_ERR
