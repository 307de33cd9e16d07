"""Run the benchmarks: `nox -s bench`, or `nox -s bench -- write_8 window` for some of them.

Compared contenders are measured side by side in one run, interleaved, and reported as medians. Absolute values are for
orientation only, since machines differ and are shared. A limit that is not met fails nothing: it is marked in the
table, and listed at the end.
"""

import argparse
import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import uvloop
from rich.console import Console

from aioverbs.attributes import Execution

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from tests.bench import (
    basics,
    connecting,
    connections,
    data_path,
    fabric,
    fabric_many,
    growth,
    many,
    neighbours,
    one_way,
    pools,
    storage,
)
from tests.bench.measuring import Result, check_build
from tests.bench.table import add, empty_table, missed

ROUNDS = 1001

Results = Iterator[Result]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.SelectorEventLoop,
}


def on_loops(measures: Iterable[Callable[[], Awaitable[Result]]], loops: Iterable[str], seconds: float) -> Results:
    """Run measurements on event loops, each for at most some seconds."""

    async def limited(measure: Callable[[], Awaitable[Result]]) -> Result:
        async with asyncio.timeout(seconds):
            return await measure()

    for measure in measures:
        for name in loops:
            with asyncio.Runner(loop_factory=LOOPS[name]) as runner:
                result = runner.run(limited(measure))
            yield replace(result, name=f"{result.name} {name}")


def alone(measure: Callable[[], Awaitable[Result]], seconds: float) -> Results:
    """Run a measurement in a process of its own: this process has free memory left from earlier measurements."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool.submit(_only, measure, seconds).result()


def _only(measure: Callable[[], Awaitable[Result]], seconds: float) -> Result:
    (result,) = on_loops([measure], ["uvloop"], seconds)
    return result


def benchmarks(options: argparse.Namespace) -> dict[str, Callable[[], Results]]:
    """Return all benchmarks by name."""
    rounds, seconds = options.rounds, options.timeout
    short = max(1, rounds // 200)  # for rounds of a second or more
    turns = max(1, rounds // 143)  # of processes
    modes: tuple[dict[str, Execution], ...] = ({"execution": "inline"}, {"execution": "thread"})

    def on(*measures: Callable[[], Awaitable[Result]], loops: Iterable[str] = ("uvloop",)) -> Callable[[], Results]:
        return partial(on_loops, measures, loops, seconds)

    return {
        "machine": lambda: iter([basics.machine()]),
        "native": partial(basics.native, seconds),
        "imports": lambda: iter([basics.imports(15)]),
        "affinity": lambda: iter([basics.affinity(101, 20_000)]),
        "resource_domains": lambda: iter([basics.resource_domains(15, 2000)]),
        "write_8": on(partial(data_path.small_write, rounds)),
        "window": on(partial(data_path.window, rounds)),
        "batch": on(partial(data_path.batch, rounds)),
        "write_64k": on(partial(data_path.large_write, rounds)),
        "wake_up": on(partial(data_path.wake_up, rounds), loops=LOOPS),
        "models": on(*(partial(data_path.message_models, rounds, **mode) for mode in modes)),
        "many": on(*(partial(many.many_queue_pairs, short, **mode) for mode in modes)),
        "neighbours": on(*(partial(neighbours.neighbours, short, **mode) for mode in modes), loops=LOOPS),
        "fabric": on(
            *(partial(each, turns) for each in (fabric.small_writes, fabric.reads_asleep, fabric.large_writes)),
            *(partial(fabric.direct_writes, turns, places) for places in (fabric.MANY, fabric.FEW)),
        ),
        "fabric_many": on(partial(fabric_many.many_clients, 10)),
        "connecting": on(
            partial(connecting.in_sequence, 5 * rounds), partial(connecting.at_once, 1000, max(9, rounds // 100))
        ),
        "connection_setup": partial(alone, partial(connections.setup, 1000), seconds),
        "connection_idle": partial(alone, partial(connections.idle, 1000), seconds),
        "connection_echo": on(partial(connections.echo, max(5, rounds // 5))),
        "connection_one_way": on(*(partial(one_way.one_way, max(9, rounds // 50), name) for name in one_way.SIZES)),
        "pool_run": on(partial(pools.calls, max(1, rounds // 5)), loops=LOOPS),
        "pool_of_two": on(*(partial(pools.scaling, 2 * short, processes=processes) for processes in (True, False))),
        "storage_reads": on(*(partial(storage.reads, short + 2, name) for name in storage.PATTERNS)),
        "storage_flush": on(*(partial(storage.flushes, max(3, rounds // 100), each) for each in storage.WRITTEN)),
        "growth": partial(alone, partial(growth.growth, options.operations, seconds / 2), seconds),
        "outstanding": partial(alone, growth.outstanding, seconds),
        "parts": lambda: iter([basics.parts(fast=rounds < ROUNDS)]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="part", help="what to measure, by default all; a wrong one lists them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per benchmark")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of what is interleaved (default: %(default)s)")
    parser.add_argument("--operations", type=int, default=10_000_000, help="of growth (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each benchmark (default: %(default)s)")
    options = parser.parse_args()
    check_build()
    known = benchmarks(options)
    if unknown := set(options.parts).difference(known):
        parser.error(f"unknown benchmarks {', '.join(sorted(unknown))}: choose from {', '.join(known)}")

    table = empty_table()
    failed = False
    misses: list[str] = []
    try:
        for part in options.parts or known:
            try:
                for result in known[part]():
                    misses += missed(result)
                    if options.json:
                        print(json.dumps(result.as_json()), flush=True)
                    else:
                        add(table, result)
            except Exception:  # keep the results of the other benchmarks
                failed = True
                print(f"{part} was not measured:", file=sys.stderr)
                traceback.print_exc()
    finally:
        if not options.json:
            Console().print(table)
        for miss in misses:
            print(f"not met: {miss}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
