"""`aioverbs top` of real processes: those that are at work, die, stand still, and those that lie."""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aioverbs._monitoring.directory import MonitorDirectory
from aioverbs._monitoring.server import INTERVALS_S, VERSION
from aioverbs.cli import main, top, watching
from tests.cli.processes import COMMAND, ended, environment, line_of, started
from tests.pace import patience

KEYS = ["pid", "time_ns", "seconds", "truncated", "rates", "devices"]
NODE = ["id", "kind", "label", "state", "owner", "created", "native", "statistics", "rates", "children"]

PROGRAM = """
import asyncio, os, signal, sys
import aioverbs

async def main():
    access = aioverbs.AccessFlags.LOCAL_WRITE | aioverbs.AccessFlags.REMOTE_WRITE
    async with (
        aioverbs.open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.register(4096, access) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), access)
        far.connect(near.local_endpoint(), access)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
        print("ready", flush=True)
        while True:
            await near.write(region[:64], region.remote()[64:128])
            await asyncio.sleep(0.001)

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "monitor"
    monkeypatch.setenv("AIOVERBS_MONITOR_DIRECTORY", str(path))
    return path


@contextlib.contextmanager
def program(code: str = PROGRAM, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """One that is watched, and has said that it is ready."""
    env, pipe = environment(AIOVERBS_MONITOR="1", PYTHONWARNINGS="error", **variables), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-P", "-c", code], env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            said = line_of(process)
            if said != "ready\n":
                process.kill()
                pytest.fail(f"it said {said!r} and {process.communicate()[1]}")
            yield process
        finally:
            process.kill()
            process.communicate()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["top", *arguments])


@contextlib.contextmanager
def watching_it(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with started("top", *arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def nodes(branch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield branch
    for child in branch["children"]:
        yield from nodes(child)


# ---- Those that are at work


def test_once_for_programs() -> None:
    with program() as process:
        done = invoke(str(process.pid), "--once", "--json", "--interval", "1")
        assert (done.exit_code, done.stderr) == (0, "")
        (line,) = done.stdout.splitlines()
        told = json.loads(line)
        assert list(told) == KEYS
        assert told["pid"] == process.pid
        assert told["seconds"] > 0
        assert told["rates"]["operations"] > 0
        assert told["rates"]["bytes"] == pytest.approx(64 * told["rates"]["operations"], rel=0.5)
        (device,) = told["devices"]
        found = list(nodes(device))
        assert all(list(node) == NODE for node in found)
        working = [node for node in found if (node["rates"] or {}).get("bytes")]
        assert [node["kind"] for node in working] == ["QueuePair"]


def test_once_for_people() -> None:
    with program() as process:
        done = invoke(str(process.pid), "--once", "--interval", "0.2")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{process.pid}  {sys.executable} -P -c ")
    for text in ("ops/s", "Device soft0", "ResourceDomain", "CompletionQueue", "native", "1 MemoryRegion"):
        assert text in done.stdout


def test_a_line_for_each_sample_until_a_signal() -> None:
    with program() as process, watching_it(str(process.pid), "--json", "-i", "0.05") as viewer:
        times = [json.loads(line_of(viewer))["time_ns"] for _ in range(3)]
        assert times == sorted(times)
        status, _, complaints = ended(viewer)
        assert (status, complaints) == (0, "")
        assert process.poll() is None, "nobody is disturbed by the end of who looks"


def test_the_list() -> None:
    assert invoke().exit_code == 1
    with program() as first, program() as second:
        text = invoke().stdout
        assert text.splitlines()[0].split() == ["PID", "PROGRAM"]
        told = json.loads(invoke("--json").stdout)
        assert {each["pid"] for each in told["processes"]} == {first.pid, second.pid}
        for each in told["processes"]:
            assert list(each) == ["pid", "program", "problem"]
            assert sys.executable in each["program"]
            assert each["problem"] is None
            assert str(each["pid"]) in text
    done = invoke()
    assert (done.exit_code, done.stderr) == (1, "")
    assert "start one with AIOVERBS_MONITOR=1" in done.stdout


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with program() as process:
        for colours, variables in ((True, {"TERM": "xterm"}), (False, {"TERM": "xterm", "NO_COLOR": "1"})):
            text = on_a_terminal([*COMMAND, "top", str(process.pid), "-i", "0.05"], 3, variables)
            assert text.count("ResourceDomain") >= 3
            assert ("\x1b[1m" in text) is colours
            assert "\x1b[1A" in text, "it is drawn in its place"
            assert text.rstrip().endswith("\x1b[?25h"), "the cursor is back"


def on_a_terminal(command: list[str], frames: int, variables: dict[str, str]) -> str:
    """What is drawn there until somebody presses Ctrl-C."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    text = ""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "COLUMNS": "150", **variables}
    ) as process:
        os.close(theirs)
        watch = threading.Timer(patience(20), process.kill)
        watch.start()
        stopped = False
        while True:
            try:
                text += os.read(ours, 4096).decode(errors="replace")
            except OSError:  # the last one who could write is gone
                break
            if not stopped and text.count("ResourceDomain") >= frames:
                stopped = True
                process.send_signal(signal.SIGINT)
        watch.cancel()
    os.close(ours)
    assert process.returncode == 0
    return text


