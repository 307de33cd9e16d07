"""`aioverbs demo`: all of it, and what is told where bytes are wrong, a process is killed, or somebody has enough."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aioverbs.cli import main
from aioverbs.cli.demonstration import children
from aioverbs.cli.demonstration.progress import Silence
from tests.cli.processes import COMMAND, ask, environment, line_of, started
from tests.pace import patience
from tests.running import wait_for_ends

pytest.importorskip("prometheus_client")

SMALL = ["--size", "2", "--seconds", "0.2", "--device", "soft0"]
KEYS = ["verified", "device", "plan", "loop", "files", "bytes", "verified_files", "verified_bytes", "faults"]
KEYS += ["written", "read", "block_reads", "flushes", "server", "affinity", "trees", "seconds"]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the demonstration's folder is; it is gone afterwards."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield path
    assert list(path.iterdir()) == []


def descendants(pid: int) -> list[int]:
    """The children of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def nodes(thing: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield thing
    for child in thing["children"]:
        yield from nodes(child)


# ---- All of it


def test_for_programs() -> None:
    done = ask("demo", *SMALL, "--seconds", "1.5", "--clients", "3", "--workers", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert list(told) == KEYS
    assert told["verified"] is True
    assert told["faults"] == []
    assert told["verified_bytes"] == told["bytes"] == 2 << 20
    assert told["verified_files"] == told["files"] > 6
    assert (told["device"]["name"], told["device"]["reason"]) == ("soft0", "it was named")
    assert told["device"]["native"]["thread_domains"] is True
    for way in ("written", "read"):
        assert told[way]["bytes"] == 2 << 20
        assert len(told[way]["requests_s"]) == 3
        assert told[way]["bytes_per_s"] > 0
    reads = told["block_reads"]
    assert 0 < reads["min"] <= reads["p50"] <= reads["p99"] <= reads["max"]
    assert told["flushes"]["count"] == told["server"]["flushes"] >= 3
    assert told["server"]["syncs"] >= 3
    assert told["server"]["message_bytes"] == 0, "all went one-sidedly"
    affinity = told["affinity"]
    assert "ibv_post_send on <QueuePair" in affinity["error"]
    assert (affinity["untouched"], affinity["works"]) == (True, True)
    server, client = ([node for device in tree["devices"] for node in nodes(device)] for tree in told["trees"])
    assert [node["kind"] for node in server].count("Connection") == 3
    assert [node["kind"] for node in client].count("Connection") == 1
    (pool,) = (node for node in server if node["kind"] == "WorkerPool")
    assert len(pool["statistics"]["workers"]) == 2
    assert told["trees"][1]["rates"]["bytes"] > 0


def test_for_people_who_see_no_terminal() -> None:
    done = ask("demo", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    for said in (
        "on soft0: it was named\n",
        "reading and comparing: 2.10M bytes in ",
        "\nAffinityError: ibv_post_send on <QueuePair ",
        "no byte was written, and its own loop went on to use it",
        "thread domains  yes",
        "WorkerPool",
    ):
        assert said in done.stdout
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"verified: 2,097,152 bytes in \d+ files, each byte and each SHA-256; \d+\.\d s", last)


def test_for_people_at_a_terminal() -> None:
    here, there = pty.openpty()
    env = environment(TERM="xterm-256color", COLUMNS="120", LINES="40", PYTHONWARNINGS="error")
    with subprocess.Popen([*COMMAND, "demo", *SMALL], env=env, stdin=there, stdout=there, stderr=there) as process:
        os.close(there)
        said = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while some := os.read(here, 1 << 16):
                said += some
        os.close(here)
        assert process.wait(patience(30)) == 0
    text = said.decode()
    assert "client 2" in text
    assert "━" in text
    assert "verified: 2,097,152 bytes" in text


# ---- What is wrong


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["demo", *SMALL, *arguments])


Do = Callable[[], None]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Do], None]:
    """Has something done when everything is as it is before a phase, which waits for that."""

    def have(name: str, do: Do) -> None:
        def phase(self: Silence, begun: str, totals: list[int], unit: str) -> None:
            if begun == name:
                do()

        monkeypatch.setattr(Silence, "phase", phase)

    return have


def volumes(temporary: Path) -> list[Path]:
    """The files that the server keeps volumes in."""
    (folder,) = temporary.iterdir()
    found = [path for path in (folder / "volumes").rglob("*") if path.is_file() and path.stat().st_size >= 1 << 20]
    assert len(found) == 2
    return found


