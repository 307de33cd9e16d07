"""`aioverbs bench`: what it measures, draws and prints, and how it ends when something goes wrong."""

import asyncio
import contextlib
import importlib.util
import json
import signal
import subprocess
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aioverbs._proofs import NONCE_BYTES, Proofs
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs.cli import bench_run, main, measuring
from aioverbs.cli.bench_device import DeviceClient
from aioverbs.cli.bench_memory import Memory
from aioverbs.cli.bench_stream import StreamClient, serve_stream
from aioverbs.cli.common import Status
from tests.cli.processes import COMMAND, environment, on_a_terminal
from tests.pace import patience
from tests.running import wait_for_ends
from tests.waiting import until

ESCAPE = "\x1b["
CONTENDERS = ["tcp", "unix", "soft0"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["bench", "--device", "soft0", *arguments])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes only."""
    monkeypatch.setattr(measuring.cells, "__defaults__", ((8, 1 << 20),))


class TestWhatIsMeasured:
    def test_all_of_it_as_json(self) -> None:
        done = invoke("--seconds", "1", "--json")
        assert done.exit_code == Status.OK, done.output
        told = json.loads(done.stdout)
        assert told.keys() == {
            "aioverbs",
            "python",
            "loop",
            "message_model",
            "seconds",
            "compared_with",
            "contenders",
            "problems",
            "figures",
        }
        assert (told["contenders"], told["problems"], told["compared_with"]) == (CONTENDERS, {}, "tcp")
        found = [(each["operation"], each["size"], each["window"], each["contender"]) for each in told["figures"]]
        wanted = measuring.cells(measuring.OPERATIONS)
        assert found == [(cell.operation, cell.size, cell.window, name) for cell in wanted for name in CONTENDERS]
        for each in told["figures"]:
            assert each["median_ns"] > 0
            assert each["bytes_per_s"] == pytest.approx(each["size"] * 1e9 / each["median_ns"])
            assert (each["p99_ns"] is not None) == (each["window"] == 1)
            assert each["contender"] != "tcp" or each["ratio"] == 1

    @pytest.mark.usefixtures("few")
    @pytest.mark.parametrize("model", ["low-latency", "high-bandwidth"])
    def test_one_operation_as_tables(self, model: str) -> None:
        done = invoke("read", "--seconds", "1", "--message-model", model)
        assert (done.exit_code, done.stderr) == (Status.OK, "")
        lines = done.stdout.splitlines()
        assert lines[0].strip() == "read, one at a time"
        assert lines[1].split() == ["size", *CONTENDERS]
        assert lines[2].startswith("  8 B  ")
        assert "1.00x" in lines[2]
        assert "read, many at a time" in done.stdout
        assert "write" not in done.stdout
        assert ESCAPE not in done.stdout

    @pytest.mark.usefixtures("few")
    def test_the_time_that_it_is_told_is_shared_by_all_that_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[float, ...]] = []

        def turn_s(*arguments: float) -> float:
            asked.append(arguments)
            return measuring.turn_s(*map(int, arguments))

        monkeypatch.setattr(bench_run, "turn_s", turn_s)
        assert invoke("write", "--seconds", "1").exit_code == Status.OK
        assert asked == [(1.0, len(measuring.cells(("write",))), len(CONTENDERS))]


class TestPlots:
    @pytest.fixture(autouse=True)
    def _drawing(self) -> None:
        pytest.importorskip("matplotlib")

    @pytest.mark.usefixtures("few")
    def test_svg(self, tmp_path: Path) -> None:
        path = tmp_path / "figures.svg"
        done = invoke("write", "send", "--seconds", "1", "--plot", str(path))
        assert done.exit_code == Status.OK, done.output
        assert f"drawn: {path}" in done.stdout
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        comments = path.read_text()
        for text in ("write, one at a time", "send, many at a time", "soft0", "unix", "tcp"):
            assert f"<!-- {text} -->" in comments

    @pytest.mark.usefixtures("few")
    def test_png(self, tmp_path: Path) -> None:
        path = tmp_path / "figures.png"
        assert invoke("read", "--seconds", "1", "--json", "--plot", str(path)).exit_code == Status.OK
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


class TestWrongInput:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["scribble"], "'scribble' is not one of 'write', 'read', 'send'"),
            (["--seconds", "0"], "0.0 is not in the range"),
            (["--message-model", "fast"], "'fast' is not one of"),
            (["--plot", "figures.pdf"], "the file is drawn by its name, as .svg or .png, not 'figures.pdf'"),
            (["--plot", "/no/such/folder/figures.svg"], "there is no folder /no/such/folder"),
        ],
    )
    def test_usage(self, arguments: list[str], said: str) -> None:
        done = invoke(*arguments)
        assert done.exit_code == Status.USAGE
        assert said in " ".join(done.stderr.replace("│", " ").split())

    def test_no_such_device(self) -> None:
        done = invoke("--device", "mlx5_7")
        assert (done.exit_code, done.stdout) == (Status.NOT_THERE, "")
        assert "there is no device 'mlx5_7'; available: " in done.stderr

    def test_nothing_to_draw_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        done = invoke("--plot", "figures.svg")
        assert done.exit_code == Status.FAILED
        assert "pip install 'aioverbs[bench]'" in done.stderr


# ---- What goes wrong on the way


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has something happen in each single operation of the Unix stream."""

    def make(happen: Callable[[], Any]) -> None:
        one = StreamClient.one

        async def instead(self: StreamClient, operation: measuring.Operation, size: int) -> None:
            if self._writer.get_extra_info("socket").family.name == "AF_UNIX":
                await happen()
            await one(self, operation, size)

        monkeypatch.setattr(StreamClient, "one", instead)

    return make


