"""`aioverbs bench`: results, plots, error messages, signals."""

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
from tests.cli.processes import COMMAND, environment, run_on_terminal
from tests.pace import patience
from tests.running import wait_for_ends
from tests.waiting import until

ESCAPE = "\x1b["
CONTENDERS = ["tcp", "unix", "soft0"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["bench", "--device", "soft0", *arguments])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the benchmark to two sizes."""
    monkeypatch.setattr(measuring.cells, "__defaults__", ((8, 1 << 20),))


class TestResults:
    def test_json_has_all_cells(self) -> None:
        done = invoke("--seconds", "1", "--json")
        assert done.exit_code == Status.OK, done.output
        result = json.loads(done.stdout)
        assert result.keys() == {
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
        assert (result["contenders"], result["problems"], result["compared_with"]) == (CONTENDERS, {}, "tcp")
        found = [(each["operation"], each["size"], each["window"], each["contender"]) for each in result["figures"]]
        wanted = measuring.cells(measuring.OPERATIONS)
        assert found == [(cell.operation, cell.size, cell.window, name) for cell in wanted for name in CONTENDERS]
        for each in result["figures"]:
            assert each["median_ns"] > 0
            assert each["bytes_per_s"] == pytest.approx(each["size"] * 1e9 / each["median_ns"])
            assert (each["p99_ns"] is not None) == (each["window"] == 1)
            assert each["contender"] != "tcp" or each["ratio"] == 1

    @pytest.mark.usefixtures("few")
    @pytest.mark.parametrize("model", ["low-latency", "high-bandwidth"])
    def test_tables_of_one_operation(self, model: str) -> None:
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
    def test_all_cells_share_the_requested_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[float, ...]] = []

        def turn_seconds(*arguments: float) -> float:
            asked.append(arguments)
            return measuring.turn_seconds(*map(int, arguments))

        monkeypatch.setattr(bench_run, "turn_seconds", turn_seconds)
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
        assert f"plot written to {path}" in done.stdout
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
        ("arguments", "message"),
        [
            (["scribble"], "'scribble' is not one of 'write', 'read', 'send'"),
            (["--seconds", "0"], "0.0 is not in the range"),
            (["--message-model", "fast"], "'fast' is not one of"),
            (["--plot", "figures.pdf"], "the name of the file must end in .svg or .png, got 'figures.pdf'"),
            (["--plot", "/no/such/folder/figures.svg"], "the directory /no/such/folder does not exist"),
        ],
    )
    def test_usage(self, arguments: list[str], message: str) -> None:
        done = invoke(*arguments)
        assert done.exit_code == Status.USAGE
        assert message in " ".join(done.stderr.replace("│", " ").split())

    def test_unknown_device(self) -> None:
        done = invoke("--device", "mlx5_7")
        assert (done.exit_code, done.stdout) == (Status.NOT_FOUND, "")
        assert "there is no device 'mlx5_7'; available: " in done.stderr

    def test_plot_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        done = invoke("--plot", "figures.svg")
        assert done.exit_code == Status.FAILED
        assert "pip install 'aioverbs[bench]'" in done.stderr


# ---- Failures during the measurement


@pytest.fixture
def on_unix_operation(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Return a function that installs a hook, awaited before each single operation of the Unix stream."""

    def make(happen: Callable[[], Any]) -> None:
        one = StreamClient.run_one

        async def instead(self: StreamClient, operation: measuring.Operation, size: int) -> None:
            if self._writer.get_extra_info("socket").family.name == "AF_UNIX":
                await happen()
            await one(self, operation, size)

        monkeypatch.setattr(StreamClient, "run_one", instead)

    return make


