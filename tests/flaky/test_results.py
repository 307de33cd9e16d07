"""The choice of the tests to run next."""

from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.flaky.results import Result, append_result, next_round, passes_in_a_row, read_results

TESTS = ["first", "second", "third", "fourth"]


def test_results_are_appended_to_those_of_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert list(read_results(path)) == []
    results = [Result("first", True, 0.5), Result("second", False, 1.0, "two\nlines"), Result("first", True)]
    for result in results:
        append_result(path, result)
    assert list(read_results(path)) == results


def test_passes_count_from_the_last_failure_on() -> None:
    outcomes = [
        ("first", True),
        ("second", False),
        ("first", True),
        ("second", True),
        ("third", True),
        ("third", False),
    ]
    passes = passes_in_a_row(Result(test, passed) for test, passed in outcomes)
    assert passes == {"first": 2, "second": 1, "third": 0}


@pytest.mark.parametrize(
    ("passes", "chosen"),
    [
        ({}, TESTS),
        ({"first": 1, "second": 1}, TESTS),
        ({"first": 2, "second": 3, "third": 2, "fourth": 3}, ["first", "third"]),
        (dict.fromkeys(TESTS, 3), []),
        (dict.fromkeys(TESTS, 5), []),
    ],
)
def test_a_round_has_the_tests_that_lack_passes(passes: dict[str, int], chosen: Sequence[str]) -> None:
    assert sorted(next_round(TESTS, passes, 3, seed=1)) == sorted(chosen)


def test_a_round_without_tests_is_empty() -> None:
    assert next_round([], {}, 3, seed=1) == []


def test_the_order_depends_on_the_seed() -> None:
    tests = [str(number) for number in range(100)]
    assert next_round(tests, {}, 3, seed=1) == next_round(tests, {}, 3, seed=1) != next_round(tests, {}, 3, seed=2)


@given(st.lists(st.tuples(st.sampled_from(TESTS), st.booleans())), st.integers(1, 4))
def test_rounds_end_when_all_have_passed_often_enough(outcomes: list[tuple[str, bool]], wanted: int) -> None:
    results = [Result(*outcome) for outcome in outcomes]
    for rounds in range(wanted + 1):
        chosen = next_round(TESTS, passes_in_a_row(results), wanted, seed=rounds)
        if not chosen:
            break
        results += [Result(test, True) for test in chosen]
    passes = passes_in_a_row(results)
    assert all(passes[test] >= wanted for test in TESTS)
