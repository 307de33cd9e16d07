"""`aioverbs top` of real processes: working, dying and stopped ones, and monitors that send invalid data."""

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
from tests.cli.processes import COMMAND, environment, read_line, start_command, stop
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
    """Run a program with a monitor; yield its process once it has printed "ready"."""
    env, pipe = environment(AIOVERBS_MONITOR="1", PYTHONWARNINGS="error", **variables), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-P", "-c", code], env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            message = read_line(process)
            if message != "ready\n":
                process.kill()
                pytest.fail(f"the program printed {message!r} and {process.communicate()[1]}")
            yield process
        finally:
            process.kill()
            process.communicate()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["top", *arguments])


@contextlib.contextmanager
def viewer_of(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with start_command("top", *arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def nodes(branch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield branch
    for child in branch["children"]:
        yield from nodes(child)


# ---- Working processes


def test_json_output_of_one_interval() -> None:
    with program() as process:
        done = invoke(str(process.pid), "--once", "--json", "--interval", "1")
        assert (done.exit_code, done.stderr) == (0, "")
        (line,) = done.stdout.splitlines()
        result = json.loads(line)
        assert list(result) == KEYS
        assert result["pid"] == process.pid
        assert result["seconds"] > 0
        assert result["rates"]["operations"] > 0
        assert result["rates"]["bytes"] == pytest.approx(64 * result["rates"]["operations"], rel=0.5)
        (device,) = result["devices"]
        found = list(nodes(device))
        assert all(list(node) == NODE for node in found)
        working = [node for node in found if (node["rates"] or {}).get("bytes")]
        assert [node["kind"] for node in working] == ["QueuePair"]


def test_text_output_of_one_interval() -> None:
    with program() as process:
        done = invoke(str(process.pid), "--once", "--interval", "0.2")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{process.pid}  {sys.executable} -P -c ")
    for text in ("ops/s", "Device soft0", "ResourceDomain", "CompletionQueue", "native", "1 MemoryRegion"):
        assert text in done.stdout


def test_a_line_for_each_sample_until_a_signal() -> None:
    with program() as process, viewer_of(str(process.pid), "--json", "-i", "0.05") as viewer:
        times = [json.loads(read_line(viewer))["time_ns"] for _ in range(3)]
        assert times == sorted(times)
        status, _, errors = stop(viewer)
        assert (status, errors) == (0, "")
        assert process.poll() is None, "the end of the viewer does not disturb the watched process"


def test_list_of_watchable_processes() -> None:
    assert invoke().exit_code == 1
    with program() as first, program() as second:
        text = invoke().stdout
        assert text.splitlines()[0].split() == ["PID", "PROGRAM"]
        result = json.loads(invoke("--json").stdout)
        assert {each["pid"] for each in result["processes"]} == {first.pid, second.pid}
        for each in result["processes"]:
            assert list(each) == ["pid", "program", "problem"]
            assert sys.executable in each["program"]
            assert each["problem"] is None
            assert str(each["pid"]) in text
    done = invoke()
    assert (done.exit_code, done.stderr) == (1, "")
    assert "start one with AIOVERBS_MONITOR=1" in done.stdout


def test_a_terminal_shows_live_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    with program() as process:
        for colours, variables in ((True, {"TERM": "xterm"}), (False, {"TERM": "xterm", "NO_COLOR": "1"})):
            text = run_on_terminal([*COMMAND, "top", str(process.pid), "-i", "0.05"], 3, variables)
            assert text.count("ResourceDomain") >= 3
            assert ("\x1b[1m" in text) is colours
            assert "\x1b[1A" in text, "each table replaces the previous one"
            assert text.rstrip().endswith("\x1b[?25h"), "the cursor is visible again"


def run_on_terminal(command: list[str], frames: int, variables: dict[str, str]) -> str:
    """Run a command on a terminal, send SIGINT after some frames, and return its output."""
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
            except OSError:  # reading fails when the last writer has closed the terminal
                break
            if not stopped and text.count("ResourceDomain") >= frames:
                stopped = True
                process.send_signal(signal.SIGINT)
        watch.cancel()
    os.close(ours)
    assert process.returncode == 0
    return text


# ---- Dying, stopped and missing processes


def test_killed_process(folder: Path) -> None:
    with program() as process, viewer_of(str(process.pid), "--json", "-i", "0.05") as viewer:
        read_line(viewer)
        process.kill()
        _, errors = viewer.communicate(timeout=patience(20))
        process.wait()
        assert (viewer.returncode, errors) == (0, "")
        assert [each.name.partition("-")[0] for each in folder.iterdir()] == [str(process.pid)]
        assert invoke(str(process.pid)).exit_code == 3
        assert list(folder.iterdir()) == [], "the socket of a dead process is removed"


def test_process_that_ends(folder: Path) -> None:
    with program() as process, viewer_of(str(process.pid), "--json", "-i", "0.05") as viewer:
        read_line(viewer)
        status, message, errors = stop(process, signal.SIGTERM)
        assert (status, message, errors) == (0, "done\n", "")
        viewer.communicate(timeout=patience(20))  # drains the pipe, so that the viewer can end
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


def test_process_that_ends_by_an_exception(folder: Path) -> None:
    with program(FAILING) as process:
        assert invoke("--json").exit_code == 0
        status, _, errors = stop(process, signal.SIGUSR1)
    assert status == 1
    assert "ZeroDivisionError" in errors
    assert list(folder.iterdir()) == []


def test_child_process_of_multiprocessing(folder: Path) -> None:
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
        output, errors = process.communicate(timeout=patience(20))
    assert (output, errors) == ("2\n0 1\n", "")
    assert list(folder.iterdir()) == []


@pytest.mark.stops_processes
def test_stopped_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with program() as process:
        process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(top, "_GRACE_S", 0.3)
            patch.setattr(watching, "_CONNECT_S", 0.3)
            done = invoke(str(process.pid), "--once")
            (listed,) = json.loads(invoke("--json").stdout)["processes"]
        process.send_signal(signal.SIGCONT)
        assert done.exit_code == 4
        assert done.stderr == f"aioverbs: process {process.pid} does not answer: it may be stopped\n"
        assert listed == {"pid": process.pid, "program": "", "problem": done.stderr[10:-1]}
        assert invoke(str(process.pid), "--once", "-i", "0.1").exit_code == 0


def test_process_without_monitor(folder: Path) -> None:
    done = invoke(str(os.getpid()))
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith(f"aioverbs: process {os.getpid()} cannot be watched: start it")
    assert not folder.exists()


def test_directory_open_to_others_is_an_error(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    done = invoke()
    assert done.exit_code == 4
    assert "is open to others: chmod 0700 it" in done.stderr


def test_sockets_of_dead_processes_are_removed(folder: Path) -> None:
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


# ---- Invalid data


@contextlib.contextmanager
def fake_monitor(*answers: bytes) -> Iterator[None]:
    """Run a monitor in this process; it sends the first answer to a client, and the others after the first request."""
    with MonitorDirectory(make=True) as directory:
        listening, name = directory.listen(1)
        listening.settimeout(patience(10))

        def answer_client() -> None:
            with listening.accept()[0] as peer, contextlib.suppress(ConnectionError):
                peer.sendall(answers[0])
                if len(answers) > 1 and peer.recv(100):
                    for answer in answers[1:]:
                        peer.sendall(answer)

        thread = threading.Thread(target=answer_client)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            listening.close()
            directory.remove(name)


GREETING = json.dumps({"aioverbs-monitor": VERSION, "pid": 1, "program": "\x1b[31mred"}).encode() + b"\n"


@pytest.mark.parametrize(
    ("answers", "status", "message"),
    [
        ([b""], 3, "uses another version"),
        ([b"hello\n"], 3, "uses another version"),
        ([b"[1]\n"], 3, "uses another version"),
        ([b'{"aioverbs-monitor": 99}\n'], 3, "uses another version"),
        ([b'{"aioverbs-monitor": 1, "refused": "8 others look already"}\n'], 3, "now: 8 others look already"),
        ([GREETING, b""], 3, "ended before its first sample"),
        ([GREETING, b"{}"], 3, "ended before its first sample"),
        ([GREETING, b"{}\n"], 4, "sent an invalid sample: devices must be list, got NoneType"),
        ([GREETING, b"nonsense\n"], 4, "sent an invalid sample: Expecting value"),
    ],
)
def test_invalid_answers(answers: list[bytes], status: int, message: str) -> None:
    with fake_monitor(*answers):
        done = invoke(str(os.getpid()), "--json")
    assert (done.exit_code, done.stdout) == (status, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_line_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_MAX_LINE", 1000)
    with fake_monitor(GREETING, b"x" * 5000):
        done = invoke(str(os.getpid()), "--json")
    assert done.exit_code == 4
    assert "sent a line of more than 1,000 bytes" in done.stderr


def test_control_characters_in_a_program_name_are_replaced() -> None:
    with fake_monitor(GREETING):
        (result,) = json.loads(invoke("--json").stdout)["processes"]
    assert result["program"] == "�[31mred"


# ---- Command lines


@pytest.mark.parametrize("arguments", [["0"], ["-1"], ["me"], ["1", "2"], ["1", "-i", "0"], ["1", "-i", "nan"]])
def test_invalid_command_lines(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_interval_option_matches_the_monitor() -> None:
    options: dict[str | None, Any] = {each.name: each.type for each in top.top.params}
    assert (options["interval"].min, options["interval"].max) == INTERVALS_S


def test_process_ids_are_completed(folder: Path) -> None:
    complete: Callable[..., Any] = top._complete
    assert complete(None, None, "") == []
    with program() as process:
        assert [each.value for each in complete(None, None, "")] == [str(process.pid)]
        assert complete(None, None, "x") == []
