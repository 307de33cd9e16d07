"""`aioverbs demo`: what it tells, and what becomes of wrong bytes, wrong calls, and processes that end too early."""

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
from tests.cli.processes import ask, ended, started
from tests.running import wait_for_ends
from tests.waiting import wait_until

SMALL = ["--size", "2", "--messages", "20", "--device", "soft0"]
KEYS = ["verified", "device", "reason", "native", "processes", "messages", "round_trip_ns", "bytes", "read_seconds"]
KEYS += ["affinity_error", "faults"]


def descendants(pid: int) -> list[int]:
    """The children of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["demo", *SMALL, *arguments])


def test_for_programs() -> None:
    done = ask("demo", *SMALL, "--size", "5", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert list(told) == KEYS
    assert (told["verified"], told["faults"]) == (True, [])
    assert (told["device"], told["reason"]) == ("soft0", "it was named")
    assert told["native"]["thread_domains"] is True
    assert len(set(told["processes"])) == 2
    assert (told["messages"], told["bytes"]) == (20, 5 << 20)
    took = told["round_trip_ns"]
    assert 0 < took["p50"] <= took["p99"] <= took["max"]
    assert told["read_seconds"] > 0
    assert "ibv_post_send on <QueuePair" in told["affinity_error"]


def test_for_people() -> None:
    done = ask("demo", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    for said in ("soft0: it was named", "thread domains", "native", "20 of 64 bytes", "2,097,152 bytes"):
        assert said in done.stdout
    assert "AffinityError: ibv_post_send on <QueuePair " in done.stdout
    assert done.stdout.splitlines()[-1] == "verified: each message and each byte"


@pytest.mark.parametrize("variable", ["soft0", ""])
def test_why_it_is_that_device(variable: str) -> None:
    done = ask("demo", *SMALL[:4], "--json", AIOVERBS_DEVICE=variable)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    if variable:
        assert told["reason"] == "AIOVERBS_DEVICE names it"
    elif told["device"] == "soft0":
        assert any(why in told["reason"] for why in ("there is no RDMA device", "cannot be loaded", "is active"))
    else:
        assert told["reason"] == "the first RDMA device with an active port"


# ---- What is wrong


def test_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    content = demo_run._content  # of this process; the other one has its own

    def spoilt(seed: int, piece: int) -> bytes:
        made = bytearray(content(seed, piece))
        made[7:9] = [made[7] ^ 1, made[8] ^ 1] if piece == 1 else made[7:9]
        return bytes(made)

    monkeypatch.setattr(demo_run, "_content", spoilt)
    done = invoke("--json")
    assert (done.exit_code, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    assert told["verified"] is False
    assert told["faults"] == ["2 of 2,097,152 bytes are not those of the other process"]
    assert "not as it should be: 2 of 2,097,152 bytes" in invoke().stdout


def test_wrong_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Connection.send
    monkeypatch.setattr(Connection, "send", lambda self, message: send(self, message[:-1] + b"x"))
    done = invoke("--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["faults"] == ["20 of 20 messages did not come back as they should"]


def test_a_call_that_nothing_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(_: Any, call: Coroutine[Any, Any, None]) -> None:
        await call

    monkeypatch.setattr("asyncio.to_thread", here)
    done = invoke("--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["affinity_error"] is None
    assert told["faults"] == ["a call from a wrong loop was not stopped", "a call from a wrong loop changed memory"]
    assert "its call was not stopped" in invoke().stdout


def test_the_other_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_device_that_is_not_there() -> None:
    done = ask("demo", "--device", "mlx5_7")
    assert (done.returncode, done.stdout) == (3, "")  # that, or what lists such devices
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--size", "0"], ["--size", "x"], ["--messages", "0"], ["--seconds", "1"], ["more"]]
)
def test_what_is_no_command_line(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


# ---- Who has enough


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_both_processes(number: signal.Signals) -> None:
    with started("demo", "--messages", "1000000", "--device", "soft0") as process:
        try:
            wait_until(lambda: descendants(process.pid), 30)
            pids = descendants(process.pid)
            assert ended(process, number) == (130, "", "")
        finally:
            process.kill()
    wait_for_ends(pids)


def test_one_that_is_killed_leaves_no_process() -> None:
    with started("demo", "--messages", "1000000", "--device", "soft0") as process:
        try:
            wait_until(lambda: descendants(process.pid), 30)
            pids = descendants(process.pid)
        finally:
            process.kill()
    wait_for_ends(pids)
