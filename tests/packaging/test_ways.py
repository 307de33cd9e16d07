"""Parametrized tests alternate between event loops and executions (see `tests.ways`)."""

import pytest

from tests.ways import in_turn


@pytest.mark.parametrize("first", range(5))
def test_four_rows_run_in_all_four_ways(first: int) -> None:
    assert sorted(in_turn([4] * 4, first)) == [0, 1, 2, 3]


def test_a_row_that_runs_in_fewer_ways_runs_in_one_of_them() -> None:
    assert in_turn([4, 1, 2, 4], 3) == [3, 0, 0, 2]


@pytest.mark.parametrize("values", [2, 4])
def test_each_value_of_a_parameter_meets_each_way(values: int) -> None:
    ways = in_turn([4] * 16, 0)
    assert {(row % values, way) for row, way in enumerate(ways)} == {(v, w) for v in range(values) for w in range(4)}
