"""Run programs that may be broken: one at a time, and end all that they started with them."""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Ended", "become_subreaper", "run_alone"]

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a program.

    Attributes:

            status: exit status; negative if a signal ended the program; None if it did not end in time.
            output: standard output and errors.
    """

    status: int | None
    output: str


def become_subreaper() -> None:
    """Make this process adopt descendants whose parent has ended, so that it can end them.

    :raises OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def run_alone(command: Sequence[str], limit_s: float, *, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run a program without input, then end all descendants of this process.

    :param limit_s: when to end it, in seconds.
    :param env: variables in addition to those of this process.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # in the same session, since priorities are by session
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_descendants()
            process.wait()
        output.seek(0)
        return Ended(status, output.read())


def _end_descendants() -> None:
    """Kill all descendants, including those adopted meanwhile, and reap them."""
    this = psutil.Process()
    while descendants := this.children(recursive=True):
        for each in descendants:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(descendants, timeout=10)
