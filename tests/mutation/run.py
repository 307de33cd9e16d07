"""Plant faults in C, Cython and Python, one at a time, and check whether tests find them.

    python tests/mutation/run.py --count 300 --minutes 60 --results results.jsonl --work FOLDER

Faults are planted in a copy of the project. Then the tests that reach the line run until one fails. For C, these are
first the native programs of tests/native under the address sanitizer (for faults of locks and wake-ups also under the
thread sanitizer), then the tests of pytest.

Coverage is recorded once, which takes most of a first run; until it is complete, a fault that survives has no result.
`--record` records again after sources or tests have changed: until then a new line counts as reached by what reached
its function, and a new function as reached by nothing.

Results are appended to a file: the next run continues from there. At the end the program prints how many faults were
planted and found in each folder, and the faults that survived.
"""

import argparse
import fcntl
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path, PurePath

# Run as a script: import the project's packages from its root.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.mutation.c_mutants import c_faults
from tests.mutation.mutants import Mutant, choose, mutants_of, only
from tests.mutation.processes import become_subreaper
from tests.mutation.pytest_run import collect
from tests.mutation.python_mutants import python_faults
from tests.mutation.reach import Reach, record_program, record_tests
from tests.mutation.results import Outcome, Result, append_result, latest_results, survivors, table
from tests.mutation.trial import Trials
from tests.mutation.workspace import ROOT, Workspace
from tests.native.build import programs

# Folders with tests of RDMA devices, builds, timing or the tests themselves. Native programs run without pytest.
RECORDING = 0.6  # share of a run's time for recording, before faults are tried with the records so far
NOT_ASKED = {"bench", "checks", "flaky", "fuzz", "mutation", "native", "packaging", "rdma", "soak", "verbs_matrix"}


def all_mutants(places: Sequence[str]) -> list[Mutant]:
    """Return the mutants of the sources: C first, headers last, then Cython, then Python.

    :param places: folders or files, from the project's root; all if there are none.
    """
    sources = [str(each.relative_to(ROOT)) for each in sorted((ROOT / "aioverbs").rglob("*.*"))]
    sources = [each for each in only(sources, places) if not each.startswith(("aioverbs/_build/", "aioverbs/_docs/"))]
    found: list[Mutant] = []
    # Changes of headers take long to build, and need another build after the last of them.
    for suffixes in ((".c",), (".h",), (".pyx", ".pxi"), (".py",)):
        faults = c_faults if suffixes[0] in (".c", ".h") else python_faults
        for path in sources:
            if path.endswith(suffixes):
                source = (ROOT / path).read_bytes()
                found += mutants_of(path, source, faults(source))
    return found


def test_files(places: Sequence[str]) -> list[str]:
    """Return the test files that pytest may run, from the project's root, one of each folder in turn.

    :param places: folders or files; all if there are none.
    """
    files = [str(each.relative_to(ROOT)) for each in sorted((ROOT / "tests").rglob("test_*.py"))]
    folders: dict[str, list[str]] = defaultdict(list)
    for file in only(files, places):
        folders[str(PurePath(file).parent)].append(file)
    columns = [files for folder, files in folders.items() if folder.split("/")[1] not in NOT_ASKED]
    return [file for row in zip_longest(*columns) for file in row if file is not None]


def fixed_addresses() -> list[str]:
    """Return the command prefix that turns off address randomization, as the thread sanitizer needs; empty without."""
    fixed = ["setarch", platform.machine(), "-R"]
    able = shutil.which(fixed[0]) and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
    return fixed if able else []