# ---- Those that die, stand still, or were never there


def test_one_that_is_killed(folder: Path) -> None:
    with program() as process, watching_it(str(process.pid), "--json", "-i", "0.05") as viewer:
        line_of(viewer)
        process.kill()
        _, complaints = viewer.communicate(timeout=patience(20))
        process.wait()
        assert (viewer.returncode, complaints) == (0, "")
        assert [each.name.partition("-")[0] for each in folder.iterdir()] == [str(process.pid)]
        assert invoke(str(process.pid)).exit_code == 3
        assert list(folder.iterdir()) == [], "what it left is taken away"


def test_one_that_ends(folder: Path) -> None:
    with program() as process, watching_it(str(process.pid), "--json", "-i", "0.05") as viewer:
        line_of(viewer)
        status, said, complaints = ended(process, signal.SIGTERM)
        assert (status, said, complaints) == (0, "done\n", "")
        viewer.communicate(timeout=patience(20))  # what it says fills a pipe
        assert viewer.returncode == 0
        assert list(folder.iterdir()) == []


FAILING = """
import asyncio, signal, aioverbs
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
asyncio.run(aioverbs.open_device("soft0").open())
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
1 / 0
"""


def test_one_that_ends_by_an_error(folder: Path) -> None:
    with program(FAILING) as process:
        assert invoke("--json").exit_code == 0
        status, _, complaints = ended(process, signal.SIGUSR1)
    assert status == 1
    assert "ZeroDivisionError" in complaints
    assert list(folder.iterdir()) == []


def test_a_child_of_multiprocessing(folder: Path) -> None:
    code = """
import asyncio, multiprocessing, os, sys, warnings
import aioverbs

async def child():
    async with aioverbs.open_device("soft0"):
        print(len(os.listdir(os.environ["AIOVERBS_MONITOR_DIRECTORY"])), flush=True)

async def parent():
    async with aioverbs.open_device("soft0"):
        print("ready", flush=True)
        warnings.simplefilter("ignore")
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        print(process.exitcode, len(os.listdir(os.environ["AIOVERBS_MONITOR_DIRECTORY"])), flush=True)

def run():
    asyncio.events._set_running_loop(None)
    asyncio.run(child())

asyncio.run(parent())
"""
    with program(code) as process:
        output, complaints = process.communicate(timeout=patience(20))
    assert (output, complaints) == ("2\n0 1\n", "")
    assert list(folder.iterdir()) == []


@pytest.mark.stops_processes
def test_one_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    with program() as process:
        process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(top, "_PATIENCE_S", 0.3)
            patch.setattr(watching, "_CONNECT_S", 0.3)
            done = invoke(str(process.pid), "--once")
            (listed,) = json.loads(invoke("--json").stdout)["processes"]
        process.send_signal(signal.SIGCONT)
        assert done.exit_code == 4
        assert done.stderr == f"aioverbs: process {process.pid} does not answer: it may be stopped\n"
        assert listed == {"pid": process.pid, "program": "", "problem": done.stderr[10:-1]}
        assert invoke(str(process.pid), "--once", "-i", "0.1").exit_code == 0


