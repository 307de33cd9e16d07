"""Parts of the data path, each measured by pyperf in processes of their own.

python tests/bench/parts.py [--fast] [-o FILE] [--help]
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pyperf
import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from aioverbs import MessageModel
from tests.bench.ends import Ends, batches, ends, reads, writes

SIZE = 1 << 18
WINDOW = 64


async def write(here: Ends, loops: int, *, length: int) -> float:
    return await writes(here.qp, here.place(length), loops)


async def window(here: Ends, loops: int) -> float:
    return await reads(here.qp, here.places(4096, WINDOW), loops * WINDOW)


async def batch(here: Ends, loops: int) -> float:
    return await batches(here.qp, here.places(8, WINDOW), loops)


async def post_and_drop(here: Ends, loops: int) -> float:
    """Post without awaiting: the cost includes completing an operation without a waiter."""
    local, remote = here.place(8)
    begin = time.perf_counter_ns()
    for _ in range(loops):
        for _ in range(WINDOW - 1):
            _ = here.qp.write(local, remote)
        await here.qp.write(local, remote)
    return time.perf_counter_ns() - begin


async def slices(here: Ends, loops: int) -> float:
    """Make the two slices that an operation takes."""
    local, remote = here.local, here.remote.remote()
    begin = time.perf_counter_ns()
    for _ in range(loops):
        local[8:16], remote[8:16]
    return time.perf_counter_ns() - begin


async def request_notify(here: Ends, loops: int) -> float:
    """Call a verb that does nearly nothing: the cost is that of the call."""
    call = here.cq.handle.request_notify
    begin = time.perf_counter_ns()
    for _ in range(loops):
        call()
    return time.perf_counter_ns() - begin


PARTS: dict[str, tuple[Callable[[Ends, int], Awaitable[float]], int]] = {  # with the operations of each loop
    "await_write_8": (partial(write, length=8), 1),
    "await_write_4k": (partial(write, length=4096), 1),
    "await_write_64k": (partial(write, length=65536), 1),
    "window_64_reads_4k": (window, WINDOW),
    "batch_64_writes_8": (batch, WINDOW),
    "post_64_await_1": (post_and_drop, WINDOW),
    "two_slices": (slices, 1),
    "request_notify": (request_notify, 1),
}


def measure(loops: int, part: Callable[[Ends, int], Awaitable[float]]) -> float:
    """Return the seconds for a number of loops of a part."""

    async def run() -> float:
        async with ends(MessageModel.FORCE_LOW_LATENCY, size=SIZE) as here:
            return await part(here, loops) / 1e9

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def main() -> None:
    runner = pyperf.Runner()
    for name, (part, operations) in PARTS.items():
        runner.bench_time_func(name, measure, part, inner_loops=operations)


if __name__ == "__main__":
    main()
