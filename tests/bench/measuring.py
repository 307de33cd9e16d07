"""How the benchmarks measure: in turns, in many short rounds, by medians; and what the table says of a figure."""

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

# A contender runs so many operations and says how many nanoseconds all of them took.
Contender = Callable[[int], Awaitable[float]]


def check_build() -> None:
    """See that what is measured was compiled as its users have it.

    :raises SystemExit: it was compiled without optimization.
    """
    if not is_optimized():
        sys.exit("aioverbs was compiled without optimization: build it with CFLAGS unset, or with -O3 among them")


@dataclass(frozen=True)
class Limit:
    """The bounds of a figure."""

    at_most: float = math.inf
    at_least: float = -math.inf

    def met(self, value: float) -> bool:
        """Whether a value is within it."""
        return self.at_least <= value <= self.at_most

    def __str__(self) -> str:
        least, most = (f"{value:,.6g}" for value in (self.at_least, self.at_most))
        if math.isinf(self.at_most):
            return f"≥ {least}"
        return f"≤ {most}" if math.isinf(self.at_least) else f"{least} to {most}"


@dataclass(frozen=True)
class Result:
    """The figures of a benchmark. Their names end with their units; a ratio has none.

    :param limits: of those figures that have one.
    """

    name: str
    figures: Mapping[str, object]
    limits: Mapping[str, Limit] = field(default_factory=dict)

    def met(self, figure: str) -> bool | None:
        """Whether a figure is within its limit; None where it has none. One that was not measured is not."""
        if figure not in self.limits:
            return None
        value = self.figures[figure]
        return isinstance(value, int | float) and self.limits[figure].met(value)

    def as_json(self) -> dict[str, object]:
        """All of it, flat but for the limits."""
        limits = {figure: {"limit": str(limit), "met": self.met(figure)} for figure, limit in self.limits.items()}
        return {"name": self.name, **self.figures, **({"limits": limits} if limits else {})}


@dataclass(frozen=True)
class Rounds:
    """Nanoseconds for one operation of each contender, round by round."""

    times: Mapping[str, list[float]]

    def ns(self, name: str) -> float:
        """The median of a contender."""
        return statistics.median(self.times[name])

    def quiet_ns(self, name: str) -> float:
        """What a contender takes where nothing else has the processor: nine of ten rounds take longer."""
        return percentile(self.times[name], 0.1)

    def over(self, name: str, other: str) -> float:
        """The median of how much longer one takes than the other in the same round."""
        return statistics.median(a - b for a, b in zip(self.times[name], self.times[other], strict=True))

    def ratio(self, name: str, other: str) -> float:
        """The median of how many times as long one takes as the other in the same round."""
        return statistics.median(a / b for a, b in zip(self.times[name], self.times[other], strict=True))

    def noise(self, name: str) -> float:
        """Half of the rounds differ from the median by no more than this part of it."""
        median = self.ns(name)
        return statistics.median(abs(time - median) for time in self.times[name]) / median


async def interleaved(contenders: Mapping[str, Contender], rounds: int, turn_s: float = 0.0005) -> Rounds:
    """Measure contenders against each other: in each round each has its turn, in an order that rotates.

    :param turn_s: how long a turn is to take, in seconds. Shorter than what a scheduler gives a thread at once, most
        turns are not interrupted, and the medians are of those, however busy the machine is.
    """
    counts = {name: await _calibrate(contender, turn_s) for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for at in range(rounds):
        first = at % len(names)
        for name in (*names[first:], *names[:first]):
            # Before it counts: caches, and how long the loop had no turn, are to be its own and not of who was before.
            await contenders[name](min(WARM_UP, counts[name] // 10 + 1))
            times[name].append(await contenders[name](counts[name]) / counts[name])
    return Rounds(times)


async def _calibrate(contender: Contender, turn_s: float) -> int:
    """How many operations take about so long; the contender is warm then."""
    count = 1
    while True:
        took = await contender(count)
        if took >= turn_s * 1e9 / 4:
            return max(1, round(count * turn_s * 1e9 / took))
        count *= 2


def percentile(values: list[float], part: float) -> float:
    """The smallest of the values that so large a part of them does not exceed."""
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1)]


class Sleeps:
    """How often this thread gave up its processor of its own accord inside of the blocks: `count`, of all of them."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self.count -= resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        return self

    def __exit__(self, *exc: object) -> None:
        self.count += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
