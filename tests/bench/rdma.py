"""Benchmarks on an RDMA device: `nox -s rdma -- --bench`, in a virtual machine if there is no device.

Each figure is a median over processes that measure nothing else; compared contenders run in turns, since on emulated
machines some processes are slower than others for their whole life. `quiet` figures compare the best process of each
instead, for machines that are busy. Absolute values are for orientation only. The exit status is 1 if a limit is not
met, or something was not measured.
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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

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
DELAY_US = 500  # delay of a packet: long enough for the waiting thread to go to sleep on an emulated machine


@dataclass(frozen=True)
class Contender:
    """A program that takes the arguments of `rdma_baseline.c`.

    :param program: command that runs it.
    :param wait: argument WAIT or MODEL.
    """

    program: tuple[str, ...]
    wait: str


@dataclass(frozen=True)
class Work:
    """Work of all contenders of a benchmark: see `rdma_baseline.c`."""

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
class Timings:
    """Measurements by processes of a contender, for one operation.

    :param ns: nanoseconds.
    :param sleeps: number of voluntary context switches of the thread.
    :param events: number of completion channel events.
    """

    ns: list[float]
    sleeps: list[float]
    events: list[float]

    @property
    def us(self) -> float:
        """Return the median in microseconds."""
        return statistics.median(self.ns) / 1e3

    def quicker_than(self, other: "Timings") -> float:
        """Return the ratio of the best rates: without other load of the machine."""
        return min(other.ns) / min(self.ns)

    @property
    def per_s(self) -> float:
        """Return the median as a rate per second."""
        return 1e6 / self.us


async def both(work: Work, contender: Contender) -> bytes:
    """Run two processes that receive each other's lines; return the answer of the one that asks."""
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


async def measure(work: Work, contenders: Mapping[str, Contender], rounds: int) -> dict[str, Timings]:
    """Measure each contender."""

    def turn(contender: Contender) -> Callable[[], Awaitable[bytes]]:
        if work.what == "echo":
            return partial(both, work, contender)
        return partial(alone, *work.command(contender, work.what, work.near, work.far))

    turns = {name: turn(contender) for name, contender in contenders.items()}
    taken = await in_turns(turns, rounds, 12 * PACE)
    return {name: Timings(*map(list, zip(*answers, strict=True))) for name, answers in taken.items()}


