"""PURE: a bounded set of written byte ranges of a volume."""

import bisect
from collections.abc import Iterable

__all__ = ["MAX_RANGES", "Ranges"]

MAX_RANGES = 256


class Ranges:
    """Sorted byte ranges that neither overlap nor touch.

    Ranges that touch are merged. If there are too many, the two with the smallest gap are merged, so the set may cover
    more bytes than were added, but never fewer.

    :param most: maximum number of ranges.
    """

    def __init__(self, most: int = MAX_RANGES) -> None:
        self._most = most
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the bytes from `start` up to, but not including, `end`; add nothing if there are none."""
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        if len(self._starts) > self._most:
            gaps = [begin - finish for begin, finish in zip(self._starts[1:], self._ends, strict=False)]
            nearest = gaps.index(min(gaps))
            del self._starts[nearest + 1], self._ends[nearest]

    def update(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add several ranges, as pairs of start and end (exclusive)."""
        for start, end in ranges:
            self.add(start, end)

    def take(self) -> tuple[tuple[int, int], ...]:
        """Remove all ranges and return them sorted, as pairs of start and end (exclusive)."""
        taken = tuple(zip(self._starts, self._ends, strict=True))
        self._starts, self._ends = [], []
        return taken

    def __len__(self) -> int:
        return len(self._starts)
