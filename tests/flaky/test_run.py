"""`run.py` as started by `nox -s flaky`, on a test suite with a flaky test."""

import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.flaky.disturbances import Stopper
from tests.flaky.results import passes_in_a_row, read_results
from tests.pace import patience
from tests.running import run, wait_for_ends
from tests.waiting import wait_until

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(240)]  # starts pytest several times

CONFTEST = f"""
import sys
sys.path.append({str(ROOT)!r})
pytest_plugins = ["tests.flaky.plugin"] if "AIOVERBS_TEST_ROUND" in __import__("os").environ else []
"""
PASSING = "".join(f"def test_passes_{number}(): pass\n" for number in range(20))
FAILS_AT_FIRST = """
from pathlib import Path

def test_fails_at_first():
    before = Path({folder!r}, "before")
    there = before.exists()
    before.touch()
    assert there, "for the first time"
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = stops_processes\n")
    (folder / "test_passing.py").write_text(PASSING)
    below = folder / "below"
    below.mkdir()
    (below / "conftest.py").touch()  # if several folders have such a file, pytest calls some hooks of one of them only
    (below / "test_failing.py").write_text(FAILS_AT_FIRST.format(folder=str(tmp_path)))
    return folder


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "AIOVERBS_TEST_ROUND"}
# Plugins that this suite does not need are not loaded, to save time.
ENVIRONMENT |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}


def command(suite: Path, *arguments: str) -> list[str]:
    results = suite.parent / "results.jsonl"
    script = str(ROOT / "tests/flaky/run.py")
    return [sys.executable, "-P", script, "--results", str(results), *arguments, "--", str(suite)]


def flaky(suite: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(command(suite, "--busy", "0", "--workers", "2", *arguments), patience(200), env=ENVIRONMENT, cwd=suite)


def test_runs_resume_until_each_test_has_passed(suite: Path) -> None:
    results = suite.parent / "results.jsonl"
    first = flaky(suite, "--passes", "1", "--minutes", "3", "--seed", "1")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "21 tests have passed 1 times in a row or more" in first.stdout
    assert "failed 1 of 2 times, passed 1 times since: below/test_failing.py::test_fails_at_first" in first.stdout
    collected = list(read_results(results))
    assert Counter(passes_in_a_row(collected).values()) == {1: 21}
    (failed,) = (result for result in collected if not result.passed)
    assert "for the first time" in failed.report
    names = [result.test.partition("::")[2] for result in collected if "passing" in result.test]
    assert names != sorted(names, key=PASSING.index), "the order is random"

    assert flaky(suite, "--passes", "1", "--minutes", "3").returncode == 0
    assert list(read_results(results)) == collected, "no test is left to run"

    none = flaky(suite, "--passes", "1", "--minutes", "0", "--fresh")
    assert (none.returncode, results.exists()) == (1, False)
    assert "21 tests have passed 0 times in a row" in none.stdout


def test_a_suite_that_cannot_be_collected_is_an_error(suite: Path) -> None:
    (suite / "test_passing.py").write_text("import there_is_no_such_module\n")
    done = flaky(suite, "--minutes", "1")
    assert done.returncode == 2
    assert "there_is_no_such_module" in done.stderr


def test_terminating_a_run_leaves_no_process(suite: Path) -> None:
    (suite / "test_passing.py").write_text("import time\ndef test_stays(): time.sleep(100)\n")
    with subprocess.Popen(
        command(suite, "--busy", "1", "--workers", "2", "--minutes", "3"), env=ENVIRONMENT, cwd=suite
    ) as process:
        try:
            runner = psutil.Process(process.pid)
            busy, workers = os.cpu_count() or 1, 2
            wait_until(lambda: len(runner.children(recursive=True)) == busy + 1 + workers, 60)
            started = runner.children(recursive=True)
        finally:
            process.terminate()
        assert process.wait(patience(20)) == 128 + signal.SIGTERM
    wait_for_ends(each.pid for each in started)


WITH_A_CHILD = textwrap.dedent("""
    import subprocess, sys
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin) as child:
        print(child.pid, flush=True)
""")


def test_descendants_are_stopped_and_continue(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_A_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        with Stopper(parent.pid, stop_s=0.02, pause_s=0.01, exempt=tmp_path, seed=1) as stopper:
            assert child in stopper.candidates()
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
            wait_until(lambda: stopper.stops > 3)
        assert child.status() != psutil.STATUS_STOPPED

        (tmp_path / str(child.pid)).touch()
        assert child not in stopper.candidates()
        (tmp_path / str(child.pid)).unlink()

        child.suspend()  # suspended by the test: the stopper must not resume it
        wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
        stopper.stop(child)
        assert child.status() == psutil.STATUS_STOPPED
        child.resume()
        parent.communicate("\n", timeout=patience(20))
        stopper.stop(child)  # must not fail for a process that has ended
