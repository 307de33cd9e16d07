"""The benchmarks on an RDMA device: `nox -s rdma -- --bench`, in the virtual machine where there is none.

Each figure is a median over processes that measure nothing else, those that are compared in turns: where the machine is
emulated some are slower than others for all of their life. What is `quiet` compares the best of each instead, where the
machine has other things to do. Absolute values are for orientation. The exit status is 1 where a limit is not met, or
something was not measured.
"""

import argparse
import asyncio
import os
import statistics
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # this is run as a script

from aioverbs._verbs.ports import gid_index
from tests.bench.measuring import Limit, Result, check_build
from tests.bench.table import add, empty_table, missed
from tests.bench.turns import alone, in_turns, line_of, running
from tests.rdma.links import NEAR, netem
from tests.rdma.seam import opened, rdma_devices

HERE = Path(__file__).resolve().parent
PACE = float(os.environ.get("AIOVERBS_TEST_PACE", "1"))
EMULATED = Path("/sys/class/net", NEAR).exists() and os.geteuid() == 0
WINDOW = 64
LARGE = 1 << 16
LARGE_WINDOW = 16
DELAY_US = 500  # of a packet: long enough for who waits for the answer to come to sleep, where all is emulated


@dataclass(frozen=True)
class Contender:
    """A program that takes the arguments of `rdma_yard.c`.

    :param program: how it is run.
    :param wait: how it waits.
    """

    program: tuple[str, ...]
    wait: str


@dataclass(frozen=True)
class Work:
    """What all contenders of a benchmark do: see `rdma_yard.c`."""

    what: str
    length: int
    window: int
    operations: int
    near: str
    far: str
    gids: Mapping[str, int]

    def command(self, contender: Contender, what: str, near: str, far: str) -> list[str]:
        numbers = (self.length, self.window, self.operations, self.gids[near])
        return [*contender.program, what, contender.wait, *map(str, numbers), near, far]


@dataclass(frozen=True)
class Taken:
    """What processes of a contender measured, for one operation.

    :param ns: how many nanoseconds it took.
    :param sleeps: how often the thread gave up its processor.
    :param events: how many the completion channel gave.
    """

    ns: list[float]
    sleeps: list[float]
    events: list[float]

    @property
    def us(self) -> float:
        """The median, in microseconds."""
        return statistics.median(self.ns) / 1e3

    def quicker_than(self, other: "Taken") -> float:
        """How many times as many operations per second, each at its best: without what the machine did meanwhile."""
        return min(other.ns) / min(self.ns)

    @property
    def per_s(self) -> float:
        """The same as a rate."""
        return 1e6 / self.us


async def both(work: Work, contender: Contender) -> bytes:
    """The answer of the one that asks, of two processes that are told what the other one says."""
    async with (
        running(*work.command(contender, "ask", work.near, work.far)) as ask,
        running(*work.command(contender, "answer", work.far, work.near)) as answer,
    ):
        assert ask.stdin is not None
        assert answer.stdin is not None
        for _ in ("who they are", "that they are ready", "that they are done"):
            asks, answers = await asyncio.gather(line_of(ask), line_of(answer))
            ask.stdin.write(answers)
            answer.stdin.write(asks)
        result, _ = await asyncio.gather(line_of(ask), line_of(answer))
        await asyncio.gather(ask.wait(), answer.wait())
    return result


async def measure(work: Work, contenders: Mapping[str, Contender], rounds: int) -> dict[str, Taken]:
    """What each of them took."""

    def turn(contender: Contender) -> Callable[[], Awaitable[bytes]]:
        if work.what == "echo":
            return partial(both, work, contender)
        return partial(alone, *work.command(contender, work.what, work.near, work.far))

    turns = {name: turn(contender) for name, contender in contenders.items()}
    taken = await in_turns(turns, rounds, 12 * PACE)
    return {name: Taken(*map(list, zip(*answers, strict=True))) for name, answers in taken.items()}


