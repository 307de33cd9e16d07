"""examples/rc_pingpong.py with rdma-core's `ibv_rc_pingpong` as the peer, in both roles."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.listening import free_port, listens
from tests.rdma.seam import rdma_devices

pytestmark = [pytest.mark.rdma, pytest.mark.rdma_all, pytest.mark.timeout(240)]

GID_INDEX = os.environ.get("AIOVERBS_RDMA_GID_INDEX", "1")
OURS = [sys.executable, "-W", "error", str(ROOT / "examples" / "rc_pingpong.py"), "--timeout", "60"]
THEIRS = ["ibv_rc_pingpong"]
NOT_NATIVE = "not native from here on"  # logged for devices without native thread domains
PATIENCE_S = 90

# Options of both: message size, path MTU, number of messages. Options of rdma-core's program: polling and checking
# received data, or sleeping.
SHAPES = [
    pytest.param((4096, 1024, 200), [*THEIRS, "-c"], id="4096"),
    pytest.param((1, 256, 100), [*THEIRS, "-e"], id="1"),
    pytest.param((100_000, 4096, 30), [*THEIRS, "-e"], id="100000"),
]


class ProgramPair:
    """Two programs: a server, then a client."""

    def __init__(self, waiting: list[str], coming: list[str], *options: str) -> None:
        devices = rdma_devices()
        port = free_port()
        self.programs: list[subprocess.Popen[str]] = []
        self._start(waiting, devices[0], port, options)
        deadline = time.monotonic() + PATIENCE_S
        while not listens(port):
            assert self.programs[0].poll() is None, self.programs[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self._start(coming, devices[-1], port, (*options, "localhost"))

    def _start(self, program: list[str], device: str, port: int, options: tuple[str, ...]) -> None:
        command = [*program, "-d", device, "-g", GID_INDEX, "-p", str(port), *options]
        pipe = subprocess.PIPE
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.programs.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=unbuffered))

    def result_of(self, which: int) -> tuple[str, str, int]:
        """Return output, errors and exit status of a program."""
        out, err = self.programs[which].communicate(timeout=PATIENCE_S)
        complaints = [line for line in err.splitlines() if NOT_NATIVE not in line]
        return out, "\n".join(complaints), self.programs[which].returncode

    def end(self) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()


@contextlib.contextmanager
def run_programs(waiting: list[str], coming: list[str], *options: str) -> Iterator[ProgramPair]:
    started = ProgramPair(waiting, coming, *options)
    try:
        yield started
    finally:
        started.end()


def _options(shape: tuple[int, int, int]) -> list[str]:
    return [part for flag, value in zip("smn", shape, strict=True) for part in (f"-{flag}", str(value))]


@pytest.mark.parametrize(("shape", "theirs"), SHAPES)
def test_our_server_with_rdma_core_client(shape: tuple[int, int, int], theirs: list[str]) -> None:
    size, _, count = shape
    with run_programs(OURS, theirs, *_options(shape)) as programs:
        out, err, status = programs.result_of(1)
        assert (err, status) == ("", 0)
        assert f"{2 * size * count} bytes in" in out
        out, err, status = programs.result_of(0)
        assert (err, status) == ("", 0)
        assert f"answered {count} messages" in out


@pytest.mark.parametrize(("shape", "theirs"), SHAPES)
def test_our_client_with_rdma_core_server(shape: tuple[int, int, int], theirs: list[str]) -> None:
    """Our program checks each returned message; all messages differ."""
    size, _, count = shape
    with run_programs(theirs, OURS, *_options(shape)) as programs:
        out, err, status = programs.result_of(1)
        assert (err, status) == ("", 0)
        assert re.search(rf"{2 * size * count} bytes in .*\n{count} iters in", out)
        out, err, status = programs.result_of(0)
        assert (err, status) == ("", 0)
        assert f"{count} iters in" in out


@pytest.mark.parametrize("role", ["answers", "asks"])
def test_a_killed_peer_ends_the_program(role: str) -> None:
    """With a send, a receive or both in flight, our program ends with an error."""
    ours = [*OURS, "--timeout", "10"]  # a receive in flight ends by this timeout
    waiting, coming, us = (ours, THEIRS, 0) if role == "answers" else (THEIRS, ours, 1)
    with run_programs(waiting, coming, "-n", "1000000") as programs:
        stdout = programs.programs[us].stdout
        assert stdout is not None
        assert any("queue pair" in line for line in stdout)  # connected
        time.sleep(0.5)
        programs.programs[1 - us].kill()
        _, err, status = programs.result_of(us)
        assert status == 1
        assert re.search("RETRY_EXC_ERR|WR_FLUSH_ERR|timed out", err)
