"""`aioverbs demo`: output, faults that it reports, and signals."""

import json
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aioverbs import Connection
from aioverbs.cli import demo_run, main
from tests.cli.processes import run_command, start_command, stop
from tests.running import wait_for_ends
from tests.waiting import wait_until

SMALL = ["--size", "2", "--messages", "20", "--device", "soft0"]
KEYS = ["verified", "device", "reason", "native", "processes", "messages", "round_trip_ns", "bytes", "read_seconds"]
KEYS += ["affinity_error", "faults"]


def descendants(pid: int) -> list[int]:
    """Return the IDs of a process's children."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["demo", *SMALL, *arguments])


def test_json_output() -> None:
    done = run_command("demo", *SMALL, "--size", "5", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    assert (result["verified"], result["faults"]) == (True, [])
    assert (result["device"], result["reason"]) == ("soft0", "selected by --device")
    assert result["native"]["thread_domains"] is True
    assert len(set(result["processes"])) == 2
    assert (result["messages"], result["bytes"]) == (20, 5 << 20)
    took = result["round_trip_ns"]
    assert 0 < took["p50"] <= took["p99"] <= took["max"]
    assert result["read_seconds"] > 0
    assert "ibv_post_send on <QueuePair" in result["affinity_error"]


def test_text_output() -> None:
    done = run_command("demo", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    for message in (
        "soft0: selected by --device",
        "thread domains",
        "native",
        "20 round trips of 64 bytes",
        "2,097,152 bytes",
    ):
        assert message in done.stdout
    assert "AffinityError: ibv_post_send on <QueuePair " in done.stdout
    assert done.stdout.splitlines()[-1] == "verified: every message and every byte"


@pytest.mark.parametrize("variable", ["soft0", ""])
def test_reason_for_the_device(variable: str) -> None:
    done = run_command("demo", *SMALL[:4], "--json", AIOVERBS_DEVICE=variable)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    if variable:
        assert result["reason"] == "selected by AIOVERBS_DEVICE"
    elif result["device"] == "soft0":
        assert any(why in result["reason"] for why in ("there is no RDMA device", "cannot be loaded", "is active"))
    else:
        assert result["reason"] == "the first RDMA device with an active port"


# ---- Faults


def test_wrong_bytes_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    content = demo_run._content  # of this process; the worker process has its own

    def corrupt(seed: int, piece: int) -> bytes:
        made = bytearray(content(seed, piece))
        made[7:9] = [made[7] ^ 1, made[8] ^ 1] if piece == 1 else made[7:9]
        return bytes(made)

    monkeypatch.setattr(demo_run, "_content", corrupt)
    done = invoke("--json")
    assert (done.exit_code, done.stderr) == (1, "")
    result = json.loads(done.stdout)
    assert result["verified"] is False
    assert result["faults"] == ["2 of 2,097,152 bytes differ from the worker's memory"]
    assert "failed: 2 of 2,097,152 bytes" in invoke().stdout


def test_wrong_messages_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Connection.send
    monkeypatch.setattr(Connection, "send", lambda self, message: send(self, message[:-1] + b"x"))
    done = invoke("--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["faults"] == ["20 of 20 messages had a wrong answer"]


def test_a_foreign_call_that_does_not_fail_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call_in_this_thread(_: Any, call: Coroutine[Any, Any, None]) -> None:
        await call

    monkeypatch.setattr("asyncio.to_thread", call_in_this_thread)
    done = invoke("--json")
    assert done.exit_code == 1
    result = json.loads(done.stdout)
    assert result["affinity_error"] is None
    assert result["faults"] == [
        "a call from a foreign loop did not raise AffinityError",
        "a call from a foreign loop changed memory",
    ]
    assert "did not fail" in invoke().stdout


def test_a_killed_worker_process_is_one_line_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def exchange(self: Any, count: int) -> None:
        (peer,) = descendants(os.getpid())
        os.kill(peer, signal.SIGKILL)
        await self._connection.receive()

    monkeypatch.setattr(demo_run._Client, "exchange", exchange)
    before = descendants(os.getpid())
    done = invoke()
    assert (done.exit_code, done.stdout) == (4, "")
    assert done.stderr.startswith("aioverbs: ")
    assert done.stderr.count("\n") == 1
    assert descendants(os.getpid()) == before


def test_unknown_device() -> None:
    done = run_command("demo", "--device", "mlx5_7")
    assert (done.returncode, done.stdout) == (3, "")  # the device or the library that lists devices is missing
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--size", "0"], ["--size", "x"], ["--messages", "0"], ["--seconds", "1"], ["more"]]
)
def test_invalid_command_lines(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


# ---- Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_both_processes(number: signal.Signals) -> None:
    with start_command("demo", "--messages", "1000000", "--device", "soft0") as process:
        try:
            wait_until(lambda: descendants(process.pid), 30)
            pids = descendants(process.pid)
            assert stop(process, number) == (130, "", "")
        finally:
            process.kill()
    wait_for_ends(pids)


def test_killing_the_command_ends_the_worker_process() -> None:
    with start_command("demo", "--messages", "1000000", "--device", "soft0") as process:
        try:
            wait_until(lambda: descendants(process.pid), 30)
            pids = descendants(process.pid)
        finally:
            process.kill()
    wait_for_ends(pids)
