"""Programs that tests run to their end, with all that these start."""

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
    """Run a program that is given nothing to read: what it says, what it complains of, and its exit status.

    Where it does not end, or the test does not wait for it, what it started is killed with it.

    :raises TimeoutError: it, or what it started and left its output to, did not end in that time.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, process_group=0
    ) as process:
        try:
            output, complaints = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said, complained = process.communicate(timeout=10)  # what came before that
            raise TimeoutError(
                f"{command} did not end within {timeout_s:g} s. It said:\n{said}\nand complained:\n{complained}"
            ) from None
    return subprocess.CompletedProcess(command, process.returncode, output, complaints)


def wait_for_ends(pids: Iterable[int]) -> None:
    """Wait until processes have ended, be it that nobody has asked for their status yet.

    :raises AssertionError: one did not end in time.
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
