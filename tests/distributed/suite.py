"""The tests of `distributed`, with this backend and with tcp beside it, and a table of the differences.

    python tests/distributed/suite.py CHECKOUT [MODULE ...]

CHECKOUT is a working copy of the repository of `distributed`: its wheel has no tests. They are copied into the
environment of this Python, beside the package, where they expect their certificates. First, the checks that they
contain for any backend are made of this one, by test_comms_of_distributed.py.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
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


def outcomes(checkout: Path, tests: Path, scheme: str) -> dict[str, str]:
    """Run a file of tests.

    :param checkout: the checkout, whose configuration of pytest is used.
    :param tests: the file.
    :param scheme: scheme of addresses that have none.
    :returns: the outcome of each test, as from `parse`.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(checkout / "conftest.py", Path(folder, "conftest_of_distributed.py"))
        shutil.copy(checkout / "pyproject.toml", folder)
        report = Path(folder, "report.xml")
        command = [*PYTEST, "-p", "conftest_of_distributed", "-o", "timeout_method=signal"]
        command += ["-o", "addopts=-p no:asyncio", "--rootdir", folder, "-c", f"{folder}/pyproject.toml"]
        print(f"==== {tests.stem} with {scheme}", flush=True)
        settings = {"DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME": scheme, "PYTHONPATH": folder}
        run([*command, f"--junitxml={report}", str(tests)], Path(folder), settings)
        return parse(report, tests.stem)


def outcomes_of_checks() -> dict[str, str]:
    """Make the checks of any backend of this one, and return the outcome of each, as from `parse`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        print(f"==== {CHECKS.stem}", flush=True)
        run([*PYTEST, "--every-way", f"--junitxml={report}", str(CHECKS)], CHECKS.parents[2], {})
        return parse(report, CHECKS.stem)


def run(command: Sequence[str], folder: Path, settings: Mapping[str, str], limit_s: float = 3600) -> None:
    """Run a command, and kill all processes of its group that are left in the end, or when the time is over.

    :param command: the command.
    :param folder: working directory.
    :param settings: further environment variables.
    :param limit_s: limit in seconds.
    """
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, process_group=0)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{command[-1]} did not end within {limit_s} s")
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


def main(checkout: Path, *modules: str) -> int:
    """Make the checks, run the modules, print the table, and return the number of differences without a reason."""
    package = copy_tests(checkout)
    reasons = tomllib.loads(DIFFERENCES.read_text())
    checks = outcomes_of_checks()
    passed = sum(each == "passed" for each in checks.values())
    unknown = sum(each == "failed" for each in checks.values()) + (passed == 0)
    lines = [f"| `{CHECKS.stem}` | | {passed} of {len(checks)} | {unknown} | |"]
    for module in modules or MODULES:
        tests = min(package.glob(f"**/tests/{module}.py"), key=lambda path: len(path.parts))
        theirs, ours = (outcomes(checkout, tests, scheme) for scheme in (THEIRS, OURS))
        further, count = tabulate(module, theirs, ours, reasons)
        lines += further
        unknown += count
    print("| test | tcp | aioverbs | only with tcp | reason |\n|---|---|---|---|---|", *lines, sep="\n")
    return unknown


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]).resolve(), *sys.argv[2:]) else 0)
