"""How the benchmarks measure: contenders in turns, in many short rounds, by medians; and limits for figures."""

import math
import resource
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from aioverbs._core.handles.handles import is_optimized

__all__ = ["Contender", "Limit", "Result", "Rounds", "Sleeps", "check_build", "interleaved", "percentile"]

WARM_UP = 32  # operations

# A contender runs a number of operations, and returns the nanoseconds for all of them.
Contender = Callable[[int], Awaitable[float]]


def check_build() -> None:
    """Check that the measured code was compiled as users compile it.

    :raises SystemExit: it was compiled without optimization.
    """
    if not is_optimized():
        sys.exit("aioverbs was compiled without optimization: build it with CFLAGS unset, or with -O3 among them")


@dataclass(frozen=True)
class Limit:
    """Bounds of a figure."""

    at_most: float = math.inf
    at_least: float = -math.inf

    def met(self, value: float) -> bool:
        """Return whether a value is within the bounds."""
        return self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        least, most = (f"{value:,.6g}" for value in (self.at_least, self.at_most))
        if math.isinf(self.at_most):
            return f"≥ {least}"
        return f"≤ {most}" if math.isinf(self.at_least) else f"{least} to {most}"


@dataclass(frozen=True)
class Result:
    """Figures of a benchmark. Names end with the unit; ratios have none.

    :param limits: limits of some figures.
    """

    name: str
    figures: Mapping[str, object]
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def met(self, figure: str) -> bool | None:
        """Return whether a figure is within its limit; None if it has no limit. A missing figure is not."""
        if figure not in self.limits:
            return None
        value = self.figures[figure]
        return isinstance(value, int | float) and self.limits[figure].met(value)

    def as_json(self) -> dict[str, object]:
        """Return all fields, flat except for the limits."""
        limits = {figure: {"limit": str(limit), "met": self.met(figure)} for figure, limit in self.limits.items()}
        return {"name": self.name, **self.figures, **({"limits": limits} if limits else {})}


@dataclass(frozen=True)
class Rounds:
    """Nanoseconds for one operation of each contender, by round."""

    times: Mapping[str, list[float]]

    def ns(self, name: str) -> float:
        """Return the median of a contender in nanoseconds."""
        return statistics.median(self.times[name])

    def quiet_ns(self, name: str) -> float:
        """Return the 10th percentile of a contender in nanoseconds, which approximates an idle machine."""
        return percentile(self.times[name], 0.1)

    def over(self, name: str, other: str) -> float:
        """Return the median difference between two contenders in the same round."""
        return statistics.median(a - b for a, b in zip(self.times[name], self.times[other], strict=True))

    def ratio(self, name: str, other: str) -> float:
        """Return the median ratio of two contenders in the same round."""
        return statistics.median(a / b for a, b in zip(self.times[name], self.times[other], strict=True))

    def noise(self, name: str) -> float:
        """Return the relative deviation from the median within which half of the rounds are."""
        median = self.ns(name)
        return statistics.median(abs(time - median) for time in self.times[name]) / median


async def interleaved(contenders: Mapping[str, Contender], rounds: int, turn_s: float = 0.0005) -> Rounds:
    """Measure contenders against each other: each has one turn in each round, in rotating order.

    :param turn_s: target duration of a turn in seconds. If it is shorter than a scheduler's time slice, most turns are
        not interrupted, and the medians come from those even on a busy machine.
    """
    counts = {name: await _calibrate(contender, turn_s) for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for at in range(rounds):
        first = at % len(names)
        for name in (*names[first:], *names[:first]):
            # A warm-up before each turn: the caches and the loop's idle time should be the contender's own, not its
            # predecessor's.
            await contenders[name](min(WARM_UP, counts[name] // 10 + 1))
            times[name].append(await contenders[name](counts[name]) / counts[name])
    return Rounds(times)


async def _calibrate(contender: Contender, turn_s: float) -> int:
    """Return the number of operations that take about `turn_s`, and warm the contender up. The faster of two runs
    counts: the first operations of a contender may take far longer than the others, and a turn would then have few.
    """
    count = 1
    while True:
        took = min(await contender(count), await contender(count))
        if took >= turn_s * 1e9 / 4:
            return max(1, round(count * turn_s * 1e9 / took))
        count *= 2


def percentile(values: list[float], part: float) -> float:
    """Return the smallest value that is greater than or equal to the given part of all values."""
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1)]


class Sleeps:
    """Count the voluntary context switches of this thread inside the blocks: `count` is the total."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self.count -= resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        return self

    def __exit__(self, *exc: object) -> None:
        self.count += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
