"""The awaitable data path compared with baselines: the same work in C, memcpy, an echo, a bare wake-up."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from aioverbs import MessageModel
from aioverbs.attributes import Execution
from tests.bench.baselines import Baseline, baseline, waker
from tests.bench.echo import protocol_echo, stream_echo
from tests.bench.ends import (
    Ends,
    Walk,
    bare_awaits,
    bare_window,
    batches,
    batches_over,
    ends,
    reads,
    writes,
    writes_over,
)
from tests.bench.measuring import Contender, Limit, Result, Rounds, Sleeps, interleaved
from tests.soft_context import soft_context

__all__ = ["batch", "large_write", "message_models", "small_write", "wake_up", "window"]

BATCH = WINDOW = 64
KIB = 1 << 10
LARGE_BATCH = 16
DELAY_NS = 50_000  # long enough for a loop to go to sleep
COLD = 2048  # slots of 64 KiB: 128 MiB for each region, more than a cache holds


@asynccontextmanager
async def _inline(size: int = 1 << 18) -> AsyncIterator[tuple[Ends, Baseline, Baseline]]:
    """Open queue pairs that poll, and equivalents in C, with ``ibv_poll_cq`` and with ``ibv_start_poll``."""
    async with ends(MessageModel.FORCE_LOW_LATENCY, size=size) as here:
        context = here.device.handle
        with (
            baseline(context, here.local, here.remote) as basic,
            baseline(context, here.local, here.remote, extended=True) as extended,
        ):
            yield here, basic, extended
            if basic.idle_polls or extended.idle_polls:
                raise RuntimeError("a request did not complete while it was posted, so this would measure polling")


def _over_c(rounds: Rounds, per: int = 1) -> dict[str, object]:
    """Compare with the faster of the two C variants, by medians and without other load of the machine (`quiet`)."""
    best = min(("c", "c_extended"), key=rounds.ns)
    return {
        "await_ns": rounds.ns("await") / per,
        "c_poll_cq_ns": rounds.ns("c") / per,
        "c_start_poll_ns": rounds.ns("c_extended") / per,
        "over_c_ns": rounds.over("await", best) / per,
        "quiet_over_c_ns": (rounds.quiet_ns("await") - rounds.quiet_ns(best)) / per,
        "to_c": rounds.ratio("await", best),
        "noise": rounds.noise("await"),
    }


async def small_write(rounds: int) -> Result:
    """Measure awaited 8-byte writes of one task, with inline execution and FORCE_LOW_LATENCY."""
    async with _inline() as (here, basic, extended), stream_echo() as echo, protocol_echo() as bare_echo:
        taken = await interleaved(
            {
                "await": partial(writes, here.qp, here.place(8)),
                "c": partial(basic.writes, 8),
                "c_extended": partial(extended.writes, 8),
                "python": bare_awaits,
                "echo": echo,
                "bare_echo": bare_echo,
            },
            rounds,
        )
        with Sleeps() as sleeps:
            await writes(here.qp, here.place(8), operations := 10_000)
    return Result(
        "write_8",
        {
            **_over_c(taken),
            "per_s": 1e9 / taken.ns("await"),
            "python_ns": taken.ns("python"),
            "echo_streams_us": taken.ns("echo") / 1e3,
            "echo_protocols_us": taken.ns("bare_echo") / 1e3,
            "to_echo_streams": taken.ratio("echo", "await"),
            "to_echo_protocols": taken.ratio("bare_echo", "await"),
            "sleeps_per_write": sleeps.count / operations,
        },
        {"over_c_ns": Limit(at_most=200), "to_echo_streams": Limit(at_least=25), "per_s": Limit(at_least=3e6)},
    )


async def window(rounds: int) -> Result:
    """Measure 4 KiB reads of one task with 64 handles in flight, with inline execution."""
    async with _inline(WINDOW * 4 * KIB) as (here, basic, extended):
        taken = await interleaved(
            {
                "await": partial(reads, here.qp, here.places(4 * KIB, WINDOW)),
                "c": partial(basic.window, 4 * KIB, WINDOW),
                "c_extended": partial(extended.window, 4 * KIB, WINDOW),
                "python": partial(bare_window, here.places(4 * KIB, WINDOW)),
            },
            rounds,
        )
    figures = {**_over_c(taken), "per_s": 1e9 / taken.ns("await"), "python_ns": taken.ns("python")}
    return Result("window_64_reads_4k", figures, {"to_c": Limit(at_most=1.5), "per_s": Limit(at_least=1e6)})


async def batch(rounds: int) -> Result:
    """Measure batches of 64 8-byte writes, with inline execution; the figures are for one write."""
    async with _inline() as (here, basic, extended):
        taken = await interleaved(
            {
                "await": partial(batches, here.qp, here.places(8, BATCH)),
                "c": partial(basic.batches, 8, BATCH),
                "c_extended": partial(extended.batches, 8, BATCH),
            },
            rounds,
        )
    return Result("batch_64_writes_8", _over_c(taken, BATCH), {"over_c_ns": Limit(at_most=100)})


async def large_write(rounds: int) -> Result:
    """Measure 64 KiB writes with inline execution, within the caches (the same 64 KiB) and beyond (128 MiB in turn).

    Bandwidth is measured with batches, that is, many writes in flight; and for comparison with each write awaited
    before the next.
    """
    length = 64 * KIB
    figures: dict[str, object] = {}
    async with _inline(COLD * length) as (here, basic, _):
        for name, places in (("warm", 1), ("cold", COLD)):
            walk = Walk(here.places(length, places))

            async def c(operations: int, walk: Walk = walk) -> float:
                return await basic.writes(length, operations, offset=walk.take(operations), stride=walk.stride)

            async def copy(operations: int, walk: Walk = walk) -> float:
                return await basic.copies(length, operations, offset=walk.take(operations), stride=walk.stride)

            contenders: dict[str, Contender] = {
                "batches": partial(batches_over, here.qp, walk, size=LARGE_BATCH),
                "await": partial(writes_over, here.qp, walk),
                "c": c,
                "memcpy": copy,
            }
            taken = await interleaved(contenders, rounds)
            figures |= {
                f"{name}_gb_per_s": length / taken.ns("batches"),
                f"{name}_awaited_gb_per_s": length / taken.ns("await"),
                f"{name}_c_gb_per_s": length / taken.ns("c"),
                f"{name}_memcpy_gb_per_s": length / taken.ns("memcpy"),
                f"{name}_to_memcpy": taken.ratio("memcpy", "batches"),
                f"{name}_awaited_to_memcpy": taken.ratio("memcpy", "await"),
                f"{name}_c_to_memcpy": taken.ratio("memcpy", "c"),
                f"{name}_noise": taken.noise("batches"),
            }
    limit = Limit(at_least=0.9)
    return Result("write_64k", figures, {"warm_to_memcpy": limit, "cold_to_memcpy": limit})


async def wake_up(rounds: int) -> Result:
    """Measure an 8-byte write with thread execution and DEFAULT, compared with a thread that only wakes the loop.

    A write may complete before the loop goes to sleep, and is then found without a wake-up. So this also measures with
    a delay, the same for both contenders, during which the loop sleeps; the figures are the time beyond the delay.
    """
    figures: dict[str, object] = {}
    for name, delay_ns in (("at_once", 0), ("asleep", DELAY_NS)):
        taken, counted = await _wake_ups(rounds, delay_ns)
        beyond = Rounds({name: [time - delay_ns for time in times] for name, times in taken.times.items()})
        figures |= {
            f"{name}_await_us": beyond.ns("await") / 1e3,
            f"{name}_bare_us": beyond.ns("bare") / 1e3,
            f"{name}_to_bare": beyond.ratio("await", "bare"),
            f"{name}_noise": beyond.noise("await"),
            **{f"{name}_{what}": value for what, value in counted.items()},
        }
    limits = {
        "asleep_to_bare": Limit(at_most=1.3),
        # Not all operations sleep: other load of the machine holds up some threads on their way to sleep.
        "asleep_wake_ups_per_write": Limit(at_least=0.95),
        "asleep_sleeps_per_write": Limit(at_least=0.95),
        "asleep_sleeps_per_bare": Limit(at_least=0.95),
    }
    return Result("wake_up", figures, limits)


async def _wake_ups(rounds: int, delay_ns: int) -> tuple[Rounds, dict[str, float]]:
    """Return durations, and the number of wake-ups and of sleeps for each operation."""
    slept = {"await": Sleeps(), "bare": Sleeps()}
    done = dict.fromkeys(slept, 0)

    def counting(name: str, contender: Contender) -> Contender:
        async def counted(operations: int) -> float:
            done[name] += operations
            with slept[name]:
                return await contender(operations)

        return counted

    async with ends(MessageModel.DEFAULT, execution="thread") as here:
        soft_context(here.device).set_delay(delay_ns)
        with waker(delay_ns) as bare:
            contenders: dict[str, Contender] = {"await": partial(writes, here.qp, here.place(8)), "bare": bare.wake_ups}
            counted = {name: counting(name, contender) for name, contender in contenders.items()}
            taken = await interleaved(counted, rounds, turn_s=0.002)
        woken = here.cq.statistics().wakeups
    return taken, {
        "wake_ups_per_write": woken / done["await"],
        "sleeps_per_write": slept["await"].count / done["await"],
        "sleeps_per_bare": slept["bare"].count / done["bare"],
    }


async def message_models(rounds: int, *, execution: Execution) -> Result:
    """Compare all message models: a write awaited immediately, and a window of 64 reads of 4 KiB."""
    contenders: dict[str, Contender] = {}
    async with AsyncExitStack() as stack:
        for model in MessageModel:
            here = await stack.enter_async_context(ends(model, execution=execution))
            name = model.name.lower()
            contenders[f"{name}_write"] = partial(writes, here.qp, here.place(8))
            contenders[f"{name}_window"] = partial(reads, here.qp, here.places(4 * KIB, WINDOW))
        taken = await interleaved(contenders, rounds)
    return Result(f"message_models_{execution}", {f"{name}_us": taken.ns(name) / 1e3 for name in contenders})
