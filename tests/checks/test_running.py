"""`tests.running.run` kills a program that exceeds its time limit, with the program's children."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pace import patience
from tests.running import run
from tests.waiting import wait_until

# Program with a child that inherits its output and ends only when killed.
STARTS = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
"""


def python(body: str) -> list[str]:
    return [sys.executable, "-P", "-c", textwrap.dedent(body)]


def ends(process_id: str) -> bool:
    """Return whether a process ends soon; works for processes that are no children of this one."""
    end = time.monotonic() + patience(10)
    while (alive := _is_running(process_id)) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive


def _is_running(process_id: str) -> bool:
    try:
        return Path("/proc", process_id, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_output_and_exit_status(tmp_path: Path) -> None:
    body = "import os, sys; print(os.getcwd(), os.environ, sys.stdin.read()); sys.exit('so')"
    done = run(python(body), patience(50), env={"ONLY": "this"}, cwd=tmp_path)
    assert done.stdout.startswith(str(tmp_path))
    assert "'ONLY': 'this'" in done.stdout
    assert "'PATH'" not in done.stdout
    assert (done.stderr, done.returncode) == ("so\n", 1)


@pytest.mark.parametrize("after", ["time.sleep(600)", "pass"], ids=["hangs", "leaves a child"])
def test_a_program_that_exceeds_its_limit_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Wait for the program's first output before its time limit starts, so that a slow start does not matter."""

    def when_begun(process: "subprocess.Popen[str]", **limit: Any) -> Any:
        wait_until((tmp_path / "begun").exists, 50)
        return communicate(process, **limit)

    communicate: Callable[..., Any] = subprocess.Popen.communicate
    monkeypatch.setattr(subprocess.Popen, "communicate", when_begun)
    with pytest.raises(TimeoutError, match=r"did not end within \S+ s\. Its output:\n\d+\n") as caught:
        run(python(f"{STARTS}    open('begun', 'x').close(); {after}\n"), patience(0.2), cwd=tmp_path)
    assert ends(str(caught.value).split("Its output:\n")[1].split()[0])


def test_an_interrupted_run_kills_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(BaseException):
        pass

    def interrupted(process: "subprocess.Popen[str]", **_: object) -> None:
        assert process.stdout is not None
        output.append(process.stdout.readline())
        raise Interrupted

    output: list[str] = []
    communicate: Callable[..., None] = interrupted
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(Interrupted):
        run(python(f"{STARTS}    time.sleep(600)\n"), patience(50))
    assert ends(output[0].strip())
