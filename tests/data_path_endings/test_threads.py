"""Several loops in several threads: each uses its own objects, and calls from the wrong thread are refused."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from aioverbs import (
    AffinityError,
    BrokenResourceError,
    CompletionQueue,
    ConcurrentAccessError,
    Device,
    MessageModel,
    QpCapabilities,
    ThreadModel,
)
from tests.data_path.ends import LONG_TIMEOUT
from tests.data_path_endings.pair import ACCESS, PATIENCE_S, Pair, open_pair, pair_on, until
from tests.holding import hold, unhold
from tests.pace import fewer, patience

TURNS = fewer(300, least=100)
HANDOVERS = fewer(20, least=10)
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


async def run_in_thread(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run an event loop with `main` in another thread to its end."""
    return await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(main())), PATIENCE_S)


def owner_calls(pair: Pair) -> list[Callable[[], object]]:
    """Return calls that only the owner of the pair may make."""
    source, remote = pair.source[:8], pair.target.remote()[:8]
    return [
        lambda: pair.near.write(source, remote),
        lambda: pair.near.write_nowait(source, remote),
        lambda: pair.far.receive(source),
        lambda: pair.near.query(),
        lambda: pair.cq.handle.request_notify(),
    ]


@every_model
async def test_two_loops_go_on_beside_calls_from_the_wrong_thread(device: Device, model: MessageModel) -> None:
    running: list[Pair] = []
    finished: list[int] = []
    stop = threading.Event()
    refused = 0

    async def transfer() -> None:
        async with pair_on(device, model, spin_ns=1000 if "LATENCY" in model.name else None) as pair:
            running.append(pair)
            await until(lambda: len(running) == 2)
            turn = 0
            while turn < TURNS or not refused:
                turn += 1
                data = turn.to_bytes(8, "big")
                receive = pair.far.receive(pair.target[64:72])
                pair.source.buffer[64:72] = data
                await asyncio.gather(pair.write(0, data), pair.near.send(pair.source[64:72]), receive)
                assert pair.written(0) == pair.written(64) == data
            finished.append(turn)
            await until(lambda: len(finished) == 2)
            stop.set()
            await until(lambda: intruder.done())
            await pair.check_idle()
            sends = pair.near.statistics().sends
            assert sends.posted == 2 * turn + 1, "requests of the wrong thread were posted"

    async def call_from_wrong_thread() -> None:
        nonlocal refused
        await until(lambda: len(running) == 2)
        while not stop.is_set():
            for pair in running:
                for call in owner_calls(pair):
                    with pytest.raises(AffinityError):
                        call()
                    refused += 1
                with pytest.raises(AffinityError):
                    await pair.near.aclose()
            await asyncio.sleep(0.001)

    intruder = asyncio.ensure_future(run_in_thread(call_from_wrong_thread))
    try:
        await asyncio.gather(run_in_thread(transfer), transfer())
    finally:
        stop.set()
        await intruder
    assert refused


@pytest.mark.every_way
async def test_an_operation_is_refused_to_another_loop(device: Device) -> None:
    async with pair_on(device) as pair:
        pair.hold()
        operations = [pair.write(8 * each) for each in range(3)]

        async def wrong() -> None:
            with pytest.raises(AffinityError):
                operations[0].done()
            with pytest.raises(AffinityError):
                await operations[1]

        await run_in_thread(wrong)
        assert len(pair.source.pins) == 3
        pair.unhold()
        await asyncio.wait_for(asyncio.gather(*operations), PATIENCE_S)
        await pair.check_idle()


@every_model
async def test_each_waiter_of_a_shared_queue_is_woken_on_its_own_loop(device: Device, model: MessageModel) -> None:
    async with pair_on(device, model, ThreadModel.SAFE, sends=4) as pair:

        async def use(number: int) -> None:
            caller = threading.get_ident(), asyncio.get_running_loop()

            async def one(offset: int) -> None:
                for turn in range(fewer(50, least=20)):
                    data = (turn << 8 | number).to_bytes(8, "big")
                    await pair.write(offset, data)
                    assert (threading.get_ident(), asyncio.get_running_loop()) == caller
                    assert pair.written(offset) == data

            await asyncio.gather(*(one(8 * (8 * number + each)) for each in range(8)))

        await asyncio.gather(use(0), *(run_in_thread(partial(use, each)) for each in range(1, 4)))
        await pair.check_idle()


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.every_way
async def test_a_waiter_is_woken_on_its_loop_by_the_loop_that_polls(device: Device, shared: bool) -> None:
    """This loop watches the completion queue, which belongs to no loop; the owner of the queue pair sleeps."""
    async with (
        device.protection_domain() as pd,
        pd.completion_queue(64) as cq,
        pd.register(64, ACCESS) as memory,
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
        domain.completion_queue(64) as own_cq,
        domain.queue_pair(own_cq) as near,
    ):

        async def wait() -> None:
            async with device.thread_domain() as td, pd.parent_domain(td) as domain, AsyncExitStack() as own:
                srq = await own.enter_async_context(domain.shared_receive_queue(4)) if shared else None
                far = await own.enter_async_context(domain.queue_pair(cq, srq=srq))
                far.connect(near.local_endpoint(), ACCESS, **LONG_TIMEOUT)
                ends.append(far.local_endpoint())
                for _ in range(HANDOVERS):
                    receive = (srq or far).receive(memory[:8])
                    asyncio.get_running_loop().call_soon(posted.set)
                    async with asyncio.timeout(PATIENCE_S):
                        assert (await receive).byte_len == 8

        ends: list[Any] = []
        posted = threading.Event()
        waiting = asyncio.ensure_future(run_in_thread(wait))
        await until(lambda: ends or waiting.done())
        near.connect(ends[0], ACCESS, **LONG_TIMEOUT)
        for _ in range(HANDOVERS):
            await until(lambda: posted.is_set() or waiting.done())
            posted.clear()
            await asyncio.wait_for(near.send(memory[8:16]), PATIENCE_S)
        await waiting


