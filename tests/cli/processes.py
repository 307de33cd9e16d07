"""The command as a process, and what it says line by line."""

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

__all__ = ["COMMAND", "ask", "ended", "environment", "line_of", "lines", "on_a_terminal", "server", "started"]

COMMAND = [sys.executable, "-P", "-m", "aioverbs.cli"]
PATIENCE_S = 30


def environment(**variables: str) -> dict[str, str]:
    """This process's, with what else is given; aioverbs is found where it is here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def started(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """Run the command, warnings being errors, on the software device where nothing else is said."""
    env = environment(**{"AIOVERBS_DEVICE": "soft0", "PYTHONWARNINGS": "error", **variables})
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*COMMAND, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def ask(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run it to its end."""
    with started(*arguments, **variables) as process:
        try:
            output, complaints = process.communicate(timeout=patience(PATIENCE_S))
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, complaints)


def on_a_terminal(command: list[str], **variables: str) -> str:
    """What a command prints to its end where its input and output are a terminal."""
    ours, theirs = pty.openpty()
    env = environment(**variables)
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env):
        os.close(theirs)
        parts = []
        with contextlib.suppress(OSError):  # the last one who could write is gone
            while part := os.read(ours, 4096):
                parts.append(part)
    os.close(ours)
    return b"".join(parts).decode()


def line_of(process: "subprocess.Popen[str]") -> str:
    """Its next line, and nothing beyond, which is for `communicate`; what does not come is not waited for for ever."""
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


def ended(process: "subprocess.Popen[str]", number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """Send it a signal: its exit status then, and what else it said."""
    process.send_signal(number)
    output, complaints = process.communicate(timeout=patience(PATIENCE_S))
    return process.returncode, output, complaints


def lines(text: str) -> list[dict[str, Any]]:
    """Of JSON."""
    return [json.loads(line) for line in text.splitlines()]


@contextlib.contextmanager
def server(*arguments: str, host: str = "127.0.0.1", **variables: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server of pings, and where it is."""
    with started("ping", "serve", host, "--json", *arguments, **variables) as process:
        try:
            told = json.loads(line_of(process))
            assert told["event"] == "listening"
            yield process, told["addresses"][0]
        finally:
            process.kill()
            process.communicate()
