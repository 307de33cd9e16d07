"""Run programs until they end, and kill their children with them."""

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from tests.waiting import wait_until

__all__ = ["run", "wait_for_ends"]


def run(
    command: Sequence[str], timeout_s: float, *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program without input; return its output, its errors and its exit status.

    If the program exceeds its time limit, or the wait for it is interrupted, its whole process group is killed.

    :param timeout_s: time limit in seconds.
    :raises TimeoutError: the program, or a child that inherited its output, did not end in time.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, process_group=0
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output, errors = process.communicate(timeout=10)  # output before the kill
            raise TimeoutError(
                f"{command} did not end within {timeout_s:g} s. Its output:\n{output}\nIts errors:\n{errors}"
            ) from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def wait_for_ends(pids: Iterable[int]) -> None:
    """Wait until processes have ended or are zombies.

    :raises AssertionError: a process did not end in time.
    """
    left = set(pids)

    def all_have_ended() -> bool:
        left.difference_update([pid for pid in left if _has_ended(pid)])
        return not left

    wait_until(all_have_ended, 30)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
