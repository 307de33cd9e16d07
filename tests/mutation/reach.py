"""Coverage of each test and native program: recorded once, and stored in a folder with a file for each test file.

gcov counts the lines of native programs, and those of extension modules for all tests of a file together. coverage
records lines of Python for each test. A killed process leaves no record.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coverage import Coverage, CoverageData

from tests.mutation import c_mutants, python_mutants
from tests.mutation.mutants import place_key
from tests.mutation.processes import run_alone
from tests.mutation.pytest_run import run_tests
from tests.mutation.workspace import COMPILER, Workspace

__all__ = ["Reach", "Unit", "record_program", "record_tests"]

PROGRAM_LIMIT_S = 900.0
TESTS_LIMIT_S = 1200.0
_COVERAGE = """[run]
source_pkgs = aioverbs
parallel = true
patch = subprocess, _exit
data_file = {data}
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """Record of a native program or a file of tests.

    Attributes:

            tests: duration in seconds of each test that passed.
            reach: by file and key of a line (see `place_key`), the tests that reach it, as positions in `tests`; None:
                unknown which of them. Lines that no test reaches have an empty list.
    """

    tests: dict[str, float]
    reach: dict[str, dict[str, list[int] | None]] = field(default_factory=dict)


class Reach:
    """All records so far.

    :param folder: where the units are stored.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.units: dict[str, Unit] = {}
        for file in sorted(folder.glob("*.json")):
            self.units[file.stem.replace("+", "/")] = Unit(**json.loads(file.read_text()))

    def add(self, name: str, unit: Unit) -> None:
        """Store the record of a native program, by name, or of a file of tests, by path."""
        file = self._folder / f"{name.replace('/', '+')}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(unit)))
        part.rename(file)
        self.units[name] = unit

    def covering(self, path: str, key: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the tests that reach a line, with their durations in seconds, by unit.

        An unknown line, such as the second line of a statement, is reached by what reaches its function.

        :param key: key of the line, see `place_key`.
        :param names: units to consider; unrecorded ones are skipped.
        """
        function = f"{key.partition(':')[0]}: "
        names = [name for name in names if name in self.units]
        units = [self.units[name] for name in names]
        known = any(key in unit.reach.get(path, ()) for unit in units)
        found: dict[str, dict[str, float]] = {}
        for name, unit in zip(names, units, strict=True):
            lines = unit.reach.get(path, {})
            reached = [lines[key]] if key in lines else []
            if not known:
                reached = [tests for line, tests in lines.items() if line.startswith(function)]
            tests = list(unit.tests)
            positions = {each for part in reached for each in (range(len(tests)) if part is None else part)}
            if positions:
                found[name] = {tests[each]: unit.tests[tests[each]] for each in sorted(positions)}
        return found


def _keys_of_lines(tree: Path, path: str) -> dict[int, str]:
    """Return the key of each line of a source file."""
    source = (tree / path).read_bytes()
    functions = (c_mutants if path.endswith((".c", ".h")) else python_mutants).functions_of_lines(source)
    lines = source.decode().split("\n")
    return {number: place_key(functions.get(number, ""), line) for number, line in enumerate(lines, 1)}


