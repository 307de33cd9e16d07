"""The tests of `distributed`, with this backend and with tcp beside it, and a table of the differences.

    python tests/distributed/suite.py CHECKOUT [MODULE ...]

CHECKOUT is a working copy of the repository of `distributed`: its wheel has no tests. They are copied into the
environment of this Python, beside the package, where they expect their certificates.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
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
DIFFERENCES = Path(__file__).with_name("differences.toml")
_LIMIT_S = 3600  # of a module


def copy_tests(checkout: Path) -> Path:
    """Copy all folders of tests into the installed package, and return the package's folder."""
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
    :returns: by name of the test, ``"passed"``, ``"failed"`` or ``"skipped"``; a file that does not end is one failure.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(checkout / "conftest.py", Path(folder, "conftest_of_distributed.py"))
        shutil.copy(checkout / "pyproject.toml", folder)
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest_of_distributed", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-o", "timeout_method=signal", "-o", "addopts=-p no:asyncio", "--color=no"]
        command += ["--rootdir", folder, "-c", f"{folder}/pyproject.toml", f"--junitxml={report}", str(tests)]
        env = {**os.environ, "DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME": scheme, "PYTHONPATH": folder}
        print(f"==== {tests.stem} with {scheme}", flush=True)
        try:
            subprocess.run(command, cwd=folder, env=env, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            print(f"{tests.stem} did not end within {_LIMIT_S} s")
        return parse(report) if report.exists() else {f"{tests.stem}": "failed"}


def parse(report: Path) -> dict[str, str]:
    """Return the outcome of each test in a report in the format of JUnit."""
    found: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if found.get(name) != "failed":  # a test whose teardown fails is reported twice
            found[name] = outcome
    return found


def compare(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of the tests that fail with this backend, but not with tcp."""
    return [name for name, outcome in ours.items() if outcome == "failed" != theirs.get(name, "passed")]


def main(checkout: Path, *modules: str) -> int:
    """Run the modules, print the table, and return the number of differences without a reason."""
    package = copy_tests(checkout)
    reasons = tomllib.loads(DIFFERENCES.read_text())
    lines, unknown = [], 0
    for module in modules or MODULES:
        tests = min(package.glob(f"**/tests/{module}.py"), key=lambda path: len(path.parts))
        theirs, ours = (outcomes(checkout, tests, scheme) for scheme in (THEIRS, OURS))
        different = compare(ours, theirs)
        counts = [sum(each == "passed" for each in found.values()) for found in (theirs, ours)]
        lines.append(f"| `{module}` | {counts[0]} of {len(theirs)} | {counts[1]} of {len(ours)} | {len(different)} | |")
        for name in different:
            reason = reasons.get(name.partition("[")[0])
            unknown += reason is None
            lines.append(f"| `{name}` | {theirs.get(name, 'missing')} | failed | | {reason or 'UNKNOWN'} |")
    print("| test | tcp | aioverbs | fail with aioverbs only | reason |\n|---|---|---|---|---|", *lines, sep="\n")
    return unknown


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]).resolve(), *sys.argv[2:]) else 0)