def test_one_that_is_not_watched(folder: Path) -> None:
    done = invoke(str(os.getpid()))
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith(f"aioverbs: there is no process {os.getpid()} that lets itself be watched: start it")
    assert not folder.exists()


def test_a_folder_that_others_can_look_into(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    done = invoke()
    assert done.exit_code == 4
    assert "is open to others: chmod 0700 it" in done.stderr


def test_what_dead_ones_left(folder: Path) -> None:
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "4711-0123abcd.sock"))
    with socket.socket(socket.AF_UNIX) as begun:
        begun.bind(str(folder / ".4712-0123abcd.sock"))
    old = folder / ".4713-0123abcd.sock"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(old))
    os.utime(old, (0, 0))
    (folder / "notes.txt").write_text("mine")
    assert invoke().exit_code == 1
    assert {each.name for each in folder.iterdir()} == {".4712-0123abcd.sock", "notes.txt"}


# ---- Those that lie


@contextlib.contextmanager
def liar(*answers: bytes) -> Iterator[None]:
    """In this process; it says the first to whoever comes, and the others when it is asked."""
    with MonitorDirectory(make=True) as directory:
        listening, name = directory.listen(1)
        listening.settimeout(patience(10))

        def lie() -> None:
            with listening.accept()[0] as peer, contextlib.suppress(ConnectionError):
                peer.sendall(answers[0])
                if len(answers) > 1 and peer.recv(100):
                    for answer in answers[1:]:
                        peer.sendall(answer)

        thread = threading.Thread(target=lie)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            listening.close()
            directory.remove(name)


GREETING = json.dumps({"aioverbs-monitor": VERSION, "pid": 1, "program": "\x1b[31mred"}).encode() + b"\n"


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ([b""], 3, "speaks another version"),
        ([b"hello\n"], 3, "speaks another version"),
        ([b"[1]\n"], 3, "speaks another version"),
        ([b'{"aioverbs-monitor": 99}\n'], 3, "speaks another version"),
        ([b'{"aioverbs-monitor": 1, "refused": "8 others look already"}\n'], 3, "now: 8 others look already"),
        ([GREETING, b""], 3, "ended before there was anything to show"),
        ([GREETING, b"{}"], 3, "ended before there was anything to show"),
        ([GREETING, b"{}\n"], 4, "said what is no sample: devices is NoneType"),
        ([GREETING, b"nonsense\n"], 4, "said what is no sample: Expecting value"),
    ],
)
def test_what_is_said_is_looked_at(answers: list[bytes], status: int, said: str) -> None:
    with liar(*answers):
        done = invoke(str(os.getpid()), "--json")
    assert (done.exit_code, done.stdout) == (status, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_more_than_anybody_has_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_LONGEST", 1000)
    with liar(GREETING, b"x" * 5000):
        done = invoke(str(os.getpid()), "--json")
    assert done.exit_code == 4
    assert "said more than 1,000 bytes at once" in done.stderr


def test_a_name_that_would_colour_the_list() -> None:
    with liar(GREETING):
        (told,) = json.loads(invoke("--json").stdout)["processes"]
    assert told["program"] == "�[31mred"


# ---- Command lines


@pytest.mark.parametrize("arguments", [["0"], ["-1"], ["me"], ["1", "2"], ["1", "-i", "0"], ["1", "-i", "nan"]])
def test_what_is_no_command_line(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_the_command_line_has_what_there_is() -> None:
    options: dict[str | None, Any] = {each.name: each.type for each in top.top.params}
    assert (options["interval"].min, options["interval"].max) == INTERVALS_S


def test_numbers_of_processes_are_completed(folder: Path) -> None:
    complete: Callable[..., Any] = top._complete
    assert complete(None, None, "") == []
    with program() as process:
        assert [each.value for each in complete(None, None, "")] == [str(process.pid)]
        assert complete(None, None, "x") == []
