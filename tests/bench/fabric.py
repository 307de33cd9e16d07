"""The software fabric between two processes of this machine, compared with plain sockets and system calls."""

import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.baselines import compiled
from tests.bench.measuring import Limit, Result
from tests.bench.turns import alone, in_turns

__all__ = ["FEW", "MANY", "direct_writes", "large_writes", "reads_asleep", "small_writes"]

HERE = Path(__file__).resolve().parent
TURN_S = 60
LARGE = 1 << 20
FEW, MANY = 4, 64  # number of messages in memory: within a cache, and beyond it

Turn = Callable[[], Awaitable[bytes]]


@contextmanager
def _baseline() -> Iterator[str]:
    """Compile fabric_baseline.c; yield the path of the program."""
    with tempfile.TemporaryDirectory(prefix="fabric-baseline-") as folder:
        yield compiled(Path(folder, "fabric_baseline"), "fabric_baseline.c")


def _ours(what: str, model: str, length: int, window: int, operations: int, *, direct: bool = True) -> Turn:
    command = (sys.executable, "-P", str(HERE / "fabric_end.py"), what, model, *map(str, (length, window, operations)))
    return partial(alone, *command, env={**os.environ, "AIOVERBS_SOFT_DIRECT": str(int(direct))})


def _streams(kind: str, asked: int, answered: int, operations: int) -> Turn:
    return partial(
        alone, sys.executable, "-P", str(HERE / "stream_end.py"), kind, *map(str, (asked, answered, operations))
    )


def _c(baseline: str, what: str, length: int, places: int, operations: int) -> Turn:
    return partial(alone, baseline, what, *map(str, (length, places, operations)))


async def _medians(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Run the contenders in turns; return the median of each of their numbers."""
    taken = await in_turns(turns, rounds, TURN_S)
    return {name: [statistics.median(each) for each in zip(*lines, strict=True)] for name, lines in taken.items()}


async def small_writes(rounds: int) -> Result:
    """Measure awaited 8-byte writes with polling; the baseline in C sends 8 bytes back and forth."""
    with _baseline() as baseline:
        turns = {
            "await": _ours("write", "FORCE_LOW_LATENCY", 8, 1, 50_000),
            "c": _c(baseline, "spins", 8, 1, 100_000),
        }
        taken = await _medians(turns, rounds)
    ours, c = taken["await"][0], taken["c"][0]
    figures = {"await_us": ours / 1e3, "c_us": c / 1e3, "to_c": ours / c}
    return Result("fabric_write_8", figures, {"to_c": Limit(at_most=2)})


async def reads_asleep(rounds: int) -> Result:
    """Measure awaited 4 KiB reads with DEFAULT; the baseline in uvloop requests as much by 8 bytes."""
    operations = 10_000
    turns = {
        "await": _ours("read", "DEFAULT", 4096, 1, operations),
        "streams": _streams("streams", 8, 4096, operations),
        "protocols": _streams("protocols", 8, 4096, operations),
    }
    taken = await _medians(turns, rounds)
    (ours, woken, _), (streams,), (protocols,) = taken["await"], taken["streams"], taken["protocols"]
    figures = {
        "await_us": ours / 1e3,
        "events_per_await": woken,
        "streams_us": streams / 1e3,
        "protocols_us": protocols / 1e3,
        "faster_than_streams": streams / ours,
        "faster_than_protocols": protocols / ours,
    }
    return Result("fabric_read_4k", figures, {"faster_than_streams": Limit(at_least=1)})


async def large_writes(rounds: int) -> Result:
    """Measure 1 MiB writes, several in flight, through the socket; the baseline in C sends as much."""
    with _baseline() as baseline:
        turns = {
            "await": _ours("write", "DEFAULT", LARGE, FEW, 500, direct=False),
            "c": _c(baseline, "streams", LARGE, FEW, 500),
        }
        taken = await _medians(turns, rounds)
    figures = {f"{name}_gb_per_s": LARGE / numbers[0] for name, numbers in taken.items()}
    figures["to_c"] = taken["c"][0] / taken["await"][0]
    return Result("fabric_writes_1m_socket", figures, {"to_c": Limit(at_least=0.8)})


async def direct_writes(rounds: int, places: int) -> Result:
    """Measure 1 MiB writes from memory to memory; the baselines are memcpy and process_vm_readv."""
    with _baseline() as baseline:
        turns = {
            "await": _ours("write", "DEFAULT", LARGE, places, 2000),
            "memcpy": _c(baseline, "copies", LARGE, places, 2000),
            "process_vm": _c(baseline, "moves", LARGE, places, 2000),
        }
        taken = await _medians(turns, rounds)
    if not taken["await"][2]:
        raise RuntimeError("no direct transfers: the kernel denies access to another process's memory")
    figures = {f"{name}_gb_per_s": LARGE / numbers[0] for name, numbers in taken.items()}
    figures["to_memcpy"] = taken["memcpy"][0] / taken["await"][0]
    figures["to_process_vm"] = taken["process_vm"][0] / taken["await"][0]
    return Result(f"fabric_writes_1m_direct_{places}_places", figures, {"to_memcpy": Limit(at_least=0.7)})
