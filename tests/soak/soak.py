"""Soak test: random storms of cancellations, closes and threads for a given time, watching memory and the ledger.

`python tests/soak/soak.py --seconds 300 --seed 1`; a failure reports its seed.
"""

import argparse
import asyncio
import gc
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from aioverbs.attributes import Execution

sys.path.append(str(Path(__file__).resolve().parents[2]))

import uvloop

from aioverbs import Device, MessageModel, ThreadModel, open_device
from aioverbs._core.handles import handles
from tests.data_path_endings.pair import PATIENCE_S, open_pair, pair_on
from tests.data_path_endings.stress import stress_on

WARM_UP = 8  # rounds until memory usage is stable
GROWTH_BYTES = 48 << 20
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}

Round = Callable[[Device, random.Random], Awaitable[int]]


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def storm(device: Device, draw: random.Random) -> int:
    """Cancel many operations in flight."""
    operations, tasks = draw.randint(1000, 20_000), draw.randint(4, 48)
    async with (
        device.resource_domain(message_model=draw.choice(list(MessageModel))) as domain,
        stress_on(
            domain, seed=draw.getrandbits(32), tasks=tasks, connections=draw.randint(1, 8), spin_ns=5000
        ) as stress,
    ):
        await stress.run(tasks, operations)
    return operations


async def closing(device: Device, draw: random.Random) -> int:
    """Close queue pairs with work in flight, with and without references to them."""
    rounds = draw.randint(5, 40)
    for _ in range(rounds):
        async with pair_on(device, draw.choice(list(MessageModel)), sends=draw.randint(1, 16)) as pair:
            operations = [pair.write(8 * each) for each in range(draw.randint(0, 32))]
            waiting = asyncio.ensure_future(asyncio.gather(*operations, return_exceptions=True))
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
            await asyncio.wait_for(pair.near.aclose(), PATIENCE_S)
            results = await asyncio.wait_for(waiting, PATIENCE_S)
            ended = [each is None for each in results]
            assert ended == sorted(ended, reverse=True), "a request completed after one that was flushed"
            for each, done in enumerate(ended):
                assert not done or pair.written(8 * each) == b"12345678"
            assert len(pair.source.pins) == 0
    return rounds


async def threads(device: Device, draw: random.Random) -> int:
    """Run several loops on one domain that any thread may use."""
    count = draw.randint(50, 500)
    async with pair_on(device, draw.choice(list(MessageModel)), ThreadModel.SAFE, sends=draw.randint(1, 8)) as pair:

        async def use(number: int) -> None:
            async def one(offset: int) -> None:
                for turn in range(count):
                    data = (turn << 8 | number).to_bytes(8, "big")
                    await asyncio.wait_for(pair.write(offset, data), PATIENCE_S)
                    assert pair.written(offset) == data

            await asyncio.gather(*(one(8 * (4 * number + each)) for each in range(4)))

        others = (asyncio.to_thread(asyncio.run, use(each)) for each in range(1, 4))
        await asyncio.gather(use(0), *others)
    return 16 * count


async def orphans(device: Device, draw: random.Random) -> int:
    """End a loop with work in flight; closing the device closes the remaining resources."""
    rounds = draw.randint(1, 5)

    async def leave() -> None:
        pair = await open_pair(device, draw.choice(list(MessageModel)), receive_depth=4, receive_size=8)
        for each in range(16):
            _ = pair.write(8 * each)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(rounds):
            await asyncio.to_thread(lambda: asyncio.run(leave()))
    return rounds


ROUNDS: list[Round] = [storm, storm, closing, threads, orphans]


async def one(kind: Round, draw: random.Random) -> int:
    """Run a round on a device of its own."""
    execution: Execution = "thread" if draw.random() < 0.7 else "inline"
    delay_ns = draw.choice([0, 1000, 50_000]) if execution == "thread" else 0
    device = await open_device("soft0", execution=execution, delay_ns=delay_ns).open()
    try:
        if execution == "thread" and draw.random() < 0.5:
            device.faults.jitter(draw.choice([1000, 200_000]))
        return await kind(device, draw)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # expected for resources that are left open
            await asyncio.wait_for(device.aclose(), 2 * PATIENCE_S)


def main() -> None:
    """Run rounds until the time is over or a round fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all that is drawn")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    end = time.monotonic() + arguments.seconds
    done: Counter[str] = Counter()
    before = set(handles.open_handles())
    settled = 0
    seed = arguments.seed
    while time.monotonic() < end or sum(done.values()) == 0:
        draw = random.Random(seed)
        name = draw.choice(list(LOOPS))
        kind = draw.choice(ROUNDS)
        try:
            with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
                done[kind.__name__] += runner.run(one(kind, draw))
            gc.collect()
            left = [handle for handle in handles.open_handles() if handle not in before]
            assert not left, f"left open: {left}"
        except BaseException:
            print(f"failed: {kind.__name__} on {name}, --seed {seed}", file=sys.stderr, flush=True)
            raise
        seed += 1
        rounds = seed - arguments.seed
        if rounds == WARM_UP:
            settled = resident()
        elif rounds > WARM_UP:
            grown = resident() - settled
            assert grown < GROWTH_BYTES, f"memory grew by {grown} bytes in {rounds} rounds"
    grown = resident() - settled if settled else 0
    print(f"{seed - arguments.seed} rounds, {dict(done)}; memory grew by {grown >> 10} KiB")


if __name__ == "__main__":
    main()