async def test_a_waiting_request_is_posted_by_its_owner(device: Device) -> None:
    """The loop that takes the completions may not post: the owner of the queue pair does."""
    async with (
        device.protection_domain() as pd,
        pd.completion_queue(256) as cq,
        pd.register(64, ACCESS) as memory,
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=2)) as near,
        domain.queue_pair(cq) as far,
        pd.queue_pair(cq) as idle_qp,
    ):
        near.connect(far.local_endpoint(), ACCESS, **LONG_TIMEOUT)
        far.connect(near.local_endpoint(), ACCESS, **LONG_TIMEOUT)
        idle_qp.connect(idle_qp.local_endpoint(), ACCESS, **LONG_TIMEOUT)
        hold(device, near)
        writes = [near.write(memory[:8], memory.remote()[:8]) for _ in range(4)]
        assert near.statistics().sends.queued == 2
        unhold(device, near)

        async def take() -> None:
            for _ in range(10_000):
                if near.statistics().sends.completed == 2:
                    break
                await idle_qp.write(memory[8:16], memory.remote()[8:16])

        thread = threading.Thread(target=lambda: asyncio.run(take()))
        thread.start()
        thread.join()  # this loop blocks, and takes no completions itself
        assert near.statistics().sends.completed == 2
        for write in writes:
            await asyncio.wait_for(write, PATIENCE_S)


async def test_a_chain_is_posted_by_its_owner_when_another_loop_watches(device: Device) -> None:
    """The chain is posted at the end of a turn of the owner's loop."""
    async with (
        device.protection_domain() as pd,
        pd.register(64, ACCESS) as memory,
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
    ):
        opened: list[CompletionQueue] = []
        errors: list[dict[str, Any]] = []
        stop = threading.Event()

        async def watch() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
            async with pd.completion_queue(256, message_model=MessageModel.HIGH_BANDWIDTH) as cq:
                opened.append(cq)
                await until(stop.is_set)

        watching = asyncio.ensure_future(run_in_thread(watch))
        try:
            await until(lambda: opened or watching.done())
            async with domain.queue_pair(opened[0]) as qp:
                qp.connect(qp.local_endpoint(), ACCESS, **LONG_TIMEOUT)
                for _ in range(3):
                    write = qp.write(memory[:8], memory.remote()[8:16])
                    await until(lambda write=write: write.ended)  # type: ignore[misc]
                    write.result()
        finally:
            stop.set()
            await watching
        assert not errors


@pytest.mark.every_way
async def test_a_receive_completes_for_the_loop_that_watches_its_completion_queue(device: Device) -> None:
    loop = asyncio.get_running_loop()
    async with (
        device.protection_domain() as pd,
        pd.register(64, ACCESS) as memory,
        pd.shared_receive_queue(4) as srq,
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq, srq=srq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS, **LONG_TIMEOUT)
        far.connect(near.local_endpoint(), ACCESS, **LONG_TIMEOUT)

        async def post() -> Any:
            return srq.receive(memory[:8])

        loop.set_debug(True)  # raises for calls from other threads that would not wake the loop
        try:
            receive = await run_in_thread(post)
        finally:
            loop.set_debug(False)
        await asyncio.wait_for(near.send(memory[8:16]), PATIENCE_S)
        await until(lambda: receive.ended)
        assert receive.result().byte_len == 8