@pytest.mark.usefixtures("few")
class TestFailures:
    def test_one_that_breaks_is_left_out(self, calls: Callable[[Callable[[], Any]], None]) -> None:
        async def fail() -> None:
            raise ConnectionResetError("cut")

        calls(fail)
        done = invoke("write", "--seconds", "1", "--json")
        assert done.exit_code == Status.NO
        told = json.loads(done.stdout)
        assert told["problems"] == {"unix": "cut"}
        assert {each["contender"] for each in told["figures"]} == {"tcp", "soft0"}

    def test_one_that_is_stuck_is_left_out(
        self, calls: Callable[[Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls(lambda: asyncio.sleep(60))
        monkeypatch.setattr(bench_run, "_STUCK_S", patience(2))
        done = invoke("write", "--seconds", "1")
        assert done.exit_code == Status.NO
        assert "unix: it is stuck: a turn took more than " in done.stdout

    def test_a_device_whose_connection_breaks_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def broken(self: DeviceClient, operation: measuring.Operation, size: int) -> None:
            await self._connection.send(self.memory.outgoing[:size])
            await self._connection.abort()
            await self._connection.receive()

        monkeypatch.setattr(DeviceClient, "one", broken)
        done = invoke("send", "--seconds", "1", "--json")
        assert done.exit_code == Status.NO
        told = json.loads(done.stdout)
        assert told["problems"].keys() == {"soft0"}
        assert {each["contender"] for each in told["figures"]} == {"tcp", "unix"}
        assert len(told["figures"]) == 2 * 4

    def test_it_takes_too_long(
        self, calls: Callable[[Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls(lambda: asyncio.sleep(60))
        monkeypatch.setattr(bench_run, "_START_S", patience(2))
        monkeypatch.setattr(bench_run, "_LONGEST", 0)
        done = invoke("write", "--seconds", "1")
        assert (done.exit_code, done.stdout) == (Status.FAILED, "")
        assert "it took more than " in done.stderr

    def test_bytes_that_do_not_arrive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def half(self: Memory, size: int, places: int, turn: int) -> None:
            begin(self, size, places, turn)
            self.outgoing[size - 1] ^= 1  # here, and not in the other process

        begin = Memory.begin
        monkeypatch.setattr(Memory, "begin", half)
        done = invoke("write", "--seconds", "1")
        assert done.exit_code == Status.NOT_THERE
        assert "nobody is left who could be measured: tcp: what arrived in turn 1" in done.stderr

    async def test_the_other_process_dies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processes = []
        start = asyncio.create_subprocess_exec

        async def kept(*arguments: str, **settings: Any) -> asyncio.subprocess.Process:
            processes.append(await start(*arguments, **settings))
            return processes[0]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", kept)
        cells = measuring.cells(("write",))
        with pytest.raises(bench_run.PeerGoneError, match="the other process ended with status -9"):
            await bench_run.measure(cells, ["soft0"], MessageModel.DEFAULT, 1, lambda: processes[0].kill())
        assert processes[0].returncode == -signal.SIGKILL

    async def test_the_other_process_has_ended(self) -> None:
        async with bench_run._other_process() as peer:
            peer._process.kill()
            await until(peer._stdin.is_closing)
            await asyncio.sleep(0)  # by now it is closed
            with pytest.raises(bench_run.PeerGoneError, match="the other process ended with status -9"):
                await peer.ask(what="end")


# ---- Signals, terminals


BENCH = [*COMMAND, "bench", "--device", "soft0", "write"]


def child_of(process: "subprocess.Popen[str]") -> int:
    """The other process, once it is there."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + patience(30)
    while time.monotonic() < end:
        for child in map(int, path.read_text().split()):
            with contextlib.suppress(OSError):
                if "bench_peer" in Path(f"/proc/{child}/cmdline").read_text():
                    return child
        time.sleep(0.01)
    raise AssertionError("the other process was not started")


@pytest.fixture
def measuring_now() -> "Iterator[subprocess.Popen[str]]":
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as where all of it runs in the background: it is inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [*BENCH, "--seconds", "60"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_it_is_killed(measuring_now: "subprocess.Popen[str]") -> None:
    child = child_of(measuring_now)
    measuring_now.kill()
    wait_for_ends([child])


def test_it_is_interrupted(measuring_now: "subprocess.Popen[str]") -> None:
    child = child_of(measuring_now)
    time.sleep(0.5)
    measuring_now.send_signal(signal.SIGINT)
    output, complaints = measuring_now.communicate(timeout=patience(30))
    assert (measuring_now.returncode, output, complaints) == (Status.INTERRUPTED, "", "")
    wait_for_ends([child])


def test_colours_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert ESCAPE in on_a_terminal([*BENCH, "--seconds", "1"], TERM="xterm")
    plain = on_a_terminal([*BENCH, "--seconds", "1"], TERM="xterm", NO_COLOR="1")
    assert f"{ESCAPE}3" not in plain
    assert "write, one at a time" in plain


async def test_streams_answer_nobody_who_does_not_know_the_secret() -> None:
    async with await asyncio.start_server(serve_stream(Memory(), b"s" * 32), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        nonce = await reader.readexactly(NONCE_BYTES)
        writer.write(Proofs(b"aioverbs bench", b"t" * 32).make(b"client", nonce))
        writer.write(b"r" + bytes([0, 0, 0, 8, 0, 0, 0, 0]))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
