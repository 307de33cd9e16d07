"""Rows of a test take the ways in turn: see `tests.ways`."""

import pytest

from tests.ways import in_turn


@pytest.mark.parametrize("first", range(5))
def test_four_rows_run_in_all_four_ways(first: int) -> None:
    assert sorted(in_turn([4] * 4, first)) == [0, 1, 2, 3]


def test_a_row_that_runs_in_fewer_ways_runs_in_one_of_them() -> None:
    assert in_turn([4, 1, 2, 4], 3) == [3, 0, 0, 2]
