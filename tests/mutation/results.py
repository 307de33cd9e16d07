"""Results of single mutants, stored in a file of JSON lines, and tables of them."""

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path, PurePath

__all__ = ["Outcome", "Result", "append_result", "latest_results", "survivors", "table"]


class Outcome(StrEnum):
    """Outcome of a mutant."""

    FOUND = "found"  # a test failed, twice in a row
    TIMED_OUT = "timed out"  # a test did not end; counts as found
    SURVIVED = "survived"  # all tests passed, or none reaches the line
    NOT_COMPILED = "not compiled"  # the compiler rejected it, which says nothing about the tests
    EQUIVALENT = "equivalent"  # the compiler produces the same code


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Result of one mutant.

    Attributes:

            id: the mutant's ID.
            path: file that the fault was planted in.
            line: line number at that time.
            operator: kind of fault.
            outcome: one of `Outcome`.
            by: test or program that found the mutant; empty if none did.
            seconds: time from the start of the first test until the outcome, including builds.
            tests: number of tests or native programs that were run.
            covering: number of tests that reach the changed line; more than `tests` if they take longer than the cap.
            by_pytest: whether pytest looked for the mutant; False: native programs did, and pytest has not run yet.
            diff: the change.
            report: end of the test's output.
    """

    id: str
    path: str
    line: int
    operator: str
    outcome: str
    by: str = ""
    seconds: float = 0.0
    tests: int = 0
    covering: int = 0
    by_pytest: bool = True
    diff: str = ""
    report: str = ""


def append_result(path: Path, result: Result) -> None:
    """Add a result to the file. It is complete or absent, even if the process is killed meanwhile."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(dataclasses.asdict(result)).encode() + b"\n")


def latest_results(path: Path) -> dict[str, Result]:
    """Return the last result of each mutant of the file, by its ID; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result.id: result for result in (Result(**json.loads(line)) for line in lines)}


def table(results: Iterable[Result]) -> str:
    """Describe how many mutants were found, by folder and by kind of fault."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for group, name in ((folders, str(PurePath(result.path).parent)), (kinds, result.operator)):
            group[name][result.outcome] += 1
    parts = []
    for title, groups in (("folder", folders), ("fault", kinds)):
        total = sum(groups.values(), Counter())
        rows = [(title, *("planted", *Outcome, "score")), *(_row(*each) for each in sorted(groups.items()))]
        rows.append(_row("all", total))
        width = max(len(row[0]) for row in rows)
        parts.append("\n".join("  ".join([row[0].ljust(width), *(each.rjust(12) for each in row[1:])]) for row in rows))
    return "\n\n".join(parts)


def _row(name: str, counts: Counter[str]) -> tuple[str, ...]:
    found = counts[Outcome.FOUND] + counts[Outcome.TIMED_OUT]
    judged = found + counts[Outcome.SURVIVED]
    score = f"{100 * found / judged:.1f} %" if judged else "-"
    return (name, str(counts.total()), *(str(counts[each]) for each in Outcome), score)


def survivors(results: Iterable[Result]) -> str:
    """Describe each mutant that no test found, with its diff."""
    return "\n\n".join(
        f"{each.path}:{each.line}: {each.operator}, {each.id}, "
        f"{each.tests} of {each.covering} tests{'' if each.by_pytest else ', native programs alone'}\n{each.diff}"
        for each in sorted(results, key=lambda each: (each.path, each.line))
        if each.outcome == Outcome.SURVIVED
    )
