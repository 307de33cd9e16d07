"""Many queue pairs on one loop, each used by a task of its own: total rate, and fairness."""

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial

from aioverbs.attributes import Execution
from tests.bench.baselines import baseline
from tests.bench.ends import MODELS, Ends, ends
from tests.bench.measuring import Contender, Limit, Result, interleaved

__all__ = ["many_queue_pairs"]

FEW, MANY = 10, 1000
DEPTH = 4
ROUND_S = 1.0  # many iterations of the loop, so that one more or less does not matter
CHECK_INTERVAL_S = 0.01


async def write_for(here: Ends, clock: Callable[[], float], seconds: float) -> tuple[list[int], float]:
    """Write 8 bytes repeatedly on all queue pairs for some time by a clock; return the counts and the time."""
    counts = [0] * len(here.qps)
    places = here.places(8, len(counts))
    loop = asyncio.get_running_loop()
    result: asyncio.Future[tuple[list[int], float]] = loop.create_future()

    async def run(at: int) -> None:
        qp, (local, remote) = here.qps[at], places[at]
        while not result.done():
            await qp.write(local, remote)
            counts[at] += 1

    def check_time() -> None:
        took = clock() - begin
        if took < seconds:
            loop.call_later(CHECK_INTERVAL_S, check_time)
        else:
            result.set_result((list(counts), took))  # copied, before the writes still in flight are counted

    tasks = [asyncio.create_task(run(at)) for at in range(len(counts))]
    begin = clock()
    check_time()
    await asyncio.gather(*tasks)
    return await result


async def many_queue_pairs(rounds: int, *, execution: Execution) -> Result:
    """Compare 1,000 queue pairs with 10, on one loop and one completion queue; and the same in C.

    With inline execution, this thread does all the work and never sleeps, so time is its CPU time.
    """
    clock = time.perf_counter if execution == "thread" else time.thread_time
    model = MODELS[execution]
    rates: dict[int, list[float]] = {FEW: [], MANY: []}
    spreads: dict[int, list[float]] = {FEW: [], MANY: []}
    async with (
        ends(model, execution=execution, count=FEW, depth=DEPTH) as few,
        ends(model, execution=execution, count=MANY, depth=DEPTH) as many,
    ):
        for here in (few, many):
            await write_for(here, clock, ROUND_S / 10)  # warm up
        for at in range(rounds):
            for here in (few, many) if at % 2 else (many, few):
                counts, took = await write_for(here, clock, ROUND_S)
                rates[len(counts)].append(sum(counts) / took)
                spreads[len(counts)].append(max(counts) / max(1, min(counts)))
        c = (
            {} if execution == "thread" else {"c_1000_to_10": await _in_c(few, many)}
        )  # the C code would wait for each write in turn
    return Result(
        f"queue_pairs_{execution}",
        {
            "10_per_s": statistics.median(rates[FEW]),
            "1000_per_s": statistics.median(rates[MANY]),
            "1000_to_10": statistics.median(a / b for a, b in zip(rates[MANY], rates[FEW], strict=True)),
            **c,
            "10_fastest_to_slowest": statistics.median(spreads[FEW]),
            "1000_fastest_to_slowest": statistics.median(spreads[MANY]),
        },
        {"1000_to_10": Limit(at_least=0.8), "1000_fastest_to_slowest": Limit(at_most=2)},
    )


async def _in_c(few: Ends, many: Ends) -> float:
    """Return the ratio for the same work in C: one write after the other, cycling through the queue pairs."""
    with (
        baseline(few.device.handle, few.local, few.remote, count=FEW, depth=DEPTH) as c_few,
        baseline(many.device.handle, many.local, many.remote, count=MANY, depth=DEPTH) as c_many,
    ):
        contenders: dict[str, Contender] = {
            "few": partial(c_few.round_robin, 8),
            "many": partial(c_many.round_robin, 8),
        }
        return (await interleaved(contenders, 101, turn_s=0.002)).ratio("few", "many")
