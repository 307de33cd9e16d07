"""Histogram: exact and approximate statistics of values."""

import itertools
import statistics

import pytest
from hypothesis import given, strategies as st

from aioverbs.cli.histogram import Histogram

TIMES = st.lists(st.integers(0, 1 << 40) | st.integers(0, 300), min_size=1)


def filled(values: list[int]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(TIMES)
def test_count_extremes_mean_and_deviation_are_exact(values: list[int]) -> None:
    found = filled(values)
    assert (found.count, found.minimum, found.maximum) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.deviation == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-3)


@given(TIMES, st.floats(0, 100))
def test_percentiles_are_within_a_bucket(values: list[int], percent: float) -> None:
    ordered = sorted(values)
    rank = max(1, -(-len(values) * percent // 100))
    exact = ordered[int(min(rank, len(values))) - 1]
    assert exact <= filled(values).percentile(percent) <= exact * (1 + 1 / 64)


@given(TIMES, st.integers(1, 50))
def test_rows_contain_all_values(values: list[int], most: int) -> None:
    rows = filled(values).rows(most)
    for (_, end, _), (begin, _, _) in itertools.pairwise(rows):
        assert begin == end
    for begin, end, count in rows:
        assert count == sum(begin <= value < end for value in values)
    assert sum(count for _, _, count in rows) == len(values)
    assert len(rows) <= max(most, 42)
    assert rows[0][2]
    assert rows[-1][2]


def test_empty_histogram() -> None:
    empty = Histogram()
    assert (empty.count, empty.mean, empty.deviation, empty.percentile(50), empty.rows()) == (0, 0, 0, 0, [])


@pytest.mark.parametrize("percent", [-0.1, 100.1, float("nan")])
def test_invalid_percentile(percent: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 100"):
        Histogram().percentile(percent)


def test_negative_value() -> None:
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        Histogram().record(-1)
