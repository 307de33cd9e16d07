"""PURE: a histogram of durations, with buckets whose width grows with the value.

A bucket is 1/64 of a power of two wide: percentiles are exact to 1.6 %, and the memory does not grow with the number of
values.
"""

import math
from collections import Counter
from collections.abc import Iterator

__all__ = ["Histogram"]

_BITS = 6
_EXACT = 1 << (_BITS + 1)  # smaller values have a bucket each
_FRACTIONS = (8, 4, 2, 1)  # allowed row widths: a power of two divided by one of these


class Histogram:
    """Counts of non-negative integers. `minimum` and `maximum` are exact; 0 if there are no values."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.minimum = 0
        self.maximum = 0
        self._mean = 0.0
        self._squares = 0.0  # sum of the squared distances from the mean

    def record(self, value: int) -> None:
        """Add a value to the histogram.

        :raises ValueError: `value` is negative.
        """
        if value < 0:
            raise ValueError(f"`value` must be at least 0, got {value}")
        self.minimum = min(self.minimum, value) if self.count else value
        self.maximum = max(self.maximum, value)
        self.count += 1
        distance = value - self._mean
        self._mean += distance / self.count
        self._squares += distance * (value - self._mean)
        self._buckets[_bucket(value)] += 1

    @property
    def mean(self) -> float:
        """Exact mean of all values; 0 if there are none."""
        return self._mean

    @property
    def deviation(self) -> float:
        """Exact standard deviation of all values; 0 if there are none."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def percentile(self, percent: float) -> int:
        """Return a percentile of the values, rounded up to the largest value of its bucket, but at most `maximum`; 0 if
        there are no values.

        :param percent: a number from 0 to 100.
        :raises ValueError: `percent` is outside 0..100.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"`percent` must be from 0 to 100, got {percent}")
        if not self.count:
            return 0
        rank = max(1, math.ceil(self.count * percent / 100))
        counted = 0
        for bucket in sorted(self._buckets):
            counted += self._buckets[bucket]
            if counted >= rank:
                return max(self.minimum, min(self.maximum, _end(bucket) - 1))
        return self.maximum

    def rows(self, max_rows: int = 20) -> list[tuple[int, int, int]]:
        """Return the rows of a bar chart in ascending order: for each row a tuple of its first value, its end
        (exclusive) and its count.

        A row covers an eighth, a quarter, a half or the whole of a power of two: the narrowest that needs at most
        `max_rows` rows. If even rows of a whole power of two are more than that, all of them are returned. Rows between
        the smallest and the largest value are included even if their count is 0. If there are no values, the list is
        empty.

        :param max_rows: desired maximum number of rows.
        """
        if not self.count:
            return []
        first, last = _bucket(self.minimum), _bucket(self.maximum)
        widths = [(1 << _BITS) // parts for parts in _FRACTIONS]  # in buckets
        width = next((width for width in widths if last // width - first // width < max_rows), widths[-1])
        return list(self._merge_buckets(first // width, last // width, width))

    def _merge_buckets(self, first: int, last: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Yield the rows that `rows` returns: for each a tuple of its first value, its end (exclusive) and its count.

        :param first: number of the first row, in units of ``width``.
        :param last: number of the last row, in units of ``width``.
        :param width: number of buckets in each row.
        """
        counts: Counter[int] = Counter()
        for bucket, count in self._buckets.items():
            counts[bucket // width] += count
        for row in range(first, last + 1):
            yield _begin(row * width), _begin((row + 1) * width), counts[row]


def _bucket(value: int) -> int:
    """Return the number of the bucket in which a value is counted."""
    if value < _EXACT:
        return value
    shift = value.bit_length() - 1 - _BITS
    return (shift << _BITS) + (value >> shift)


def _begin(bucket: int) -> int:
    """Return the smallest value that is counted in a bucket."""
    if bucket < _EXACT:
        return bucket
    shift = (bucket >> _BITS) - 1
    return (bucket - (shift << _BITS)) << shift


def _end(bucket: int) -> int:
    """Return the exclusive upper bound of a bucket: the smallest value that is too large for the bucket."""
    return _begin(bucket + 1)
