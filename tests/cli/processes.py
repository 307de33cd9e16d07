"""Run the command as a process, and read its output."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tests.pace import patience

__all__ = [
    "COMMAND",
    "environment",
    "parse_lines",
    "ping_server",
    "read_line",
    "run_command",
    "run_on_terminal",
    "start_command",
    "stop",
]

COMMAND = [sys.executable, "-P", "-m", "aioverbs.cli"]
PATIENCE_S = 30


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `variables` added; it makes a child import the same aioverbs."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def start_command(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """Start the command with warnings as errors, on the software device unless AIOVERBS_DEVICE is given."""
    env = environment(**{"AIOVERBS_DEVICE": "soft0", "PYTHONWARNINGS": "error", **variables})
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*COMMAND, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def run_command(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the command until it ends."""
    with start_command(*arguments, **variables) as process:
        try:
            output, errors = process.communicate(timeout=patience(PATIENCE_S))
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run_on_terminal(command: list[str], **variables: str) -> str:
    """Run a command with a terminal as its input and output, and return its output."""
    ours, theirs = pty.openpty()
    env = environment(**variables)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env):
        os.close(theirs)
        parts = []
        with contextlib.suppress(OSError):  # reading fails when the last writer has closed the terminal
            while part := os.read(ours, 4096):
                parts.append(part)
    os.close(ours)
    return b"".join(parts).decode()


def read_line(process: "subprocess.Popen[str]") -> str:
    """Read one line from a process, and nothing beyond it, so that `communicate` works afterwards.

    A process that prints no line in time is killed.
    """
    assert process.stdout is not None
    watch = threading.Timer(patience(PATIENCE_S), process.kill)
    watch.start()
    line = b""
    try:
        while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
            line += byte
    finally:
        watch.cancel()
    return line.decode()


def stop(process: "subprocess.Popen[str]", number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """Send a signal to a process; return its exit status, and the rest of its output and errors."""
    process.send_signal(number)
    output, errors = process.communicate(timeout=patience(PATIENCE_S))
    return process.returncode, output, errors


def parse_lines(text: str) -> list[dict[str, Any]]:
    """Parse lines of JSON."""
    return [json.loads(line) for line in text.splitlines()]


@contextlib.contextmanager
def ping_server(
    *arguments: str, host: str = "127.0.0.1", **variables: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a ping server; yield its process and its address."""
    with start_command("ping", "serve", host, "--json", *arguments, **variables) as process:
        try:
            result = json.loads(read_line(process))
            assert result["event"] == "listening"
            yield process, result["addresses"][0]
        finally:
            process.kill()
            process.communicate()
