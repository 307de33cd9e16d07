"""Memory: growth after millions of operations, and cost of each operation in flight."""

import gc
import sys
import time

from aioverbs import MessageModel
from tests.bench.ends import ends, reads, writes
from tests.bench.measuring import Limit, Result
from tests.soft_context import soft_context

__all__ = ["growth", "outstanding"]

PAGE = 4096
WINDOW = 64
IN_FLIGHT = 16384


def resident() -> int:
    """Return the resident memory of this process in bytes, without shared pages."""
    gc.collect()
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * PAGE


async def growth(operations: int, limit_s: float) -> Result:
    """Compare memory after the first and the last of ten steps, each half awaited writes and half windows of reads.

    :param limit_s: begin no step after this time in seconds; the result has the number of operations done.
    """
    step = operations // 10
    done = 0
    steps: list[tuple[int, int]] = []
    begin = time.monotonic()
    async with ends(MessageModel.FORCE_LOW_LATENCY) as here:
        while done < operations and (len(steps) < 2 or time.monotonic() - begin < limit_s):
            await writes(here.qp, here.place(8), step // 2)
            await reads(here.qp, here.places(4096, WINDOW), step - step // 2)
            done += step
            steps.append((resident(), sys.getallocatedblocks()))
    (first_bytes, first_blocks), (last_bytes, last_blocks) = steps[0], steps[-1]
    return Result(
        "growth",
        {
            "operations": done,
            "resident_kib": last_bytes / 1024,
            "grown_kib": (last_bytes - first_bytes) / 1024,
            "grown_blocks": last_blocks - first_blocks,
        },
        {"operations": Limit(at_least=operations), "grown_kib": Limit(at_most=64), "grown_blocks": Limit(at_most=100)},
    )


async def outstanding() -> Result:
    """Measure the memory of each write in flight, including its handle.

    The queues are used up once before: their memory belongs to the queue pair, not to an operation.
    """
    async with ends(MessageModel.DEFAULT, execution="thread", depth=IN_FLIGHT) as here:
        qp, (local, remote) = here.qp, here.place(8)
        await writes(qp, (local, remote), IN_FLIGHT + 1)
        before = resident(), sys.getallocatedblocks()
        soft_context(here.device).set_delay(1_000_000_000)  # no write completes before all are posted
        handles = [qp.write(local, remote) for _ in range(IN_FLIGHT)]
        during = resident(), sys.getallocatedblocks()
        done = sum(handle.done() for handle in handles)
        soft_context(here.device).set_delay(0)
        for handle in handles:
            await handle
    return Result(
        "outstanding",
        {
            "in_flight": IN_FLIGHT - done,
            "bytes_per_operation": (during[0] - before[0]) / IN_FLIGHT,
            "blocks_per_operation": (during[1] - before[1]) / IN_FLIGHT,
        },
        {"in_flight": Limit(at_least=IN_FLIGHT)},
    )