def test_a_wrong_byte_in_a_volume(temporary: Path, before: Callable[[str, Do], None]) -> None:
    def spoil() -> None:
        with volumes(temporary)[0].open("r+b") as volume:
            byte = volume.read(1)
            volume.seek(0)
            volume.write(bytes([byte[0] ^ 1]))

    before("reading and comparing", spoil)
    done = invoke("--json")
    assert (done.exit_code, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    assert told["verified"] is False
    assert told["verified_files"] == told["files"] - 1
    assert told["verified_bytes"] < told["bytes"]
    assert re.search(r"file-0000, of .* is not what was written from byte 0 on \(1 bytes", told["faults"][0])


def test_blocks_that_are_wrong_are_seen(temporary: Path, before: Callable[[str, Do], None]) -> None:
    def spoil() -> None:
        for path in volumes(temporary):
            with path.open("r+b") as volume:
                volume.write(bytes(path.stat().st_size))

    before("reading blocks of 4 KiB", spoil)
    done = invoke("--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["verified_files"] == told["files"], "they were read before"
    assert "4,096 bytes from" in told["faults"][0]


def server_of(pid: int) -> int:
    """The process that serves."""
    (found,) = (each for each in descendants(pid) if b"storage_server" in Path(f"/proc/{each}/cmdline").read_bytes())
    return found


@pytest.mark.parametrize("phase", ["writing", "reading and comparing", "reading blocks of 4 KiB"])
def test_a_server_that_is_killed(phase: str, before: Callable[[str, Do], None]) -> None:
    before(phase, lambda: os.kill(server_of(os.getpid()), signal.SIGKILL))
    done = invoke("--json")
    assert (done.exit_code, done.stdout) == (4, "")
    assert re.fullmatch(
        r"aioverbs: the storage server \(process \d+\) was killed by signal 9 before it was done\n", done.stderr
    )
    assert descendants(os.getpid()) == []


def test_a_client_that_is_killed(before: Callable[[str, Do], None]) -> None:
    def kill() -> None:
        os.kill(max(set(descendants(os.getpid())) - {server_of(os.getpid())}), signal.SIGKILL)

    before("reading and comparing", kill)
    done = invoke("--json")
    assert (done.exit_code, done.stdout) == (4, "")
    assert re.fullmatch(r"aioverbs: client \d \(process \d+\) was killed by signal 9 before it was done\n", done.stderr)
    assert descendants(os.getpid()) == []


@pytest.mark.stops_processes
def test_a_client_that_stands_still(before: Callable[[str, Do], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "SILENCE_S", 3.0)
    monkeypatch.setattr(children, "_END_S", 0.5)

    def stop() -> None:
        os.kill(max(set(descendants(os.getpid())) - {server_of(os.getpid())}), signal.SIGSTOP)

    before("reading and comparing", stop)
    done = invoke("--json")
    assert (done.exit_code, done.stdout) == (4, "")
    assert "said nothing for 3 s" in done.stderr


def test_a_device_that_is_not_there() -> None:
    done = ask("demo", "--device", "mlx5_7", "--size", "1")
    assert (done.returncode, done.stdout) == (3, "")  # that, or what lists such devices
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("variable", ["soft0", ""])
def test_why_it_is_that_device(variable: str) -> None:
    done = ask("demo", *SMALL[:4], "--json", AIOVERBS_DEVICE=variable)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)["device"]
    if variable:
        assert told["reason"] == "AIOVERBS_DEVICE names it"
    elif told["provider"] == "software":
        assert re.search("there is no RDMA device|cannot be loaded|is active", told["reason"])
    else:
        assert told["reason"] == "the first RDMA device with an active port"


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=5 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    done = invoke()
    assert done.exit_code == 4
    assert "5 MiB free, and 68 are needed: have TMPDIR name another folder, or say a smaller --size" in done.stderr


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    done = invoke()
    assert (done.exit_code, done.stdout) == (4, "")
    assert "`pip install prometheus-client`" in done.stderr
    assert done.stderr.count("\n") == 1


# ---- Who has enough


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_of_it(number: signal.Signals) -> None:
    with started("demo", "--size", "4", "--seconds", "60", "--device", "soft0") as process:
        try:
            while not line_of(process).startswith("reading and comparing"):
                assert process.poll() is None
            pids = descendants(process.pid)
            assert len(pids) == 3
            process.send_signal(number)
            output, complaints = process.communicate(timeout=patience(20))
        finally:
            process.kill()
    assert (process.returncode, output, complaints) == (130, "", "")
    wait_for_ends(pids)


def test_one_that_is_killed_leaves_no_process(temporary: Path) -> None:
    with started("demo", "--size", "4", "--seconds", "60", "--device", "soft0") as process:
        try:
            while not line_of(process).startswith("reading and comparing"):
                assert process.poll() is None
            pids = descendants(process.pid)
        finally:
            process.kill()
    assert len(pids) == 3
    wait_for_ends(pids)
    for left in temporary.iterdir():  # nobody was there to take it away
        shutil.rmtree(left)


# ---- Command lines


@pytest.mark.parametrize("arguments", [["--size", "0"], ["--clients", "0"], ["--seconds", "nan"], ["more"]])
def test_what_is_no_command_line(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2