class Run:
    """One run, with a limit of time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._begin = time.monotonic()
        self._seconds: float = 60 * options.minutes
        self._results: Path = options.results
        self._work: Path = options.work
        self._native_only: bool = options.native
        self._work.mkdir(parents=True, exist_ok=True)
        self._lock = (self._work / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if options.record:
            shutil.rmtree(self._work / "reach", ignore_errors=True)
        self._reach = Reach(self._work / "reach")
        self._programs = [each.stem for each in programs("asan")]
        self._files = [] if options.native else test_files(options.tests)
        self._tried = Workspace(self._work / "tree", ["asan", "tsan"], counted=False)
        self._trials = Trials(self._tried, self._reach, self._programs, self._files, options.cap, fixed_addresses())

    def over(self, share: float = 1.0) -> bool:
        """Return whether the time, or a share of it, is over."""
        return time.monotonic() > self._begin + share * self._seconds

    def record(self, names: Sequence[str], share: float = 1.0) -> bool:
        """Record the coverage of native programs or test files; return whether all are recorded.

        :param share: share of the run's time after which no further recording begins.
        """
        missing = [name for name in names if name not in self._reach.units]
        if not missing or self.over(share):
            return not missing
        tests = names is self._files
        counting = Workspace(self._work / "counting", ["coverage"], counted=True)
        counting.build("extensions" if tests else "coverage")
        collected = collect(counting, missing) if tests else []
        for position, name in enumerate(missing, 1):
            if self.over(share):
                return False
            begin = time.monotonic()
            if tests:
                unit = record_tests(counting, [each for each in collected if each.partition("::")[0] == name])
            else:
                unit = record_program(counting, self._tried, name)
            self._reach.add(name, unit)
            took = time.monotonic() - begin
            print(f"recorded {position} of {len(missing)}: {name}, {len(unit.tests)} tests, {took:.1f} s", flush=True)
        return True

    def try_all(self, mutants: Sequence[Mutant], *, by_pytest: bool, complete: bool) -> None:
        """Try mutants until the time is over, and append the results.

        :param complete: whether the coverage of all tests is known; if not, a survivor gets no result.
        """
        for position, mutant in enumerate(mutants, 1):
            if self.over():
                return
            if not complete and not self._trials.tests_of(mutant, by_pytest=by_pytest):
                continue
            result = self._trials.run(mutant, by_pytest=by_pytest)
            if complete or result.outcome != Outcome.SURVIVED:
                append_result(self._results, result)
            print(
                f"{position} of {len(mutants)}: {mutant.path}:{mutant.line} {mutant.fault.operator}: {result.outcome} "
                f"{result.by} {result.seconds:.0f} s, {result.tests} of {result.covering} tests",
                flush=True,
            )

    def run(self, mutants: Sequence[Mutant], results: dict[str, Result], *, again: bool) -> None:
        """Try the mutants without a result: those of C by native programs, then all that remain by pytest.

        :param again: whether to try survivors again.
        """

        def is_left(mutant: Mutant) -> bool:
            result = results.get(mutant.id)
            if result is None:
                return True
            return result.outcome == Outcome.SURVIVED and (again or not result.by_pytest)

        todo = [mutant for mutant in mutants if is_left(mutant)]
        in_c = [mutant for mutant in todo if mutant.path.endswith((".c", ".h")) and (again or mutant.id not in results)]
        if in_c and not self.over():
            self._tried.build("asan")
            complete = self.record(self._programs, RECORDING)
            self.try_all(in_c, by_pytest=False, complete=complete)
        if self._native_only or self.over():
            return
        latest = latest_results(self._results)
        untried = [each.id for each in in_c if each.id not in latest]
        settled = [each.id for each in in_c if each.id in latest and latest[each.id].outcome != Outcome.SURVIVED]
        todo = [mutant for mutant in todo if mutant.id not in (*untried, *settled)]
        if todo:
            self._tried.build("extensions")
            complete = self.record(self._files, RECORDING)
            self.try_all(todo, by_pytest=True, complete=complete)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults, one at a time, and see whether tests find them.")
    parser.add_argument("--count", type=int, default=300, help="how many faults (300)")
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="plant in this file or folder")
    parser.add_argument("--tests", action="append", default=[], metavar="PATH", help="pytest's files or folders (all)")
    parser.add_argument("--native", action="store_true", help="ask the native programs only")
    parser.add_argument("--again", action="store_true", help="try faults again that survived")
    parser.add_argument("--record", action="store_true", help="record again which tests reach which lines")
    parser.add_argument("--minutes", type=float, default=600.0, help="when to try no further fault (600)")
    parser.add_argument("--cap", type=float, default=120.0, help="seconds, after which no test of a fault begins (120)")
    parser.add_argument("--seed", type=int, default=21, help="of the choice of faults")
    parser.add_argument("--report", action="store_true", help="print the results of earlier runs, and try nothing")
    parser.add_argument("--results", type=Path, required=True, help="the file that collects the results")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the copies and what is built there")
    options = parser.parse_args()
    # so that child processes are ended, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    become_subreaper()

    mutants = choose(all_mutants(options.only), options.count, options.seed)
    results = latest_results(options.results)
    if not options.report:
        try:
            run = Run(options)
        except BlockingIOError:
            parser.error(f"another run uses {options.work}")
        run.run(mutants, results, again=options.again)
        results = latest_results(options.results)
    tried = [results[mutant.id] for mutant in mutants if mutant.id in results]
    print(f"{survivors(tried)}\n\n{table(tried)}\n\n{len(tried)} of {len(mutants)} faults were tried")
    return int(len(tried) < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
