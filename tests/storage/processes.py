"""Servers and clients as processes, started by their commands."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner
from storage_server.commands import main

from tests.conftest import ROOT
from tests.pace import patience

__all__ = ["Process", "command", "run", "run_in_process", "served"]

START_S = 30


def command(*arguments: object) -> list[str]:
    """Return the command line for the example."""
    return [sys.executable, "-W", "error", str(ROOT / "examples" / "storage_server"), *map(str, arguments)]


def _without_device_notes(complaints: str) -> str:
    """Drop the note on devices that lack native features, which is logged once."""
    lines = complaints.splitlines(keepends=True)
    return "".join(each for each in lines if "not native from here on" not in each)


def run(*arguments: object, device: str = "soft0", **env: object) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end in a process."""
    settings = {**os.environ, "AIOVERBS_DEVICE": device, **{name: str(value) for name, value in env.items()}}
    with subprocess.Popen(
        command(*arguments), env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            output, complaints = process.communicate(timeout=patience(60))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # including the processes that it started
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, _without_device_notes(complaints))


class CommandResult(NamedTuple):
    """Result of a command."""

    status: int
    output: str
    complaints: str


def run_in_process(*arguments: object, device: str = "soft0", **env: object) -> CommandResult:
    """Run a command to its end in this process, which is faster than a new process."""
    settings = {"AIOVERBS_DEVICE": device, **{name: str(value) for name, value in env.items()}}
    done = CliRunner().invoke(main, [*map(str, arguments)], env=settings)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return CommandResult(done.exit_code, done.stdout, _without_device_notes(done.stderr))


class Process:
    """A server process."""

    def __init__(self, process: "subprocess.Popen[str]", root: Path, device: str) -> None:
        assert process.stdout is not None
        self.process = process
        self.root = root
        self.output_lines: list[str] = []
        while not self.output_lines or not self.output_lines[-1].startswith("serving"):
            line = process.stdout.readline()
            assert line, f"the server ended: {process.communicate()[1]}"
            self.output_lines.append(line.strip())
        self.host, _, port = self.output_lines[-1].split()[-1].rpartition(":")
        self.port = int(port)
        self.device = device
        self.env = {"STORAGE_AT": f"{self.host}:{port}", "STORAGE_TOKEN_FILE": str(root / "owner.token")}

    def ask(self, *arguments: object, **env: object) -> CommandResult:
        """Run a client command on this server, in the test process."""
        return run_in_process(*arguments, device=self.device, **{**self.env, **env})

    def done(self, *arguments: object, **env: object) -> str:
        """Run a client command that must succeed; return its output."""
        done = self.ask(*arguments, **env)
        assert done.status == 0, done.complaints
        return done.output

    def fails(self, *arguments: object, **env: object) -> str:
        """Run a client command that must fail; return its error message."""
        done = self.ask(*arguments, **env)
        assert done.status in (1, 2), done.output
        assert "Error: " in done.complaints
        return done.complaints

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def served(root: Path, *options: object, device: str = "soft0", recovers: bool = False) -> Iterator[Process]:
    """Run a server. Unless it was killed, end it by SIGTERM and check that it reported no errors.

    :param recovers: whether it may report that it removes unfinished volumes of an earlier server.
    """
    env, pipe = {**os.environ, "AIOVERBS_DEVICE": device}, subprocess.PIPE
    with subprocess.Popen(command("serve", root, *options), env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield Process(process, root, device)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                complaints = _without_device_notes(process.communicate(timeout=patience(START_S))[1])
                if recovers:
                    complaints = "".join(each for each in complaints.splitlines() if "was interrupted" not in each)
                assert (process.returncode, complaints) == (0, "")
        except BaseException:
            process.kill()
            print(process.communicate()[1])
            raise
        finally:
            process.kill()
