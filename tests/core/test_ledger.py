"""The ledger check fails the test that leaks a handle, and no other test."""

import subprocess
import sys
from pathlib import Path

import pytest

from aioverbs._core.handles import handles
from tests.conftest import ROOT
from tests.pace import patience

INNER = """
import pytest

from aioverbs._core.handles import handles
from aioverbs._core.software import software

pytestmark = pytest.mark.usefixtures("aioverbs_ledger")

def test_leaks() -> None:
    cq = handles.CompletionQueue(software.Context.open(execution="thread"), 1)

def test_is_not_blamed() -> None:
    assert handles.open_handles() == []

def test_fails_and_leaks() -> None:
    handles.ProtectionDomain(software.Context.open())
    raise AssertionError("the one reason")

def test_is_not_blamed_either() -> None:
    assert handles.open_handles() == []
"""


@pytest.mark.timeout(patience(180))
def test_a_leak_is_an_error_of_its_test_alone(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    options = ["-p", "aioverbs.testing", "-p", "no:cacheprovider", "-rA"]
    run = f"import sys, pytest; sys.path.append({str(ROOT)!r}); sys.exit(pytest.main({options!r}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=patience(150)
    )
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = {line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL", "ERROR"))}
    assert outcomes == {
        "PASSED test_inner.py::test_leaks",
        "ERROR test_inner.py::test_leaks",
        "PASSED test_inner.py::test_is_not_blamed",
        "FAILED test_inner.py::test_fails_and_leaks",
        "PASSED test_inner.py::test_is_not_blamed_either",
    }
    assert "left open: <Context of soft0>, <CompletionQueue of soft0>" in done.stdout


def test_every_test_has_the_ledger(request: pytest.FixtureRequest) -> None:
    assert "aioverbs_ledger" in request.fixturenames
    assert handles.open_handles() == []
