"""Results of single tests, collected over several runs in a file of JSON lines, and the choice of tests to run next."""

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

__all__ = ["Result", "append_result", "next_round", "passes_in_a_row", "read_results"]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one test in one round.

    Attributes:
        test: the test's node ID.
        passed: whether it passed; a test that was skipped counts as passed.
        seconds: what its set-up, call and tear-down took together.
        report: the end of the failure's report; empty if the test passed.
    """

    test: str
    passed: bool
    seconds: float = 0.0
    report: str = ""


def append_result(path: Path, result: Result) -> None:
    """Add a result to the file. It is complete or absent, even if the process is killed meanwhile."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(dataclasses.asdict(result)).encode() + b"\n")


def read_results(path: Path) -> Iterator[Result]:
    """Yield all results of the file, oldest first; none if there is no file."""
    if path.exists():
        for line in path.read_text().splitlines():
            yield Result(**json.loads(line))


def passes_in_a_row(results: Iterable[Result]) -> dict[str, int]:
    """Return how often each test has passed since it last failed."""
    passes: dict[str, int] = {}
    for result in results:
        passes[result.test] = passes.get(result.test, 0) + 1 if result.passed else 0
    return passes


def next_round(tests: Sequence[str], passes: dict[str, int], wanted: int, seed: int) -> list[str]:
    """Choose the tests of the next round: in random order, all that lack passes. Rounds of a few tests, which take
    minutes to begin, come only at the end.

    :param tests: the node IDs of the whole suite.
    :param passes: from `passes_in_a_row`.
    :param wanted: how often each test is to pass in a row.
    :param seed: of the order.
    """
    chosen = [test for test in tests if passes.get(test, 0) < wanted]
    random.Random(seed).shuffle(chosen)
    return chosen
