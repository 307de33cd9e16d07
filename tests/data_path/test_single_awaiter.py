"""An operation has one awaiter: a second one is refused, as with a coroutine, and the first goes on."""

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from aioverbs import AffinityError, Device, Operation, ThreadModel, WorkCompletionError
from aioverbs._core.data_path.data_path import Inbox, Received
from tests.conftest import LOOP_FACTORIES
from tests.data_path.ends import Ends, ends
from tests.pace import patience
from tests.waiting import until

AWAITED_ALREADY = "is awaited by another task: an operation can be awaited once"
Use = Callable[[Operation[Any]], object]

# Calls that a second awaiter may try.
SECOND_USES: dict[str, Use] = {
    "await": lambda operation: operation.__await__(),
    "send": lambda operation: operation.send(None),
    "next": next,
    "throw": lambda operation: operation.throw(KeyError),
    "close": lambda operation: operation.close(),
}


async def waiting_receive(pair: Ends) -> tuple[Operation[Received], "asyncio.Task[Received]"]:
    """Post a receive, and start a task that sleeps until a message arrives."""
    operation = pair.receive()

    async def wait() -> Received:
        return await operation

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return operation, task


async def finish_receive(pair: Ends, task: "asyncio.Task[Received]") -> None:
    assert not task.done()
    await pair.near.send(pair.source[:8], **pair.addressing)
    async with asyncio.timeout(patience(10)):
        assert (await task).byte_len == 8
    assert pair.is_idle()


async def in_thread(function: Callable[[], object]) -> None:
    """Call `function` in a thread without an event loop."""
    await asyncio.to_thread(function)


async def in_loop(function: Callable[[], object]) -> None:
    """Call `function` in a thread with an event loop of its own."""

    async def use() -> None:
        function()

    await asyncio.to_thread(asyncio.run, use())


async def in_task(function: Callable[[], object]) -> None:
    """Call `function` in another task of the same loop: that of the test."""
    function()


async def in_callback(function: Callable[[], object]) -> None:
    """Call `function` on the same loop, outside any task."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    asyncio.get_running_loop().call_soon(call)
    await done


SAME_LOOP = [in_task, in_callback]
OTHER_THREADS = [in_loop, in_thread]


@pytest.mark.parametrize("model", [ThreadModel.SINGLE, ThreadModel.SAFE], ids=lambda model: model.name)
@pytest.mark.parametrize("where", SAME_LOOP + OTHER_THREADS)
async def test_a_second_awaiter_is_refused(device: Device, where: Callable[..., Any], model: ThreadModel) -> None:
    is_affinity = where in OTHER_THREADS and model is ThreadModel.SINGLE
    refusal = "which belongs to thread" if is_affinity else AWAITED_ALREADY
    async with ends(device, thread_model=model) as pair:
        operation, task = await waiting_receive(pair)

        def use() -> None:
            for attempt in SECOND_USES.values():
                with pytest.raises(RuntimeError, match=refusal) as caught:
                    attempt(operation)
                assert isinstance(caught.value, AffinityError) is is_affinity

        await where(use)
        await finish_receive(pair, task)
        with pytest.raises(RuntimeError, match="was awaited before: an operation can be awaited once"):
            await operation


@pytest.mark.every_way
async def test_a_second_task_is_refused(device: Device) -> None:
    async with ends(device) as pair:
        operation, task = await waiting_receive(pair)
        async with asyncio.timeout(patience(10)):
            for second in (asyncio.ensure_future(operation), asyncio.create_task(operation)):
                with pytest.raises(RuntimeError, match=AWAITED_ALREADY):
                    await second
            with pytest.raises(RuntimeError, match=AWAITED_ALREADY):
                await operation
        await finish_receive(pair, task)


@pytest.mark.every_way
async def test_a_cancelled_task_no_longer_awaits(device: Device) -> None:
    """Refuse only other tasks: the cancelled task may have been the awaiter, and has left."""
    async with ends(device) as pair:
        operation, task = await waiting_receive(pair)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        operation.close()
        await pair.near.send(pair.source[:8], **pair.addressing)
        await pair.wait_far_receives()


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
async def test_two_loops_that_await_at_once_are_refused_but_one(
    device: Device, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Any of the two loops may await the operation, but only one."""
    async with ends(device, thread_model=ThreadModel.SAFE) as pair:
        operation = pair.receive()
        begun, is_refused = threading.Barrier(2), threading.Event()
        refused: list[str] = []
        got: list[int] = []

        async def wait() -> None:
            begun.wait(patience(10))
            try:
                async with asyncio.timeout(patience(10)):
                    got.append((await operation).byte_len)
            except RuntimeError as error:
                refused.append(str(error))
                is_refused.set()

        def run() -> None:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(wait())

        threads = [asyncio.create_task(asyncio.to_thread(run)) for _ in range(2)]
        await asyncio.to_thread(is_refused.wait, patience(10))
        await pair.near.send(pair.source[:8], **pair.addressing)
        await asyncio.gather(*threads)
        assert got == [8]
        assert len(refused) == 1
        assert refused[0].endswith(AWAITED_ALREADY)


