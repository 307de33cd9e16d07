"""Several loops in several threads: each has what is its own, and is told where something is not."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from aioverbs import AffinityError, BrokenResourceError, ConcurrentAccessError, Device, MessageModel, ThreadModel
from tests.data_path_endings.pair import PATIENCE_S, Pair, open_pair, pair_on, until
from tests.pace import fewer, patience

TURNS = fewer(300, least=100)
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
        lambda: pair.cq.handle.poll(1),
    ]


@every_model
async def test_two_loops_and_one_who_misuses_their_objects(device: Device, model: MessageModel) -> None:
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


async def test_callers_that_take_turns(device: Device) -> None:
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
