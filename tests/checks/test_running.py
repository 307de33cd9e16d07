"""What tests run is gone when it took too long, with what it started."""

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

# Its child has its output, as children have, and ends when it is killed.
STARTS = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
"""


def python(body: str) -> list[str]:
    return [sys.executable, "-P", "-c", textwrap.dedent(body)]


def ends(process_id: str) -> bool:
    """Whether a process that is not ours to wait for is gone before long."""
    end = time.monotonic() + patience(10)
    while (alive := _is_running(process_id)) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive


def _is_running(process_id: str) -> bool:
    try:
        return Path("/proc", process_id, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_it_says_and_how_it_ends(tmp_path: Path) -> None:
    body = "import os, sys; print(os.getcwd(), os.environ, sys.stdin.read()); sys.exit('so')"
    done = run(python(body), patience(50), env={"ONLY": "this"}, cwd=tmp_path)
    assert done.stdout.startswith(str(tmp_path))
    assert "'ONLY': 'this'" in done.stdout
    assert "'PATH'" not in done.stdout
    assert (done.stderr, done.returncode) == ("so\n", 1)


@pytest.mark.parametrize("after", ["time.sleep(600)", "pass"], ids=["hangs", "leaves a child"])
def test_one_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Its time counts from when it has said something, however long that took."""

    def when_begun(process: "subprocess.Popen[str]", **limit: Any) -> Any:
        wait_until((tmp_path / "begun").exists, 50)
        return communicate(process, **limit)

    communicate: Callable[..., Any] = subprocess.Popen.communicate
    monkeypatch.setattr(subprocess.Popen, "communicate", when_begun)
    with pytest.raises(TimeoutError, match=r"did not end within \S+ s\. It said:\n\d+\n") as caught:
        run(python(f"{STARTS}    open('begun', 'x').close(); {after}\n"), patience(0.2), cwd=tmp_path)
    assert ends(str(caught.value).split("It said:\n")[1].split()[0])


def test_one_that_the_test_does_not_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(BaseException):
        pass

    def interrupted(process: "subprocess.Popen[str]", **_: object) -> None:
        assert process.stdout is not None
        told.append(process.stdout.readline())
        raise Interrupted

    told: list[str] = []
    communicate: Callable[..., None] = interrupted
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(Interrupted):
        run(python(f"{STARTS}    time.sleep(600)\n"), patience(50))
    assert ends(told[0].strip())
