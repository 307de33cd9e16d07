"""Worker pools: cost of a call to a worker, and gain of a second worker."""

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from anyio.from_thread import BlockingPortal

from aioverbs import AccessFlags, MessageModel, Worker, WorkerPool, current_worker, open_device
from tests.bench.ends import writes
from tests.bench.measuring import Contender, Limit, Result, interleaved

__all__ = ["calls", "scaling"]

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
ROUND_S = 0.5
CHUNK = 1000


def nothing() -> None:
    """Do nothing."""


async def nothing_awaited() -> None:
    """Do nothing, as a coroutine."""


def _each(call: Callable[[], Awaitable[object]]) -> Contender:
    async def run(operations: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(operations):
            await call()
        return time.perf_counter_ns() - begin

    return run


def _bare(target_loop: asyncio.AbstractEventLoop) -> Contender:
    """Return a contender: ``call_soon_threadsafe`` to another loop and back."""
    here = asyncio.get_running_loop()

    def answer(back: asyncio.Future[None]) -> None:
        nothing()
        here.call_soon_threadsafe(back.set_result, None)

    async def run(operations: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(operations):
            back = here.create_future()
            target_loop.call_soon_threadsafe(answer, back)
            await back
        return time.perf_counter_ns() - begin

    return run


@contextlib.asynccontextmanager
async def _portal(pool: WorkerPool) -> AsyncIterator[BlockingPortal]:
    """Open an anyio portal to the worker's loop."""
    made: asyncio.Future[BlockingPortal] = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()

    async def hold() -> None:
        async with BlockingPortal() as portal:
            here.call_soon_threadsafe(made.set_result, portal)
            await portal.sleep_until_stopped()

    held = pool.start_soon(hold)
    portal = await made
    try:
        yield portal
    finally:
        await pool.run(portal.stop)
        await held.wait()


async def calls(rounds: int) -> Result:
    """Compare calls of a function that does nothing on another thread's loop, one after the other."""
    loop = "uvloop" if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else "asyncio"
    async with open_device("soft0") as device, WorkerPool(device, 1, loop=loop) as pool, _portal(pool) as portal:
        target_loop = await pool.run(lambda: current_worker().loop)
        contenders: dict[str, Contender] = {
            "bare": _bare(target_loop),
            "run": _each(lambda: pool.run(nothing)),
            "coroutine": _each(lambda: pool.run(nothing_awaited)),
            "threadsafe": _each(
                lambda: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(nothing_awaited(), target_loop))
            ),
        }
        if hasattr(portal, "call_async"):  # anyio 4.16
            contenders["portal"] = _each(lambda: portal.call_async(nothing))
        times = await interleaved(contenders, rounds, turn_s=0.005)
    portals = {"portal_to_call_soon_threadsafe": times.ratio("portal", "bare")} if "portal" in contenders else {}
    return Result(
        "pool_run",
        {
            "run_ns": times.ns("run"),
            "call_soon_threadsafe_ns": times.ns("bare"),
            "run_to_call_soon_threadsafe": times.ratio("run", "bare"),
            "quiet_ratio": times.quiet_ns("run") / times.quiet_ns("bare"),
            "coroutine_to_run_coroutine_threadsafe": times.ratio("coroutine", "threadsafe"),
            **portals,
            "noise": times.noise("run"),
        },
        {"run_to_call_soon_threadsafe": Limit(at_most=1.3)},
    )


@dataclass(frozen=True)
class _Load:
    """Work of a worker in these benchmarks."""

    write: Contender


@contextlib.asynccontextmanager
async def loaded(worker: Worker) -> AsyncIterator[_Load]:
    """Open queue pairs of the worker's own, which write repeatedly."""
    domain = worker.domain
    async with (
        domain.register(64, ACCESS) as local,
        domain.register(64, ACCESS) as remote,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), ACCESS)
        far.connect(near.local_endpoint(), ACCESS)
        place = local[:8], remote.remote()[:8]
        yield _Load(lambda operations: writes(near, place, operations))


async def work(seconds: float) -> tuple[float, float]:
    """Return writes per second of this worker, and per second of CPU time."""
    load: _Load = current_worker().state
    begin, begin_busy = time.perf_counter(), time.thread_time()
    done = 0
    while (took := time.perf_counter() - begin) < seconds:
        await load.write(CHUNK)
        done += CHUNK
    return done / took, done / (time.thread_time() - begin_busy)


async def scaling(rounds: int, *, processes: bool) -> Result:
    """Compare the rate of 8-byte writes of one worker with that of two concurrent workers, each writing to itself."""
    rates: dict[int, list[tuple[float, ...]]] = {1: [], 2: []}
    async with (
        open_device("soft0") as device,
        WorkerPool(
            device, 2, processes=processes, loop="uvloop", setup=loaded, message_model=MessageModel.FORCE_LOW_LATENCY
        ) as pool,
    ):
        await asyncio.gather(*(pool.run(work, ROUND_S / 5, worker=worker) for worker in range(2)))
        for at in range(rounds):
            for count in rates if at % 2 else reversed(rates):
                # Measure each worker alone, since one of the processors may be slower.
                some = range(2) if count == 2 else [at // 2 % 2]
                each = await asyncio.gather(*(pool.run(work, ROUND_S, worker=one) for one in some))
                rates[count].append(tuple(map(sum, zip(*each, strict=True))))
    ratios = [
        statistics.median(two[which] / one[which] for one, two in zip(rates[1], rates[2], strict=True))
        for which in range(2)
    ]
    kind = "processes" if processes else "threads"
    free = not getattr(sys, "_is_gil_enabled", lambda: True)()
    return Result(
        f"pool_of_two_{kind}",
        {
            "one_per_s": statistics.median(rate for rate, _ in rates[1]),
            "two_per_s": statistics.median(rate for rate, _ in rates[2]),
            "two_to_one": ratios[0],
            # CPU time excludes waiting for other processes and for the GIL.
            **({"two_to_one_of_processor_time": ratios[1]} if processes else {}),
        },
        {"two_to_one": Limit(at_least=1.8)} if processes or free else {},
    )
