"""PURE: what of a volume was written: ranges of bytes, in order and apart, and never too many of them."""

import bisect
from collections.abc import Iterable

__all__ = ["RANGES_MOST", "Ranges"]

RANGES_MOST = 256


class Ranges:
    """Ranges of bytes. Those that touch become one, and where they are too many, those that are nearest do.

    So they may have more in them than was added, and never less.

    :param most: how many there are at most.
    """

    def __init__(self, most: int = RANGES_MOST) -> None:
        self._most = most
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Have the bytes from `start` up to `end` as well."""
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
        """Have all of these as well."""
        for start, end in ranges:
            self.add(start, end)

    def take(self) -> tuple[tuple[int, int], ...]:
        """All of them; afterwards there are none."""
        taken = tuple(zip(self._starts, self._ends, strict=True))
        self._starts, self._ends = [], []
        return taken

    def __len__(self) -> int:
        return len(self._starts)