class Benchmarks:
    """All benchmarks, each a coroutine method of its name.

    :param baseline: path of the program compiled from `rdma_baseline.c`.
    :param devices: the near and the far device, which may be the same.
    :param rounds: number of processes of each contender.
    :param scale: factor for the usual number of operations.
    """

    def __init__(self, baseline: str, devices: list[str], rounds: int, scale: float) -> None:
        self._near, self._far = devices[0], devices[-1]
        self._rounds, self._scale = rounds, scale
        self._gids = {}
        for name in (self._near, self._far):
            with opened(name) as context:
                self._gids[name] = gid_index(context, 1)
        self._baseline = (baseline,)
        python = (sys.executable, "-P")
        self._library = (*python, str(HERE / "rdma_library.py"))
        self._peer = (*python, str(HERE / "rdma_peer.py"))
        self._connection = (*python, str(HERE / "rdma_connection.py"))
        self.all: dict[str, Callable[[], Awaitable[Result]]] = {
            "polling": self.polling,
            "sleeping": self.sleeping,
            "window": self.window,
            "large": self.large,
            "echo": self.echo,
            "connection": self.connection,
        }

    def _work(self, what: str, length: int, window: int, operations: int, far: str) -> Work:
        return Work(what, length, window, round(operations * self._scale), self._near, far, self._gids)

    async def polling(self) -> Result:
        """Measure awaited 8-byte writes of a device to itself."""
        contenders = {"await": Contender(self._library, "FORCE_LOW_LATENCY"), "c": Contender(self._baseline, "polls")}
        taken = await measure(self._work("writes", 8, 1, 20_000, self._near), contenders, self._rounds)
        ours, c = taken["await"], taken["c"]
        figures = {"await_us": ours.us, "c_us": c.us, "to_c": ours.us / c.us, "quiet_to_c": c.quicker_than(ours)}
        return Result("write_8_polling", figures, {"to_c": Limit(at_most=1.3)})

    async def sleeping(self) -> Result:
        """Measure awaited 8-byte writes between devices, where each side has to sleep.

        Soft-RoCE completes a write before the posting call returns, so no thread would sleep: its network is slowed
        down. `beyond_delay_to_c` excludes that delay.
        """
        contenders = {"await": Contender(self._library, "DEFAULT"), "c": Contender(self._baseline, "sleeps")}
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
        # Not all operations sleep: other load of the machine holds up some threads on their way to sleep.
        asleep = Limit(at_least=0.95)
        limits = {"to_c": Limit(at_most=3), "events_per_await": asleep, "events_per_c": asleep}
        return Result("write_8_sleeping", figures, limits)

    async def window(self) -> Result:
        """Measure 8-byte writes of a device to itself, with 64 handles of one task in flight.

        HIGH_BANDWIDTH posts chains of requests, where C posts one by one.
        """
        contenders = {
            "handles": Contender(self._library, "FORCE_LOW_LATENCY"),
            "chained": Contender(self._library, "HIGH_BANDWIDTH"),
            "c": Contender(self._baseline, "polls"),
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
        """Measure 64 KiB writes of a device to itself, several in flight."""
        contenders = {"handles": Contender(self._library, "FORCE_LOW_LATENCY"), "c": Contender(self._baseline, "polls")}
        taken = await measure(self._work("writes", LARGE, LARGE_WINDOW, 500, self._near), contenders, self._rounds)
        ours, c = taken["handles"], taken["c"]
        figures = {f"{name}_gb_per_s": LARGE * of.per_s / 1e9 for name, of in taken.items()}
        figures |= {"to_c": ours.per_s / c.per_s, "quiet_to_c": ours.quicker_than(c)}
        return Result("writes_64k", figures, {"to_c": Limit(at_least=0.95)})

    async def echo(self) -> Result:
        """Measure echoes of 8 bytes with another process, 64 in flight; all contenders wait for the completion channel.

        The hand-written contenders use awaitable requests, as this library does, and completions without futures
        (`bare`).
        """
        contenders = {
            "handles": Contender(self._library, "DEFAULT"),
            "chained": Contender(self._library, "HIGH_BANDWIDTH"),
            "c": Contender(self._baseline, "sleeps"),
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

    async def connection(self) -> Result:
        """Measure echoes of 8 bytes with another process over a connection, and over a queue pair (`raw`).

        One after the other, and 64 in flight. All contenders wait for the completion channel.
        """
        contenders = {"connection": Contender(self._connection, "DEFAULT"), "raw": Contender(self._library, "DEFAULT")}
        figures: dict[str, float] = {}
        for name, window, operations in (("one", 1, 1000), ("window", WINDOW, 5000)):
            taken = await measure(self._work("echo", 8, window, operations, self._far), contenders, self._rounds)
            ours, raw = taken["connection"], taken["raw"]
            figures |= {f"{name}_us": ours.us, f"{name}_raw_us": raw.us, f"{name}_to_raw": ours.us / raw.us}
            figures |= {f"{name}_quiet_to_raw": raw.quicker_than(ours)}
        limits = {"one_to_raw": Limit(at_most=1.3), "window_to_raw": Limit(at_most=1.3)}
        return Result("connection_echo_8", figures, limits)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help="what to measure, by default all")
    parser.add_argument("--baseline", required=True, help="the program of rdma_baseline.c")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each contender (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1, help="of the number of operations (default: %(default)s)")
    options = parser.parse_args()
    check_build()
    benchmarks = Benchmarks(options.baseline, rdma_devices(), options.rounds, options.scale)
    if unknown := set(options.parts).difference(benchmarks.all):
        parser.error(f"unknown benchmarks {', '.join(sorted(unknown))}: choose from {', '.join(benchmarks.all)}")

    table = empty_table()
    failed = False
    misses: list[str] = []
    for part in options.parts or benchmarks.all:
        try:
            result = await benchmarks.all[part]()
        except Exception:  # keep the results of the other benchmarks
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