@pytest.mark.usefixtures("few")
class TestFailures:
    def test_a_broken_stream_is_dropped(self, on_unix_operation: Callable[[Callable[[], Any]], None]) -> None:
        async def fail() -> None:
            raise ConnectionResetError("cut")

        on_unix_operation(fail)
        done = invoke("write", "--seconds", "1", "--json")
        assert done.exit_code == Status.NO
        result = json.loads(done.stdout)
        assert result["problems"] == {"unix": "cut"}
        assert {each["contender"] for each in result["figures"]} == {"tcp", "soft0"}

    def test_a_stuck_stream_is_dropped(
        self, on_unix_operation: Callable[[Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_unix_operation(lambda: asyncio.sleep(60))
        monkeypatch.setattr(bench_run, "_TURN_LIMIT_S", patience(2))
        done = invoke("write", "--seconds", "1")
        assert done.exit_code == Status.NO
        assert "unix: stuck: a turn took more than " in done.stdout

    def test_a_device_whose_connection_breaks_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def broken(self: DeviceClient, operation: measuring.Operation, size: int) -> None:
            await self._connection.send(self.memory.outgoing[:size])
            self._connection.abort()
            await self._connection.receive()

        monkeypatch.setattr(DeviceClient, "run_one", broken)
        done = invoke("send", "--seconds", "1", "--json")
        assert done.exit_code == Status.NO
        result = json.loads(done.stdout)
        assert result["problems"].keys() == {"soft0"}
        assert {each["contender"] for each in result["figures"]} == {"tcp", "unix"}
        assert len(result["figures"]) == 2 * 4

    def test_exceeding_the_time_limit_fails(
        self, on_unix_operation: Callable[[Callable[[], Any]], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_unix_operation(lambda: asyncio.sleep(60))
        monkeypatch.setattr(bench_run, "_START_LIMIT_S", patience(2))
        monkeypatch.setattr(bench_run, "_TIME_LIMIT_FACTOR", 0)
        done = invoke("write", "--seconds", "1")
        assert (done.exit_code, done.stdout) == (Status.FAILED, "")
        assert "the benchmark took more than " in done.stderr

    def test_wrong_bytes_drop_the_contender(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def corrupt(self: Memory, size: int, slots: int, turn: int) -> None:
            prepare(self, size, slots, turn)
            self.outgoing[size - 1] ^= 1  # in this process, not in the peer

        prepare = Memory.prepare
        monkeypatch.setattr(Memory, "prepare", corrupt)
        done = invoke("write", "--seconds", "1")
        assert done.exit_code == Status.FAILED
        assert "no contender is left to measure: tcp: turn 1 " in done.stderr
        assert "the bytes that arrived differ" in done.stderr

    async def test_peer_process_killed_during_the_measurement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processes = []
        start = asyncio.create_subprocess_exec

        async def start_and_record(*arguments: str, **settings: Any) -> asyncio.subprocess.Process:
            processes.append(await start(*arguments, **settings))
            return processes[0]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_record)
        cells = measuring.cells(("write",))
        with pytest.raises(bench_run.PeerExitedError, match="the peer process ended with status -9"):
            await bench_run.measure(cells, ["soft0"], MessageModel.DEFAULT, 1, lambda: processes[0].kill())
        assert processes[0].returncode == -signal.SIGKILL

    async def test_a_cancelled_block_still_waits_for_the_peer_process(self) -> None:
        async def use() -> None:
            async with bench_run._peer_process() as peer:
                processes.append(peer._process)

        processes: list[asyncio.subprocess.Process] = []
        using = asyncio.create_task(use())
        await until(lambda: processes)
        for _ in range(2):
            using.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([using])
        assert using.cancelled()
        assert processes[0].returncode is not None

    async def test_request_to_an_exited_peer_process(self) -> None:
        async with bench_run._peer_process() as peer:
            peer._process.kill()
            await until(peer._stdin.is_closing)
            await asyncio.sleep(0)  # lets the transport close
            with pytest.raises(bench_run.PeerExitedError, match="the peer process ended with status -9"):
                await peer.request(action="end")


# ---- Signals, terminals


BENCH = [*COMMAND, "bench", "--device", "soft0", "write"]


def child_of(process: "subprocess.Popen[str]") -> int:
    """Return the ID of the peer process, once it runs."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + patience(30)
    while time.monotonic() < end:
        for child in map(int, path.read_text().split()):
            with contextlib.suppress(OSError):
                if "bench_peer" in Path(f"/proc/{child}/cmdline").read_text():
                    return child
        time.sleep(0.01)
    raise AssertionError("the peer process was not started")


@pytest.fixture
def measuring_now() -> "Iterator[subprocess.Popen[str]]":
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from a background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [*BENCH, "--seconds", "60"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_killing_the_command_ends_the_peer_process(measuring_now: "subprocess.Popen[str]") -> None:
    child = child_of(measuring_now)
    measuring_now.kill()
    wait_for_ends([child])


def test_an_interrupt_ends_both_processes(measuring_now: "subprocess.Popen[str]") -> None:
    child = child_of(measuring_now)
    time.sleep(0.5)
    measuring_now.send_signal(signal.SIGINT)
    output, errors = measuring_now.communicate(timeout=patience(30))
    assert (measuring_now.returncode, output, errors) == (Status.INTERRUPTED, "", "")
    wait_for_ends([child])


def test_colours_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert ESCAPE in run_on_terminal([*BENCH, "--seconds", "1"], TERM="xterm")
    plain = run_on_terminal([*BENCH, "--seconds", "1"], TERM="xterm", NO_COLOR="1")
    assert f"{ESCAPE}3" not in plain
    assert "write, one at a time" in plain


async def test_streams_require_the_secret() -> None:
    async with await asyncio.start_server(serve_stream(Memory(), b"s" * 32), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        nonce = await reader.readexactly(NONCE_BYTES)
        writer.write(Proofs(b"aioverbs bench", b"t" * 32).make(b"client", nonce))
        writer.write(b"r" + bytes([0, 0, 0, 8, 0, 0, 0, 0]))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
