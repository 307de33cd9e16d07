"""The tests of `distributed`, with this backend and with tcp beside it, and a table of the differences.

    python tests/distributed/suite.py CHECKOUT [MODULE ...] --results FOLDER [--minutes 120] [--fresh]

CHECKOUT is a working copy of the repository of `distributed`: its wheel has no tests. They are copied into the
environment of this Python, beside the package, where they expect their certificates. First, the checks that they
contain for any backend are made of this one, by test_comms_of_distributed.py.

FOLDER keeps the outcomes of each file with each backend. A run continues where the previous run ended, and `--fresh`
deletes the outcomes first.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

MODULES = (
    "test_comms",
    "test_core",
    "test_batched",
    "test_utils_comm",
    "test_failed_workers",
    "test_nanny",
    "test_steal",
    "test_worker",
    "test_scheduler",
    "test_client",
    "test_shuffle",
)
OURS, THEIRS = "aioverbs", "tcp"
CHECKS = Path(__file__).with_name("test_comms_of_distributed.py")
DIFFERENCES = Path(__file__).with_name("differences.toml")
FILE_LIMIT_S = 2400  # for a file of tests; each test has a limit of its own, of 300 s
PYTEST = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--color=no"]


def copy_tests(checkout: Path) -> Path:
    """Copy all folders of tests into the installed package, and return the package's folder."""
    if not (checkout / "distributed/comm/tests/test_comms.py").exists():
        raise SystemExit(f"{checkout} contains no tests of distributed: git clone https://github.com/dask/distributed")
    found = importlib.util.find_spec("distributed")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    for tests in checkout.glob("distributed/**/tests"):
        shutil.copytree(tests, package / tests.relative_to(checkout / "distributed"), dirs_exist_ok=True)
    return package


def outcomes(checkout: Path, tests: Path, scheme: str, limit_s: float) -> dict[str, str] | None:
    """Run a file of tests.

    :param checkout: the checkout, whose configuration of pytest is used.
    :param tests: the file.
    :param scheme: scheme of addresses that have none.
    :param limit_s: limit in seconds.
    :returns: the outcome of each test, as from `parse`; None if the time was over before the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(checkout / "conftest.py", Path(folder, "conftest_of_distributed.py"))
        shutil.copy(checkout / "pyproject.toml", folder)
        report = Path(folder, "report.xml")
        command = [*PYTEST, "-p", "conftest_of_distributed", "-o", "timeout_method=signal"]
        command += ["-o", "addopts=-p no:asyncio", "--rootdir", folder, "-c", f"{folder}/pyproject.toml"]
        print(f"==== {tests.stem} with {scheme}", flush=True)
        settings = {"DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME": scheme, "PYTHONPATH": folder}
        has_ended = run([*command, f"--junitxml={report}", str(tests)], Path(folder), settings, limit_s)
        return parse(report, tests.stem) if has_ended else None


def outcomes_of_checks(limit_s: float) -> dict[str, str] | None:
    """Make the checks of any backend of this one.

    :param limit_s: limit in seconds.
    :returns: the outcome of each check, as from `parse`; None if the time was over before the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        print(f"==== {CHECKS.stem}", flush=True)
        command = [*PYTEST, "--every-way", f"--junitxml={report}", str(CHECKS)]
        has_ended = run(command, CHECKS.parents[2], {}, limit_s)
        return parse(report, CHECKS.stem) if has_ended else None


def run(command: Sequence[str], folder: Path, settings: Mapping[str, str], limit_s: float) -> bool:
    """Run a command, and kill all processes of its group that are left in the end, or when the time is over.

    :param command: the command.
    :param folder: working directory.
    :param settings: further environment variables.
    :param limit_s: limit in seconds.
    :returns: whether the command ended in time.
    """
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, process_group=0)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{command[-1]} did not end within {limit_s:.0f} s", flush=True)
        return False
    else:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def parse(report: Path, module: str) -> dict[str, str]:
    """Return the outcome of each test in a report in the format of JUnit: ``"passed"``, ``"failed"``, ``"skipped"`` or
    ``"xfailed"``. There are none if the run made no report, because it was killed or could not begin.

    :param report: the file.
    :param module: name of the file with the tests, which the names of the tests begin with.
    """
    found: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():
        children = {child.tag: child for child in case}
        outcome = "passed"
        if not children.keys().isdisjoint(("failure", "error")):
            outcome = "failed"
        elif "skipped" in children:
            outcome = "xfailed" if children["skipped"].get("type") == "pytest.xfail" else "skipped"
        group = case.get("classname", "").rpartition(".")[2]
        name = "::".join((module, *([group] if group not in ("", module) else []), case.get("name", "")))
        if found.get(name) != "failed":  # a test whose teardown fails is reported twice
            found[name] = outcome
    return found


