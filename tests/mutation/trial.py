"""Trial of one mutant: plant it in a copy of the project, and run tests."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tests.mutation.mutants import Mutant
from tests.mutation.processes import run_alone
from tests.mutation.pytest_run import run_tests
from tests.mutation.reach import Reach
from tests.mutation.results import Outcome, Result
from tests.mutation.workspace import ROOT, BuildError, Workspace

__all__ = ["IN_THREADS", "Trials", "in_turn"]

# Faults that the thread sanitizer may find although tests pass.
IN_THREADS = ("lock removed", "freed too early", "missing wake-up")
FIRST = ("-x", "-o", "timeout=30")  # pytest options: stop at the first failure; few tests take that long
PYTEST_PATIENCE = 2.0  # factor of a test's recorded duration before it times out
PROGRAM_PATIENCE, PROGRAM_LEAST_S = 10.0, 20.0  # the same for native programs, and their minimum timeout
REPORT_CHARACTERS = 2000
TSAN = {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}
ASAN = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}


def in_turn(units: Mapping[str, Mapping[str, float]], seconds: float) -> list[str]:
    """Choose tests for a limit of time: the quickest one of each file, then the second of each, and so on.

    :param units: duration in seconds of each test, by file.
    :param seconds: limit for all of them; at least one test is chosen.
    :returns: tests grouped by file, files ordered by their quickest tests.
    """
    columns = [sorted(tests.items(), key=lambda each: each[1]) for tests in units.values()]
    columns.sort(key=lambda column: column[0][1])
    chosen: set[str] = set()
    for row in zip_longest(*columns):
        for test, takes in filter(None, row):
            if takes <= seconds or not chosen:
                seconds -= takes
                chosen.add(test)
    return [test for column in columns for test, _ in column if test in chosen]


@dataclass(slots=True)
class _Trial:
    """State of a trial."""

    left_s: float  # for tests; building does not count
    outcome: Outcome = Outcome.SURVIVED
    by: str = ""
    tests: int = 0
    report: str = ""

    def end(self, outcome: Outcome, by: str, report: str) -> bool:
        """Record the outcome; return True."""
        self.outcome, self.by, self.report = outcome, by, report
        return True


@dataclass(frozen=True, slots=True)
class Trials:
    """Tries mutants one after another.

    Attributes:

            workspace: copy of the project to plant mutants in, with native programs for `asan` and `tsan`.
            reach: which tests reach which lines.
            programs: the native programs.
            files: the test files that pytest may run.
            cap_s: time in seconds after which no further test of a mutant begins.
            fixed: command prefix for programs under the thread sanitizer.
    """

    workspace: Workspace
    reach: Reach
    programs: Sequence[str]
    files: Sequence[str]
    cap_s: float
    fixed: Sequence[str]

    def tests_of(self, mutant: Mutant, *, by_pytest: bool) -> dict[str, dict[str, float]]:
        """Return the tests of pytest, or the native programs, that reach a mutant: see `Reach.covering`."""
        return self.reach.covering(mutant.path, mutant.key, self.files if by_pytest else self.programs)

    def run(self, mutant: Mutant, *, by_pytest: bool) -> Result:
        """Plant a mutant, look for it, and remove it.

        :param by_pytest: whether to use pytest; otherwise, native programs.
        """
        source = (ROOT / mutant.path).read_bytes()
        units = self.tests_of(mutant, by_pytest=by_pytest)
        begin = time.monotonic()
        trial = _Trial(self.cap_s)
        try:
            self._make(mutant, source)
            if by_pytest:
                self._pytest(trial, units, build=not mutant.path.endswith(".py"))
            else:
                found = self._native(trial, "asan", units)
                if not found and mutant.fault.operator in IN_THREADS and self._native(trial, "tsan", units):
                    self._unless_without(trial, mutant, source)
        except BuildError as error:
            trial.end(Outcome.NOT_COMPILED, "", str(error))
        except _EquivalentError:
            trial.end(Outcome.EQUIVALENT, "", "")
        finally:
            self.workspace.plant(mutant.path, source)
        return Result(
            mutant.id,
            mutant.path,
            mutant.line,
            mutant.fault.operator,
            trial.outcome,
            trial.by,
            round(time.monotonic() - begin, 1),
            trial.tests,
            sum(map(len, units.values())),
            by_pytest,
            mutant.diff(source),
            trial.report[-REPORT_CHARACTERS:],
        )

    def _make(self, mutant: Mutant, source: bytes) -> None:
        """Plant a mutant.

        :raises BuildError: it does not compile.
        :raises _EquivalentError: the compiler produces the same code.
        """
        content = mutant.apply(source)
        if mutant.path.endswith(".c"):
            before = self.workspace.assembly(mutant.path)
            self.workspace.plant(mutant.path, content)
            if self.workspace.assembly(mutant.path) == before:
                raise _EquivalentError
        elif mutant.path.endswith(".py"):
            try:
                compile(content, mutant.path, "exec")
            except SyntaxError as error:
                raise BuildError(str(error)) from None
        self.workspace.plant(mutant.path, content)

    def _native(self, trial: _Trial, kind: str, units: Mapping[str, Mapping[str, float]]) -> bool:
        """Return whether a native program found the mutant, the quickest one first."""
        seconds = {name: tests[name] for name, tests in units.items()}
        for name in sorted(seconds, key=seconds.__getitem__):
            if trial.left_s < 0:
                return False
            program = self.workspace.program(kind, name)
            self.workspace.build(program)
            trial.tests += kind == "asan"  # do not count the runs under the thread sanitizer a second time
            command = [*(self.fixed if kind == "tsan" else ()), program]
            limit = PROGRAM_PATIENCE * seconds[name] + PROGRAM_LEAST_S
            begin = time.monotonic()
            ended = run_alone(command, limit, cwd=self.workspace.tree, env=ASAN | TSAN)
            if ended.status != 0:  # another run may have delayed it
                ended = run_alone(command, limit, cwd=self.workspace.tree, env=ASAN | TSAN)
            trial.left_s -= time.monotonic() - begin
            if ended.status != 0:
                outcome = Outcome.TIMED_OUT if ended.status is None else Outcome.FOUND
                return trial.end(outcome, f"{name} ({kind})", ended.output)
        return False

    def _unless_without(self, trial: _Trial, mutant: Mutant, source: bytes) -> None:
        """Withdraw the result if the thread sanitizer complains without the fault, too."""
        name = trial.by.partition(" ")[0]
        self.workspace.plant(mutant.path, source)
        sound = _Trial(self.cap_s)
        if self._native(sound, "tsan", {name: {name: self.reach.units[name].tests[name]}}):
            trial.end(Outcome.SURVIVED, "", "")
        self.workspace.plant(mutant.path, mutant.apply(source))

    def _pytest(self, trial: _Trial, units: Mapping[str, Mapping[str, float]], *, build: bool) -> None:
        """Look for the mutant by pytest."""
        if build and units:
            self.workspace.build("extensions")
        tests = in_turn(units, trial.left_s / PYTEST_PATIENCE)
        while tests and trial.left_s > 0:
            results, ended = run_tests(self.workspace, tests, trial.left_s, *FIRST)
            trial.left_s -= sum(result.seconds for result in results)
            trial.tests += len(results)
            failed = next((result for result in results if not result.passed), None)
            if failed is not None:
                again, ended = run_tests(self.workspace, [failed.test], self.cap_s, *FIRST)
                if ended.status == 0 and again:  # it had been delayed
                    tests = tests[tests.index(failed.test) + 1 :]
                    continue
                trial.end(Outcome.FOUND, failed.test, failed.report)
            elif ended.status is None:
                trial.end(Outcome.TIMED_OUT, tests[min(len(results), len(tests) - 1)], ended.output)
            elif ended.status not in (0, 5):  # 5: no test was collected
                trial.end(Outcome.FOUND, f"pytest ended with {ended.status}", ended.output)
            return


class _EquivalentError(Exception):
    """The compiler produces the same code with and without the fault."""
