"""Benchmarks of the data path's foundations: the software device in C, imports, domains."""

import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pyperf
import uvloop

from tests.bench.measuring import Limit, Result

__all__ = ["affinity", "imports", "machine", "native", "parts", "resource_domains"]

LIMITS = {"soft_rings_write_8": {"rings_to_bare_ring": Limit(at_most=10)}}  # of the programs in C

IMPORTS = """
import time
start = time.perf_counter()
import anyio
middle = time.perf_counter()
import aioverbs
end = time.perf_counter()
import aioverbs._core.handles.handles
core = time.perf_counter()
print(middle - start, end - middle, core - end)
"""


def machine() -> Result:
    """Describe the machine, and how busy it is."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    figures = {
        "processor": model[1] if model else platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "uvloop": metadata.version("uvloop"),
    }
    return Result("machine", figures)


def native(seconds: float) -> Iterator[Result]:
    """Run the C benchmark programs; yield their figures."""
    from tests.native.build import build

    with tempfile.TemporaryDirectory(prefix="aioverbs-bench-") as folder:
        for program in build("bench", Path(folder)):
            done = subprocess.run([program], capture_output=True, text=True, timeout=seconds, check=True)
            for figures in map(json.loads, done.stdout.splitlines()):
                name = figures.pop("name")
                yield Result(name, figures, LIMITS.get(name, {}))


def imports(runs: int) -> Result:
    """Measure the duration of imports, each in a new interpreter."""
    times = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-P", "-c", IMPORTS], capture_output=True, text=True, check=True)
        times.append([float(value) for value in done.stdout.split()])
    anyio, aioverbs, core = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    figures = {"anyio_ms": anyio, "aioverbs_beyond_anyio_ms": aioverbs, "core_beyond_aioverbs_ms": core}
    return Result("import", figures)


def affinity(rounds: int, operations: int) -> Result:
    """Measure the cost of the affinity check for a verb, on two queues in turn, one bound and one not."""
    from aioverbs._core.handles import handles
    from tests.rdma.seam import opened

    async def measure() -> list[tuple[float, float]]:
        owner = handles.Affinity.of_running_loop()
        channel = handles.CompletionChannel(context)
        bound, anyones = (
            handles.CompletionQueue(context, 16, channel, single_threaded=True, affinity=each) for each in (owner, None)
        )
        calls = bound.request_notify, anyones.request_notify
        times = [(repeat(calls[0], operations), repeat(calls[1], operations)) for _ in range(rounds)]
        for handle in (bound, anyones, channel):
            handle.destroy()
        return times

    figures: dict[str, object] = {}
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
    return Result("affinity_check", figures)


def resource_domains(rounds: int, operations: int) -> Result:
    """Measure opening and closing resource domains, with a protection domain of their own and with a shared one."""
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
    return Result("resource_domain_open_close", medians)


def repeat(function: Callable[[], object], operations: int) -> float:
    """Return the duration of one call in nanoseconds."""
    start = time.perf_counter_ns()
    for _ in range(operations):
        function()
    return (time.perf_counter_ns() - start) / operations


def parts(fast: bool) -> Result:
    """Run parts.py; return medians, and the relative deviation within which half of the values are."""
    with tempfile.TemporaryDirectory(prefix="aioverbs-bench-") as folder:
        file = Path(folder, "parts.json")
        script = Path(__file__).with_name("parts.py")
        options = ["--fast"] if fast else []
        subprocess.run([sys.executable, str(script), "--quiet", *options, "-o", str(file)], check=True, stdout=2)
        suite = pyperf.BenchmarkSuite.load(str(file))
    figures: dict[str, object] = {}
    for benchmark in suite.get_benchmarks():
        figures[f"{benchmark.get_name()}_ns"] = benchmark.median() * 1e9
        figures[f"{benchmark.get_name()}_noise"] = benchmark.median_abs_dev() / benchmark.median()
    return Result("parts", figures)
