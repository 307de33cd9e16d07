"""Several loops in several threads: each has what is its own, and is told where something is not."""

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
from tests.data_path.ends import PATIENT
from tests.data_path_endings.pair import ACCESS, PATIENCE_S, Pair, open_pair, pair_on, until
from tests.holding import hold, unhold
from tests.pace import fewer, patience

TURNS = fewer(300, least=100)
TURNS_OF_TWO = fewer(20, least=10)
every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)


async def elsewhere(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a loop in another thread to its end."""
    return await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(main())), PATIENCE_S)


def calls_of(pair: Pair) -> list[Callable[[], object]]:
    """What nobody but its owner may call."""
    source, remote = pair.source[:8], pair.target.remote()[:8]
    return [
        lambda: pair.near.write(source, remote),
        lambda: pair.near.write_nowait(source, remote),
        lambda: pair.far.receive(source),
        lambda: pair.near.query(),
        lambda: pair.cq.handle.request_notify(),
    ]


@every_model
async def test_two_loops_go_on_beside_one_who_misuses_their_objects(device: Device, model: MessageModel) -> None:
    playing: list[Pair] = []
    played: list[int] = []
    over = threading.Event()
    refused = 0

    async def play() -> None:
        async with pair_on(device, model, spin_ns=1000 if "LATENCY" in model.name else None) as pair:
            playing.append(pair)
            await until(lambda: len(playing) == 2)
            turn = 0
            while turn < TURNS or not refused:
                turn += 1
                data = turn.to_bytes(8, "big")
                receive = pair.far.receive(pair.target[64:72])
                pair.source.buffer[64:72] = data
                await asyncio.gather(pair.write(0, data), pair.near.send(pair.source[64:72]), receive)
                assert pair.written(0) == pair.written(64) == data
            played.append(turn)
            await until(lambda: len(played) == 2)
            over.set()
            await until(lambda: misuser.done())
            await pair.check_idle()
            sends = pair.near.statistics().sends
            assert sends.posted == 2 * turn + 1, "somebody else's were posted"

    async def misuse() -> None:
        nonlocal refused
        await until(lambda: len(playing) == 2)
        while not over.is_set():
            for pair in playing:
                for call in calls_of(pair):
                    with pytest.raises(AffinityError):
                        call()
                    refused += 1
                with pytest.raises(AffinityError):
                    await pair.near.aclose()
            await asyncio.sleep(0.001)

    misuser = asyncio.ensure_future(elsewhere(misuse))
    try:
        await asyncio.gather(elsewhere(play), play())
    finally:
        over.set()
        await misuser
    assert refused


@pytest.mark.every_way
async def test_an_operation_of_another_loop_is_not_awaited_here(device: Device) -> None:
    async with pair_on(device) as pair:
        pair.hold()
        operations = [pair.write(8 * each) for each in range(3)]

        async def wrong() -> None:
            with pytest.raises(AffinityError):
                operations[0].done()
            with pytest.raises(AffinityError):
                await operations[1]

        await elsewhere(wrong)
        assert len(pair.source.pins) == 3
        pair.unhold()
        await asyncio.wait_for(asyncio.gather(*operations), PATIENCE_S)
        await pair.check_idle()


@every_model
async def test_each_waiter_of_a_shared_queue_is_woken_on_its_own_loop(device: Device, model: MessageModel) -> None:
    async with pair_on(device, model, ThreadModel.SAFE, sends=4) as pair:

        async def use(number: int) -> None:
            here = threading.get_ident(), asyncio.get_running_loop()

            async def one(offset: int) -> None:
                for turn in range(fewer(50, least=20)):
                    data = (turn << 8 | number).to_bytes(8, "big")
                    await pair.write(offset, data)
                    assert (threading.get_ident(), asyncio.get_running_loop()) == here
                    assert pair.written(offset) == data

            await asyncio.gather(*(one(8 * (8 * number + each)) for each in range(8)))

        await asyncio.gather(use(0), *(elsewhere(partial(use, each)) for each in range(1, 4)))
        await pair.check_idle()


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.every_way
async def test_a_waiter_is_woken_on_its_loop_by_the_one_that_takes_completions(device: Device, shared: bool) -> None:
    """The completion queue is anybody's, and this loop watches it; the queue pair's owner sleeps."""
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
                far.connect(near.local_endpoint(), ACCESS, **PATIENT)
                ends.append(far.local_endpoint())
                for _ in range(TURNS_OF_TWO):
                    receive = (srq or far).receive(memory[:8])
                    asyncio.get_running_loop().call_soon(asked.set)
                    async with asyncio.timeout(PATIENCE_S):
                        assert (await receive).byte_len == 8

        ends: list[Any] = []
        asked = threading.Event()
        waiting = asyncio.ensure_future(elsewhere(wait))
        await until(lambda: ends or waiting.done())
        near.connect(ends[0], ACCESS, **PATIENT)
        for _ in range(TURNS_OF_TWO):
            await until(lambda: asked.is_set() or waiting.done())
            asked.clear()
            await asyncio.wait_for(near.send(memory[8:16]), PATIENCE_S)
        await waiting


async def test_what_waits_for_a_place_is_posted_by_its_owner(device: Device) -> None:
    """It is posted by its owner: whoever takes what completes there may not."""
    async with (
        device.protection_domain() as pd,
        pd.completion_queue(256) as cq,
        pd.register(64, ACCESS) as memory,
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=2)) as near,
        domain.queue_pair(cq) as far,
        pd.queue_pair(cq) as others,
    ):
        near.connect(far.local_endpoint(), ACCESS, **PATIENT)
        far.connect(near.local_endpoint(), ACCESS, **PATIENT)
        others.connect(others.local_endpoint(), ACCESS, **PATIENT)
        hold(device, near)
        writes = [near.write(memory[:8], memory.remote()[:8]) for _ in range(4)]
        assert near.statistics().sends.queued == 2
        unhold(device, near)

        async def take() -> None:
            for _ in range(10_000):
                if near.statistics().sends.completed == 2:
                    break
                await others.write(memory[8:16], memory.remote()[8:16])

        thread = threading.Thread(target=lambda: asyncio.run(take()))
        thread.start()
        thread.join()  # this loop stands still, and takes nothing itself
        assert near.statistics().sends.completed == 2
        for write in writes:
            await asyncio.wait_for(write, PATIENCE_S)


async def test_a_chain_is_posted_by_its_owner_where_another_loop_watches(device: Device) -> None:
    """At the end of that loop's turn; by its owner."""
    async with (
        device.protection_domain() as pd,
        pd.register(64, ACCESS) as memory,
        device.thread_domain() as td,
        pd.parent_domain(td) as domain,
    ):
        opened: list[CompletionQueue] = []
        errors: list[dict[str, Any]] = []
        over = threading.Event()

        async def watch() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
            async with pd.completion_queue(256, message_model=MessageModel.HIGH_BANDWIDTH) as cq:
                opened.append(cq)
                await until(over.is_set)

        watching = asyncio.ensure_future(elsewhere(watch))
        try:
            await until(lambda: opened or watching.done())
            async with domain.queue_pair(opened[0]) as qp:
                qp.connect(qp.local_endpoint(), ACCESS, **PATIENT)
                for _ in range(3):
                    write = qp.write(memory[:8], memory.remote()[8:16])
                    await until(lambda write=write: write.ended)  # type: ignore[misc]
                    write.result()
        finally:
            over.set()
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
        near.connect(far.local_endpoint(), ACCESS, **PATIENT)
        far.connect(near.local_endpoint(), ACCESS, **PATIENT)

        async def post() -> Any:
            return srq.receive(memory[:8])

        loop.set_debug(True)  # refuses what is asked of it from other threads in ways that would not wake it
        try:
            receive = await elsewhere(post)
        finally:
            loop.set_debug(False)
        await asyncio.wait_for(near.send(memory[8:16]), PATIENCE_S)
        await until(lambda: receive.ended)
        assert receive.result().byte_len == 8


@every_model
async def test_threads_forget_what_waits_for_a_place_and_lose_no_place(device: Device, model: MessageModel) -> None:
    """Operations end, wait, are withdrawn, asked for their result and forgotten, in whatever thread, all at once."""
    async with pair_on(device, model, ThreadModel.SAFE, sends=4) as pair:

        async def use(number: int) -> None:
            for _ in range(fewer(100, least=40)):
                operations = [pair.write(8 * number) for _ in range(8)]
                dropped.extend(operations[3:])
                await asyncio.gather(*operations[:3])
                del operations
                await asyncio.sleep(0)

        def forget() -> None:
            while not over.is_set() or dropped:
                try:
                    operation = dropped.pop()
                except IndexError:
                    over.wait(0.0005)
                    continue
                if operation.ended:
                    assert operation.result() is None

        dropped: list[Any] = []
        over = threading.Event()
        forgetting = [asyncio.ensure_future(asyncio.to_thread(forget)) for _ in range(2)]
        try:
            await asyncio.gather(use(0), *(elsewhere(partial(use, each)) for each in range(1, 4)))
        finally:
            over.set()
            await asyncio.gather(*forgetting)
        await pair.check_idle()


@pytest.mark.every_way
async def test_an_owner_is_not_disturbed_by_threads_that_forget_its_operations(device: Device) -> None:
    async with pair_on(device, sends=4) as pair:

        def forget() -> None:
            while not over.is_set() or dropped:
                try:
                    dropped.pop()
                except IndexError:
                    over.wait(0.0005)

        dropped: list[Any] = []
        over = threading.Event()
        forgetting = asyncio.ensure_future(asyncio.to_thread(forget))
        try:
            for _ in range(fewer(200, least=80)):
                operations = [pair.write() for _ in range(8)]
                dropped.extend(operations[3:])
                await asyncio.gather(*operations[:3])
                del operations
                await asyncio.sleep(0)
        finally:
            over.set()
            await forgetting
        await pair.check_idle()


@pytest.mark.every_way
async def test_callers_that_take_turns_disturb_nobody(device: Device) -> None:
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
                    except ConcurrentAccessError:  # an await looks at the queue, beside who has the turn
                        await asyncio.sleep(0)
            assert pair.written(8 * number) == number.to_bytes(8, "big")

        await asyncio.gather(use(1), *(elsewhere(partial(use, each)) for each in range(2, 4)))
        await pair.check_idle()


@pytest.mark.every_way
async def test_a_home_that_is_busy_delays_and_loses_nothing(device: Device) -> None:
    async with pair_on(device, thread_model=ThreadModel.SAFE) as pair:
        go = threading.Event()
        done = threading.Event()

        async def use() -> None:
            pair.hold()
            operation = pair.write()
            task = asyncio.ensure_future(operation)
            await asyncio.sleep(0)
            go.set()
            await asyncio.sleep(0.02)  # home is busy, and nobody takes what completes
            pair.unhold()
            await task
            done.set()

        using = asyncio.ensure_future(elsewhere(use))
        await until(go.is_set)
        done.wait(0.1)  # this loop stands still
        await using
        await pair.check_idle()


@pytest.mark.every_way
async def test_a_home_that_is_closed_is_told_of(device: Device) -> None:
    made: list[Pair] = []

    async def begin() -> None:
        made.append(await open_pair(device, thread_model=ThreadModel.SAFE))

    await elsewhere(begin)
    (pair,) = made
    with pytest.raises(BrokenResourceError, match="no loop watches it"):
        _ = pair.write()
    assert len(pair.source.pins) == 0
    for resource in (pair.near, pair.far, pair.cq, pair.source, pair.target, pair.domain):
        await resource.aclose()


@pytest.mark.every_way
async def test_who_waits_when_the_home_is_closed_ends_with_the_queue_pair(device: Device) -> None:
    made: list[Pair] = []
    ready, go = threading.Event(), threading.Event()

    async def home() -> None:
        made.append(await open_pair(device, thread_model=ThreadModel.SAFE))
        ready.set()
        await until(go.is_set)

    ended = asyncio.ensure_future(elsewhere(home))
    await until(ready.is_set)
    (pair,) = made
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
