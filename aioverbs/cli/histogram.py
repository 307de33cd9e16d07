"""PURE: how long things took, counted in buckets that grow with what they hold.

A bucket is as wide as 1/64 of the power of two that it lies in: what is told of the values is exact to 1.6 %, and takes
no more memory the more there are.
"""

import math
from collections import Counter
from collections.abc import Iterator

__all__ = ["Histogram"]

_BITS = 6
_EXACT = 1 << (_BITS + 1)  # values below have a bucket each
_FRACTIONS = (8, 4, 2, 1)  # of a power of two, that a row of a picture may be


class Histogram:
    """Counts of values, which are integers from 0."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.minimum = 0
        self.maximum = 0
        self._mean = 0.0
        self._squares = 0.0  # the sum of those of distances from the mean

    def record(self, value: int) -> None:
        """Count a value.

        :raises ValueError: it is negative.
        """
        if value < 0:
            raise ValueError(f"nothing takes {value}: values are 0 and more")
        self.minimum = min(self.minimum, value) if self.count else value
        self.maximum = max(self.maximum, value)
        self.count += 1
        distance = value - self._mean
        self._mean += distance / self.count
        self._squares += distance * (value - self._mean)
        self._buckets[_bucket(value)] += 1

    @property
    def mean(self) -> float:
        """The mean of all values, exactly; 0 of none."""
        return self._mean

    @property
    def deviation(self) -> float:
        """The standard deviation of all values, exactly; 0 of none."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def percentile(self, percent: float) -> int:
        """What so many percent of the values are not above, as near as buckets tell; 0 of none.

        :param percent: from 0 to 100.
        :raises ValueError: it is something else.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile is from 0 to 100, not {percent}")
        if not self.count:
            return 0
        wanted = max(1, math.ceil(self.count * percent / 100))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return max(self.minimum, min(self.maximum, _end(bucket) - 1))
        return self.maximum

    def rows(self, most: int = 20) -> list[tuple[int, int, int]]:
        """The values in rows from the least to the greatest: where each begins and ends, and how many lie in it.

        They are eighths of powers of two, or quarters, halves, wholes, so that there are no more rows than wanted; of
        wholes there are as many as it takes.
        """
        if not self.count:
            return []
        first, last = _bucket(self.minimum), _bucket(self.maximum)
        widths = [(1 << _BITS) // parts for parts in _FRACTIONS]  # in buckets
        width = next((width for width in widths if last // width - first // width < most), widths[-1])
        return list(self._in_rows(first // width, last // width, width))

    def _in_rows(self, first: int, last: int, width: int) -> Iterator[tuple[int, int, int]]:
        counts: Counter[int] = Counter()
        for bucket, count in self._buckets.items():
            counts[bucket // width] += count
        for row in range(first, last + 1):
            yield _begin(row * width), _begin((row + 1) * width), counts[row]


def _bucket(value: int) -> int:
    if value < _EXACT:
        return value
    shift = value.bit_length() - 1 - _BITS
    return (shift << _BITS) + (value >> shift)


def _begin(bucket: int) -> int:
    """The least value of a bucket."""
    if bucket < _EXACT:
        return bucket
    shift = (bucket >> _BITS) - 1
    return (bucket - (shift << _BITS)) << shift


def _end(bucket: int) -> int:
    return _begin(bucket + 1)