class Benchmarks:
    """All of them, each a coroutine function of its name.

    :param yard: the program that `rdma_yard.c` is compiled to.
    :param devices: the near one and the far one, which may be one.
    :param rounds: how many processes each contender has.
    :param scale: how much of the usual number of operations each of them does.
    """

    def __init__(self, yard: str, devices: list[str], rounds: int, scale: float) -> None:
        self._near, self._far = devices[0], devices[-1]
        self._rounds, self._scale = rounds, scale
        self._gids = {}
        for name in (self._near, self._far):
            with opened(name) as context:
                self._gids[name] = gid_index(context, 1)
        self._yard = (yard,)
        python = (sys.executable, "-P")
        self._library = (*python, str(HERE / "rdma_library.py"))
        self._peer = (*python, str(HERE / "rdma_peer.py"))
        self.all: dict[str, Callable[[], Awaitable[Result]]] = {
            "polling": self.polling,
            "sleeping": self.sleeping,
            "window": self.window,
            "large": self.large,
            "echo": self.echo,
        }

    def _work(self, what: str, length: int, window: int, operations: int, far: str) -> Work:
        return Work(what, length, window, round(operations * self._scale), self._near, far, self._gids)

    async def polling(self) -> Result:
        """An 8-byte write, awaited before the next, of a device to itself."""
        contenders = {"await": Contender(self._library, "FORCE_LOW_LATENCY"), "c": Contender(self._yard, "polls")}
        taken = await measure(self._work("writes", 8, 1, 20_000, self._near), contenders, self._rounds)
        ours, c = taken["await"], taken["c"]
        figures = {"await_us": ours.us, "c_us": c.us, "to_c": ours.us / c.us, "quiet_to_c": c.quicker_than(ours)}
        return Result("write_8_polling", figures, {"to_c": Limit(at_most=1.3)})

    async def sleeping(self) -> Result:
        """The same from one device to the other, where each has to sleep.

        Soft-RoCE has done a write before the call that posts it returns, so that nobody would: its network is slowed
        down. `beyond_delay_to_c` is without that.
        """
        contenders = {"await": Contender(self._library, "DEFAULT"), "c": Contender(self._yard, "sleeps")}
        with netem(f"delay {DELAY_US // 2}us") if EMULATED else nullcontext():
            taken = await measure(self._work("writes", 8, 1, 1000, self._far), contenders, self._rounds)
        ours, c = taken["await"], taken["c"]
        delay = DELAY_US if EMULATED else 0
        figures = {
            "await_us": ours.us,
            "c_us": c.us,
            "to_c": ours.us / c.us,
            "quiet_to_c": c.quicker_than(ours),
            "beyond_delay_to_c": (ours.us - delay) / (c.us - delay),
            "events_per_await": statistics.median(ours.events),
            "events_per_c": statistics.median(c.events),
            "sleeps_per_await": statistics.median(ours.sleeps),
            "sleeps_per_c": statistics.median(c.sleeps),
        }
        # Not each and every one: what runs beside the benchmark holds some up on their way to sleep.
        asleep = Limit(at_least=0.95)
        limits = {"to_c": Limit(at_most=3), "events_per_await": asleep, "events_per_c": asleep}
        return Result("write_8_sleeping", figures, limits)

    async def window(self) -> Result:
        """8-byte writes of a device to itself, 64 handles of one task under way.

        HIGH_BANDWIDTH posts in chains what C posts one by one.
        """
        contenders = {
            "handles": Contender(self._library, "FORCE_LOW_LATENCY"),
            "chained": Contender(self._library, "HIGH_BANDWIDTH"),
            "c": Contender(self._yard, "polls"),
        }
        taken = await measure(self._work("writes", 8, WINDOW, 20_000, self._near), contenders, self._rounds)
        c = taken["c"]
        figures = {f"{name}_per_s": of.per_s for name, of in taken.items()}
        for name in ("handles", "chained"):
            figures |= {
                f"{name}_to_c": taken[name].per_s / c.per_s,
                f"{name}_quiet_to_c": taken[name].quicker_than(c),
            }
        return Result("window_64_writes_8", figures, {"handles_to_c": Limit(at_least=0.75)})

    async def large(self) -> Result:
        """64 KiB writes of a device to itself, some under way."""
        contenders = {"handles": Contender(self._library, "FORCE_LOW_LATENCY"), "c": Contender(self._yard, "polls")}
        taken = await measure(self._work("writes", LARGE, LARGE_WINDOW, 500, self._near), contenders, self._rounds)
        ours, c = taken["handles"], taken["c"]
        figures = {f"{name}_gb_per_s": LARGE * of.per_s / 1e9 for name, of in taken.items()}
        figures |= {"to_c": ours.per_s / c.per_s, "quiet_to_c": ours.quicker_than(c)}
        return Result("writes_64k", figures, {"to_c": Limit(at_least=0.95)})

    async def echo(self) -> Result:
        """8 bytes to another process and back, 64 under way; all of them wait for the completion channel.

        By hand it is done with what can be awaited, as here, and without (`bare`).
        """
        contenders = {
            "handles": Contender(self._library, "DEFAULT"),
            "chained": Contender(self._library, "HIGH_BANDWIDTH"),
            "c": Contender(self._yard, "sleeps"),
            "by_hand": Contender(self._peer, "awaits"),
            "by_hand_bare": Contender(self._peer, "bare"),
        }
        taken = await measure(self._work("echo", 8, WINDOW, 5000, self._far), contenders, self._rounds)
        figures = {f"{name}_per_s": of.per_s for name, of in taken.items()}
        figures |= {f"{name}_events": statistics.median(of.events) for name, of in taken.items()}
        for other in ("c", "by_hand", "by_hand_bare"):
            for name in ("handles", "chained"):
                figures |= {
                    f"{name}_to_{other}": taken[name].per_s / taken[other].per_s,
                    f"{name}_quiet_to_{other}": taken[name].quicker_than(taken[other]),
                }
        limits = {"handles_to_c": Limit(at_least=0.6), "handles_to_by_hand": Limit(at_least=1.8)}
        return Result("echo_8", figures, limits)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help="what to measure, by default all")
    parser.add_argument("--yard", required=True, help="the program of rdma_yard.c")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each contender (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1, help="of the number of operations (default: %(default)s)")
    options = parser.parse_args()
    check_build()
    benchmarks = Benchmarks(options.yard, rdma_devices(), options.rounds, options.scale)
    if unknown := set(options.parts).difference(benchmarks.all):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(benchmarks.all)}")

    table = empty_table()
    failed = False
    misses: list[str] = []
    for part in options.parts or benchmarks.all:
        try:
            result = await benchmarks.all[part]()
        except Exception:  # the others are worth having
            failed = True
            print(f"{part} was not measured:", file=sys.stderr)
            traceback.print_exc()
        else:
            add(table, result)
            misses += missed(result)
    Console().print(table)
    for miss in misses:
        print(f"not met: {miss}", file=sys.stderr)
    return failed or bool(misses)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