class _Keys(dict[str, dict[int, str]]):
    """Keys of the lines of each file in a copy of the project."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree

    def __missing__(self, path: str) -> dict[int, str]:
        self[path] = _keys_of_lines(self._tree, path)
        return self[path]


_KEYS: dict[Path, _Keys] = {}


@contextlib.contextmanager
def _counting(notes: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Provide the environment that makes instrumented code write its counts to a temporary folder, and the folder.

    :param notes: the folder with the compiler's notes.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        for note in notes.glob("*.gcno"):
            Path(name, note.name).symlink_to(note)
        yield {"GCOV_PREFIX": name, "GCOV_PREFIX_STRIP": "99"}, Path(name)


def _counted_lines(folder: Path, tree: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield the file and number of each executable line, and whether the line was executed; lines may repeat.

    :raises RuntimeError: the compiler is not gcc.
    """
    counts = sorted(str(each) for each in folder.glob("*.gcda"))
    gcov = str(Path(COMPILER[0]).with_name(Path(COMPILER[0]).name.replace("gcc", "gcov").replace("cc", "gcov")))
    if not counts:
        return
    ended = run_alone([gcov, "--json-format", "--stdout", *counts], PROGRAM_LIMIT_S, cwd=folder)
    if ended.status != 0:
        raise RuntimeError(
            f"{gcov} does not read what {COMPILER[0]} has counted; gcc and its gcov do: {ended.output[-500:]}"
        )
    for document in (line for line in ended.output.splitlines() if line.startswith("{")):
        for file in json.loads(document)["files"]:
            path = file["file"]
            if path.startswith("aioverbs/") and (tree / path).exists():
                yield from ((path, line["line_number"], line["count"] > 0) for line in file["lines"])


def _add_counts(
    reach: dict[str, dict[str, list[int] | None]], folder: Path, tree: Path, everything: list[int] | None
) -> None:
    keys = _KEYS.setdefault(tree, _Keys(tree))
    for path, line, executed in _counted_lines(folder, tree):
        key = keys[path].get(line)
        if key is not None:
            lines = reach.setdefault(path, {})
            if executed:
                lines[key] = everything
            else:
                lines.setdefault(key, [])


def record_program(workspace: Workspace, tried: Workspace, name: str) -> Unit:
    """Run a native program, and return its record; a record without tests if the program fails.

    :param workspace: has the instrumented program.
    :param tried: has the program that mutants are tried with, whose duration counts.
    """
    begin = time.monotonic()
    if run_alone([tried.program("asan", name)], PROGRAM_LIMIT_S, cwd=tried.tree).status != 0:
        return Unit({})
    unit = Unit({name: round(time.monotonic() - begin, 3)}, {})
    with _counting(workspace.counts("coverage")) as (env, folder):
        run_alone([workspace.program("coverage", name)], PROGRAM_LIMIT_S, cwd=workspace.tree, env=env)
        _add_counts(unit.reach, folder, workspace.tree, [0])
    return unit


def record_tests(workspace: Workspace, tests: Sequence[str]) -> Unit:
    """Run the tests of a file, and return their record without tests that fail."""
    with _counting(workspace.counts("extensions")) as (env, folder):
        config, data = folder / "coverage.ini", folder / "data"
        config.write_text(_COVERAGE.format(data=data))
        counting = ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
        results, _ = run_tests(workspace, tests, TESTS_LIMIT_S, *counting, env=env)
        passed = {result.test: result.seconds for result in results if result.passed}
        unit = Unit(passed, {})
        _add_counts(unit.reach, folder, workspace.tree, None)
        if data.exists():
            _add_lines(unit, data, workspace.tree)
    return unit


def _add_lines(unit: Unit, data: Path, tree: Path) -> None:
    keys = _KEYS.setdefault(tree, _Keys(tree))
    positions = {test: position for position, test in enumerate(unit.tests)}
    recorded = CoverageData(str(data))
    recorded.read()
    for file in recorded.measured_files():
        path = os.path.relpath(os.path.realpath(file), tree)
        if path.startswith("..") or not path.endswith(".py"):
            continue
        lines = unit.reach.setdefault(path, {})
        contexts = recorded.contexts_by_lineno(file)
        for line in _statements(file):
            lines.setdefault(keys[path][line], [])
        for line, names in contexts.items():
            if line not in keys[path]:  # with threads, coverage sometimes attributes a line to the wrong file
                continue
            reached = {positions[test] for name in names if (test := name.rpartition("|")[0]) in positions}
            # Not executed by a test, but during import, or in another process.
            lines[keys[path][line]] = sorted(reached) if reached else None if "" in names else []


def _statements(file: str) -> Sequence[int]:
    statements: Mapping[int, object] | list[int] = Coverage(data_file=None).analysis2(file)[1]
    return list(statements)
