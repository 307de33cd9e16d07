"""The benchmarks: `nox -s bench`.

Everything that is compared is measured side by side in one run, interleaved, and given as a median; absolute values
are for orientation, since machines differ and are shared.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

IMPORTS = """
import time
start = time.perf_counter()
import anyio
middle = time.perf_counter()
import aioverbs
end = time.perf_counter()
import aioverbs._core.engine
core = time.perf_counter()
print(middle - start, end - middle, core - end)
"""


def native(seconds: float) -> Iterator[dict[str, object]]:
    """The figures of the C benchmark programs, as they come."""
    from tests.native.build import build

    with tempfile.TemporaryDirectory(prefix="aioverbs-bench-") as folder:
        for program in build("bench", Path(folder)):
            done = subprocess.run([program], capture_output=True, text=True, timeout=seconds, check=True)
            yield from map(json.loads, done.stdout.splitlines())


def imports(runs: int) -> dict[str, object]:
    """What importing costs, each time in a new interpreter."""
    times = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-P", "-c", IMPORTS], capture_output=True, text=True, check=True)
        times.append([float(value) for value in done.stdout.split()])
    anyio, aioverbs, core = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return {"name": "import", "anyio_ms": anyio, "aioverbs_beyond_anyio_ms": aioverbs, "core_beyond_aioverbs_ms": core}


def handles(rounds: int, operations: int) -> dict[str, object]:
    """A signalled 8-byte RDMA WRITE, posted and polled through the Python handles."""
    from aioverbs import SendFlags, SendOpcode
    from aioverbs._core import engine
    from tests.rdma.seam import Pair, opened

    times = []
    with opened("soft0") as context:
        pd = engine.ProtectionDomain(context)
        pair = Pair(pd, pd, size=4096)
        qp, cq, sges = pair.qps[0], pair.queues[0], [pair.sge(0, 0, 8)]
        address, rkey = pair.regions[1].address, pair.regions[1].rkey
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(operations):
                qp.post_send(SendOpcode.RDMA_WRITE, sges, flags=SendFlags.SIGNALED, remote_addr=address, rkey=rkey)
                cq.poll(1)
            times.append((time.perf_counter() - start) / operations)
    return {"name": "handles_write_8", "post_and_poll_ns": statistics.median(times) * 1e9}


def affinity(rounds: int, operations: int) -> dict[str, object]:
    """What the check of thread and running loop adds to a verb: polls of two queues, in turns, one of them bound."""
    from aioverbs._core import engine
    from tests.rdma.seam import opened

    async def measure() -> list[tuple[float, float]]:
        owner = engine.Affinity.of_running_loop()
        bound = engine.CompletionQueue(context, 16, single_threaded=True, affinity=owner)
        anyones = engine.CompletionQueue(context, 16, single_threaded=True)
        times = [(poll(bound.poll, operations), poll(anyones.poll, operations)) for _ in range(rounds)]
        bound.destroy()
        anyones.destroy()
        return times

    figures: dict[str, object] = {"name": "affinity_check"}
    with opened("soft0") as context:
        for name, factory in (("asyncio", asyncio.SelectorEventLoop), ("uvloop", uvloop.new_event_loop)):
            with asyncio.Runner(loop_factory=factory) as runner:
                times = runner.run(measure())
            checked, unchecked = (statistics.median(column) for column in zip(*times, strict=True))
            figures |= {
                f"{name}_checked_ns": checked,
                f"{name}_unchecked_ns": unchecked,
                f"{name}_check_ns": statistics.median(one - other for one, other in times),
            }
    return figures


def resource_domains(rounds: int, operations: int) -> dict[str, object]:
    """Resource domains opened and closed one after the other, with a protection domain of their own or over one."""
    import aioverbs

    async def measure() -> dict[str, list[float]]:
        rates: dict[str, list[float]] = {"own_pd_per_s": [], "one_pd_per_s": []}
        async with aioverbs.open_device("soft0") as device, device.protection_domain() as pd:
            for _ in range(rounds):
                for name, given in (("own_pd_per_s", None), ("one_pd_per_s", pd)):
                    start = time.perf_counter()
                    for _ in range(operations):
                        async with device.resource_domain(given):
                            pass
                    rates[name].append(operations / (time.perf_counter() - start))
        return rates

    medians = {name: statistics.median(rates) for name, rates in asyncio.run(measure()).items()}
    return {"name": "resource_domain_open_close", **medians}


def poll(function: Callable[[], object], operations: int) -> float:
    """Nanoseconds for each of so many calls."""
    start = time.perf_counter_ns()
    for _ in range(operations):
        function()
    return (time.perf_counter_ns() - start) / operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object per benchmark")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each C program")
    options = parser.parse_args()
    table = Table("benchmark", "figure", "value")
    for result in (
        *native(options.timeout),
        imports(15),
        handles(20, 20_000),
        affinity(101, 20_000),
        resource_domains(15, 2000),
    ):
        if options.json:
            print(json.dumps(result), flush=True)
            continue
        name = result.pop("name")
        for figure, value in result.items():
            table.add_row(str(name), figure, f"{value:.3g}" if isinstance(value, float) else str(value))
            name = ""
        table.add_section()
    if not options.json:
        Console().print(table)


if __name__ == "__main__":
    main()