@every_model
async def test_threads_that_drop_waiting_requests_lose_no_slot(device: Device, model: MessageModel) -> None:
    """Operations complete, wait, are withdrawn, queried and dropped, in any thread, all at once."""
    async with pair_on(device, model, ThreadModel.SAFE, sends=4) as pair:

        async def use(number: int) -> None:
            for _ in range(fewer(100, least=40)):
                operations = [pair.write(8 * number) for _ in range(8)]
                dropped.extend(operations[3:])
                await asyncio.gather(*operations[:3])
                del operations
                await asyncio.sleep(0)

        def drop_operations() -> None:
            while not stop.is_set() or dropped:
                try:
                    operation = dropped.pop()
                except IndexError:
                    stop.wait(0.0005)
                    continue
                if operation.ended:
                    assert operation.result() is None

        dropped: list[Any] = []
        stop = threading.Event()
        droppers = [asyncio.ensure_future(asyncio.to_thread(drop_operations)) for _ in range(2)]
        try:
            await asyncio.gather(use(0), *(run_in_thread(partial(use, each)) for each in range(1, 4)))
        finally:
            stop.set()
            await asyncio.gather(*droppers)
        await pair.check_idle()


@pytest.mark.every_way
async def test_threads_that_drop_operations_do_not_disturb_the_owner(device: Device) -> None:
    async with pair_on(device, sends=4) as pair:

        def drop_operations() -> None:
            while not stop.is_set() or dropped:
                try:
                    dropped.pop()
                except IndexError:
                    stop.wait(0.0005)

        dropped: list[Any] = []
        stop = threading.Event()
        droppers = asyncio.ensure_future(asyncio.to_thread(drop_operations))
        try:
            for _ in range(fewer(200, least=80)):
                operations = [pair.write() for _ in range(8)]
                dropped.extend(operations[3:])
                await asyncio.gather(*operations[:3])
                del operations
                await asyncio.sleep(0)
        finally:
            stop.set()
            await droppers
        await pair.check_idle()


@pytest.mark.every_way
async def test_callers_that_take_turns_do_not_disturb_each_other(device: Device) -> None:
    async with pair_on(device, thread_model=ThreadModel.UNSAFE, sends=4) as pair:
        turn = threading.Lock()

        async def use(number: int) -> None:
            for _ in range(100):
                while True:
                    try:
                        with turn:
                            operation = pair.write(8 * number, number.to_bytes(8, "big"))
                        await operation
                        break
                    except ConcurrentAccessError:  # an await polls the queue without holding the lock
                        await asyncio.sleep(0)
            assert pair.written(8 * number) == number.to_bytes(8, "big")

        await asyncio.gather(use(1), *(run_in_thread(partial(use, each)) for each in range(2, 4)))
        await pair.check_idle()


@pytest.mark.every_way
async def test_a_busy_watching_loop_delays_and_loses_nothing(device: Device) -> None:
    async with pair_on(device, thread_model=ThreadModel.SAFE) as pair:
        go = threading.Event()
        done = threading.Event()

        async def use() -> None:
            pair.hold()
            operation = pair.write()
            task = asyncio.ensure_future(operation)
            await asyncio.sleep(0)
            go.set()
            await asyncio.sleep(0.02)  # the watching loop is busy, and no other thread takes completions
            pair.unhold()
            await task
            done.set()

        using = asyncio.ensure_future(run_in_thread(use))
        await until(go.is_set)
        done.wait(0.1)  # this loop blocks
        await using
        await pair.check_idle()


@pytest.mark.every_way
async def test_requests_fail_when_the_watching_loop_is_closed(device: Device) -> None:
    opened: list[Pair] = []

    async def begin() -> None:
        opened.append(await open_pair(device, thread_model=ThreadModel.SAFE))

    await run_in_thread(begin)
    (pair,) = opened
    with pytest.raises(BrokenResourceError, match="no loop watches it"):
        _ = pair.write()
    assert len(pair.source.pins) == 0
    for resource in (pair.near, pair.far, pair.cq, pair.source, pair.target, pair.domain):
        await resource.aclose()


@pytest.mark.every_way
async def test_a_waiter_ends_with_the_queue_pair_when_the_watching_loop_is_closed(device: Device) -> None:
    opened: list[Pair] = []
    ready, go = threading.Event(), threading.Event()

    async def home() -> None:
        opened.append(await open_pair(device, thread_model=ThreadModel.SAFE))
        ready.set()
        await until(go.is_set)

    ended = asyncio.ensure_future(run_in_thread(home))
    await until(ready.is_set)
    (pair,) = opened
    pair.hold()
    waiting = asyncio.ensure_future(pair.write())
    await asyncio.sleep(0.01)
    go.set()
    await ended
    pair.unhold()
    with pytest.raises(BrokenResourceError):
        _ = pair.write(8)
    for resource in (pair.near, pair.far, pair.cq, pair.source, pair.target, pair.domain):
        await resource.aclose()
    await asyncio.wait_for(asyncio.wait({waiting}), patience(5))
    assert isinstance(waiting.exception(), BrokenResourceError)