@pytest.mark.parametrize("where", OTHER_THREADS)
async def test_an_unawaited_operation_is_refused_to_other_threads(device: Device, where: Callable[..., Any]) -> None:
    """Other threads can neither start nor end an operation that is not awaited yet."""
    async with ends(device) as pair:
        operation = pair.receive()

        def use() -> None:
            for name in ("send", "throw", "close"):
                with pytest.raises(AffinityError):
                    SECOND_USES[name](operation)

        await where(use)
        await pair.near.send(pair.source[:8], **pair.addressing)
        assert (await operation).byte_len == 8


@pytest.mark.parametrize("attempt", SECOND_USES)
async def test_a_part_of_a_batch_is_never_awaited(device: Device, attempt: str) -> None:
    async with ends(device) as pair:
        batch = pair.near.batch()
        part = batch.fetch_and_add(pair.target.remote()[:8], 1)
        assert isinstance(part, Operation)
        if attempt == "close":
            part.close()
        else:
            with pytest.raises((RuntimeError, KeyError)):
                SECOND_USES[attempt](part)
        with pytest.raises(RuntimeError, match="is part of a batch"):
            await part
        await batch.post()
        assert part.result() == 0


class Delegating:
    """A user's own awaitable."""

    def __init__(self, operation: Operation[Any]) -> None:
        self.operation = operation

    def __await__(self) -> Generator[Any, None, Any]:
        result = yield from self.operation.__await__()
        return result


@pytest.mark.every_way
async def test_a_coroutine_delegates_to_an_operation(device: Device) -> None:
    """Delegate with an await that completes at once, one that yields to other tasks, and one that sleeps."""
    async with ends(device) as pair:
        for number in range(200):
            assert await Delegating(pair.near.fetch_and_add(pair.target.remote()[64:72], 1)) == number
        receive = asyncio.create_task(await_it(Delegating(pair.receive())))
        await asyncio.sleep(0)
        await pair.near.send(pair.source[:8], **pair.addressing)
        assert (await receive).byte_len == 8
        assert pair.is_idle()


async def await_it(awaitable: Delegating) -> Any:
    return await awaitable


# ---- While an await begins


@pytest.mark.skipif("asyncio" not in LOOP_FACTORIES, reason="a method of the loop is replaced")
async def test_code_that_runs_while_an_await_begins_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the loop may run anything: it finds the operation in use, and an error leaves the operation as it was."""
    loop = asyncio.get_running_loop()
    create_future = loop.create_future
    refused = 0

    def intrude() -> asyncio.Future[Any]:
        nonlocal refused
        monkeypatch.undo()
        for attempt in SECOND_USES.values():
            with pytest.raises(RuntimeError, match=AWAITED_ALREADY):
                attempt(operation)
            refused += 1
        return create_future()

    def fail() -> asyncio.Future[Any]:
        monkeypatch.undo()
        raise MemoryError("no future")

    async with ends(device) as pair:
        operation = pair.receive()
        monkeypatch.setattr(loop, "create_future", fail)
        with pytest.raises(MemoryError, match="no future"):
            operation.send(None)
        monkeypatch.setattr(loop, "create_future", intrude)
        task = asyncio.create_task(operation)
        await asyncio.sleep(0)
        assert refused == len(SECOND_USES)
        await finish_receive(pair, task)


# ---- Messages


@pytest.mark.parametrize("where", OTHER_THREADS)
async def test_messages_are_refused_to_other_threads(device: Device, where: Callable[..., Any]) -> None:
    """Refuse other threads before the iteration ends, and afterwards while messages are left: the owner loses none."""
    async with (
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.register(64) as source,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq, receive_depth=4, receive_size=8) as far,
    ):
        near.connect(far.local_endpoint())
        far.connect(near.local_endpoint())
        inbox = far.messages()
        assert isinstance(inbox, Inbox)
        pending = anext(inbox)

        def use() -> None:
            with pytest.raises(AffinityError):
                _ = anext(inbox)
            for name in ("send", "throw", "close"):
                with pytest.raises(AffinityError):
                    SECOND_USES[name](pending)

        await where(use)
        for number in range(3):
            source.buffer[:1] = bytes([number])
            await near.send(source[:1])
        with await pending as message:
            assert bytes(message.data) == b"\0"
        await until(lambda: len(inbox) == 2)
        far.to_error()
        await until(lambda: not far.statistics().receives.in_flight)

        def use_afterwards() -> None:
            with pytest.raises(AffinityError):
                _ = anext(inbox)

        await where(use_afterwards)
        for number in (1, 2):
            with await anext(inbox) as message:
                assert bytes(message.data) == bytes([number])
        with pytest.raises(WorkCompletionError):
            await anext(inbox)
        await where(use_afterwards)
