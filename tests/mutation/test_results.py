"""Stored results of mutants, and the printed tables."""

from pathlib import Path

from tests.mutation.results import Outcome, Result, append_result, latest_results, survivors, table


def result(id_: str, outcome: Outcome, path: str = "aioverbs/_pool/pool.py", operator: str = "wrong errno") -> Result:
    return Result(id_, path, 3, operator, outcome, tests=2, covering=5, diff="-return 1\n+return 2")


def test_the_last_result_of_a_mutant_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert latest_results(path) == {}
    for each in (result("a", Outcome.SURVIVED), result("b", Outcome.FOUND), result("a", Outcome.TIMED_OUT)):
        append_result(path, each)
    assert latest_results(path) == {"a": result("a", Outcome.TIMED_OUT), "b": result("b", Outcome.FOUND)}


def test_the_score_excludes_uncompiled_and_equivalent_mutants() -> None:
    outcomes = [Outcome.FOUND, Outcome.TIMED_OUT, Outcome.FOUND, Outcome.SURVIVED]
    others = [Outcome.NOT_COMPILED, Outcome.EQUIVALENT]
    rows = table(result("", outcome) for outcome in (*outcomes, *others)).splitlines()
    assert rows[1].split() == ["aioverbs/_pool", "6", "2", "1", "1", "1", "1", "75.0", "%"]
    assert [row[:5] for row in rows if row] == ["folde", "aiove", "all  ", "fault", "wrong", "all  "]
    assert table([result("", Outcome.EQUIVALENT)]).splitlines()[1].endswith("-")


def test_survivors_are_shown_with_their_diff() -> None:
    shown = survivors([result("abc", Outcome.SURVIVED), result("def", Outcome.FOUND)])
    assert shown == "aioverbs/_pool/pool.py:3: wrong errno, abc, 2 of 5 tests\n-return 1\n+return 2"