def compare(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of the tests that do not pass with this backend, but do with tcp, or fail with this one only."""
    return [
        name
        for name in sorted({*ours, *theirs})
        if (theirs.get(name) == "passed" and ours.get(name, "missing") in ("failed", "skipped", "missing"))
        or (ours.get(name) == "failed" != theirs.get(name))
    ]


def tabulate(
    module: str, theirs: Mapping[str, str], ours: Mapping[str, str], reasons: Mapping[str, str]
) -> tuple[list[str], int]:
    """Return the lines of a module in the table, and the number of differences without a reason.

    :param module: name of the module.
    :param theirs: outcomes with tcp. That none passed is a difference: nothing was compared then.
    :param ours: outcomes with this backend.
    :param reasons: reasons by name of the test, without parameters.
    """
    different = compare(ours, theirs)
    passed = [sum(each == "passed" for each in found.values()) for found in (theirs, ours)]
    unknown = int(not passed[0])
    note = "" if passed[0] else "NOTHING PASSED WITH TCP"
    lines = [f"| `{module}` | {passed[0]} of {len(theirs)} | {passed[1]} of {len(ours)} | {len(different)} | {note} |"]
    for name in different:
        reason = reasons.get(name.partition("[")[0])
        unknown += reason is None
        outcome = [found.get(name, "missing") for found in (theirs, ours)]
        lines.append(f"| `{name}` | {outcome[0]} | {outcome[1]} | | {reason or 'UNKNOWN'} |")
    return lines, unknown


class Results:
    """Outcomes of files that earlier runs have run, and the time that is left for others.

    :param folder: the folder that keeps the outcomes.
    :param minutes: time for this run.
    """

    def __init__(self, folder: Path, minutes: float) -> None:
        self._folder = folder
        self._deadline = time.monotonic() + 60 * minutes
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, measure: Callable[[float], dict[str, str] | None]) -> dict[str, str] | None:
        """Return the outcomes of a file: those of an earlier run, or else of a run now, if there is time.

        A file that takes longer than `FILE_LIMIT_S` has no outcomes. One that takes longer than the time that is left
        is run again by the next run.

        :param name: name of the file with outcomes.
        :param measure: called with a limit in seconds; returns the outcomes, or None if the time was over.
        :returns: the outcomes; None if there was no time.
        """
        kept = self._folder / f"{name}.json"
        if kept.exists():
            return dict(json.loads(kept.read_text()))
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return None
        found = measure(min(left_s, FILE_LIMIT_S))
        if found is None and left_s < FILE_LIMIT_S:
            return None
        kept.write_text(json.dumps(found or {}))
        return found or {}


def main(checkout: Path, modules: Sequence[str], results: Results) -> int:
    """Make the checks, run the modules, print the table, and return the number of differences without a reason, and of
    files for which no time was left.
    """
    package = copy_tests(checkout)
    reasons = tomllib.loads(DIFFERENCES.read_text())
    lines = []
    unknown = left = 0
    checks = results.get(CHECKS.stem, outcomes_of_checks)
    if checks is None:
        left += 1
    else:
        passed = sum(each == "passed" for each in checks.values())
        unknown = sum(each == "failed" for each in checks.values()) + (passed == 0)
        lines.append(f"| `{CHECKS.stem}` | | {passed} of {len(checks)} | {unknown} | |")
    for module in modules or MODULES:
        tests = min(package.glob(f"**/tests/{module}.py"), key=lambda path: len(path.parts))
        theirs, ours = (
            results.get(f"{module}-{scheme}", partial(outcomes, checkout, tests, scheme)) for scheme in (THEIRS, OURS)
        )
        if theirs is None or ours is None:
            left += 1
            continue
        further, count = tabulate(module, theirs, ours, reasons)
        lines += further
        unknown += count
    print("| test | tcp | aioverbs | only with tcp | reason |\n|---|---|---|---|---|", *lines, sep="\n")
    if left:
        print(f"\nThere was no time for {left} files: run this again to continue.")
    return unknown + left


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="working copy of the repository of distributed")
    parser.add_argument("modules", nargs="*", metavar="module", help="name of a file with tests")
    parser.add_argument("--results", type=Path, required=True, help="folder that keeps outcomes")
    parser.add_argument("--minutes", type=float, default=120, help="time for this run")
    parser.add_argument("--fresh", action="store_true", help="forget the outcomes of earlier runs")
    options = parser.parse_intermixed_args()
    if options.fresh:
        shutil.rmtree(options.results, ignore_errors=True)
    sys.exit(main(options.checkout.resolve(), options.modules, Results(options.results, options.minutes)) != 0)
