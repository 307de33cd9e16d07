"""Other work on a loop, a timer and an echo over TCP, while a task writes without pause."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from aioverbs.attributes import Execution
from tests.bench.echo import tcp_echo
from tests.bench.ends import MODELS, Ends, ends
from tests.bench.measuring import Contender, Result, percentile

__all__ = ["neighbours"]

TICK_S = 0.001
ROUND_S = 0.5


async def _ticks(seconds: float) -> list[float]:
    """Return how many microseconds late a timer of 1 ms fires, repeatedly."""
    late = []
    loop = asyncio.get_running_loop()
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        waiter = loop.create_future()
        loop.call_later(TICK_S, waiter.set_result, None)
        await waiter
        late.append((time.perf_counter() - now - TICK_S) * 1e6)
    return late


async def _echoes(echo: Contender, seconds: float) -> list[float]:
    """Return the durations of round trips in microseconds, with pauses in between."""
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(await echo(1) / 1e3)
        await asyncio.sleep(TICK_S / 2)
    return times


@contextlib.asynccontextmanager
async def _writing(here: Ends) -> AsyncIterator[list[int]]:
    """Run a task that writes without pause; yield a list with one item, the number of writes."""
    done = [0]
    local, remote = here.place(8)

    async def run() -> None:
        while True:
            await here.qp.write(local, remote)
            done[0] += 1

    task = asyncio.create_task(run())
    try:
        yield done
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def neighbours(rounds: int, *, execution: Execution) -> Result:
    """Compare a timer's delay and an echo's round trip on an idle loop, and on one with a writing task."""
    ticks: dict[str, list[float]] = {"idle": [], "busy": []}
    echoes: dict[str, list[float]] = {"idle": [], "busy": []}
    written, seconds = 0, 0.0
    async with ends(MODELS[execution], execution=execution) as here, tcp_echo() as echo:
        await echo(100)
        for _ in range(rounds):
            for name in ticks:
                async with contextlib.AsyncExitStack() as stack:
                    done = await stack.enter_async_context(_writing(here)) if name == "busy" else [0]
                    begin = time.perf_counter()
                    ticks[name] += await _ticks(ROUND_S)
                    echoes[name] += await _echoes(echo, ROUND_S)
                    if name == "busy":
                        written += done[0]
                        seconds += time.perf_counter() - begin
    figures: dict[str, object] = {"writes_per_s": written / seconds}
    for what, values in (("timer_late", ticks), ("echo", echoes)):
        for name in values:
            figures[f"{what}_{name}_us"] = percentile(values[name], 0.5)
            figures[f"{what}_{name}_p99_us"] = percentile(values[name], 0.99)
    return Result(f"neighbours_{execution}", figures)
